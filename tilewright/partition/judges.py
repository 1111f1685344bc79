"""Chains of any machine: how they are predicted (in strips on a CPU, in tiles on a GPU), what their candidates are, and their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels import registry
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.apart import Apart, lower_apart, parts_of
from tilewright.partition.chain_kernel import StripSchedule
from tilewright.partition.merges import Memory, Way
from tilewright.partition.strip_judge import StripJudge
from tilewright.partition.tile_judge import TileJudge
from tilewright.partition.tile_kernel import TileSchedule
from tilewright.selection.choice import choose

SCHEDULES = (StripSchedule, TileSchedule)
"""The types of the schedules of chains as one kernel; `Apart` is what they are compared with."""


def judge_of(
    machine: Machine,
    threads: int,
    numerics: Numerics = USUAL,
    counted: Callable[[int], object] = lambda count: None,
    memory: Memory | None = None,
) -> StripJudge | TileJudge:
    """What predicts chains for a machine; `threads` and `memory` are for CPUs."""
    return TileJudge(machine, numerics, counted) if machine.is_gpu else StripJudge(machine, threads, numerics, counted, memory or Memory())


def ways_of(chain: Problem, machine: Machine, threads: int, numerics: Numerics = USUAL) -> Sequence[Way]:
    """The strips or tiles that a canonical chain can be cut into, those predicted fastest first."""
    direct = replace(numerics, winograd=False)
    ranked = judge_of(machine, threads, numerics).ranked(chain, [choose(part, machine, threads, direct).seconds for part in parts_of(chain)])
    return [] if isinstance(ranked, str) else ranked


def lower(problem: Problem, schedule: object, machine: Machine) -> Lowered:
    """Kernels, calls and extra storage of a canonical region or chain; see `kernels.registry.lower_for_images`.

    Raises:
        Unsuitable: if the schedule does not fit the problem.
    """
    if problem.region.kind == "chain" and isinstance(schedule, StripSchedule) and not machine.is_gpu:
        return StripJudge(machine, schedule.workers, USUAL).lower(problem, schedule)
    if problem.region.kind == "chain" and isinstance(schedule, TileSchedule) and machine.is_gpu:
        return TileJudge(machine, USUAL).lower(problem, schedule)
    if problem.region.kind == "chain" and isinstance(schedule, Apart):
        return lower_apart(problem, schedule, machine)
    return registry.lower_for_images(problem, schedule, machine)
