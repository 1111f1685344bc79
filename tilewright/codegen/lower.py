"""Lowering a region under a schedule, on whatever kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.cpu import lower_cpu
from tilewright.codegen.gpu import lower_gpu
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Lowered, Region


def lower(
    region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str], machine: Machine, schedule: Any
) -> Lowered:
    """Kernels, calls and extra storage of one region under a schedule that `cost.choice` ranks for it.

    Raises:
        Unsuitable: where the region does not have the form that the schedule's schema lowers.
    """
    return (lower_gpu if machine.is_gpu else lower_cpu)(region, layouts, values, constants, machine, schedule)
