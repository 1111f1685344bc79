"""Predicted times of loop nests of one form."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.estimate import Estimate
from tilewright.ir.expr import loads
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.kernels.columns import Columns, length


def estimate_loops(problem: Problem, rows: Columns, machine: Machine, threads: int) -> Estimate:
    """Seconds of a region without tiles (map, window, rows, prefix): each input and the output pass the caches' outer edge once, and the
    arithmetic runs at half the vector peak (no multiply-add pairs).

    Worked example: adding two million float32 to as many moves 24 MB; at 100 GB/s that is 240 us, and the additions are hidden behind it."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    moved = sum(min(layouts[name].size, _loaded(region, name)) * size_of(values[name].dtype) for name in region.inputs if name in layouts)
    moved += sum(layouts[name].size * size_of(values[name].dtype) for name in region.outputs)
    level_3 = machine.cache(3)
    supply = machine.cache_bandwidth(3) if level_3 is not None and moved < level_3.bytes else machine.memory_bandwidth
    peak = machine.peak_flops["fp32"] / machine.processors * min(threads, machine.processors)
    terms = {"memory": moved / supply, "arithmetic": region.flops() / (peak / 2), "dispatch": machine.dispatch_seconds}
    return Estimate({name: np.full(length(rows), seconds) for name, seconds in terms.items()}, overlapped=("memory", "arithmetic"))


def _loaded(region: Region, name: str) -> int:
    """Elements of a value that the region's loops load, repeated ones included."""
    return sum(
        prod(axis.extent or 0 for axis in (*step.axes, *step.reduction)) * sum(load.buffer == name for load in loads(*step.bodies))
        for step in region.steps
    )
