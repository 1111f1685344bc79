"""Softmax, or its logarithm, along one dimension as a library's operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tilewright.graph.rows import rows_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import ZERO, Expr, Load, Var, loads, rewrite, substitute, unary
from tilewright.ir.library import LibraryCall, Softmax
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.library.views import Operation, linear_address, target_of, view_of


def softmax_operations(problem: Problem) -> Mapping[str, Callable[[], Operation]]:
    """The operator whose result the region's map reads, with what finds the operation, or raises ValueError: Unsuitable, or because the operator is
    not defined for these views and types. Raises Unsuitable if the region is no softmax along one dimension of a stored input."""
    steps = problem.region.steps
    if [step.combiner for step in steps] != ["max", "sum", None] or steps[0].dtypes[0] != FLOAT32:
        raise Unsuitable("the region is no softmax of float32")
    greatest, total, last = (_without_units(step) for step in steps)
    rows = rows_of(tuple(steps))
    reduced = [step.reduction for step in (greatest, total)]
    if rows is None or any(len(axes) != 1 for axes in reduced):
        raise Unsuitable("the region does not reduce one dimension of its rows")
    along = [axis for axis in last.axes if axis not in rows and axis.extent == reduced[0][0].extent]
    if len(along) != 1 or len(last.axes) != sum(axis.extent != 1 for axis in rows) + 1:
        raise Unsuitable("the region stores something other than its rows")
    # the elements, the greatest ones and the sums at the axes of the map
    elements = []
    for step, its in zip((greatest, total), steps, strict=False):
        at = {axis: row for axis, row in zip(its.axes, rows, strict=True) if axis.extent != 1} | {step.reduction[0]: along[0]}
        elements.append(substitute(step.bodies[0], at))
    at_rows = tuple(row if row.extent != 1 else ZERO for row in rows)
    x, held, summed = elements[0], Load(greatest.name, at_rows, FLOAT32), Load(total.name, at_rows, FLOAT32)
    if not isinstance(x, Load) or x.buffer not in problem.layouts or elements[1] != unary("exp", x - held):
        raise Unsuitable("elements are computed while they are read")
    ways = {"softmax": unary("exp", x - held) / summed, "log_softmax": x - held - unary("log", summed)}
    result = Load(greatest.name, last.axes, FLOAT32)
    bodies = {name: _replaced(last.bodies[0], weight, result, total.name) for name, weight in ways.items()}
    return {name: partial(_operation, problem, name, x, along[0], last, result, body) for name, body in bodies.items() if body is not None}


def _without_units(step: Step) -> Step:
    """The step with 0 in place of axes of one element."""
    unit: dict[Var, Expr] = {axis: ZERO for axis in (*step.axes, *step.reduction) if axis.extent == 1}
    axes, reduction = (tuple(axis for axis in its if axis.extent != 1) for its in (step.axes, step.reduction))
    bodies = tuple(substitute(body, unit) for body in step.bodies)
    index = tuple(substitute(position, unit) for position in step.index)
    return Step(step.name, step.shape, axes, bodies, reduction, step.combiner, index=index)


def _replaced(body: Expr, weight: Expr, result: Load, total: str) -> Expr | None:
    """The body with the operator's result, instead of what it computes; None if it reads more of the rows than that."""
    marked = rewrite(body, lambda node: Load("", result.index, result.dtype) if node == weight else node)
    read = {load.buffer for load in loads(marked)}
    if "" not in read or not read.isdisjoint((result.buffer, total)):
        return None
    return rewrite(marked, lambda node: result if isinstance(node, Load) and not node.buffer else node)


def _operation(problem: Problem, name: str, x: Load, along: Var, last: Step, result: Load, body: Expr) -> Operation:
    layout = problem.layouts[x.buffer]
    a = linear_address(x.buffer, layout.offset(x.index))
    order = sorted(last.axes, key=lambda axis: -a.stride(axis))
    step = Step(result.buffer, last.shape, last.axes, (x,), index=last.index)
    following = [Step(last.name, last.shape, last.axes, (body,), index=last.index)]
    target = target_of(problem, step, following, problem.values[x.buffer].dtype, order)
    sizes = [axis.extent or 1 for axis in order]
    views = [view_of(address, sizes, [address.stride(axis) for axis in order]) for address in (a, target.address)]
    return target.operation(problem, LibraryCall(Softmax(name, order.index(along)), (views[0],), (views[1],)))
