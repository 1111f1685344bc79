"""Pooling: reductions over windows of the trailing dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.graph.operators.convolution import Pairs
from tilewright.graph.operators.definition import Operator, flatten, in_bounds, number
from tilewright.ir.computation import StepBuilder, Tensor, lowest, maximum, minimum
from tilewright.ir.expr import Const, Expr, compare, const, floordiv, logical_and, mod, mul, select, sub
from tilewright.ir.windows import pooled_extent


def _windows(x: Tensor, window: Sequence[int], stride: Sequence[int], padding: Pairs, dilation: Sequence[int], ceil_mode: bool) -> tuple[int, ...]:
    if x.rank < len(window) or min((*window, *stride, *dilation)) < 1:
        raise ValueError(f"pooling of {x.shape} in windows of {tuple(window)}, stride {tuple(stride)} and dilation {tuple(dilation)}")
    dims = zip(x.shape[x.rank - len(window) :], window, stride, padding, dilation, strict=True)
    return x.shape[: x.rank - len(window)] + tuple(pooled_extent(*dim, ceil_mode) for dim in dims)


def _guarded(
    x: Tensor, index: Sequence[Expr], rank: int, stride: Sequence[int], padding: Pairs, dilation: Sequence[int], outside: Expr
) -> tuple[Expr, Expr]:
    """The element under a window's tap, or `outside`; and its flat position in the trailing dimensions. For a tap outside, the position is that of
    the window's first tap after the left padding, which is PyTorch's result for a window in which nothing exceeds `outside`."""
    lead, where, taps = index[: -2 * rank], index[-2 * rank : -rank], index[-rank:]
    starts = [o * s - p[0] for o, s, p in zip(where, stride, padding, strict=True)]
    positions = [start + t * d for start, t, d in zip(starts, taps, dilation, strict=True)]
    firsts = [select(compare("lt", start, 0), mod(start, d), start) for start, d in zip(starts, dilation, strict=True)]
    sizes = x.shape[-rank:]
    inside = logical_and(*(c for position, size in zip(positions, sizes, strict=True) for c in in_bounds(position, size)))
    return select(inside, x(*lead, *positions), outside), select(inside, flatten(positions, sizes), flatten(firsts, sizes))


def _max_pool(
    b: StepBuilder,
    x: Tensor,
    *,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int],
    ceil_mode: bool = False,
    indices: bool = False,
) -> tuple[Tensor, ...]:
    """Greatest element of each window; with `indices` also its flat position in the trailing dimensions: the first of equal elements, the last
    NaN."""
    rank = len(window)

    def body(*index: Expr) -> Expr | tuple[Expr, ...]:
        tap = _guarded(x, index, rank, stride, padding, dilation, lowest(x.dtype))
        return tap if indices else tap[0]

    return b.reduce("pooled_argmax" if indices else "max", _windows(x, window, stride, padding, dilation, ceil_mode), window, body)


def _average_pool(
    b: StepBuilder,
    x: Tensor,
    *,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Pairs,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """Mean of each window: over all taps within the padded input, or within the input (`count_include_pad` False), or the sum over a given
    divisor."""
    rank, ones = len(window), (1,) * len(window)
    shape = _windows(x, window, stride, padding, ones, ceil_mode)
    zero = const(0, x.dtype)
    (total,) = b.reduce("sum", shape, window, lambda *i: _guarded(x, i, rank, stride, padding, ones, zero)[0])

    def scaled(*index: Expr) -> Expr:
        if divisor is not None:
            return total(*index) / float(divisor)
        count = taps_within(index[-rank:], x.shape[x.rank - rank :], window, stride, padding, count_include_pad)
        return total(*index) / float(count.value) if isinstance(count, Const) else total(*index) / number(count, x.dtype)

    return b.map(shape, scaled)


def taps_within(where: Sequence[Expr], sizes: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Pairs, padded: bool) -> Expr:
    """The number of taps within an input of these sizes, or also in its padding, of the window at a place."""
    count: Expr = Const(1, "i64")
    for o, size, taps, step, (before, after) in zip(where, sizes, window, stride, padding, strict=True):
        start = o * step - before
        stop = _least(start + taps, size + after)
        if not padded:
            start, stop = _greatest(start, 0), _least(stop, size)
        count = mul(count, sub(stop, start))
    return count


def _least(a: Expr, limit: int) -> Expr:
    return a if (a <= limit) == Const(True, "bool") else minimum(a, limit)


def _greatest(a: Expr, limit: int) -> Expr:
    return a if (a >= limit) == Const(True, "bool") else maximum(a, limit)


def _adaptive_pool(b: StepBuilder, x: Tensor, *, output: Sequence[int], kind: str, indices: bool = False) -> tuple[Tensor, ...]:
    """Window i of n over a dimension of size s: floor(i s / n) to ceil((i + 1) s / n); `kind` is "mean" or "max"."""
    rank = len(output)
    sizes = x.shape[x.rank - rank :]
    shape = (*x.shape[: x.rank - rank], *output)
    # the longest window: exact if the sizes divide, else at most one element more than the rounded-up quotient
    window = tuple(max((-(-(i + 1) * s // n) - i * s // n for i in range(n)), default=1) for s, n in zip(sizes, output, strict=True))

    def body(*index: Expr) -> Expr | tuple[Expr, ...]:
        lead, where, taps = index[: -2 * rank], index[-2 * rank : -rank], index[-rank:]
        starts = [floordiv(o * s, n) for o, s, n in zip(where, sizes, output, strict=True)]
        positions = [start + t for start, t in zip(starts, taps, strict=True)]
        inside = logical_and(*(p < floordiv((o + 1) * s + (n - 1), n) for p, o, s, n in zip(positions, where, sizes, output, strict=True)))
        outside = lowest(x.dtype) if kind == "max" else const(0, x.dtype)
        value = select(inside, x(*lead, *positions), outside)
        return (value, flatten(positions, sizes)) if indices else value

    results = b.reduce("pooled_argmax" if indices else "max" if kind == "max" else "sum", shape, window, body)
    if kind == "max":
        return results

    def scaled(*index: Expr) -> Expr:
        if all(s % n == 0 for s, n in zip(sizes, output, strict=True) if n):
            return results[0](*index) / float(prod(window))
        count: Expr = Const(1, "i64")
        for o, s, n in zip(index[-rank:], sizes, output, strict=True):
            count = mul(count, sub(floordiv((o + 1) * s + (n - 1), n), floordiv(o * s, n)))
        return results[0](*index) / number(count, x.dtype)

    return (b.map(shape, scaled),)


OPERATORS: tuple[Operator, ...] = (
    Operator("max_pool", _max_pool),
    Operator("average_pool", _average_pool),
    Operator("adaptive_pool", _adaptive_pool),
)
