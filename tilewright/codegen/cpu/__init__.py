"""Lowering regions to kernels for CPUs: OpenMP threads outside, vector lanes inside."""

from __future__ import annotations

from typing import Mapping

from tilewright.codegen.cpu.contraction import lower_contraction
from tilewright.codegen.cpu.map import lower_map
from tilewright.codegen.cpu.prefix import lower_prefix
from tilewright.codegen.cpu.rows import lower_rows
from tilewright.codegen.cpu.window import lower_window
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Lowered, Region
from tilewright.schedule.cpu_contraction import CpuContractionSchedule


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
