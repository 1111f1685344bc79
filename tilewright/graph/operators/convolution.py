"""Convolution in any number of dimensions: a sum of products over the filter's extents and the channels of a group."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.graph.operators.definition import Operator, in_bounds
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.expr import Expr, const, floordiv, logical_and, mod, mul, select

Pairs = Sequence[tuple[int, int]]


def output_extent(size: int, filter_extent: int, stride: int, padding: tuple[int, int], dilation: int) -> int:
    """Number of positions of a dilated filter along one padded dimension."""
    return (size + sum(padding) - dilation * (filter_extent - 1) - 1) // stride + 1


def _check_attributes(stride: Sequence[int], dilation: Sequence[int], groups: int) -> None:
    if min((*stride, *dilation, groups)) < 1:
        raise ValueError(f"convolution of stride {tuple(stride)} and dilation {tuple(dilation)} in {groups} groups")


def _convolution(b: StepBuilder, x: Tensor, w: Tensor, *, stride: Sequence[int], padding: Pairs, dilation: Sequence[int], groups: int = 1) -> Tensor:
    """x [N, C, spatial...], w [K, C / groups, filter...] -> [N, K, spatial'...]; `padding` is ((before, after), ...)."""
    _check_attributes(stride, dilation, groups)
    n, k, filters = x.shape[0], w.shape[0], w.shape[2:]
    group_outputs, group_channels = k // groups, w.shape[1]
    if x.shape[1] != group_channels * groups or k % groups:
        raise ValueError(f"convolution of {x.shape} with {w.shape} in {groups} groups")
    extents = tuple(output_extent(*dim) for dim in zip(x.shape[2:], filters, stride, padding, dilation, strict=True))

    def product(batch: Expr, group: Expr | int, output: Expr, where: Sequence[Expr], taps: Sequence[Expr], channel: Expr) -> Expr:
        positions = [o * s + t * d - p[0] for o, s, t, d, p in zip(where, stride, taps, dilation, padding, strict=True)]
        inside = logical_and(*(c for position, size in zip(positions, x.shape[2:], strict=True) for c in in_bounds(position, size)))
        loaded = x(batch, channel + mul(group, group_channels), *positions)
        return mul(select(inside, loaded, const(0, x.dtype)), w(output, channel, *taps))

    rank = len(filters)
    if groups == 1:
        (result,) = b.reduce(
            "sum",
            (n, k, *extents),
            (*filters, group_channels),
            lambda i, o, *rest: product(i, 0, o, rest[:rank], rest[rank:-1], rest[-1]),
        )
        return result
    (result,) = b.reduce(
        "sum",
        (n, k, *extents),
        (*filters, group_channels),
        lambda i, g, o, *rest: product(i, g, o + mul(g, group_outputs), rest[:rank], rest[rank:-1], rest[-1]),
        axes=(n, groups, group_outputs, *extents),
        index=lambda i, g, o, *rest: (i, o + mul(g, group_outputs), *rest),
    )
    return result


def _transposed_convolution(
    b: StepBuilder,
    x: Tensor,
    w: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """x [N, C, spatial...], w [C, K / groups, filter...]: each output gathers the inputs whose filters reach it."""
    _check_attributes(stride, dilation, groups)
    n, c, filters, group_outputs = x.shape[0], w.shape[0], w.shape[2:], w.shape[1]
    if x.shape[1] != c or c % groups:
        raise ValueError(f"transposed convolution of {x.shape} with {w.shape} in {groups} groups")
    group_channels = c // groups
    extents = tuple(
        (size - 1) * s - 2 * p + d * (f - 1) + extra + 1
        for size, f, s, p, extra, d in zip(x.shape[2:], filters, stride, padding, output_padding, dilation, strict=True)
    )
    rank = len(filters)

    def product(batch: Expr, group: Expr, output: Expr, *rest: Expr) -> Expr:
        where, taps, channel = rest[:rank], rest[rank:-1], rest[-1] + mul(group, group_channels)
        offsets = [o + p - t * d for o, p, t, d in zip(where, padding, taps, dilation, strict=True)]
        positions = [floordiv(o, s) for o, s in zip(offsets, stride, strict=True)]
        conditions = [mod(o, s).equals(0) for o, s in zip(offsets, stride, strict=True)]
        conditions += [c for position, size in zip(positions, x.shape[2:], strict=True) for c in in_bounds(position, size)]
        loaded = x(batch, channel, *positions)
        return mul(select(logical_and(*conditions), loaded, const(0, x.dtype)), w(channel, output, *taps))

    (result,) = b.reduce(
        "sum",
        (n, groups * group_outputs, *extents),
        (*filters, group_channels),
        product,
        axes=(n, groups, group_outputs, *extents),
        index=lambda i, g, o, *rest: (i, o + mul(g, group_outputs), *rest),
    )
    return result


OPERATORS: tuple[Operator, ...] = (
    Operator("convolution", _convolution),
    Operator("transposed_convolution", _transposed_convolution),
)
