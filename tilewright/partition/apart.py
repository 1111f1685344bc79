"""The regions of a chain as kernels of their own, one after another: what trials compare the chain's one kernel with.

Measured together, a region finds what the one before has stored where a network would leave it, in the caches. The sum of times measured region by
region lacks that, and chains would seem to gain more than they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tilewright.hardware.machine import Machine
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.kernels import registry
from tilewright.partition.canonical import canonical, named


@dataclass(frozen=True)
class Apart:
    """The schedules of a chain's regions, in order, each of which is kernels of its own."""

    schedules: tuple[Any, ...]

    def __str__(self) -> str:
        return f"apart: {'; '.join(map(str, self.schedules))}"


def parts_of(problem: Problem) -> list[Problem]:
    """The canonical problems of a chain's regions."""
    return [canonical(Problem(stage, problem.layouts, problem.values, problem.constants)).problem for stage in problem.region.stages]


def lower_apart(problem: Problem, schedule: Apart, machine: Machine) -> Lowered:
    """The kernels of a canonical chain's regions, one after another; results in between are storage.

    Raises:
        Unsuitable: if a schedule does not fit its region, or is a library's, whose operators run before all kernels.
    """
    stages = problem.region.stages
    if len(schedule.schedules) != len(stages):
        raise Unsuitable(f"{len(schedule.schedules)} schedules for {len(stages)} regions")
    kernels: list[Kernel] = []
    calls: list[Call] = []
    inner = [stage.outputs[0] for stage in stages if stage.outputs[0] not in problem.region.outputs]
    storage = {name: Storage(problem.values[name], problem.layouts[name]) for name in inner}
    said: list[str] = []
    within: list[str] = []
    for stage, own in zip(stages, schedule.schedules, strict=True):
        same = canonical(Problem(stage, problem.layouts, problem.values, problem.constants))
        part = named(registry.lower_for_images(same.problem, own, machine), stage, same.actual)
        if part.library is not None:
            raise Unsuitable(f"{stage.outputs[0]} is computed by a library, whose operators run before all kernels")
        kernels += part.kernels
        calls += part.calls
        storage |= part.storage
        said.append(f"{stage.kind} ({part.schedule})")
        within += part.within
    return Lowered(problem.region, f"apart: {'; '.join(said)}", tuple(kernels), tuple(calls), MappingProxyType(storage), within=tuple(within))
