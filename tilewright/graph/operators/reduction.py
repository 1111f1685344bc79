"""Reductions over whole dimensions, and scans along one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.graph.operators.definition import Operator, convert
from tilewright.ir.computation import StepBuilder, Tensor, lowest
from tilewright.ir.expr import INDEX, Const, Expr, binary, compare, select, unary


def spread(index: Sequence[Expr], axes: Sequence[int]) -> tuple[Expr, ...]:
    """An index with the reduced dimensions at 0: the position of a row's statistics when these are kept with extent 1."""
    return tuple(Const(0, INDEX) if i in axes else value for i, value in enumerate(index))


def reduced(
    b: StepBuilder,
    combiner: str,
    x: Tensor,
    axes: Sequence[int],
    keepdim: bool,
    of: Callable[[Expr], Expr] = lambda value: value,
    *,
    position: bool = False,
) -> tuple[Tensor, ...]:
    """Combines of(x) over `axes` (sorted, non-negative); `position` adds the index along the single axis as a second component."""
    shape = tuple(1 if i in axes else extent for i, extent in enumerate(x.shape) if keepdim or i not in axes)
    rank = len(shape)

    def body(*index: Expr) -> Expr | tuple[Expr, Expr]:
        outer = iter([v for i, v in enumerate(index[:rank]) if not (keepdim and i in axes)])
        inner = iter(index[rank:])
        full = tuple(next(inner) if i in axes else next(outer) for i in range(x.rank))
        value = of(x(*full))
        return (value, full[axes[0]]) if position else value

    return b.reduce(combiner, shape, tuple(x.shape[i] for i in axes), body)


@dataclass(frozen=True)
class Moments:
    """Statistics of rows; `squares` holds the sums of squared deviations from the mean, one for each row."""

    squares: Tensor
    deviation: Callable[[Sequence[Expr], Expr], Expr]
    """Maps a row's index and one of its elements to the element minus the row's mean."""


def moments(b: StepBuilder, rows: Sequence[int], columns: Sequence[int], element: Callable[..., Expr]) -> Moments:
    """Statistics of element(row..., column...) over the columns, in two passes over data that are shifted by each row's first element (Chan, Golub
    and LeVeque, Algorithms for computing the sample variance, 1983): rows of equal elements have deviations of exactly zero at any length, and rows
    far from zero lose no precision to the rounding of their mean."""
    count = prod(columns)
    rank = len(rows)
    if not count:
        (empty,) = b.reduce("sum", rows, columns, element)
        return Moments(empty, lambda row, value: value)
    (first,) = b.reduce("max", rows, [1] * len(columns), element)
    (total,) = b.reduce("sum", rows, columns, lambda *i: element(*i) - first(*i[:rank]))

    def deviation(row: Sequence[Expr], value: Expr) -> Expr:
        return (value - first(*row)) - total(*row) * (1.0 / count)

    def squared(*index: Expr) -> Expr:
        value = deviation(index[:rank], element(*index))
        return value * value

    (squares,) = b.reduce("sum", rows, columns, squared)
    return Moments(squares, deviation)


def moments_over(b: StepBuilder, x: Tensor, axes: Sequence[int]) -> Moments:
    """Statistics over `axes`, which rows keep with extent 1."""

    def element(*index: Expr) -> Expr:
        inner = iter(index[x.rank :])
        return x(*(next(inner) if i in axes else v for i, v in enumerate(index[: x.rank])))

    return moments(b, [1 if i in axes else extent for i, extent in enumerate(x.shape)], [x.shape[i] for i in axes], element)


def _simple(name: str, combiner: str, to: str | None = None) -> Operator:
    def define(b: StepBuilder, x: Tensor, *, axes: Sequence[int], keepdim: bool = False, dtype: str | None = None) -> Tensor:
        kind = to or dtype or x.dtype
        return reduced(b, combiner, x, axes, keepdim, lambda value: convert(value, kind))[0]

    return Operator(name, define)


def _mean(b: StepBuilder, x: Tensor, *, axes: Sequence[int], keepdim: bool = False, dtype: str | None = None) -> Tensor:
    (total,) = reduced(b, "sum", x, axes, keepdim, lambda value: convert(value, dtype or x.dtype))
    count = float(prod(x.shape[i] for i in axes))
    # a division, because the product with a rounded reciprocal is not the mean of equal elements even if their sum is exact
    return b.map(total.shape, lambda *i: total(*i) / count)


def _variance(b: StepBuilder, x: Tensor, *, axes: Sequence[int], correction: float = 1.0, keepdim: bool = False, root: bool = False) -> Tensor:
    """Sum of squared deviations over max(count - correction, 0), or its square root."""
    squares = moments_over(b, x, axes).squares
    freedom = max(prod(x.shape[i] for i in axes) - correction, 0.0)
    shape = tuple(1 if i in axes else extent for i, extent in enumerate(x.shape) if keepdim or i not in axes)

    def body(*index: Expr) -> Expr:
        rest = iter(index)
        row = index if keepdim else tuple(Const(0, INDEX) if i in axes else next(rest) for i in range(x.rank))
        mean_square = squares(*row) / freedom
        return unary("sqrt", mean_square) if root else mean_square

    return b.map(shape, body)


def _extreme(name: str) -> Operator:
    def define(b: StepBuilder, x: Tensor, *, axis: int, keepdim: bool = False) -> tuple[Tensor, ...]:
        if not x.shape[axis]:
            raise ValueError(f"{name} over a dimension without elements")
        return reduced(b, name, x, (axis,), keepdim, position=True)

    return Operator(f"{name}_with_value", define)


def _largest(b: StepBuilder, x: Tensor, *, count: int) -> Tensor:
    """The `count` largest of the distinct integers of each row, in descending order: each is the greatest of those below the one before."""
    *rows, extent = x.shape
    if not 0 < count <= extent:
        raise ValueError(f"the {count} largest of {extent}")
    found: list[Tensor] = []
    for _ in range(count):

        def below(*index: Expr, previous: Tensor | None = found[-1] if found else None) -> Expr:
            value = x(*index)
            return value if previous is None else select(compare("lt", value, previous(*index[:-1])), value, lowest(x.dtype))

        found += b.reduce("max", rows, [extent], below)

    def nth(*index: Expr) -> Expr:
        result = found[-1](*index[:-1])
        for i in reversed(range(count - 1)):
            result = select(compare("eq", index[-1], i), found[i](*index[:-1]), result)
        return result

    return b.map((*rows, count), nth)


def _norm(b: StepBuilder, x: Tensor, *, order: float, axes: Sequence[int], keepdim: bool = False) -> Tensor:
    """(sum |x| ** order) ** (1 / order); orders of infinity are extremes, order 0 counts."""
    if order == float("inf"):
        return reduced(b, "max", x, axes, keepdim, lambda v: unary("abs", v))[0]
    if order == float("-inf"):
        return reduced(b, "min", x, axes, keepdim, lambda v: unary("abs", v))[0]
    if order == 0:
        return reduced(b, "sum", x, axes, keepdim, lambda v: convert(convert(v, "bool"), x.dtype))[0]
    if order == 1:
        return reduced(b, "sum", x, axes, keepdim, lambda v: unary("abs", v))[0]
    if order == 2:
        (total,) = reduced(b, "sum", x, axes, keepdim, lambda v: v * v)
        return b.map(total.shape, lambda *i: unary("sqrt", total(*i)))
    (total,) = reduced(b, "sum", x, axes, keepdim, lambda v: _power(unary("abs", v), order))
    return b.map(total.shape, lambda *i: _power(total(*i), 1.0 / order))


def _power(x: Expr, y: float) -> Expr:
    return binary("pow", x, y)


def _cumulative(name: str, combiner: str) -> Operator:
    def define(b: StepBuilder, x: Tensor, *, axis: int, dtype: str | None = None) -> Tensor:
        (result,) = b.scan(combiner, x.shape, axis, lambda *i: convert(x(*i), dtype or x.dtype))
        return result

    return Operator(name, define)


OPERATORS: tuple[Operator, ...] = (
    _simple("sum", "sum"),
    _simple("prod", "prod"),
    _simple("amax", "max"),
    _simple("amin", "min"),
    _simple("any", "any", "bool"),
    _simple("all", "all", "bool"),
    Operator("mean", _mean),
    Operator("variance", _variance),
    Operator("norm", _norm),
    Operator("largest", _largest),
    _extreme("argmax"),
    _extreme("argmin"),
    _cumulative("cumsum", "sum"),
    _cumulative("cumprod", "prod"),
)
