"""Lowering regions to CPU kernels: OpenMP threads outside, vector lanes inside; which schedule is best is `tilewright.cost.cpu`'s business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from tilewright.codegen.cpu.amx import lower_amx
from tilewright.codegen.cpu.contraction import lower_contraction
from tilewright.codegen.cpu.depthwise import lower_depthwise
from tilewright.codegen.cpu.map import lower_map
from tilewright.codegen.cpu.prefix import lower_prefix
from tilewright.codegen.cpu.rows import lower_rows
from tilewright.codegen.cpu.window import lower_window
from tilewright.codegen.cpu.winograd import lower_winograd
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.schedule.cpu_amx import CpuAmxSchedule
from tilewright.schedule.cpu_contraction import CpuContractionSchedule
from tilewright.schedule.cpu_depthwise import CpuDepthwiseSchedule
from tilewright.schedule.cpu_loops import LoopSchedule
from tilewright.schedule.cpu_winograd import CpuWinogradSchedule

CpuSchedule: TypeAlias = CpuContractionSchedule | CpuAmxSchedule | CpuWinogradSchedule | CpuDepthwiseSchedule | LoopSchedule

_LOWERINGS: Mapping[tuple[str, type], Callable[..., Lowered]] = MappingProxyType(
    {
        ("contraction", CpuContractionSchedule): lower_contraction,
        ("contraction", CpuAmxSchedule): lower_amx,
        ("contraction", CpuWinogradSchedule): lower_winograd,
        ("map", LoopSchedule): lower_map,
        ("window", CpuDepthwiseSchedule): lower_depthwise,
        ("window", LoopSchedule): lower_window,
        ("rows", LoopSchedule): lower_rows,
        ("prefix", LoopSchedule): lower_prefix,
    }
)


def lower_cpu(problem: Problem, schedule: CpuSchedule, machine: Machine) -> Lowered:
    """Kernels, calls and extra storage of a problem under a schedule of its schema.

    Raises:
        Unsuitable: where the schedule is not one for this kind of region.
    """
    lowering = _LOWERINGS.get((problem.region.kind, type(schedule)))
    if lowering is None:
        raise Unsuitable(f"no {type(schedule).__name__} lowers a region of kind {problem.region.kind}")
    return lowering(problem, schedule, machine)
