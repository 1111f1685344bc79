"""Lowering of the `map` schema on CPUs: every element of the output in the order of its storage."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, split_divided_axes, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.codegen.cpu.common import nest
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, coefficient, loads
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Store
from tilewright.ir.layout import Layout
from tilewright.ir.region import Lowered, Region
from tilewright.schedule.cpu_loops import LoopSchedule

SHORT = 8
"""Elements of an innermost axis that are no work for vectors."""


def lower_map(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    schedule: LoopSchedule,
) -> Lowered:
    """out[index] = body, in the order of the output's layout, contiguous axes merged."""
    step = split_divided_axes(region.steps[-1])
    body, offset = flat_step(step, region, layouts)
    order = storage_order(step.axes, offset)
    axes, (flat, at) = merge_axes(order, [body, offset], lambda outer, inner: False)
    if len(axes) > 1 and (axes[-1].extent or 0) < SHORT and any(coefficient(load.index[0], axes[-2]) == 1 for load in loads(flat)):
        # an image's three channels go to their places one after the other, each in vectors, row by row
        axes = (*axes[:-2], axes[-1], axes[-2])
    else:
        axes, (flat, at) = merge_axes(order, [body, offset])
    lets, (value, where) = bind_shared([flat, at])
    element = block(lets, Store(region.outputs[0], where, value))
    return single(region, schedule, nest(axes, element, max(step.flops(), prod(step.shape))), layouts, values)


def flat_step(step: Step, region: Region, layouts: Mapping[str, Layout]) -> tuple[Expr, Expr]:
    """(body, store offset) of a map with flat loads."""
    return flatten(step.bodies[0], layouts), layouts[region.outputs[0]].offset(step.index)
