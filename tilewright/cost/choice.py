"""Ranking the schedules of a region, and choosing one, by the models alone."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.cost import cpu_choice, gpu_choice
from tilewright.cost.ranking import Choice, Ranking
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region


def rank(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    threads: int,
    atomics: bool = False,
) -> Ranking:
    """Every candidate with its prediction; the same for the same arguments. `constants` names the values that may be packed when compiling, `threads`
    counts those of a CPU. `atomics`: candidates that add parts of a sum by atomic operations, in no fixed order, are offered too (on a GPU).

    Raises:
        Unsuitable: where the region has no schema on this machine, or not the form that its schema needs.
    """
    if machine.is_gpu:
        return gpu_choice.rank(region, layouts, values, constants, machine, atomics)
    return cpu_choice.rank(region, layouts, values, constants, machine, threads)


def choose(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    threads: int,
    atomics: bool = False,
) -> Choice:
    """The candidate with the least predicted time; `atomics` as for `rank`.

    Raises:
        Unsuitable: as `rank`, and where no candidate is feasible.
    """
    return rank(region, layouts, values, constants, machine, threads, atomics).first()
