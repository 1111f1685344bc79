"""Ranking the schedules of a problem, and choosing one, by the models alone."""

from __future__ import annotations

from tilewright.cost import cpu_choice, gpu_choice
from tilewright.cost.ranking import Choice, Ranking
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem


def rank(problem: Problem, machine: Machine, threads: int = 1, atomics: bool = False) -> Ranking:
    """Every candidate with its prediction; the same for the same arguments. `threads` counts those of a CPU. `atomics`: candidates that add
    parts of a sum by atomic operations, in no fixed order, are offered too (on a GPU).

    Raises:
        Unsuitable: where the region has no schema on this machine, or not the form that its schema needs.
    """
    if machine.is_gpu:
        return gpu_choice.rank(problem, machine, atomics)
    return cpu_choice.rank(problem, machine, threads)


def choose(problem: Problem, machine: Machine, threads: int = 1, atomics: bool = False) -> Choice:
    """The candidate with the least predicted time; `atomics` as for `rank`.

    Raises:
        Unsuitable: as `rank`, and where no candidate is feasible.
    """
    return rank(problem, machine, threads, atomics).first()
