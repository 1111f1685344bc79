"""Lowering a problem under a schedule, on whatever kind of machine."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tilewright.codegen.cpu import lower_cpu
from tilewright.codegen.gpu import lower_gpu
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import INDEX
from tilewright.ir.graph import Value
from tilewright.ir.kernel import FAULTS
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Storage


def lower(problem: Problem, schedule: Any, machine: Machine) -> Lowered:
    """Kernels, calls and extra storage of a problem under a schedule that `cost.choice` ranks for it.

    Raises:
        Unsuitable: where the region does not have the form that the schedule's schema lowers.
    """
    return with_faults((lower_gpu if machine.is_gpu else lower_cpu)(problem, schedule, machine))


def with_faults(lowered: Lowered) -> Lowered:
    """With storage for the indices that its kernels find out of range."""
    sizes = [buffer.size for kernel in lowered.kernels for buffer in kernel.parameters if buffer.name == FAULTS]
    if not sizes:
        return lowered
    faults = Storage(Value(FAULTS, (max(sizes),), INDEX), row_major((max(sizes),)))
    return replace(lowered, storage=MappingProxyType({**lowered.storage, FAULTS: faults}))
