"""Lowering of the `map` schema on CPUs: computes the elements of the output in storage order.

If inputs are contiguous along another axis than the output (a copy from row-major to channels-last, or back), squares of the two axes are transposed
in registers, so that both loads and stores are vectors.

A body `select(condition, value, out[index])` keeps the elements for which the condition does not hold, and stores nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.codegen.access import VECTOR_TYPES, bind_shared, flatten, merge_axes, split_divided_axes, storage_order, vectorise
from tilewright.codegen.assemble import block, single
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import NARROW_FLOATS
from tilewright.ir.expr import TRUE, Apply, Const, Expr, Load, Var, as_lanes, binary, coefficient, const, index_const, loads, substitute, variables
from tilewright.ir.kernel import SERIAL_WORK, Allocate, Buffer, For, If, Let, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels.cpu.common import halves, in_vectors, loops, nest, vector_nest, vector_store
from tilewright.kernels.cpu.loops.space import LoopSchedule
from tilewright.kernels.cpu.transposition import transposed

SHORT = 8
"""Extent of an innermost axis below which it is too short for vectors."""
LEAST = 4
"""Minimum side of a square that is worth transposing, in elements."""
PARTS = 8
"""Minimum iterations of the parallel loops, to have work for all threads."""


def lower_map(problem: Problem, schedule: LoopSchedule) -> Lowered:
    """out[index] = body, in the order of the output's layout, contiguous axes merged."""
    region = problem.region
    step = split_divided_axes(region.steps[-1])
    body, condition = _kept(step)
    exprs = [flatten(expr, problem.layouts) for expr in (body, problem.layouts[region.outputs[0]].offset(step.index), condition)]
    order = storage_order(step.axes, exprs[1])
    axes, (flat, at, condition) = merge_axes(order, exprs, lambda outer, inner: False)
    if len(axes) > 1 and (axes[-1].extent or 0) < SHORT and any(coefficient(load.index[0], axes[-2]) == 1 for load in loads(flat)):
        # an image's three channels are copied one after the other, each in vectors, row by row
        axes = (*axes[:-2], axes[-1], axes[-2])
    else:
        axes, (flat, at, condition) = merge_axes(order, exprs)
    work = max(step.flops(), prod(axis.extent or 0 for axis in step.axes))
    depth = max((number for number, axis in enumerate(axes, 1) if axis in variables(condition)), default=0)
    outer, inner = axes[:depth], axes[depth:]
    parallel = work > SERIAL_WORK and depth > 0
    stores = _stores(problem, inner, flat, at, schedule.lanes, 0 if parallel else work)
    return single(problem, schedule, stores if condition == TRUE else loops(outer, If(condition, stores), parallel))


def _kept(step: Step) -> tuple[Expr, Expr]:
    """What is stored, and the condition under which it is. An element at another place, such as a loop's state before this step, is a value like any
    other."""
    body = step.bodies[0]
    if isinstance(body, Apply) and body.operation == "select":
        condition, value, kept = body.args
        if isinstance(kept, Load) and (kept.buffer, kept.index) == (step.name, step.index):
            return value, condition
    return body, TRUE


def _stores(problem: Problem, axes: Sequence[Var], flat: Expr, at: Expr, lanes: int, work: int) -> Statement:
    """Loops over the axes that store all elements."""
    region = problem.region
    stored = problem.values[region.outputs[0]].dtype
    moved = _moved(flat, stored, problem) if stored in NARROW_FLOATS else None
    lets, (value, where) = bind_shared([moved or flat, at])
    element = block(lets, Store(region.outputs[0], where, value))
    vectors = _squares(axes, flat, at, region.outputs[0], lanes, work)
    if vectors is None and moved is None:
        vectors = _in_vectors(problem, axes, flat, at, lanes, work)
    return vectors or nest(axes, element, work)


def _moved(value: Expr, stored: str, problem: Problem) -> Expr | None:
    """The value in the 16-bit type in which all that it selects from is stored, so that nothing is converted; None if it is computed."""
    if isinstance(value, Const):
        return const(float(value.value), stored)
    if isinstance(value, Load):
        return replace(value, dtype=stored) if problem.values[value.buffer].dtype == stored else None
    if isinstance(value, Apply) and value.operation == "select":
        sides = [_moved(side, stored, problem) for side in value.args[1:]]
        return None if None in sides else replace(value, args=(value.args[0], *sides), dtype=stored)  # type: ignore[arg-type]
    return None


def _in_vectors(problem: Problem, axes: Sequence[Var], body: Expr, at: Expr, lanes: int, work: int) -> Statement | None:
    """The loops over vectors of 16-bit floats along the innermost axis; None if there are none, or they cannot be vectors."""
    width = in_vectors(problem, axes[-1], lanes) if axes else 1
    if width == 1:
        return None
    parts = halves(problem, axes[-1], width)
    store = vector_store(problem.region.outputs[0], at, body, axes[-1], width, parts)
    return None if store is None else vector_nest(axes, parts * width, store, work)


def _squares(axes: Sequence[Var], body: Expr, at: Expr, target: str, lanes: int, work: int) -> Statement | None:
    """Loops over squares of the output's innermost axis and another axis, along which the body is contiguous. Each square is read as vectors of the
    other axis, transposed, and stored. None if there is no such axis, an axis is too short, or too few parts remain for threads.

    If squares do not divide an axis, the last one overlaps the one before and stores some elements twice; one thread does both."""
    if not axes or coefficient(at, axes[-1]) != 1 or vectorise(body, axes[-1], lanes) is not None:
        return None
    inner = axes[-1]
    for other in reversed(axes[:-1]):
        width = min(lanes, *(1 << (axis.extent or 1).bit_length() - 1 for axis in (inner, other)))
        wide = vectorise(body, other, width) if width >= LEAST and coefficient(at, other) is not None and body.dtype in VECTOR_TYPES else None
        if wide is None or all(coefficient(load.index[0], other) == 0 for load in loads(body)):
            continue
        outer = [axis for axis in axes if axis not in (inner, other)]
        squares = {axis: Var(f"{axis.name}_square", -(-(axis.extent or 0) // width)) for axis in (other, inner)}
        shared = [*outer, *(part for axis, part in squares.items() if (axis.extent or 0) % width == 0)]
        own = [part for part in squares.values() if part not in shared]
        if work > SERIAL_WORK and prod(axis.extent or 0 for axis in shared) < PARTS:
            continue
        place, square = Var("place", width), {axis: Var(axis.name, None) for axis in (other, inner)}
        last = {axis: index_const((axis.extent or 0) - width) for axis in squares}
        starts = [Let(square[axis], part * width if part in shared else binary("min", part * width, last[axis])) for axis, part in squares.items()]
        read = substitute(as_lanes(wide, width), {other: square[other], inner: square[inner] + place})
        turns, turned = transposed("square", "turned", width, body.dtype)
        where = substitute(at, {other: square[other] + place, inner: square[inner]})
        result: Statement = block(
            starts,
            [Allocate(Buffer(name, body.dtype, width * width, "register", width)) for name in ("square", "turned")],
            For(place, index_const(width), Store("square", place * width, read), "unroll"),
            turns,
            For(place, index_const(width), Store(target, where, Load(turned, (place * width,), body.dtype, width)), "unroll"),
        )
        return loops(shared, loops(own, result, False), work > SERIAL_WORK)
    return None
