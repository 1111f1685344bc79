"""ONNX's operators that read between elements, at positions that are data, in terms of the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from tilewright.frontend.aten_neural import biased
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_neural import window_of
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, numpy_dtype
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.operators.convolution import output_extent
from tilewright.ir.dtypes import computed_in
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


def _corners(g: GraphBuilder, at: Sequence[Value], sizes: Sequence[int], dtype: str) -> tuple[Value, Value]:
    """Positions and weights (of a type) of the elements around positions in dimensions of these sizes."""
    weights = g.op("corner_weights", *at, sizes=tuple(sizes))
    return g.op("corner_positions", *at, sizes=tuple(sizes)), g.cast(weights, dtype)


@HANDLERS.handles("RoiAlign")
def roi_align(call: NodeCall) -> Value:
    """Positions are computed in float32 for 16-bit floats too."""
    g, x, samples = call.g, call.value(0), call.attribute("sampling_ratio", 0)
    if samples <= 0:
        raise Unsupported("as many samples as the sizes of regions, which are data, ask for")
    mode = call.attribute("coordinate_transformation_mode", "half_pixel" if call.opset >= 16 else "output_half_pixel")
    centred = {"half_pixel": True, "output_half_pixel": False}[mode]
    rois, taps = g.cast(call.value(1), computed_in(x.dtype)), list[Value]()
    for axis, name in ((1, "output_height"), (0, "output_width")):
        at = g.op(
            "roi_positions", rois, axis=axis, outputs=call.attribute(name, 1), samples=samples, scale=call.attribute("spatial_scale", 1.0),
            offset=0.5 if centred else 0.0, least=None if centred else 1.0,
        )  # fmt: skip
        taps += _corners(g, [at], [x.shape[3 - axis]], x.dtype)
    return g.op("roi_pool", x, call.value(2), *taps, kind={"avg": "mean", "max": "max"}[call.attribute("mode", "avg")])


@HANDLERS.handles("DeformConv")
def deformable_convolution(call: NodeCall) -> Value:
    """Samples outside of the image are zeros: all corners of a position far outside, and of NaN, lie in the image's border."""
    g, x, w, offsets = call.g, call.value(0), call.value(1), call.value(2)
    window, groups, out = window_of(call, x, w.shape[2:]), call.attribute("offset_group", 1), offsets.shape[2:]
    dims = zip(x.shape[2:], window.shape, window.stride, window.padding, window.dilation, strict=True)
    fits = tuple(call.attribute("kernel_shape") or window.shape) == window.shape and tuple(output_extent(*dim) for dim in dims) == out
    if groups < 1 or not fits:
        raise ValueError(f"filters {window.shape} and offsets {offsets.shape} that do not fit {x.shape}")
    rank, dtype, shape = len(out), computed_in(x.dtype), (x.shape[0], groups, *window.shape, *out)
    padded = g.op("pad", x, padding=((0, 0), (0, 0), *((2, 1),) * rank))
    apart, at = g.reshape(g.cast(offsets, dtype), (*shape[: 2 + rank], rank, *out)), list[Value]()
    for k, (before, _) in enumerate(window.padding):
        # where a tap without its offset lies in the image with its border: its place in the filter moves with the result's
        places = np.add.outer(np.arange(window.shape[k]) * window.dilation[k], np.arange(out[k]) * window.stride[k] - before + 2)
        known = call.materialise(places.astype(numpy_dtype(dtype)).reshape(*(n if i % rank == k else 1 for i, n in enumerate(shape[2:]))))
        at.append(g.pointwise("add", g.reshape(g.slice(apart, 2 + rank, k, k + 1), shape), known))
    corners, weights = _corners(g, at, padded.shape[2:], x.dtype)
    if call.has(4):
        weights = g.pointwise("mul", weights, g.reshape(call.value(4), shape))
    flat = g.reshape(padded, (*x.shape[:2], prod(padded.shape[2:])))
    columns = g.reshape(g.op("deformed_columns", flat, corners, weights), (x.shape[0], *out, *window.shape, x.shape[1]))
    product = g.op("column_products", columns, w, groups=call.attribute("group", 1))
    return biased(g, product, call.optional(3), 1)
