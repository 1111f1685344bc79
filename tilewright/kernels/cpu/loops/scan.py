"""Lowering of the `scan` schema on CPUs (cumulative sums and the like): rows in parallel, serial along the scanned axis."""

from __future__ import annotations

from tilewright.codegen.access import flatten, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.ir.computation import COMBINERS
from tilewright.ir.expr import ZERO, Expr, Load, Var, index_const, substitute
from tilewright.ir.kernel import Allocate, Buffer, For, Store, substitute_in
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels.cpu.common import combined, loops, with_results
from tilewright.kernels.cpu.loops.space import LoopSchedule


def lower_scan(problem: Problem, schedule: LoopSchedule) -> Lowered:
    """An inclusive scan: rows in parallel, serial along the scanned axis."""
    region, layouts = problem.region, problem.layouts
    step = region.steps[0]
    final = region.steps[-1]
    assert step.scan is not None
    combiner = COMBINERS[step.combiner or ""]
    along = step.scan
    names = [f"acc{i}" for i in range(combiner.components)]
    held = tuple(Load(name, (ZERO,), dtype) for name, dtype in zip(names, step.dtypes, strict=True))
    bodies = tuple(substitute(flatten(b, layouts), {step.reduction[0]: along}) for b in step.bodies)
    offset = layouts[region.outputs[0]].offset(final.index)
    value: Expr = held[0]
    if final is not step:
        value = with_results(substitute(flatten(final.bodies[0], layouts), dict(zip(final.axes, step.axes, strict=True))), step, held)
        offset = substitute(offset, dict(zip(final.axes, step.axes, strict=True)))
    else:
        component = {name: i for i, name in enumerate(step.names)}
        value = held[component.get(region.outputs[0], 0)]
    inside = block(combined(names, combiner.combine(held, bodies), ZERO), Store(region.outputs[0], offset, value))
    start = [Allocate(Buffer(name, dtype, 1, "register")) for name, dtype in zip(names, step.dtypes, strict=True)]
    start += [Store(name, ZERO, v) for name, v in zip(names, combiner.identity(step.dtypes), strict=True)]  # type: ignore[misc]
    row = block(start, For(along, index_const(along.extent or 0), inside))
    rows = [axis for axis in storage_order(step.axes, offset) if axis is not along and axis != along and axis.extent != 1]
    zero: dict[Var, Expr] = {axis: ZERO for axis in step.axes if axis.extent == 1 and axis != along}
    return single(problem, schedule, loops(rows, block(substitute_in(row, zero)), True, work=step.flops()))
