"""What the CPU schemas share: loops over threads and vector lanes, and reductions into scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.codegen.access import bind_shared, vectorise
from tilewright.codegen.assemble import block
from tilewright.codegen.printer import C_INT_BYTES
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    ZERO,
    Expr,
    Linear,
    Load,
    Var,
    as_lanes,
    binary,
    from_linear,
    index_const,
    linear,
    replace_loads,
    rewrite,
    substitute,
    variables,
)
from tilewright.ir.kernel import Allocate, Buffer, For, Let, Statement, Store, substitute_in

SERIAL_WORK = 1 << 14
"""Element operations below which a parallel region costs more than it saves."""
CHUNK = 2048
"""Chunk size in elements when a single long axis is divided among threads."""
ACCUMULATOR = "accumulated"


def accumulated(dtype: str, lanes: int = 1) -> Var:
    """The variable that stands for a sum, or a vector of sums, in an epilogue."""
    return Var(ACCUMULATOR, None, dtype, lanes)


def wide_epilogue(epilogue: Expr, axis: Var, lanes: int, dtype: str) -> Expr | None:
    """The epilogue, vectorised over `lanes` neighbours along the axis, for sums of type `dtype`; None if it cannot be vectorised."""
    if lanes == 1:
        return epilogue
    one, vector = accumulated(dtype), accumulated(dtype, lanes)
    held = rewrite(epilogue, lambda x: Load(ACCUMULATOR, (), dtype) if x == one else x)
    wide = vectorise(held, axis, lanes, resident=lambda load: load.buffer == ACCUMULATOR)
    return None if wide is None else as_lanes(rewrite(wide, lambda x: vector if isinstance(x, Load) and x.buffer == ACCUMULATOR else x), lanes)


def loops(axes: Sequence[Var], body: Statement, parallel: bool, simd: bool = False) -> Statement:
    """Loops over the axes, outermost first. parallel: all are collapsed and divided among threads; simd: the innermost is vectorised."""
    result = body
    for depth, axis in enumerate(reversed(axes)):
        kind = "parallel" if parallel else "simd" if simd and depth == 0 else "serial"
        result = For(axis, index_const(axis.extent or 0), result, kind)
    return result


def nest(axes: Sequence[Var], body: Statement, work: int) -> Statement:
    """Loops with threads over the outer axes and lanes over the innermost; a single long axis is split into chunks for the threads."""
    if not axes:
        return body
    if work <= SERIAL_WORK:
        return loops(axes, body, False, simd=True)
    *outer, inner = axes
    extent = inner.extent or 0
    if prod(axis.extent or 0 for axis in outer) >= 32:
        return loops(outer, For(inner, index_const(extent), body, "simd"), True)
    chunks = -(-extent // CHUNK)
    if chunks <= 1:
        return loops(outer, For(inner, index_const(extent), body, "simd"), bool(outer))
    chunk, within = Var("chunk", chunks), Var("within", CHUNK)
    length: Expr = index_const(CHUNK)
    if extent % CHUNK:
        length = binary("min", extent - chunk * CHUNK, index_const(CHUNK))
    moved = substitute_in(body, {inner: chunk * CHUNK + within})
    return loops([*outer, chunk], For(within, length, moved, "simd"), True)


def common_origin(element: Expr, unrolled: Sequence[Var]) -> tuple[list[Statement], Expr]:
    """Splits a load inside unrolled loops into a variable for its base address, set before the loops, and the load relative to it. The addresses then
    differ by constants that fit into the instructions; gcc finds that only if the constants are added last."""
    if not isinstance(element, Load):
        return [], element
    form = linear(element.index[0])
    moving = tuple(term for term in form.terms if not variables(term[0]).isdisjoint(unrolled))
    fixed = tuple(term for term in form.terms if term not in moving)
    if not moving or not fixed:
        return [], element
    origin = Var("origin", None)
    step = from_linear(Linear(moving, form.constant))
    return [Let(origin, from_linear(Linear(fixed, 0)))], replace(element, index=(origin + step,))


def with_results(body: Expr, step: Step, totals: Sequence[Expr]) -> Expr:
    """The body with loads of the step's results replaced by `totals`."""
    held = dict(zip(step.names, totals, strict=True))
    return replace_loads(body, held)


def reduction(step: Step, bodies: Sequence[Expr], kind: str, prefix: str = "acc") -> tuple[list[Statement], list[Expr]]:
    """Statements that reduce flat bodies over the step's reduced axes into scalars, and loads of the results."""
    combiner = COMBINERS[step.combiner or ""]
    names = [f"{prefix}{i}" for i in range(combiner.components)]
    dtypes = tuple(body.dtype for body in bodies)
    held = tuple(Load(name, (ZERO,), dtype) for name, dtype in zip(names, dtypes, strict=True))
    result: list[Statement] = []
    for name, dtype, identity in zip(names, dtypes, combiner.identity(dtypes), strict=True):
        result += [Allocate(Buffer(name, dtype, 1, "register")), Store(name, ZERO, identity)]
    zero: dict[Var, Expr] = {axis: ZERO for axis in step.reduction if axis.extent == 1}
    bodies = [substitute(b, zero) for b in bodies] if zero else bodies
    update = block(combined(names, combiner.combine(held, tuple(bodies)), ZERO))
    axes = [axis for axis in step.reduction if axis.extent != 1]
    simd_safe = combiner.components == 1 and step.combiner in ("sum", "prod", "max", "min") and size_of(dtypes[0]) >= C_INT_BYTES
    inner: Statement = update
    for depth, axis in enumerate(reversed(axes)):
        if kind == "simd":
            if depth == 0 and simd_safe:
                inner = For(axis, index_const(axis.extent or 0), inner, "simd", ((names[0], step.combiner or ""),))
            else:
                inner = For(axis, index_const(axis.extent or 0), inner)
        else:
            inner = For(axis, index_const(axis.extent or 0), inner, kind)
    return [*result, inner], list(held)


def combined(names: Sequence[str], values: Sequence[Expr], offset: Expr) -> list[Statement]:
    """Stores all components of a combined accumulator at once: no update may see another component's new value."""
    if len(names) == 1:
        lets, (value,) = bind_shared([values[0]], "w")
        return [*lets, Store(names[0], offset, value)]
    lets, fresh = bind_shared(list(values), "w")
    held = [Let(Var(f"next{i}", None, value.dtype), value) for i, value in enumerate(fresh)]
    return [*lets, *held, *[Store(name, offset, h.variable) for name, h in zip(names, held, strict=True)]]
