"""ONNX's pooling, and its inverses, in terms of the operator table."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.frontend.aten_scatter import scattered
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_neural import Window, window_of
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, numpy_dtype, through_torch
from tilewright.frontend.reading import check_computed
from tilewright.frontend.torch_indices import positions
from tilewright.ir.graph import Value
from tilewright.ir.windows import pooled_extent

HANDLERS = NodeHandlers()


def _window(call: NodeCall, x: Value) -> Window:
    return window_of(call, x, call.attribute("kernel_shape"))


@HANDLERS.handles("MaxPool")
def max_pool(call: NodeCall) -> tuple[Value, ...]:
    """ONNX returns positions within the whole tensor, the table's operator positions within one channel."""
    g, x = call.g, call.value(0)
    window, wanted = _window(call, x), any(call.used[1:])
    results = g.emit(
        "max_pool", x, window=window.shape, stride=window.stride, padding=window.padding, dilation=window.dilation,
        ceil_mode=bool(call.attribute("ceil_mode", 0)), indices=wanted,
    )  # fmt: skip
    if not wanted:
        return results
    position = g.cast(results[1], "i64")
    if call.attribute("storage_order", 0):
        position = _column_major(call, position, x.shape[2:])
    planes = x.shape[0] * x.shape[1]
    base = np.arange(planes, dtype=np.int64).reshape(*x.shape[:2], *(1,) * len(window.shape)) * prod(x.shape[2:])
    return results[0], g.pointwise("add", position, call.materialise(base))


def _column_major(call: NodeCall, position: Value, extents: tuple[int, ...]) -> Value:
    """Row-major positions as positions in the storage in which the first spatial dimension is contiguous."""
    g, rest, result = call.g, position, None
    for k in reversed(range(len(extents))):
        index = g.pointwise("remainder", rest, extents[k])
        rest = g.pointwise("floor_divide", rest, extents[k])
        term = g.pointwise("mul", index, prod(extents[:k]))
        result = term if result is None else g.pointwise("add", result, term)
    assert result is not None
    return result


@HANDLERS.handles("MaxUnpool")
def max_unpool(call: NodeCall) -> Value:
    """Zeros with the elements of x at their positions in the tensor that was pooled; a larger shape adds zeros after it."""
    g, x = call.g, call.value(0)
    shape = tuple(call.attribute("kernel_shape"))
    stride = tuple(call.attribute("strides") or (1,) * len(shape))
    pads = call.attribute("pads") or [0] * 2 * len(shape)
    extents = [(n - 1) * s + f - a - b for n, s, f, a, b in zip(x.shape[2:], stride, shape, pads[: len(shape)], pads[len(shape) :], strict=True)]
    pooled = (*x.shape[:2], *extents)
    count = prod(pooled)
    index, zeros, values = g.reshape(call.value(1), (x.elements,)), g.full((count,), 0, x.dtype), g.reshape(x, (x.elements,))
    try:
        flat = scattered(g, zeros, 0, index, values, "")
    except Unsupported:  # many elements
        (flat,) = through_torch(g, "aten.scatter.src", (zeros, 0, positions(g, index, count, negative=False), values))
    whole = g.reshape(flat, pooled)
    wanted = call.integers(2, "output shape") or pooled
    return whole if tuple(wanted) == pooled else g.op("pad", whole, padding=tuple((0, n - m) for n, m in zip(wanted, pooled, strict=True)), value=0)


@HANDLERS.handles("Col2Im")
def col2im(call: NodeCall) -> Value:
    """Blocks summed where they overlap: the transposed convolution that sends each element of a block to its place."""
    g, x = call.g, call.value(0)
    image, block = call.integers(1, "image shape") or [], call.integers(2, "block shape") or []
    rank, size = len(block), prod(block)
    strides, dilations = (tuple(call.attribute(name) or (1,) * rank) for name in ("strides", "dilations"))
    pads = call.attribute("pads") or [0] * 2 * rank
    spans = [(n + pads[k] + pads[k + rank], d * (f - 1) + 1) for k, (n, d, f) in enumerate(zip(image, dilations, block, strict=True))]
    blocks = [(whole - span) // s + 1 for (whole, span), s in zip(spans, strides, strict=True)]
    channels = x.shape[1] // max(size, 1)
    check_computed(channels * size * size)
    places = np.tile(np.eye(size).reshape(size, 1, *block), (channels, 1, *(1 for _ in block)))
    return g.op(
        "transposed_convolution", g.reshape(x, (x.shape[0], channels * size, *blocks)), call.materialise(places.astype(numpy_dtype(x.dtype))),
        stride=strides, padding=tuple(pads[:rank]), dilation=dilations, groups=channels,
        output_padding=tuple((whole - span) % s + pads[k] - pads[k + rank] for k, ((whole, span), s) in enumerate(zip(spans, strides, strict=True))),
    )  # fmt: skip


@HANDLERS.handles("AveragePool")
def average_pool(call: NodeCall) -> Value:
    g, x = call.g, call.value(0)
    window = _window(call, x)
    ceil_mode, include = bool(call.attribute("ceil_mode", 0)), bool(call.attribute("count_include_pad", 0))
    if all(d == 1 for d in window.dilation):
        return g.op(
            "average_pool", x, window=window.shape, stride=window.stride, padding=window.padding, ceil_mode=ceil_mode, count_include_pad=include
        )  # fmt: skip
    total = _sum_pool(call, x, window, ceil_mode)
    counts = np.ones((), np.float64)
    dims = zip(x.shape[2:], window.shape, window.stride, window.dilation, window.padding, total.shape[2:], strict=True)
    for size, f, s, d, pair, extent in dims:
        places = np.arange(extent)[:, None] * s + np.arange(f) * d - pair[0]
        inside = (places >= -pair[0]) & (places < size + pair[1]) if include else (places >= 0) & (places < size)
        counts = counts[..., None] * inside.sum(1)
    return g.pointwise("div", total, call.materialise(counts.astype(numpy_dtype(x.dtype))))


def _sum_pool(call: NodeCall, x: Value, window: Window, ceil_mode: bool) -> Value:
    """Sums of windows; with dilation, computed by convolving each channel with ones."""
    g = call.g
    if all(d == 1 for d in window.dilation):
        return g.op("average_pool", x, window=window.shape, stride=window.stride, padding=window.padding, ceil_mode=ceil_mode, divisor=1)
    dims = list(zip(x.shape[2:], window.shape, window.stride, window.padding, window.dilation, strict=True))
    extents = [pooled_extent(*dim, ceil_mode) for dim in dims]
    # a last partial window extends beyond the padding
    reach = [max((o - 1) * s + d * (f - 1) + 1 - n - p[0], p[1]) for o, (n, f, s, p, d) in zip(extents, dims, strict=True)]
    ones = call.materialise(np.ones((x.shape[1], 1, *window.shape), numpy_dtype(x.dtype)))
    pairs = tuple((p[0], after) for p, after in zip(window.padding, reach, strict=True))
    return g.op("convolution", x, ones, stride=window.stride, padding=pairs, dilation=window.dilation, groups=x.shape[1])


@HANDLERS.handles("LpPool")
def lp_pool(call: NodeCall) -> Value:
    """(sum of |x| ** p over each window) ** (1 / p)"""
    g, x, order = call.g, call.value(0), call.attribute("p", 2)
    powers = g.pointwise("pow", g.pointwise("abs", x), order)
    total = _sum_pool(call, powers, _window(call, x), bool(call.attribute("ceil_mode", 0)))
    return g.pointwise("pow", total, 1.0 / order)


def _all_positions(x: Value) -> tuple[int, ...]:
    return tuple(range(2, len(x.shape)))


@HANDLERS.handles("GlobalAveragePool")
def global_average_pool(call: NodeCall) -> Value:
    x = call.value(0)
    return call.g.op("mean", x, axes=_all_positions(x), keepdim=True)


@HANDLERS.handles("GlobalMaxPool")
def global_max_pool(call: NodeCall) -> Value:
    x = call.value(0)
    return call.g.op("amax", x, axes=_all_positions(x), keepdim=True)


@HANDLERS.handles("GlobalLpPool")
def global_lp_pool(call: NodeCall) -> Value:
    x = call.value(0)
    return call.g.op("norm", x, order=float(call.attribute("p", 2)), axes=_all_positions(x), keepdim=True)
