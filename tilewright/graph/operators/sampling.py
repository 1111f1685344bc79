"""Sampling between elements, at positions that are data: linear interpolation, as in ONNX's RoiAlign and DeformConv.

A position has two taps in each dimension, the elements beside it, and a corner for each choice of taps. Corners' positions and weights are values,
[2, ...] for positions [...] in one dimension, [2, 2, ...] in two: every channel reads the same ones. A corner is within the dimensions whatever the
position is, also NaN, so loads need no check; what lies outside weighs 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

from tilewright.graph.operators.definition import Operator
from tilewright.graph.operators.indexing import position
from tilewright.ir.computation import StepBuilder, Tensor, maximum, minimum
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.expr import Expr, add, cast, compare, logical_and, mul, select, unary


def _taps(at: Expr, tap: Expr, size: int) -> tuple[Expr, Expr]:
    """Index and weight of one of a position's two taps. Positions up to one element outside mean the nearest element."""
    if not size:
        raise ValueError("a dimension without elements is sampled")
    near = logical_and(compare("ge", at, -1.0), compare("le", at, float(size)))  # not of NaN
    at = minimum(maximum(select(near, at, 0.0), 0.0), float(size - 1))
    low = unary("floor", at)
    index, fraction = cast(low, "i32") + cast(tap, "i32"), at - low
    return minimum(maximum(index, 0), size - 1), select(near, select(tap.equals(0), 1.0 - fraction, fraction), 0.0)


def _corners(b: StepBuilder, at: Sequence[Tensor], sizes: Sequence[int], value: Callable[[Sequence[tuple[Expr, Expr]]], Expr]) -> Tensor:
    """Positions [...] in each dimension -> [2, 2, ..., positions...]: a value of the taps of each corner."""

    def body(*i: Expr) -> Expr:
        taps, place = i[: len(at)], i[len(at) :]
        return value([_taps(x(*place), tap, size) for x, tap, size in zip(at, taps, sizes, strict=True)])

    return b.map((*(2 for _ in at), *at[0].shape), body)


def _corner_positions(b: StepBuilder, *at: Tensor, sizes: Sequence[int]) -> Tensor:
    """at [...] in each dimension -> [2, 2, ..., positions...]: flat positions, in 32 bits, of which CPUs compute vectors."""
    if prod(sizes) > ELEMENT_TYPES["i32"].highest:
        raise ValueError(f"positions in {' x '.join(map(str, sizes))}")
    return _corners(b, at, sizes, lambda taps: reduce(lambda flat, k: flat * sizes[k] + taps[k][0], range(1, len(at)), taps[0][0]))


def _corner_weights(b: StepBuilder, *at: Tensor, sizes: Sequence[int]) -> Tensor:
    """at [...] in each dimension -> [2, 2, ..., positions...]"""
    return _corners(b, at, sizes, lambda taps: reduce(mul, (weight for _, weight in taps)))


def _roi_positions(
    b: StepBuilder, rois: Tensor, *, axis: int, outputs: int, samples: int, scale: float, offset: float, least: float | None
) -> Tensor:
    """rois [R, (x1, y1, x2, y2)] -> [R, outputs, samples]: positions along x (axis 0) or y (axis 1) of `samples` points in each of `outputs` bins.
    Corners are scaled and moved by -offset; regions are at least `least` long."""
    if rois.shape[1:] != (4,):
        raise ValueError(f"regions of shape {rois.shape}")

    def body(region: Expr, output: Expr, sample: Expr) -> Expr:
        start, stop = (rois(region, corner) * scale - offset for corner in (axis, axis + 2))
        extent = stop - start if least is None else maximum(stop - start, least)
        size = extent / float(outputs)
        return start + cast(output, rois.dtype) * size + (cast(sample, rois.dtype) + 0.5) * size / float(samples)

    return b.map((rois.shape[0], outputs, samples), body)


def _roi_pool(b: StepBuilder, x: Tensor, images: Tensor, *taps: Tensor, kind: str) -> Tensor:
    """x [N, C, H, W], images [R], taps [2, R, outputs, samples]: positions and weights of rows, then of columns -> [R, C, rows, columns]: the mean of
    a bin's samples, or (kind "max") the greatest of its weighted elements."""
    rows, row_weights, columns, column_weights = taps
    (_, regions, height, down), (_, _, width, across) = rows.shape, columns.shape
    if x.rank != 4 or images.shape != (regions,):
        raise ValueError(f"{regions} regions, of images {images.shape}, in {x.shape}")

    def body(region: Expr, channel: Expr, i: Expr, j: Expr, row: Expr, column: Expr) -> Expr:
        image = position(images(region), x.shape[0], negative=False)

        def weighted(upper: int) -> Expr:
            """A row's weight, which is not negative, applies to what its columns are combined to."""
            vertical = (upper, region, i, row)
            beside = [(left, region, j, column) for left in (0, 1)]
            y, xs = position(rows(*vertical), x.shape[2], negative=False), [position(columns(*k), x.shape[3], negative=False) for k in beside]
            return combine(*(x(image, channel, y, at) * column_weights(*k) for at, k in zip(xs, beside, strict=True))) * row_weights(*vertical)

        return combine(weighted(0), weighted(1))

    combine = maximum if kind == "max" else add
    (result,) = b.reduce("max" if kind == "max" else "sum", (regions, x.shape[1], height, width), (down, across), body)
    return result if kind == "max" else b.map(result.shape, lambda *i: result(*i) / float(down * across))


def _deformed_columns(b: StepBuilder, x: Tensor, corners: Tensor, weights: Tensor) -> Tensor:
    """x [N, C, pixels], flat positions and weights [2, ..., N, groups, filter..., spatial'...] of the corners around a sample ->
    [N, spatial'..., filter..., groups, C / groups], channels innermost: vectors of them are read, and their sum is sequential."""
    rank = (corners.rank - 2) // 3
    groups, shape = corners.shape[rank + 1], corners.shape[rank + 2 :]
    share = x.shape[1] // groups
    if share * groups != x.shape[1]:
        raise ValueError(f"{x.shape[1]} channels in {groups} groups")

    def body(image: Expr, *rest: Expr) -> Expr:
        *where, group, channel = rest
        place = (image, group, *where[rank:], *where[:rank])

        def weighted(*taps: int) -> Expr:
            if len(taps) < rank:
                return weighted(*taps, 0) + weighted(*taps, 1)
            return x(image, channel + mul(group, share), position(corners(*taps, *place), x.shape[2], negative=False)) * weights(*taps, *place)

        return weighted()

    return b.map((x.shape[0], *shape[rank:], *shape[:rank], groups, share), body)


def _column_products(b: StepBuilder, columns: Tensor, w: Tensor, *, groups: int = 1) -> Tensor:
    """columns [N, spatial'..., filter..., C], w [K, C / groups, filter...] -> [N, K, spatial'...]: a convolution whose samples are given."""
    rank, outputs, channels = w.rank - 2, w.shape[0], w.shape[1]
    n, *shape = columns.shape
    if columns.shape[-1] != channels * groups or outputs % groups or tuple(shape[rank:-1]) != w.shape[2:]:
        raise ValueError(f"convolution of samples {columns.shape} with {w.shape} in {groups} groups")
    share, extents = outputs // groups, shape[:rank]

    def product(image: Expr, group: Expr, output: Expr, *rest: Expr) -> Expr:
        where, taps, channel = rest[:rank], rest[rank:-1], rest[-1]
        return columns(image, *where, *taps, channel + mul(group, channels)) * w(output + mul(group, share), channel, *taps)

    (result,) = b.reduce(
        "sum",
        (n, outputs, *extents),
        (*w.shape[2:], channels),
        product,
        axes=(n, groups, share, *extents),
        index=lambda i, group, o, *rest: (i, o + mul(group, share), *rest),
    )
    return result


OPERATORS: tuple[Operator, ...] = (
    Operator("corner_positions", _corner_positions),
    Operator("corner_weights", _corner_weights),
    Operator("roi_positions", _roi_positions),
    Operator("roi_pool", _roi_pool),
    Operator("deformed_columns", _deformed_columns),
    Operator("column_products", _column_products),
)
