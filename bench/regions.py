"""A convolution of the benchmarks as a region: channels last, with a stored border."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.cost.gpu_choice import rank
from tilewright.cost.ranking import Ranking
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, channels_last, row_major
from tilewright.ir.region import Region


def convolution_region(layer: Mapping[str, Any]) -> tuple[Region, dict[str, Layout], dict[str, Value]]:
    """(region, layouts, values) of a layer with outputs, channels, height and width of the output, filter and stride (`bench.layers.layer`); padding
    filter // 2, input "x", weights "w", result "out"."""
    outputs, channels, height, width, size, stride = (layer[k] for k in ("outputs", "channels", "height", "width", "filter", "stride"))
    padding = size // 2
    x = Tensor("x", (1, channels, height * stride, width * stride), "f32")
    w = Tensor("w", (outputs, channels, size, size), "f32")
    builder = StepBuilder("conv")
    (result,) = builder.reduce(
        "sum", (1, outputs, height, width), (size, size, channels),
        lambda n, k, oy, ox, fy, fx, c: x(n, c, oy * stride + fy - padding, ox * stride + fx - padding) * w(k, c, fy, fx),
    )  # fmt: skip
    steps = builder.finish([result], ["out"]).steps
    values = {t.name: Value(t.name, t.shape, "f32") for t in (x, w)} | {"out": Value("out", result.shape, "f32")}
    halo = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    layouts = {"x": channels_last(x.shape).with_halo(halo), "w": row_major(w.shape), "out": channels_last(result.shape)}
    return Region("out", "contraction", (), steps, ("x", "w"), ("out",)), layouts, values


def ranking_of(layer: Mapping[str, Any], machine: Machine) -> Ranking:
    """All candidates of the layer on a GPU."""
    region, layouts, values = convolution_region(layer)
    return rank(region, layouts, values, frozenset({"w"}), machine)
