"""Lowering of the `scan` schema on CPUs (cumulative sums and the like): rows in parallel, serial along the scanned axis.

If corresponding elements of neighbouring rows are adjacent in memory, rows may fill the lanes of vectors (`across`).
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.access import flatten, merge_axes, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.ir.computation import COMBINERS
from tilewright.ir.expr import ZERO, Expr, Load, Var, index_const, replace_loads, substitute
from tilewright.ir.kernel import Allocate, Buffer, For, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.cpu.common import combined, loops
from tilewright.kernels.cpu.loops.across import Across, adjacent_axis, held
from tilewright.kernels.cpu.loops.row_reduction import Rows, accumulator
from tilewright.kernels.cpu.loops.space import RowSchedule

VALUE = "value"
"""Names what is stored for an element, among the bodies of `Rows`."""


def scanned_rows(problem: Problem) -> Rows:
    """The rows of a scan: its step, and under VALUE what is stored for each element, in which `held` stands for what was combined so far."""
    region, layouts = problem.region, problem.layouts
    step, final = region.steps[0], region.steps[-1]
    along = step.scan
    assert along is not None
    results: dict[str, Expr] = {name: held(accumulator(name), dtype) for name, dtype in zip(step.names, step.dtypes, strict=True)}
    bodies = [substitute(flatten(body, layouts), {step.reduction[0]: along}) for body in step.bodies]
    offset, value = layouts[region.outputs[0]].offset(final.index), results.get(region.outputs[0], results[step.name])
    if final is not step:
        own: dict[Var, Expr] = dict(zip(final.axes, step.axes, strict=True))
        value, offset = replace_loads(substitute(flatten(final.bodies[0], layouts), own), results), substitute(offset, own)
    order = [axis for axis in storage_order(step.axes, offset) if axis != along]
    images = step.axes[0]
    axes, (*bodies, value, offset) = merge_axes(order, [*bodies, value, offset], lambda outer, inner: outer != images)
    whole = replace(step, reduction=(along,))
    return Rows((whole,), {step.name: bodies, VALUE: [value]}, offset, axes, (), adjacent_axis(bodies, axes))


def lower_scan(problem: Problem, rows: Rows, schedule: RowSchedule) -> Lowered:
    """An inclusive scan.

    Raises:
        Unsuitable: for a schedule with rows across lanes, if none are adjacent.
    """
    if schedule.across and rows.lane is None:
        raise Unsuitable("corresponding elements of neighbouring rows are not adjacent")
    (step,), target = rows.steps, problem.region.outputs[0]
    (along,), bodies, (value,) = step.reduction, rows.flat[step.name], rows.flat[VALUE]
    names = [accumulator(name) for name in step.names]
    if schedule.across:
        assert rows.lane is not None
        types = dict(zip(names, step.dtypes, strict=True))
        across = Across.of([*bodies, value], [rows.where], rows.lane, schedule.lanes, schedule.across, types)

        def element(vector: Expr) -> list[Statement]:
            here = [across.value(body, vector) for body in bodies]
            # what is stored is bound after the accumulators have changed
            return [block(across.combine(step, names, here, vector)), block(across.store(target, rows.where, across.value(value, vector), vector))]

        inside = For(along, index_const(along.extent or 0), across.over(element))
        return single(problem, schedule, across.blocks(rows.outer, block(across.start(step, names, step.dtypes), inside), step.flops()))
    combiner = COMBINERS[step.combiner or ""]
    before = tuple(Load(name, (ZERO,), dtype) for name, dtype in zip(names, step.dtypes, strict=True))
    start: list[Statement] = [Allocate(Buffer(name, dtype, 1, "register")) for name, dtype in zip(names, step.dtypes, strict=True)]
    start += [Store(name, ZERO, identity) for name, identity in zip(names, combiner.identity(step.dtypes), strict=True)]
    result = replace_loads(value, dict(zip(names, before, strict=True)))
    one = block(combined(names, combiner.combine(before, tuple(bodies)), ZERO), Store(target, rows.where, result))
    row = block(start, For(along, index_const(along.extent or 0), one))
    return single(problem, schedule, loops(rows.axes, row, True, work=step.flops()))
