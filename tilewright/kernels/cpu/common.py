"""What the CPU schemas share: loops over threads and vector lanes, and reductions into scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from tilewright.codegen.access import VECTOR_TYPES, bind_shared, vectorise
from tilewright.codegen.assemble import block
from tilewright.codegen.printer import C_INT_BYTES
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.dtypes import NARROW_FLOATS, size_of
from tilewright.ir.expr import (
    ZERO,
    Apply,
    Expr,
    Linear,
    Load,
    Var,
    as_lanes,
    binary,
    cast,
    coefficient,
    compare,
    const,
    floordiv,
    from_linear,
    index_const,
    linear,
    replace_loads,
    rewrite,
    select,
    substitute,
    variables,
)
from tilewright.ir.kernel import SERIAL_WORK, Allocate, Block, Buffer, For, Let, Statement, Store, substitute_in
from tilewright.ir.problem import Problem

CHUNK = 2048
"""Chunk size in elements when a single long axis is divided among threads."""
MANY = 32
"""Iterations of outer axes from which the threads divide only these."""
SHORTEST = 4
"""Fewest elements along an axis that are worth vectors."""
CHAINS = 4
"""Accumulators of a reduction, so that one addition or maximum need not wait for the one before."""
IDEMPOTENT = frozenset({"max", "min", "any", "all"})
"""Combiners that may combine an element more than once."""
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


def loops(axes: Sequence[Var], body: Statement, parallel: bool, simd: bool = False, work: int | None = None) -> Statement:
    """Loops over the axes, outermost first. parallel: all are collapsed and divided among threads, if there is enough `work` (element operations of
    all of them; None: there is); simd: the innermost is vectorised."""
    result = body
    for depth, axis in enumerate(reversed(axes)):
        kind = "parallel" if parallel else "simd" if simd and depth == 0 else "serial"
        result = For(axis, index_const(axis.extent or 0), result, kind, work=0 if work is None or not parallel else max(work, 1))
    return result


def nest(axes: Sequence[Var], body: Statement, work: int) -> Statement:
    """Loops with threads over the outer axes and lanes over the innermost; a single long axis is split into chunks for the threads."""
    if not axes:
        return body
    if work <= SERIAL_WORK:
        return loops(axes, body, False, simd=True)
    *outer, inner = axes
    extent = inner.extent or 0
    if prod(axis.extent or 0 for axis in outer) >= MANY:
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


def vector_width(axis: Var, lanes: int) -> int:
    """The lanes of vectors along the axis; 1 if it is too short for them."""
    width = min(lanes, 1 << (axis.extent or 1).bit_length() - 1)
    return width if width >= SHORTEST else 1


def in_vectors(problem: Problem, axis: Var, lanes: int) -> int:
    """The lanes of the vectors in which loops along the axis access 16-bit floats: no compiler uses the instructions that convert them in a loop over
    elements. 1 if there are none, or the axis is too short."""
    names = (*problem.region.inputs, *problem.region.outputs)
    return vector_width(axis, lanes) if any(problem.values[name].dtype in NARROW_FLOATS for name in names) else 1


def halves(problem: Problem, axis: Var, width: int) -> int:
    """Vectors of `width` float32 that are stored together: two of them, converted to 16 bits, are as long as one before."""
    narrow = problem.values[problem.region.outputs[0]].dtype in NARROW_FLOATS
    return 2 if narrow and (axis.extent or 0) >= 2 * width else 1


def vector_store(target: str, where: Expr, value: Expr, axis: Var, width: int, parts: int = 1) -> Block | None:
    """target[where] = value for `parts` (1 or 2) times `width` neighbours along the axis; None if a load is no vector of them, or the target is not
    contiguous."""
    wide = vectorise(value, axis, width) if value.dtype in VECTOR_TYPES and coefficient(where, axis) == 1 else None
    if wide is None:
        return None
    wide = as_lanes(wide, width)
    if parts == 2:
        wide = Apply("join", (wide, substitute(wide, {axis: axis + width})), wide.dtype, 2 * width)
    lets, (value, where) = bind_shared([wide, where])
    return block(lets, Store(target, where, value))


def swept(axis: Var, width: int, body: Statement, length: Expr | None = None, start: Expr = ZERO) -> Statement:
    """A loop over vectors of `width` neighbours along the axis, `length` elements (all) from `start`, at least `width`. The last vector overlaps the
    one before if vectors do not divide them, so that the body must store and nothing else."""
    length = index_const(axis.extent or 0) if length is None else length
    vector = Var("vector", -(-(axis.extent or 0) // width))
    offset: Expr = vector * width
    if (axis.extent or 0) % width:
        offset = binary("min", offset, length - width)
    first = Var(axis.name, None)
    return For(vector, floordiv(length + (width - 1), width), block(Let(first, start + offset), substitute_in(body, {axis: first})))


def vector_nest(axes: Sequence[Var], width: int, body: Statement, work: int) -> Statement:
    """Loops with threads over the outer axes, and over vectors of the innermost, for which `body` stores; a single long axis is split into chunks for
    the threads, the last of which takes a rest that is shorter than a vector."""
    *outer, inner = axes
    extent, parallel = inner.extent or 0, work > SERIAL_WORK
    chunks = (extent - width) // CHUNK + 1
    if not parallel or chunks == 1 or prod(axis.extent or 0 for axis in outer) >= MANY:
        return loops(outer, swept(inner, width, body), parallel)
    chunk = Var("chunk", chunks)
    length: Expr = index_const(CHUNK)
    if extent % CHUNK:
        length = select(compare("lt", chunk, index_const(chunks - 1)), length, index_const(extent - (chunks - 1) * CHUNK))
    return loops([*outer, chunk], swept(inner, width, body, length, chunk * CHUNK), True)


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


def reduction(
    step: Step, bodies: Sequence[Expr], kind: str, prefix: str = "acc", first: Statement | None = None
) -> tuple[list[Statement], list[Expr]]:
    """Statements that reduce flat bodies over the step's reduced axes into scalars, and loads of the results; `first` comes before each body."""
    combiner = COMBINERS[step.combiner or ""]
    names = [f"{prefix}{i}" for i in range(combiner.components)]
    dtypes = tuple(body.dtype for body in bodies)
    held = tuple(Load(name, (ZERO,), dtype) for name, dtype in zip(names, dtypes, strict=True))
    result: list[Statement] = []
    for name, dtype, identity in zip(names, dtypes, combiner.identity(dtypes), strict=True):
        result += [Allocate(Buffer(name, dtype, 1, "register")), Store(name, ZERO, identity)]
    zero: dict[Var, Expr] = {axis: ZERO for axis in step.reduction if axis.extent == 1}
    bodies = [substitute(b, zero) for b in bodies] if zero else bodies
    update = block([first] if first else [], combined(names, combiner.combine(held, tuple(bodies)), ZERO))
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


def vector_reduction(step: Step, body: Expr, width: int, prefix: str, first: Statement | None = None) -> tuple[list[Statement], Expr] | None:
    """As `reduction`, in vectors of `width` neighbours along the innermost reduced axis; None if that is not possible. Elements that fill no vector
    are the last of a vector that overlaps the one before, the other elements of which are identities, unless combining them again changes nothing."""
    *outer, inner = (axis for axis in step.reduction if axis.extent != 1)
    combiner, dtype, extent = COMBINERS[step.combiner or ""], body.dtype, inner.extent or 0
    wide = vectorise(body, inner, width) if combiner.components == 1 and dtype in VECTOR_TYPES else None
    if wide is None:
        return None
    wide = as_lanes(substitute(wide, {axis: ZERO for axis in step.reduction if axis.extent == 1}), width)
    acc, numbers, total = f"{prefix}0", f"{prefix}_lanes", Var(f"{prefix}_total", None, dtype)
    full, rest = divmod(extent, width)
    chains = CHAINS if full >= CHAINS else 1
    (identity,), chain = combiner.identity((dtype,)), Var("chain", chains)

    def held(number: Expr) -> Load:
        return Load(acc, (number * width,), dtype, width)

    def merged(number: Expr, *values: Expr) -> Statement:
        return Store(acc, number * width, combiner.combine((values[0],), (values[1],))[0])

    def at(start: Expr, use: Callable[[Expr], Statement]) -> Statement:
        lets, (value,) = bind_shared([substitute(wide, {inner: start})], "w")
        return block([substitute_in(first, {inner: start})] if first else [], lets, use(value))

    def swept_by(count: int, start: Expr, number: Var) -> Statement:
        body = at(start + number * width, lambda value: merged(number, held(number), value))
        return For(number, index_const(count), body, "unroll")

    vector = Var("vector", full // chains)
    parts: list[Statement] = [For(vector, index_const(full // chains), swept_by(chains, vector * (chains * width), chain))]
    if full % chains:
        parts.append(swept_by(full % chains, index_const(full // chains * chains * width), Var("chain", full % chains)))
    result: list[Statement] = [Allocate(Buffer(acc, dtype, chains * width, "register", width))]
    result.append(For(chain, index_const(chains), Store(acc, chain * width, as_lanes(identity, width)), "unroll"))
    if rest and step.combiner in IDEMPOTENT:
        parts.append(at(index_const(extent - width), lambda value: merged(ZERO, held(ZERO), value)))
    elif rest:
        number = Var("number", width)
        numbered = For(number, index_const(width), Store(numbers, number, cast(number, dtype)), "unroll")
        result += [Allocate(Buffer(numbers, dtype, width, "register")), numbered]
        fresh = compare("ge", Load(numbers, (ZERO,), dtype, width), as_lanes(const(width - rest, dtype), width))
        parts.append(at(index_const(extent - width), lambda value: merged(ZERO, held(ZERO), select(fresh, value, as_lanes(identity, width)))))
    result.append(loops(outer, block(parts), False))
    result += [merged(ZERO, held(ZERO), held(index_const(number))) for number in range(1, chains)]
    for _ in range(width.bit_length() - 1):  # each round combines the halves; in the end every lane holds the total
        result.append(merged(ZERO, *(Apply(f"zip_{half}", (held(ZERO), held(ZERO)), dtype, width) for half in ("low", "high"))))
    return [*result, Let(total, Load(acc, (ZERO,), dtype))], total


def combined(names: Sequence[str], values: Sequence[Expr], offset: Expr) -> list[Statement]:
    """Stores all components of a combined accumulator at once: no update may see another component's new value."""
    if len(names) == 1:
        lets, (value,) = bind_shared([values[0]], "w")
        return [*lets, Store(names[0], offset, value)]
    lets, fresh = bind_shared(list(values), "w")
    held = [Let(Var(f"next{i}", None, value.dtype), value) for i, value in enumerate(fresh)]
    return [*lets, *held, *[Store(name, offset, h.variable) for name, h in zip(names, held, strict=True)]]
