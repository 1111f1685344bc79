"""ATen's shape, indexing and creation operators in terms of the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from tilewright.frontend.handlers import Handlers, Unsupported, expanded, torch_dtype
from tilewright.frontend.reading import check_computed
from tilewright.frontend.torch_indices import positions
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Value

HANDLERS = Handlers()


@HANDLERS.handles("view.default", "reshape.default", "_unsafe_view.default", "_reshape_copy.default", "view_copy.default", "unflatten.int")
def view(g: GraphBuilder, x: Value, *_: Any) -> Value:
    return g.reshape(x, g.expected[0][0])


@HANDLERS.handles("flatten.using_ints", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "atleast_1d.default")
def reshaped(g: GraphBuilder, x: Value, *_: Any) -> Value:
    return g.reshape(x, g.expected[0][0])


@HANDLERS.handles("permute.default")
def permute(g: GraphBuilder, x: Value, axes: list[int]) -> Value:
    return g.permute(x, axes)


@HANDLERS.handles("transpose.int")
def transpose(g: GraphBuilder, x: Value, first: int, second: int) -> Value:
    return g.transpose(x, first, second)


@HANDLERS.handles("t.default", "numpy_T.default")
def t(g: GraphBuilder, x: Value) -> Value:
    return g.permute(x, tuple(reversed(range(len(x.shape)))))


@HANDLERS.handles("expand.default", "broadcast_to.default")
def expand(g: GraphBuilder, x: Value, *_: Any) -> Value:
    return g.expand(x, g.expected[0][0])


@HANDLERS.handles("slice.Tensor")
def slice_tensor(g: GraphBuilder, x: Value, axis: int, start: int | None, stop: int | None, step: int) -> Value:
    return g.slice(x, axis, start or 0, x.shape[axis] if stop is None else stop, step)


@HANDLERS.handles("narrow.default")
def narrow(g: GraphBuilder, x: Value, axis: int, start: int, length: int) -> Value:
    start %= max(x.shape[axis], 1)
    return g.slice(x, axis, start, start + length)


@HANDLERS.handles("select.int")
def select(g: GraphBuilder, x: Value, axis: int, position: int) -> Value:
    return g.op("select", x, axis=axis % len(x.shape), position=position % x.shape[axis])


def _parts(g: GraphBuilder, x: Value, sizes: Sequence[int], axis: int) -> tuple[Value, ...]:
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(g.slice(x, axis, start, start + size) for start, size in zip(starts, sizes, strict=True))


@HANDLERS.handles("split.Tensor")
def split_tensor(g: GraphBuilder, x: Value, size: int, axis: int) -> tuple[Value, ...]:
    extent = x.shape[axis]
    return _parts(g, x, [min(size, extent - k) for k in range(0, extent, size)] if extent else [0], axis)


@HANDLERS.handles("split_with_sizes.default")
def split_with_sizes(g: GraphBuilder, x: Value, sizes: list[int], axis: int) -> tuple[Value, ...]:
    return _parts(g, x, sizes, axis)


@HANDLERS.handles("chunk.default")
def chunk(g: GraphBuilder, x: Value, count: int, axis: int) -> tuple[Value, ...]:
    return split_tensor(g, x, -(-x.shape[axis] // count), axis)


@HANDLERS.handles("unbind.int")
def unbind(g: GraphBuilder, x: Value, axis: int) -> tuple[Value, ...]:
    return tuple(select(g, x, axis, k) for k in range(x.shape[axis]))


@HANDLERS.handles("cat.default", "concat.default", "concatenate.default")
def cat(g: GraphBuilder, parts: list[Value], axis: int) -> Value:
    dtype, rank = g.expected[0][1], len(g.expected[0][0])
    return g.concatenate([g.cast(p, dtype) for p in parts if len(p.shape) == rank], axis % rank)  # cat still skips tensors of shape [0]


@HANDLERS.handles("diff.default")
def diff(g: GraphBuilder, x: Value, order: int, axis: int, before: Value | None, after: Value | None) -> Value:
    """Differences of neighbours along an axis, taken `order` times; of truth values, whether they differ."""
    joined = [part for part in (before, x, after) if part is not None]
    x = g.concatenate(joined, axis % len(x.shape)) if len(joined) > 1 else x
    for _ in range(order):
        x = g.pointwise("ne" if x.dtype == "bool" else "sub", g.slice(x, axis, 1, x.shape[axis]), g.slice(x, axis, 0, max(x.shape[axis] - 1, 0)))
    return x


@HANDLERS.handles("stack.default")
def stack(g: GraphBuilder, parts: list[Value], axis: int) -> Value:
    dtype, rank = g.expected[0][1], len(g.expected[0][0])
    return g.concatenate([g.unsqueeze(g.cast(p, dtype), axis % rank) for p in parts], axis % rank)


@HANDLERS.handles("repeat.default", "tile.default")
def repeat(g: GraphBuilder, x: Value, repeats: list[int]) -> Value:
    lead = (1,) * (len(x.shape) - len(repeats))
    return g.op("repeat", x, repeats=(*lead, *repeats))


@HANDLERS.handles("repeat_interleave.self_int")
def repeat_interleave(g: GraphBuilder, x: Value, repeats: int, axis: int | None, _: int | None = None) -> Value:
    if axis is None:
        x, axis = g.reshape(x, (-1,)), 0
    axis %= len(x.shape)
    wide = g.expand(g.unsqueeze(x, axis + 1), (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]))
    return g.reshape(wide, (*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]))


@HANDLERS.handles("flip.default")
def flip(g: GraphBuilder, x: Value, axes: list[int]) -> Value:
    return g.op("flip", x, axes=tuple(sorted({a % len(x.shape) for a in axes}))) if axes and x.shape else x


@HANDLERS.handles("roll.default")
def roll(g: GraphBuilder, x: Value, shifts: list[int], axes: list[int]) -> Value:
    if not axes:
        return g.reshape(g.op("roll", g.reshape(x, (-1,)), shifts=tuple(shifts), axes=(0,)), x.shape)
    return g.op("roll", x, shifts=tuple(shifts), axes=tuple(a % len(x.shape) for a in axes))


@HANDLERS.handles("diagonal.default")
def diagonal(g: GraphBuilder, x: Value, offset: int, first: int, second: int) -> Value:
    return g.op("diagonal", x, offset=offset, first=first % len(x.shape), second=second % len(x.shape))


@HANDLERS.handles("unfold.default")
def windows(g: GraphBuilder, x: Value, axis: int, size: int, step: int) -> Value:
    if not x.shape:  # a scalar counts as one element, and is its only window
        return g.slice(g.reshape(x, (1,)), 0, 0, size)
    return g.op("windows", x, axis=axis % len(x.shape), size=size, step=step)


@HANDLERS.handles("im2col.default")
def im2col(g: GraphBuilder, x: Value, window: list[int], dilation: list[int], padding: list[int], stride: list[int]) -> Value:
    """torch.nn.functional.unfold: patches as columns."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (expanded(v, 2) for v in (window, dilation, padding, stride))
    batched = x if len(x.shape) == 4 else g.reshape(x, (1, *x.shape))
    padded = g.op("pad", batched, padding=((0, 0), (0, 0), (ph, ph), (pw, pw)))
    rows = g.op("windows", padded, axis=2, size=dh * (kh - 1) + 1, step=sh)  # [N, C, OH, W, taps]
    both = g.op("windows", rows, axis=3, size=dw * (kw - 1) + 1, step=sw)  # [N, C, OH, OW, taps, taps]
    taps = g.slice(g.slice(both, 4, 0, both.shape[4], dh), 5, 0, both.shape[5], dw)
    return g.reshape(g.permute(taps, (0, 1, 4, 5, 2, 3)), g.expected[0][0])


@HANDLERS.handles("pixel_shuffle.default")
def pixel_shuffle(g: GraphBuilder, x: Value, factor: int) -> Value:
    lead, (c, h, w) = x.shape[:-3], x.shape[-3:]
    rank = len(lead)
    parts = g.reshape(x, (*lead, c // factor**2, factor, factor, h, w))
    order = (*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2)
    return g.reshape(g.permute(parts, order), g.expected[0][0])


@HANDLERS.handles("pixel_unshuffle.default")
def pixel_unshuffle(g: GraphBuilder, x: Value, factor: int) -> Value:
    lead, (c, h, w) = x.shape[:-3], x.shape[-3:]
    rank = len(lead)
    parts = g.reshape(x, (*lead, c, h // factor, factor, w // factor, factor))
    order = (*range(rank), rank, rank + 2, rank + 4, rank + 1, rank + 3)
    return g.reshape(g.permute(parts, order), g.expected[0][0])


@HANDLERS.handles("channel_shuffle.default", "native_channel_shuffle.default")
def channel_shuffle(g: GraphBuilder, x: Value, groups: int) -> Value:
    n, c, *rest = x.shape
    return g.reshape(g.transpose(g.reshape(x, (n, groups, c // groups, *rest)), 1, 2), x.shape)


@HANDLERS.handles("tril.default")
def tril(g: GraphBuilder, x: Value, diagonal: int) -> Value:
    return g.op("triangle", x, diagonal=diagonal, upper=False)


@HANDLERS.handles("triu.default")
def triu(g: GraphBuilder, x: Value, diagonal: int) -> Value:
    return g.op("triangle", x, diagonal=diagonal, upper=True)


# --- padding ----------------------------------------------------------------------------------------------------------


def _pad_pairs(pads: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    """PyTorch lists pairs from the last dimension backwards."""
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)][::-1]
    return ((0, 0),) * (rank - len(pairs)) + tuple(pairs)


@HANDLERS.handles("constant_pad_nd.default")
def constant_pad(g: GraphBuilder, x: Value, pads: list[int], value: float) -> Value:
    return g.op("pad", x, padding=_pad_pairs(pads, len(x.shape)), value=value)


@HANDLERS.handles("pad.default")
def pad(g: GraphBuilder, x: Value, pads: list[int], mode: str, value: float | None) -> Value:
    return g.op("pad", x, padding=_pad_pairs(pads, len(x.shape)), mode=mode, value=value or 0)


@HANDLERS.handles(*(f"reflection_pad{n}d.default" for n in (1, 2, 3)))
def reflection_pad(g: GraphBuilder, x: Value, pads: list[int]) -> Value:
    return pad(g, x, pads, "reflect", 0)


@HANDLERS.handles(*(f"replication_pad{n}d.default" for n in (1, 2, 3)))
def replication_pad(g: GraphBuilder, x: Value, pads: list[int]) -> Value:
    return pad(g, x, pads, "replicate", 0)


@HANDLERS.handles("_pad_circular.default")
def circular_pad(g: GraphBuilder, x: Value, pads: list[int]) -> Value:
    return pad(g, x, pads, "circular", 0)


# --- writing into a copy (what in-place writes to views become) -------------------------------------------------------


@HANDLERS.handles("slice_scatter.default")
def slice_scatter(g: GraphBuilder, x: Value, values: Value, axis: int, start: int | None, stop: int | None, step: int) -> Value:
    axis %= len(x.shape)
    first, _, step = slice(start, stop, step).indices(x.shape[axis])
    return g.op("insert", x, g.cast(values, x.dtype), axis=axis, start=first, step=step)


@HANDLERS.handles("select_scatter.default")
def select_scatter(g: GraphBuilder, x: Value, values: Value, axis: int, position: int) -> Value:
    axis %= len(x.shape)
    return g.op("insert", x, g.unsqueeze(g.cast(values, x.dtype), axis), axis=axis, start=position % x.shape[axis])


# --- indexing ---------------------------------------------------------------------------------------------------------


@HANDLERS.handles("gather.default")
def gather(g: GraphBuilder, x: Value, axis: int, index: Value, _: bool = False) -> Value:
    if not x.shape:
        raise Unsupported("gather from a tensor without dimensions")
    return g.op("gather", x, index, axis=axis % len(x.shape), negative=False)


@HANDLERS.handles("index_select.default")
def index_select(g: GraphBuilder, x: Value, axis: int, index: Value) -> Value:
    if not x.shape:
        return g.reshape(x, g.expected[0][0])
    return g.op("index_select", x, g.reshape(index, (-1,)), axis=axis % len(x.shape), negative=False)


@HANDLERS.handles("index.Tensor")
def index_tensor(g: GraphBuilder, x: Value, indices: list[Value | None]) -> Value:
    present = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if any(i.dtype == "bool" for _, i in present):
        raise Unsupported("indexing with a boolean mask has a shape that depends on data")
    if len(present) == 1:
        return g.op("index_select", x, present[0][1], axis=present[0][0])
    return g.op("index", x, *(i for _, i in present), axes=tuple(axis for axis, _ in present))


@HANDLERS.handles("take.default")
def take(g: GraphBuilder, x: Value, index: Value) -> Value:
    return g.op("take", x, index)


@HANDLERS.handles("take_along_dim.default")
def take_along_dim(g: GraphBuilder, x: Value, index: Value, axis: int | None) -> Value:
    """Along a dimension an index is taken modulo its extent; without a dimension, elements of the flattened tensor are gathered."""
    if axis is None:
        return g.op("take", x, g.reshape(index, (-1,)), negative=False)
    axis %= len(x.shape)
    if x.shape[axis]:
        index = g.pointwise("remainder", index, x.shape[axis])
    shape = [max(a, b) for a, b in zip(x.shape, index.shape, strict=True)]
    wide = g.expand(x, [x.shape[axis] if k == axis else s for k, s in enumerate(shape)])
    return g.op("gather", wide, g.expand(index, [index.shape[axis] if k == axis else s for k, s in enumerate(shape)]), axis=axis)


@HANDLERS.handles("embedding.default")
def embedding(g: GraphBuilder, weight: Value, index: Value, *_: Any) -> Value:
    return g.op("index_select", weight, index, axis=0, negative=False)


@HANDLERS.handles("embedding_bag.padding_idx", "embedding_bag.default", "_embedding_bag.default", "_embedding_bag_forward_only.default")
def embedding_bag(
    g: GraphBuilder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale: bool,
    mode: int,
    sparse: bool,
    weights: Value | None,
    include_last: bool,
    padding: int | None = None,
) -> tuple[Value | None, ...]:
    if padding is not None and padding >= 0:
        raise Unsupported("embedding_bag with a padding index")
    name = ("sum", "mean", "max")[mode]
    parameters = [] if weights is None else [weights]
    return g.op("embedding_bag", weight, indices, offsets, *parameters, mode=name, include_last=include_last), None, None, None


@HANDLERS.handles("one_hot.default")
def one_hot(g: GraphBuilder, index: Value, classes: int) -> Value:
    if classes < 0:
        raise Unsupported("one_hot without a number of classes has a shape that depends on data")
    return g.op("one_hot", positions(g, index, classes, negative=False), classes=classes, dtype="i64")


# --- creation ---------------------------------------------------------------------------------------------------------


@HANDLERS.handles("zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "new_empty.default", "empty_like.default")
def zeros(g: GraphBuilder, *_: Any) -> Value:
    return g.full(g.expected[0][0], 0, g.expected[0][1])


@HANDLERS.handles("ones.default", "ones_like.default", "new_ones.default")
def ones(g: GraphBuilder, *_: Any) -> Value:
    return g.full(g.expected[0][0], 1, g.expected[0][1])


@HANDLERS.handles("full.default", "full_like.default")
def full(g: GraphBuilder, *arguments: Any) -> Value:
    number = next(a for a in arguments[1:] if isinstance(a, (int, float, bool)))
    return g.full(g.expected[0][0], number, g.expected[0][1])


@HANDLERS.handles("new_full.default")
def new_full(g: GraphBuilder, x: Value, shape: list[int], number: float, *_: Any) -> Value:
    return g.full(g.expected[0][0], number, g.expected[0][1])


@HANDLERS.handles("scalar_tensor.default", "prims.scalar_tensor.default")
def scalar_tensor(g: GraphBuilder, number: float, *_: Any) -> Value:
    return g.full((), number, g.expected[0][1])


def _arange(g: GraphBuilder, start: float, step: float) -> Value:
    (length,), dtype = g.expected[0]
    check_computed(length)
    stop = start + step * length
    tensor = torch.arange(start, stop, step, dtype=torch.float64 if isinstance(step, float) or isinstance(start, float) else torch.int64)[:length]
    return g.constant(tensor.to(torch_dtype(dtype)), "range")


@HANDLERS.handles("arange.default")
def arange(g: GraphBuilder, stop: float, *_: Any) -> Value:
    return _arange(g, 0, 1)


@HANDLERS.handles("arange.start")
def arange_start(g: GraphBuilder, start: float, stop: float, *_: Any) -> Value:
    return _arange(g, start, 1)


@HANDLERS.handles("arange.start_step")
def arange_start_step(g: GraphBuilder, start: float, stop: float, step: float, *_: Any) -> Value:
    return _arange(g, start, step)


@HANDLERS.handles("linspace.default")
def linspace(g: GraphBuilder, start: float, stop: float, steps: int, *_: Any) -> Value:
    check_computed(steps)
    return g.constant(torch.linspace(start, stop, steps, dtype=torch_dtype(g.expected[0][1])), "range")


@HANDLERS.handles("eye.default", "eye.m")
def eye(g: GraphBuilder, *_: Any) -> Value:
    (rows, columns), dtype = g.expected[0]
    check_computed(rows * columns)
    return g.constant(torch.eye(rows, columns, dtype=torch_dtype(dtype)), "identity")


@HANDLERS.handles("tril_indices.default")
def tril_indices(g: GraphBuilder, rows: int, columns: int, offset: int, *_: Any) -> Value:
    return g.constant(torch.tril_indices(rows, columns, offset).to(torch_dtype(g.expected[0][1])), "indices")


@HANDLERS.handles("triu_indices.default")
def triu_indices(g: GraphBuilder, rows: int, columns: int, offset: int, *_: Any) -> Value:
    return g.constant(torch.triu_indices(rows, columns, offset).to(torch_dtype(g.expected[0][1])), "indices")


# --- upsampling -------------------------------------------------------------------------------------------------------


def _ratios(sizes: Sequence[int], output: Sequence[int], scales: Sequence[float | None] | None, align_corners: bool) -> tuple[tuple[int, int], ...]:
    """Input steps per output step, as exact fractions (a scale factor given by the user takes precedence over the sizes)."""
    ratios = []
    for k, (size, extent) in enumerate(zip(sizes, output, strict=True)):
        if align_corners:
            ratio = Fraction(size - 1, extent - 1) if extent > 1 else Fraction(0)
        elif scales is not None and scales[k] is not None and scales[k] > 0:  # type: ignore[operator]
            ratio = 1 / Fraction(scales[k]).limit_denominator(1 << 16)  # type: ignore[arg-type]
        else:
            ratio = Fraction(size, extent)
        ratios.append((ratio.numerator, ratio.denominator))
    return tuple(ratios)


def _upsample(g: GraphBuilder, x: Value, scales: Sequence[float | None] | None, align_corners: bool, order: int) -> Value:
    shape = g.expected[0][0]
    output, sizes = shape[2:], x.shape[2:]
    ratios = _ratios(sizes, output, scales, align_corners)
    if order == 0:
        return g.op("nearest", x, output=output, ratios=ratios)
    return g.op("interpolate", x, output=output, ratios=ratios, align_corners=align_corners, order=order)


@HANDLERS.handles("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(g: GraphBuilder, x: Value, size: list[int] | None, scales: list[float] | None) -> Value:
    return _upsample(g, x, scales, False, 0)


@HANDLERS.handles("upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default")
def upsample_nearest_default(g: GraphBuilder, x: Value, size: list[int], *scales: float | None) -> Value:
    return _upsample(g, x, scales, False, 0)


@HANDLERS.handles("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def upsample_linear(g: GraphBuilder, x: Value, size: list[int] | None, align_corners: bool, scales: list[float] | None) -> Value:
    return _upsample(g, x, scales, align_corners, 1)


@HANDLERS.handles("upsample_linear1d.default", "upsample_bilinear2d.default", "upsample_trilinear3d.default")
def upsample_linear_default(g: GraphBuilder, x: Value, size: list[int], align_corners: bool, *scales: float | None) -> Value:
    return _upsample(g, x, scales, align_corners, 1)


@HANDLERS.handles("upsample_bicubic2d.vec")
def upsample_cubic(g: GraphBuilder, x: Value, size: list[int] | None, align_corners: bool, scales: list[float] | None) -> Value:
    return _upsample(g, x, scales, align_corners, 3)


@HANDLERS.handles("upsample_bicubic2d.default")
def upsample_cubic_default(g: GraphBuilder, x: Value, size: list[int], align_corners: bool, *scales: float | None) -> Value:
    return _upsample(g, x, scales, align_corners, 3)
