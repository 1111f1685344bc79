"""Lowering regions to kernels for CPUs: OpenMP threads outside, vector lanes inside."""

from __future__ import annotations

from typing import Mapping

from ...hardware.machine import Machine
from ...ir.graph import Value
from ...ir.layout import Layout
from ...ir.region import Lowered, Region
from ...schedule.cpu_contraction import CpuContractionSchedule
from .contraction import lower_contraction
from .simple import lower_map, lower_prefix, lower_rows
from .window import lower_window


def lower_cpu(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: Mapping[str, tuple[int, ...]],
    machine: Machine,
    schedule: CpuContractionSchedule | None = None,
) -> Lowered:
    """Kernels and calls of one region. `constants` maps the names of compile-time constants to their shapes. Contractions need a schedule."""
    if region.kind == "contraction":
        assert schedule is not None
        return lower_contraction(region, layouts, values, constants, machine, schedule)
    if region.kind == "window":
        return lower_window(region, layouts, values, constants, machine)
    lower = {"map": lower_map, "rows": lower_rows, "prefix": lower_prefix}[region.kind]
    return lower(region, layouts, values, machine)
