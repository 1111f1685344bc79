"""ONNX's Resize: interpolation by constant positions and weights, dimension by dimension. Modes that the operator table's interpolation expresses
exactly (half-pixel centres, aligned corners, floors of ratios) become one node; every other coordinate mode becomes selections of rows and weighted
sums, whose positions are computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, numpy_dtype
from tilewright.frontend.reading import check_computed
from tilewright.ir.dtypes import is_float
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


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
    if call.attribute("antialias", 0) and mode != "nearest":
        raise Unsupported("resizing with antialias")
    if mode == "cubic" and coordinates == "tf_crop_and_resize":
        raise Unsupported("cubic interpolation of a crop")
    if mode != "nearest" and not is_float(x.dtype):
        raise Unsupported(f"interpolation of {x.dtype}")
    dims = _dimensions(call, x)
    check_computed(4 * sum(d.extent for d in dims if d.extent > 0))  # positions and weights of up to four taps
    whole = _table_node(call, x, dims, mode, coordinates)
    if whole is not None:
        return whole
    for dim in dims:
        if dim.size != dim.extent or dim.scale != 1 or coordinates == "tf_crop_and_resize":
            x = _resized(call, x, dim, mode, coordinates)
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
        new = [int(np.floor(n * span * s)) for n, span, s in zip(old, spans, listed, strict=True)]
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
        if coordinates == "asymmetric" and call.attribute("nearest_mode", "round_prefer_floor") == "floor":
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
        return i / dim.scale
    if coordinates == "tf_crop_and_resize":
        start, stop = dim.region
        if dim.extent > 1:
            return start * (dim.size - 1) + i * (stop - start) * (dim.size - 1) / (dim.extent - 1)
        return np.full(dim.extent, 0.5 * (start + stop) * (dim.size - 1))
    if coordinates == "pytorch_half_pixel" and dim.extent == 1:
        return np.zeros(1)
    if coordinates == "half_pixel_symmetric":
        exact = dim.scale * dim.size
        return dim.size / 2 * (1 - dim.extent / exact) + (i + 0.5) / dim.scale - 0.5
    if coordinates not in ("half_pixel", "pytorch_half_pixel"):
        raise Unsupported(f"coordinate mode {coordinates}")
    return (i + 0.5) / dim.scale - 0.5


def _resized(call: NodeCall, x: Value, dim: _Dimension, mode: str, coordinates: str) -> Value:
    g = call.g
    at = _positions(dim, coordinates)
    if mode == "nearest":
        taps = [(_nearest(at, call.attribute("nearest_mode", "round_prefer_floor")), np.ones_like(at))]
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
    if coordinates == "tf_crop_and_resize":
        inside = ((at >= 0) & (at <= dim.size - 1)).reshape(-1, *tail)
        if not inside.all():
            outside = call.attribute("extrapolation_value", 0.0)
            result = g.pointwise("where", call.materialise(inside), result, outside, dtype=x.dtype)
    return result


def _nearest(at: np.ndarray, mode: str) -> np.ndarray:
    rounded: np.ndarray
    if mode == "floor":
        rounded = np.floor(at)
    elif mode == "ceil":
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
    t = at - low

    def near(d: np.ndarray) -> np.ndarray:
        weights: np.ndarray = ((a + 2) * d - (a + 3)) * d * d + 1
        return weights

    def far(d: np.ndarray) -> np.ndarray:
        weights: np.ndarray = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return weights

    return [(low - 1, far(1 + t)), (low, near(t)), (low + 1, near(1 - t)), (low + 2, far(2 - t))]
