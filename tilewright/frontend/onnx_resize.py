"""ONNX's Resize: interpolation by constant positions and weights, dimension by dimension. Modes that the operator table's interpolation expresses
exactly (half-pixel centres, aligned corners, floors of ratios) become one node; every other coordinate mode becomes selections of rows and weighted
sums, whose positions are computed here. A filter against aliasing, which has many taps, becomes a product with the matrix of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil

import numpy as np

from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, numpy_dtype
from tilewright.frontend.reading import check_computed
from tilewright.ir.dtypes import is_float
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()
SIMPLE = "simple"
"""How Upsample and Resize until set 10 round a position, as in ONNX Runtime (`ResizeNearestMode::SIMPLE` of its upsamplebase.h): up where a dimension
becomes smaller, else down. The standard has no mode of this name."""


@dataclass(frozen=True)
class _Dimension:
    """One resized dimension: `scale` is the number of output steps per input step; `region` the crop in relative coordinates."""

    axis: int
    size: int
    extent: int
    scale: float
    region: tuple[float, float]


@HANDLERS.handles("Resize")
def resize(call: NodeCall) -> Value:
    x, mode = call.value(0), call.attribute("mode", "nearest")
    coordinates = call.attribute("coordinate_transformation_mode", "half_pixel")
    if mode != "nearest" and not is_float(x.dtype):
        raise Unsupported(f"interpolation of {x.dtype}")
    dims = _dimensions(call, x)
    check_computed(4 * sum(d.extent for d in dims if d.extent > 0))  # positions and weights of up to four taps
    smooth = bool(call.attribute("antialias", 0)) and mode != "nearest" and any(d.scale < 1 for d in dims)
    whole = None if smooth else _table_node(call, x, dims, mode, coordinates)
    if whole is not None:
        return whole
    for dim in dims:
        if dim.size != dim.extent or dim.scale != 1 or coordinates == "tf_crop_and_resize":
            x = _filtered(call, x, dim, mode, coordinates) if smooth and dim.scale < 1 else _resized(call, x, dim, mode, coordinates)
    return x


def _dimensions(call: NodeCall, x: Value) -> list[_Dimension]:
    rank = len(x.shape)
    axes = [a % rank for a in call.attribute("axes") or range(rank)]
    roi = call.constant(1, "region").reshape(-1).astype(float) if call.has(1) else np.zeros(0)
    if not roi.size:
        roi = np.array([0.0] * len(axes) + [1.0] * len(axes))
    old = [x.shape[a] for a in axes]
    scales = call.constant(2, "scales").reshape(-1).astype(float) if call.has(2) else np.zeros(0)
    if scales.size:
        listed = [float(s) for s in scales]
        crop = call.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
        spans = [roi[k + len(axes)] - roi[k] if crop else 1.0 for k in range(len(axes))]
        # rounded to float32 as in ONNX's shape inference and in ONNX Runtime: 10 times 0.7 are 7
        new = [int(np.floor(np.float32(n * span) * np.float32(s))) for n, span, s in zip(old, spans, listed, strict=True)]
    else:
        new = call.integers(3, "sizes") or []
        listed = [m / n for m, n in zip(new, old, strict=True)]
        policy = call.attribute("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            common = min(listed) if policy == "not_larger" else max(listed)
            new = [int(np.floor(common * n + 0.5)) for n in old]
            listed = [common] * len(old)
    return [
        _Dimension(a, n, m, s, (float(roi[k]), float(roi[k + len(axes)]))) for k, (a, n, m, s) in enumerate(zip(axes, old, new, listed, strict=True))
    ]


def _table_node(call: NodeCall, x: Value, dims: list[_Dimension], mode: str, coordinates: str) -> Value | None:
    """The whole resizing as one node of the table if possible (trailing dimensions, exact ratios, no values outside), else None."""
    rank = len(x.shape)
    by_axis = {d.axis: d for d in dims}
    lead = min((d.axis for d in dims if d.size != d.extent or d.scale != 1), default=rank)
    moved = [by_axis[a] for a in range(lead, rank) if a in by_axis]
    if lead == rank or len(moved) != rank - lead or lead < 1:
        return None
    aligned = coordinates == "align_corners"
    if any(d.scale * d.size != d.extent for d in moved):
        return None
    if aligned:
        steps = [Fraction(d.size - 1, d.extent - 1) if d.extent > 1 else Fraction(0) for d in moved]
    else:
        steps = [Fraction(d.size, d.extent) for d in moved]
    ratios = tuple((s.numerator, s.denominator) for s in steps)
    output = tuple(d.extent for d in moved)
    if mode == "nearest":
        nearest_mode = call.attribute("nearest_mode", "round_prefer_floor")
        if coordinates == "asymmetric" and (nearest_mode == "floor" or nearest_mode == SIMPLE and all(d.scale >= 1 for d in moved)):
            return call.g.op("nearest", x, output=output, ratios=ratios)
        return None
    centred = coordinates == "half_pixel" or (coordinates == "pytorch_half_pixel" and all(d.extent > 1 for d in moved))
    if not (aligned or centred) or call.attribute("exclude_outside", 0) or (mode == "cubic" and call.attribute("cubic_coeff_a", -0.75) != -0.75):
        return None
    return call.g.op("interpolate", x, output=output, ratios=ratios, align_corners=aligned, order=1 if mode == "linear" else 3)


def _positions(dim: _Dimension, coordinates: str) -> np.ndarray:
    """The position in the input, as a real number, of each output element."""
    i = np.arange(dim.extent, dtype=np.float64)
    if coordinates == "align_corners":
        # the length of the result before rounding down, as in the standard's implementation
        exact = dim.scale * dim.size
        return i * (dim.size - 1) / (exact - 1) if dim.extent > 1 and exact != 1 else np.zeros(dim.extent)
    if coordinates == "asymmetric":
        return (i.astype(np.float32) / np.float32(dim.scale)).astype(np.float64)  # as ONNX Runtime: 1 / (1 / 3) is no less than 3
    if coordinates == "tf_crop_and_resize":
        # rounded as in the standard's implementation: a position on the border may else be outside
        start, stop = (np.float32(end) for end in dim.region)
        if dim.extent > 1:
            steps = i.astype(np.float32) * (stop - start) * (dim.size - 1)
            return float(start * (dim.size - 1)) + steps.astype(np.float64) / (dim.extent - 1)
        return np.full(dim.extent, 0.5 * (start + stop) * (dim.size - 1))
    if coordinates == "pytorch_half_pixel" and dim.extent == 1:
        return np.zeros(1)
    if coordinates == "half_pixel_symmetric":
        exact = dim.scale * dim.size
        return dim.size / 2 * (1 - dim.extent / exact) + (i + 0.5) / dim.scale - 0.5
    if coordinates not in ("half_pixel", "pytorch_half_pixel"):
        raise Unsupported(f"coordinate mode {coordinates}")
    return (i + 0.5) / dim.scale - 0.5


def _filtered(call: NodeCall, x: Value, dim: _Dimension, mode: str, coordinates: str) -> Value:
    """One dimension made smaller by a kernel as wide as the distance of the result's elements; rows beyond the border repeat it."""
    g, at = call.g, _positions(dim, coordinates)
    check_computed(dim.extent * dim.size)
    kernel, reach = (_hat, 1) if mode == "linear" else (partial(_keys, a=call.attribute("cubic_coeff_a", -0.75)), 2)
    steps = np.arange(-ceil(reach / dim.scale) - 1, ceil(reach / dim.scale) + 2)
    check_computed(dim.extent * steps.size)
    places = np.floor(at)[:, None] + steps
    weights = kernel(np.abs(places - at[:, None]) * dim.scale)
    if call.attribute("exclude_outside", 0):
        weights = np.where((places >= 0) & (places < dim.size), weights, 0.0)
    matrix = np.zeros((dim.extent, dim.size))
    rows = np.broadcast_to(np.arange(dim.extent)[:, None], places.shape)
    np.add.at(matrix, (rows, np.clip(places, 0, dim.size - 1).astype(np.int64)), weights / weights.sum(1, keepdims=True))
    y = g.op("linear", g.transpose(x, dim.axis, -1), call.materialise(matrix.astype(numpy_dtype(x.dtype))))
    return _with_border(call, g.transpose(y, dim.axis, -1), dim, at, coordinates)


def _resized(call: NodeCall, x: Value, dim: _Dimension, mode: str, coordinates: str) -> Value:
    g = call.g
    at = _positions(dim, coordinates)
    if mode == "nearest":
        taps = [(_nearest(at, call.attribute("nearest_mode", "round_prefer_floor"), dim.scale), np.ones_like(at))]
    else:
        taps = _linear(at) if mode == "linear" else _cubic(at, call.attribute("cubic_coeff_a", -0.75))
        if call.attribute("exclude_outside", 0):
            kept = [(p, np.where((p >= 0) & (p < dim.size), w, 0.0)) for p, w in taps]
            total = sum(w for _, w in kept)
            taps = [(p, w / total) for p, w in kept]
    tail = (1,) * (len(x.shape) - 1 - dim.axis)
    result: Value | None = None
    for position, weight in taps:
        rows = g.op("index_select", x, call.materialise(np.clip(position, 0, dim.size - 1).astype(np.int64)), axis=dim.axis)
        if mode != "nearest":
            rows = g.pointwise("mul", rows, call.materialise(weight.astype(numpy_dtype(x.dtype)).reshape(-1, *tail)))
        result = rows if result is None else g.pointwise("add", result, rows)
    assert result is not None
    return _with_border(call, result, dim, at, coordinates)


def _with_border(call: NodeCall, result: Value, dim: _Dimension, at: np.ndarray, coordinates: str) -> Value:
    """The result with the positions of a crop that are outside of the input replaced by the extrapolation value."""
    inside = (at >= 0) & (at <= dim.size - 1)
    if coordinates != "tf_crop_and_resize" or inside.all():
        return result
    mask = call.materialise(inside.reshape(-1, *(1,) * (len(result.shape) - 1 - dim.axis)))
    return call.g.pointwise("where", mask, result, call.attribute("extrapolation_value", 0.0), dtype=result.dtype)


def _nearest(at: np.ndarray, mode: str, scale: float) -> np.ndarray:
    rounded: np.ndarray
    if mode == "floor" or mode == SIMPLE and scale >= 1:
        rounded = np.floor(at)
    elif mode in ("ceil", SIMPLE):
        rounded = np.ceil(at)
    else:
        rounded = np.ceil(at - 0.5) if mode == "round_prefer_floor" else np.floor(at + 0.5)
    return rounded


def _linear(at: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    low = np.floor(at)
    return [(low, 1 - (at - low)), (low + 1, at - low)]


def _cubic(at: np.ndarray, a: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys' kernel over the four neighbours."""
    low = np.floor(at)
    return [(low + k, _keys(np.abs(low + k - at), a)) for k in range(-1, 3)]


def _hat(distance: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.maximum(1 - distance, 0.0)
    return weights


def _keys(distance: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981, equation 15 for a = -1/2)."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights: np.ndarray = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    return weights
