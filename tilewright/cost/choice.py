"""Choosing the schedule of a region by the models alone."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.cost import cpu_choice, gpu_choice
from tilewright.cost.ranking import Choice
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region


def choose(
    region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str], machine: Machine, threads: int
) -> Choice:
    """The candidate with the least predicted time; deterministic. `constants` names the values that may be packed when compiling, `threads`
    counts those of a CPU.

    Raises:
        Unsuitable: where the region has no schema on this machine, not the form that its schema needs, or no feasible candidate.
    """
    if machine.is_gpu:
        return gpu_choice.rank(region, layouts, values, constants, machine).first()
    return cpu_choice.rank(region, layouts, values, constants, machine, threads).first()
