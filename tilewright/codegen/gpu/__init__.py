"""Lowering regions to GPU kernels: one schema a kind of region; which schedule is best is `tilewright.cost.gpu`'s business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from tilewright.codegen.gpu.contraction import lower_contraction
from tilewright.codegen.gpu.direct import lower_direct
from tilewright.codegen.gpu.gemv import lower_gemv
from tilewright.codegen.gpu.map import lower_map
from tilewright.codegen.gpu.prefix import lower_prefix
from tilewright.codegen.gpu.rows import lower_rows
from tilewright.codegen.gpu.window import lower_window
from tilewright.codegen.gpu.winograd import lower_winograd
from tilewright.codegen.gpu.winograd_fused import lower_fused_winograd
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.ir.region import Unsuitable as Unsuitable
from tilewright.schedule.gpu_contraction import ContractionSchedule, GemvSchedule
from tilewright.schedule.gpu_direct import DirectSchedule
from tilewright.schedule.gpu_map import MapSchedule
from tilewright.schedule.gpu_prefix import PrefixSchedule
from tilewright.schedule.gpu_rows import RowsSchedule
from tilewright.schedule.gpu_window import WindowSchedule
from tilewright.schedule.gpu_winograd import WinogradSchedule
from tilewright.schedule.gpu_winograd_fused import FusedWinogradSchedule

GpuSchedule: TypeAlias = (
    MapSchedule
    | WindowSchedule
    | RowsSchedule
    | PrefixSchedule
    | ContractionSchedule
    | DirectSchedule
    | GemvSchedule
    | WinogradSchedule
    | FusedWinogradSchedule
)

_LOWERINGS: Mapping[type, Callable[..., Lowered]] = MappingProxyType(
    {
        MapSchedule: lower_map,
        WindowSchedule: lower_window,
        RowsSchedule: lower_rows,
        PrefixSchedule: lower_prefix,
        ContractionSchedule: lower_contraction,
        DirectSchedule: lower_direct,
        GemvSchedule: lower_gemv,
        WinogradSchedule: lower_winograd,
        FusedWinogradSchedule: lower_fused_winograd,
    }
)


def lower_gpu(problem: Problem, schedule: GpuSchedule, machine: Machine) -> Lowered:
    """Kernels, calls and extra storage of a problem under a schedule of its schema.

    Raises:
        Unsuitable: where the region does not have the form that the schedule's schema lowers.
    """
    return _LOWERINGS[type(schedule)](problem, schedule, machine)
