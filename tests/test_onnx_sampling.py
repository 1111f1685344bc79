"""ONNX's operators that read between elements, against plain loops in float64, on a CPU and in the interpreter; positions may be any numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import floor
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import tilewright
from tests.draws import draws
from tests.interpreted import run_program
from tests.onnx_models import evaluated
from tilewright.errors import IndexOutOfRange
from tilewright.frontend.imported import unsupported
from tilewright.frontend.onnx_import import import_onnx
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program

NUMBERS = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9, 2.0**31, -1.0, -1.0000001, 0.0, -0.0])
Arrays = Sequence[np.ndarray]
Attributes = Mapping[str, Any]


def model(operator: str, inputs: Arrays, attributes: Attributes, opset: int = 22) -> onnx.ModelProto:
    """A model of one node; an input without elements is absent."""
    names = [f"x{k}" if x.size else "" for k, x in enumerate(inputs)]
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in zip(names, inputs, strict=True) if n]
    node = helper.make_node(operator, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", 1, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def tensors(inputs: Arrays) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(x) for x in inputs if x.size)


def compare(found: Any, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(wanted).max(initial=0)))


def check_graph(operator: str, inputs: Arrays, attributes: Attributes, wanted: np.ndarray) -> None:
    function, others, _ = evaluated(model(operator, inputs, attributes), tensors(inputs))
    assert not others
    compare(function(*tensors(inputs))[0], wanted)


def check_compiled(operator: str, inputs: Arrays, attributes: Attributes, wanted: np.ndarray) -> None:
    """Natively, and in the interpreter for a GPU and for a CPU, which reports reads outside of a value."""
    made = model(operator, inputs, attributes)
    compare(tilewright.compile(made, tensors(inputs), "native", unsupported="error")(*tensors(inputs)), wanted)
    graph, _ = simplify(import_onnx(made, tensors(inputs)).graph)
    assert not unsupported(graph)
    for target in ("h200", "x86-avx512"):
        results, faults = run_program(plan_program(graph, machine(target), 1), dict(zip(graph.inputs, (x for x in inputs if x.size), strict=True)))
        assert not faults
        compare(results[graph.outputs[0]], wanted)


def normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape).astype(np.float32)


# --- RoiAlign ---------------------------------------------------------------------------------------------------------


def between(plane: np.ndarray, y: float, x: float) -> list[float]:
    """The weighted neighbours of a point of an image, as Mask R-CNN takes them: points up to one element outside are those of the border."""
    height, width = plane.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return [0.0]
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = floor(y), floor(x)
    down, right = y - top, x - left
    corners = [
        (top, left, (1 - down) * (1 - right)),
        (top, left + 1, (1 - down) * right),
        (top + 1, left, down * (1 - right)),
        (top + 1, left + 1, down * right),
    ]
    return [plane[min(i, height - 1), min(j, width - 1)] * weight for i, j, weight in corners]


def roi_align(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    x, rois, images = (part.astype(np.float64) for part in inputs)
    outputs, samples = (attributes["output_height"], attributes["output_width"]), attributes["sampling_ratio"]
    centred, largest = attributes["coordinate_transformation_mode"] == "half_pixel", attributes["mode"] == "max"
    result = np.zeros((len(rois), x.shape[1], *outputs))
    for region, channel, i, j in np.ndindex(*result.shape):
        (left, top, right, bottom) = rois[region] * attributes["spatial_scale"] - (0.5 if centred else 0.0)
        sizes = [bottom - top, right - left] if centred else [np.fmax(bottom - top, 1.0), np.fmax(right - left, 1.0)]
        (down, across) = (size / count for size, count in zip(sizes, outputs, strict=True))
        points = product(range(samples), repeat=2)
        found = [
            between(x[int(images[region]), channel], top + (i + (a + 0.5) / samples) * down, left + (j + (b + 0.5) / samples) * across)
            for a, b in points
        ]
        result[region, channel, i, j] = max(map(max, found)) if largest else sum(map(sum, found)) / samples**2
    return result


@st.composite
def regions(draw: st.DrawFn) -> tuple[Arrays, Attributes]:
    n, channels, height, width, count = (draw(st.integers(1, most)) for most in (3, 9, 12, 12, 5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1.0, 0.25]))
    rois = generator.uniform(-4, 16, (count, 4)).astype(np.float32) / np.float32(scale)
    attributes = {
        "mode": draw(st.sampled_from(["avg", "max"])), "sampling_ratio": draw(st.integers(1, 3)), "spatial_scale": scale,
        "coordinate_transformation_mode": draw(st.sampled_from(["half_pixel", "output_half_pixel"])),
        "output_height": draw(st.integers(1, 5)), "output_width": draw(st.integers(1, 5)),
    }  # fmt: skip
    return (normal(generator, n, channels, height, width), rois, generator.integers(0, n, count)), attributes


@settings(max_examples=40, deadline=None)
@given(regions())
def test_regions(drawn: tuple[Arrays, Attributes]) -> None:
    inputs, attributes = drawn
    check_graph("RoiAlign", inputs, attributes, roi_align(inputs, attributes))


@settings(max_examples=draws(4), deadline=None)
@given(regions())
def test_regions_compiled(drawn: tuple[Arrays, Attributes]) -> None:
    inputs, attributes = drawn
    check_compiled("RoiAlign", inputs, attributes, roi_align(inputs, attributes))


ROI = {
    "mode": "avg",
    "sampling_ratio": 2,
    "spatial_scale": 1.0,
    "coordinate_transformation_mode": "half_pixel",
    "output_height": 2,
    "output_width": 3,
}


def test_regions_of_any_numbers() -> None:
    generator = np.random.default_rng(0)
    rois = np.where(np.arange(40)[:, None] % 4, generator.choice(NUMBERS, (40, 4)), generator.uniform(-4, 12, (40, 4))).astype(np.float32)
    inputs = normal(generator, 2, 3, 8, 8), rois, generator.integers(0, 2, 40)
    function = tilewright.compile(model("RoiAlign", inputs, ROI), tensors(inputs), "native", unsupported="error")
    finite = np.isfinite(rois).all(1) & (np.abs(rois) < 1e6).all(1)
    found = function(*tensors(inputs)).numpy()
    assert np.isfinite(found).all() and not found[~np.isfinite(rois).all(1)].any()
    compare(found[finite], roi_align((inputs[0], rois[finite], inputs[2][finite]), ROI))
    graph, _ = simplify(import_onnx(model("RoiAlign", inputs, ROI), tensors(inputs)).graph)
    results, faults = run_program(plan_program(graph, machine("h200"), 1), dict(zip(graph.inputs, inputs, strict=True)))
    assert not faults
    np.testing.assert_allclose(results[graph.outputs[0]], found, atol=1e-5)


def test_an_image_that_is_none() -> None:
    inputs = np.ones((2, 3, 8, 8), np.float32), np.ones((4, 4), np.float32), np.array([0, 1, 2, 0])
    function = tilewright.compile(model("RoiAlign", inputs, ROI), tensors(inputs), "native", unsupported="error")
    with pytest.raises(IndexOutOfRange, match="index 2"):
        function(*tensors(inputs))


def test_as_many_samples_as_data_asks_for_run_elsewhere() -> None:
    inputs = np.ones((2, 3, 8, 8), np.float32), np.ones((4, 4), np.float32), np.array([0, 1, 1, 0])
    assert evaluated(model("RoiAlign", inputs, {**ROI, "sampling_ratio": 0}), tensors(inputs))[1] == ["onnx.RoiAlign"]


def test_before_operator_set_16_pixels_are_not_centred() -> None:
    generator = np.random.default_rng(0)
    inputs = normal(generator, 2, 3, 8, 8), generator.uniform(0, 8, (4, 4)).astype(np.float32), np.array([0, 1, 1, 0])
    attributes = {key: value for key, value in ROI.items() if key != "coordinate_transformation_mode"}
    for opset, mode in ((13, "output_half_pixel"), (16, "half_pixel")):
        function, others, _ = evaluated(model("RoiAlign", inputs, attributes, opset), tensors(inputs))
        assert not others
        compare(function(*tensors(inputs))[0], roi_align(inputs, {**ROI, "coordinate_transformation_mode": mode}))


# --- DeformConv -------------------------------------------------------------------------------------------------------


def sampled(image: np.ndarray, at: Sequence[float]) -> float:
    """Linear interpolation in any number of dimensions, with zeros outside."""
    if not all(-1 < p < n for p, n in zip(at, image.shape, strict=True)):
        return 0.0
    total = 0.0
    for corner in product((0, 1), repeat=len(at)):
        index = [floor(p) + c for p, c in zip(at, corner, strict=True)]
        if all(0 <= i < n for i, n in zip(index, image.shape, strict=True)):
            total += image[tuple(index)] * float(np.prod([1 - abs(p - i) for p, i in zip(at, index, strict=True)]))
    return total


def deformable(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    x, w, offsets, bias, mask = (part.astype(np.float64) for part in inputs)
    rank, filters, out = x.ndim - 2, w.shape[2:], offsets.shape[2:]
    offsets = offsets.reshape(len(x), attributes["offset_group"], *filters, rank, *out)
    mask = mask.reshape(len(x), attributes["offset_group"], *filters, *out) if mask.size else np.ones(np.delete(offsets.shape, 2 + rank))
    columns = np.zeros((len(x), x.shape[1], *filters, *out))
    for image, channel, *rest in np.ndindex(*columns.shape):
        taps, where, group = rest[:rank], rest[rank:], channel * attributes["offset_group"] // x.shape[1]
        moves = (offsets[(image, group, *taps, k, *where)] for k in range(rank))
        dims = zip(where, attributes["strides"], attributes["pads"], taps, attributes["dilations"], moves, strict=False)
        at = [i * stride - pad + tap * dilation + move for i, stride, pad, tap, dilation, move in dims]
        columns[(image, channel, *rest)] = sampled(x[image, channel], at) * mask[(image, group, *rest)]
    groups = attributes["group"]
    parts = zip(np.split(columns, groups, 1), np.split(w, groups), strict=True)
    axes = list(range(1, 2 + rank))
    result = np.concatenate([np.tensordot(c, f, (axes, axes)) for c, f in parts], -1)
    return np.moveaxis(result, -1, 1) + (bias.reshape(-1, *(1,) * rank) if bias.size else 0.0)


@st.composite
def deformations(draw: st.DrawFn) -> tuple[list[np.ndarray], Attributes]:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank = draw(st.sampled_from([1, 2, 2, 2, 3]))

    def each(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=rank, max_size=rank))

    filters, strides, dilations, before, after, out = each(1, 3), each(1, 2), each(1, 2), each(0, 2), each(0, 2), each(1, 4)
    sizes = [max((o - 1) * s + d * (f - 1) + 1 - a - b, 1) for o, s, d, f, a, b in zip(out, strides, dilations, filters, before, after, strict=True)]
    after = [(o - 1) * s + d * (f - 1) + 1 - a - n for o, s, d, f, a, n in zip(out, strides, dilations, filters, before, sizes, strict=True)]
    group, offset_group, share, outputs, n = (draw(st.integers(1, most)) for most in (2, 3, 3, 3, 2))
    if any(a < 0 for a in after):  # an image of one element and less padding
        before, after = [a + min(b, 0) for a, b in zip(before, after, strict=True)], [max(b, 0) for b in after]
    channels, taps = group * offset_group * share, int(np.prod(filters)) * offset_group
    arrays = [
        normal(generator, n, channels, *sizes), normal(generator, group * outputs, channels // group, *filters), 2 * normal(generator, n, taps * rank, *out),
        normal(generator, group * outputs * draw(st.integers(0, 1))), normal(generator, n, taps * draw(st.integers(0, 1)), *out),
    ]  # fmt: skip
    attributes = {
        "group": group,
        "offset_group": offset_group,
        "strides": strides,
        "dilations": dilations,
        "pads": before + after,
        "kernel_shape": filters,
    }
    return arrays, attributes


@settings(max_examples=40, deadline=None)
@given(deformations())
def test_deformations(drawn: tuple[Arrays, Attributes]) -> None:
    inputs, attributes = drawn
    check_graph("DeformConv", inputs, attributes, deformable(inputs, attributes))


@settings(max_examples=draws(5), deadline=None)
@given(deformations())
def test_deformations_compiled(drawn: tuple[Arrays, Attributes]) -> None:
    inputs, attributes = drawn
    check_compiled("DeformConv", inputs, attributes, deformable(inputs, attributes))


def deformed(channels: int = 16, size: int = 9) -> tuple[list[np.ndarray], Attributes]:
    generator = np.random.default_rng(1)
    arrays = [
        normal(generator, 1, channels, size, size), normal(generator, 24, channels, 3, 3), 2 * normal(generator, 1, 18, size, size), normal(generator, 24),
        normal(generator, 1, 9, size, size),
    ]  # fmt: skip
    return arrays, {"group": 1, "offset_group": 1, "strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}


def test_positions_of_any_numbers() -> None:
    """Zeros stand outside of the image even where its border is infinite."""
    inputs, attributes = deformed()
    flat = inputs[2].reshape(-1)
    flat[::5] = np.resize(NUMBERS, flat[::5].size)
    check_compiled("DeformConv", inputs, attributes, deformable(inputs, attributes))
    inputs[0][...] = np.inf
    inputs[2][...] = np.resize(np.array([np.nan, 1e30, -np.inf, -20.0, 40.0]), inputs[2].shape)
    check_compiled("DeformConv", inputs, attributes, np.broadcast_to(inputs[3].reshape(-1, 1, 1), (1, 24, 9, 9)))


@pytest.mark.parametrize("target", ["x86-avx512", "h200"])
def test_channels_are_sampled_in_vectors(target: str) -> None:
    """The image with its border is stored, channels last where a map reads it; maps after the product are its epilogue."""
    inputs, attributes = deformed(32)
    made = model("DeformConv", inputs, attributes)
    made.graph.node[0].output[0] = "d"
    made.graph.node.append(helper.make_node("Relu", ["d"], ["y"]))
    graph, _ = simplify(import_onnx(made, tensors(inputs)).graph)
    program = plan_program(graph, machine(target), 1, chains=False)  # else the border may stay in a tile
    # a map, or a factor that the product computes
    (columns,) = (lowered.region for lowered in program.regions if any(node.operator == "deformed_columns" for node in lowered.region.nodes))
    (padded,) = (name for name in columns.inputs if program.storage[name].value.shape == (1, 32, 12, 12))
    assert [dim for dim, _ in program.storage[padded].layout.order] == [0, 2, 3, 1] or columns.kind == "contraction"
    assert not columns.checks  # the ranges of taps are known
    last = program.regions[-1].region
    assert last.kind == "contraction" and [node.operator for node in last.nodes[-2:]] == ["add", "relu"]


@pytest.mark.in_turns(1)
@pytest.mark.parametrize(("dtype", "error"), [(np.float16, 1e-2), (np.float64, 1e-9)])
def test_other_types(dtype: Any, error: float) -> None:
    """Positions of float16 are computed in float32."""
    generator = np.random.default_rng(2)
    inputs = normal(generator, 2, 3, 8, 8).astype(dtype), generator.uniform(0, 8, (4, 4)).astype(dtype), np.array([0, 1, 1, 0])
    arrays, attributes = deformed()
    moved = [array.astype(dtype) for array in arrays]
    for made, given_, wanted in (
        (model("RoiAlign", inputs, ROI), inputs, roi_align(inputs, ROI)),
        (model("DeformConv", moved, attributes), moved, deformable(moved, attributes)),
    ):
        found = tilewright.compile(made, tensors(given_), "native", unsupported="error")(*tensors(given_))
        assert found.numpy().dtype == dtype
        np.testing.assert_allclose(found.numpy().astype(np.float64), wanted, atol=error * max(1.0, np.abs(wanted).max()))
