"""Writing to positions that data give, as maps: each element of the result finds out what is written to it.

If several indices are equal, the last one decides. That costs a comparison for each pair of an index and a position that it may have; with a single
index, as when one token is added to a cache, the operator is a map over the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType

from tilewright.graph.operators.definition import Operator, broadcast, broadcast_load, flatten, unflatten
from tilewright.ir.computation import COMBINERS, StepBuilder, Tensor, maximum, minimum
from tilewright.ir.expr import INDEX, Expr, add, cast, compare, const, logical_and, mul, select

_COMBINED: Mapping[str, Callable[[Expr, Expr], Expr]] = MappingProxyType({"sum": add, "prod": mul, "max": maximum, "min": minimum})


def _put(b: StepBuilder, x: Tensor, values: Tensor, *indices: Tensor, axes: Sequence[int], combiner: str = "") -> Tensor:
    """x with x[..., indices, ...] = values, as the operator `index` reads it, or with x and the values combined: "sum", "prod", "max" or "min". The
    indices are valid positions."""
    common = broadcast(*(t.shape for t in indices))
    adjacent = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    start = axes[0] if adjacent else 0
    if not prod(common):
        return b.map(x.shape, x)

    def matches(i: Sequence[Expr], at: Sequence[Expr]) -> Expr:
        pairs = zip(axes, indices, strict=True)
        return logical_and(*(cast(broadcast_load(t, at), INDEX).equals(i[axis]) for axis, t in pairs))

    def value(i: Sequence[Expr], at: Sequence[Expr]) -> Expr:
        rest = [v for k, v in enumerate(i) if k not in axes]
        return broadcast_load(values, [*rest[:start], *at, *rest[start:]])

    if prod(common) == 1:
        first = [const(0, INDEX)] * len(common)
        return b.map(x.shape, lambda *i: select(matches(i, first), _new(combiner, x(*i), value(i, first)), x(*i)))
    if combiner:
        rank, (neutral,) = x.rank, COMBINERS[combiner].identity((x.dtype,))
        (combined,) = b.reduce(combiner, x.shape, common, lambda *v: select(matches(v[:rank], v[rank:]), value(v[:rank], v[rank:]), neutral))
        return b.map(x.shape, lambda *i: _COMBINED[combiner](x(*i), combined(*i)))
    positions = [x.shape[axis] for axis in axes]

    def last(*v: Expr) -> Expr:
        whole: list[Expr] = [const(0, INDEX)] * x.rank
        for axis, position in zip(axes, v, strict=False):
            whole[axis] = position
        at = v[len(axes) :]
        return select(matches(whole, at), flatten(at, common), const(-1, INDEX))

    (writer,) = b.reduce("max", positions, common, last)

    def body(*i: Expr) -> Expr:
        by = writer(*(i[axis] for axis in axes))
        at = unflatten(_within(by, prod(common)), common)
        return select(compare("ge", by, 0), value(i, at), x(*i))

    return b.map(x.shape, body)


def _scatter(b: StepBuilder, x: Tensor, index: Tensor, values: Tensor, *, axis: int, combiner: str = "") -> Tensor:
    """x with x[..., index[i], ...] = values[i], or combined with it as by `put`, for each i of the index, which has the rank of x (torch.scatter).
    Values without dimensions are written everywhere. The indices are valid positions."""
    count = index.shape[axis]
    if not prod(index.shape):
        return b.map(x.shape, x)
    shorter = [k for k in range(x.rank) if k != axis and index.shape[k] < x.shape[k]]

    def among(i: Sequence[Expr], hit: Expr, otherwise: Expr) -> Expr:
        """`hit` where the index has entries beside the element."""
        return select(logical_and(*(compare("lt", i[k], index.shape[k]) for k in shorter)), hit, otherwise) if shorter else hit

    def matches(i: Sequence[Expr], at: Expr) -> Expr:
        return cast(index(*i[:axis], at, *i[axis + 1 :]), INDEX).equals(i[axis])

    def value(i: Sequence[Expr], at: Expr) -> Expr:
        return values(*i[:axis], at, *i[axis + 1 :]) if values.rank else values()

    if count == 1:
        first = const(0, INDEX)
        return b.map(x.shape, lambda *i: among(i, select(matches(i, first), _new(combiner, x(*i), value(i, first)), x(*i)), x(*i)))
    if combiner:
        (neutral,) = COMBINERS[combiner].identity((x.dtype,))

        def one(*v: Expr) -> Expr:
            return among(v[:-1], select(matches(v[:-1], v[-1]), value(v[:-1], v[-1]), neutral), neutral)

        (combined,) = b.reduce(combiner, x.shape, (count,), one)
        return b.map(x.shape, lambda *i: _COMBINED[combiner](x(*i), combined(*i)))
    none = const(-1, INDEX)
    (writer,) = b.reduce("max", x.shape, (count,), lambda *v: among(v[:-1], select(matches(v[:-1], v[-1]), cast(v[-1], INDEX), none), none))

    def body(*i: Expr) -> Expr:
        by = writer(*i)
        return among(i, select(compare("ge", by, 0), value(i, _within(by, count)), x(*i)), x(*i))

    return b.map(x.shape, body)


def _new(combiner: str, old: Expr, value: Expr) -> Expr:
    """What replaces an element."""
    return _COMBINED[combiner](old, value) if combiner else value


def _within(position: Expr, extent: int) -> Expr:
    """The position, in a form whose range is known."""
    return minimum(maximum(position, 0), extent - 1)


OPERATORS: tuple[Operator, ...] = (Operator("put", _put), Operator("scatter", _scatter))
