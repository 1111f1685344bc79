"""Operations and data movement of loop nests of one form."""

from __future__ import annotations

from math import prod

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import loads
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.counts import Counts, counted


def loop_counts(problem: Problem, candidates: Columns, machine: Machine) -> Counts:
    """Every input is read from memory once, and every output written once, or of an update in place the elements that it may change."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    read = sum(min(layouts[name].own_size, _loaded(region, name)) * size_of(values[name].dtype) for name in region.inputs if name in layouts)
    changed = {step.name: prod(axis.extent or 0 for axis in step.axes) for step in region.steps if step.kind == "map" and loads(*step.index)}
    written = sum(changed.get(name, layouts[name].own_size) * size_of(values[name].dtype) for name in region.outputs)
    return counted(length(candidates), region.flops(), read, written)


def _loaded(region: Region, name: str) -> int:
    """Elements of a value that the region's loops load, repeated loads included."""
    return sum(
        prod(axis.extent or 0 for axis in (*step.axes, *step.reduction)) * sum(load.buffer == name for load in loads(*step.bodies))
        for step in region.steps
    )
