"""Random uses of ONNX operators against ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator

import tilewright
from tests.draws import draws
from tests.onnx_models import evaluated

drawn = settings(max_examples=draws(30), deadline=None)


def check(operator: str, inputs: Sequence[np.ndarray | None], outputs: int = 1, opset: int = 22, **attributes: Any) -> None:
    """One node: our graph's results, evaluated, are those of ONNX's evaluator. An input of None is absent."""
    names = ["" if x is None else f"x{k}" for k, x in enumerate(inputs)]
    node = helper.make_node(operator, names, [f"y{k}" for k in range(outputs)], **attributes)
    given = {name: np.asarray(x) for name, x in zip(names, inputs, strict=True) if x is not None}
    infos = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape)) for name, x in given.items()]
    results = [onnx.ValueInfoProto(name=name) for name in node.output]
    for result in results:
        result.type.tensor_type.elem_type = 1
    model = helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with np.errstate(all="ignore"):
        wanted = ReferenceEvaluator(model).run(None, given)
    tensors = [torch.from_numpy(x) for x in given.values()]
    for got, want in zip(evaluated(model, tensors)[0](*tensors), wanted, strict=True):
        assert got.shape == np.shape(want)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@given(data=st.data())
@drawn
def test_resize(mode: str, data: st.DataObject) -> None:
    """All coordinate modes, with and without a filter against aliasing, by scales and by sizes."""
    shape = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=2), "shape")
    coordinates = data.draw(
        st.sampled_from(["half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize", "half_pixel_symmetric"]), "coordinates"
    )
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": coordinates, "antialias": data.draw(st.integers(0, 1), "antialias")}
    if data.draw(st.booleans(), "outside") and coordinates != "tf_crop_and_resize":
        attributes["exclude_outside"] = 1
    if mode == "cubic":
        attributes["cubic_coeff_a"] = data.draw(st.sampled_from([-0.75, -0.5]), "a")
    if coordinates == "tf_crop_and_resize":
        attributes |= {"extrapolation_value": 7.0, "antialias": 0}
    region = np.array([0.1] * (len(shape) + 2) + [0.8, 1.2, 0.9, 1.1][: len(shape) + 2], np.float32)
    region[:2] = 0
    region[len(shape) + 2 : len(shape) + 4] = 1
    roi = region if coordinates == "tf_crop_and_resize" else None
    sizes = data.draw(st.lists(st.integers(2, 12), min_size=len(shape), max_size=len(shape)), "sizes")
    if coordinates != "tf_crop_and_resize" and data.draw(st.booleans(), "by scales"):
        scales = np.array([1, 1, *(m / n for m, n in zip(sizes, shape, strict=True))], np.float32)
        # ONNX's evaluator multiplies in float64, and its shape inference and onnxruntime, as we do, in float32 (test_onnx_old_resizing)
        assume(all(int(float(s) * n) == int(s * np.float32(n)) > 0 for s, n in zip(scales[2:], shape, strict=True)))
        check("Resize", [normal(1, 2, *shape), roi, scales], **attributes)
    else:
        check("Resize", [normal(1, 2, *shape), roi, None, np.array([1, 2, *sizes])], **attributes)


@given(data=st.data())
@drawn
def test_col2im(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 2), "rank")

    def each(least: int, most: int, name: str) -> list[int]:
        return data.draw(st.lists(st.integers(least, most), min_size=rank, max_size=rank), name)

    block, dilations, strides = each(1, 3, "block"), each(1, 2, "dilations"), each(1, 3, "strides")
    before, after, image = each(0, 2, "before"), each(0, 2, "after"), each(3, 7, "image")
    counts = [(n + a + b - d * (f - 1) - 1) // s + 1 for n, a, b, d, f, s in zip(image, before, after, dilations, block, strides, strict=True)]
    assume(all(n + a + b >= d * (f - 1) + 1 for n, a, b, d, f in zip(image, before, after, dilations, block, strict=True)))
    x = normal(2, 3 * int(np.prod(block)), int(np.prod(counts)))
    check("Col2Im", [x, np.array(image), np.array(block)], dilations=dilations, strides=strides, pads=before + after)


@given(size=st.integers(3, 6), stride=st.integers(1, 3), order=st.integers(0, 1), pad=st.integers(0, 1))
@drawn
def test_positions_of_maxima(size: int, stride: int, order: int, pad: int) -> None:
    x = np.random.default_rng(size).permutation(2 * 2 * size * (size + 1)).reshape(2, 2, size, size + 1).astype(np.float32)
    check("MaxPool", [x], 2, kernel_shape=[2, 2], strides=[stride, stride + 1], storage_order=order, pads=[pad] * 4)


def test_the_inverse_of_pooling() -> None:
    x = torch.from_numpy(np.random.default_rng(1).permutation(2 * 3 * 8 * 8).reshape(2, 3, 8, 8).astype(np.float32))
    y, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    planes = torch.arange(6).reshape(2, 3, 1, 1) * 64
    check("MaxUnpool", [y.numpy(), (indices + planes).numpy()], kernel_shape=[2, 2], strides=[2, 2])
    check("MaxUnpool", [y.numpy(), (indices + planes).numpy(), np.array([2, 3, 9, 10])], kernel_shape=[2, 2], strides=[2, 2])


@given(batch=st.integers(1, 3), channels=st.integers(1, 4), extents=st.lists(st.integers(1, 4), max_size=2))
@drawn
def test_batch_normalisation_in_training(batch: int, channels: int, extents: list[int]) -> None:
    weights = [normal(channels), normal(channels) + 1, normal(channels), np.abs(normal(channels)) + 1]
    check("BatchNormalization", [normal(batch, channels, *extents), *weights], 3, training_mode=1, momentum=0.7, epsilon=0.01)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("bias", [False, True])
def test_peepholes(direction: str, bias: bool) -> None:
    """Against the same recurrence in NumPy; ONNX's evaluator knows only forward."""
    count, length, batch, inputs, hidden = (2 if direction == "bidirectional" else 1), 4, 2, 3, 5
    generator = np.random.default_rng(4)

    def drawn(*shape: int) -> np.ndarray:
        return generator.uniform(-1, 1, shape).astype(np.float32)

    x, w, r, p = drawn(length, batch, inputs), drawn(count, 4 * hidden, inputs), drawn(count, 4 * hidden, hidden), drawn(count, 3 * hidden)
    b = drawn(count, 8 * hidden) if bias else np.zeros((count, 8 * hidden), np.float32)

    def sigmoid(a: np.ndarray) -> np.ndarray:
        return np.asarray(1 / (1 + np.exp(-a)))

    wanted = np.zeros((length, count, batch, hidden), np.float32)
    for k in range(count):
        h, c = np.zeros((2, batch, hidden), np.float32)
        p_i, p_o, p_f = np.split(p[k], 3)
        steps = range(length) if direction == "forward" or (k == 0 and count == 2) else reversed(range(length))
        for t in steps:
            i, o, f, z = np.split(x[t] @ w[k].T + h @ r[k].T + b[k, : 4 * hidden] + b[k, 4 * hidden :], 4, 1)
            new = sigmoid(f + p_f * c) * c + sigmoid(i + p_i * c) * np.tanh(z)
            h = sigmoid(o + p_o * new) * np.tanh(new)
            c = new
            wanted[t, k] = h
    names = ["x", "w", "r", "b" if bias else "", "", "", "", "p"]
    node = helper.make_node("LSTM", names, ["y"], hidden_size=hidden, direction=direction)
    given = {"x": x, "w": w, "r": r, **({"b": b} if bias else {}), "p": p}
    infos = [helper.make_tensor_value_info(name, 1, list(a.shape)) for name, a in given.items()]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    tensors = [torch.from_numpy(a) for a in given.values()]
    got = evaluated(model, tensors)[0](*tensors)[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    if direction == "forward":
        np.testing.assert_allclose(tilewright.compile(model, tuple(tensors), "native")(*tensors), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@given(axis=st.integers(-3, 2), block=st.integers(0, 3), symmetric=st.booleans())
@drawn
def test_quantisation(dtype: str, axis: int, block: int, symmetric: bool) -> None:
    """One scale, one per position of an axis, or one per block; there and back."""
    x = normal(3, 4, 5) * 100
    size = x.shape[axis]
    shape = list(x.shape)
    shape[axis] = -(-size // block) if block else size
    shape = shape if block else [size]
    generator = np.random.default_rng(block)
    scale = generator.uniform(0.5, 2, shape).astype(np.float32)
    zero = None if symmetric else generator.integers(0, 50, shape).astype(dtype)
    more: dict[str, Any] = {"axis": axis, "block_size": block}
    if symmetric:
        more["output_dtype"] = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assume(not block or size % block == 0 or -(-size // block) * block >= size)
    check("QuantizeLinear", [x, scale, zero], opset=23, **more)
    quantised = generator.integers(0, 100, x.shape).astype(dtype)
    check("DequantizeLinear", [quantised, scale, zero], opset=23, axis=axis, block_size=block)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantised_products(dtype: str) -> None:
    generator = np.random.default_rng(6)

    def whole(*shape: int) -> np.ndarray:
        return generator.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)

    a, b, scale = whole(2, 3, 4), whole(4, 5), np.array(0.01, np.float32)
    check("MatMulInteger", [a, b, whole(), whole()])
    check("MatMulInteger", [a[0], b, whole(3, 1), whole(5)])
    check("QLinearMatMul", [a, scale, whole(), b, scale, whole(), scale * 30, whole()])
    x, w = whole(2, 4, 6, 6), whole(6, 2, 3, 3)
    check("ConvInteger", [x.astype("uint8"), w.astype("uint8"), np.array(3, "uint8")], group=2, pads=[1, 0, 1, 2], strides=[2, 1])
    bias = generator.integers(-1000, 1000, 6).astype(np.int32)
    operands = [x, scale, whole(), w, generator.uniform(0.01, 0.02, 6).astype(np.float32), np.zeros(6, dtype), scale * 50, whole(), bias]
    check("QLinearConv", operands, group=2, pads=[1, 0, 1, 2], strides=[2, 1])


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@given(data=st.data())
@drawn
def test_scatter(reduction: str, data: st.DataObject) -> None:
    """Small ones, which our kernels compute, and large ones, which run elsewhere; negative indices count from the end."""
    size = data.draw(st.sampled_from([4, 40]), "size")
    generator = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    x = normal(size, 3, 5)
    rows = generator.integers(-size, size, (data.draw(st.integers(1, size), "rows"), 2, 5))
    check("ScatterElements", [x, rows, generator.standard_normal(rows.shape, np.float32)], opset=18, axis=0, reduction=reduction)
    depth = data.draw(st.integers(1, 3), "depth")
    count = data.draw(st.integers(1, 4), "count")
    places = np.unique(np.stack([generator.integers(0, n, count) for n in x.shape[:depth]], -1), axis=0)
    check("ScatterND", [x, places, generator.standard_normal((len(places), *x.shape[depth:]), np.float32)], opset=18, reduction=reduction)


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint64", "int8"])
@given(size=st.sampled_from([1, 2, 7, 16, 33]), axis=st.integers(-3, 2), largest=st.booleans(), data=st.data())
@drawn
def test_the_first_of_sorted_rows(dtype: str, size: int, axis: int, largest: bool, data: st.DataObject) -> None:
    """Rows with equal elements, infinities and NaN; many of them are sorted elsewhere."""
    generator = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    shape = [2, 3, 4]
    shape[axis] = size
    x = generator.integers(0, 6, shape).astype(dtype)
    if dtype == "float32":
        x[generator.random(shape) < 0.2] = np.nan
        x[generator.random(shape) < 0.1] = np.inf
    count = data.draw(st.integers(1, size), "count")
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=axis, largest=int(largest))
    infos = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), shape), helper.make_tensor_value_info("k", 7, [1])]
    results = [helper.make_tensor_value_info("v", 1, None), helper.make_tensor_value_info("i", 7, None)]
    model = helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    tensors = [torch.from_numpy(x), torch.tensor([count])]
    function, others, _ = evaluated(model, tensors)
    assert bool(others) == (count > 16)
    values, positions = function(*tensors)
    wide = x.astype(np.float64)
    keys = np.where(np.isnan(wide), np.inf, wide), np.isnan(wide)
    order = np.lexsort([np.broadcast_to(np.arange(size).reshape([-1 if k == axis % 3 else 1 for k in range(3)]), shape),
                        *(-key.astype(float) if largest else key.astype(float) for key in keys)], axis=axis)  # fmt: skip
    wanted = np.take(order, np.arange(count), axis=axis)
    np.testing.assert_array_equal(positions, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis=axis))


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4))
@drawn
def test_reflection_beyond_the_data(pads: list[int]) -> None:
    check("Pad", [normal(2, 4), np.array(pads)], mode="reflect")


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([None, 0, 1, -1]))
@drawn
def test_compress(condition: list[bool], axis: int | None) -> None:
    check("Compress", [normal(6, 6), np.array(condition)], **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("mode", ["linear", "circular"])
@given(size=st.integers(3, 6), count=st.integers(1, 3), data=st.data())
@drawn
def test_caches_are_written(mode: str, size: int, count: int, data: st.DataObject) -> None:
    last = size - 1 if mode == "circular" else size - count
    first = np.array(data.draw(st.lists(st.integers(0, last), min_size=2, max_size=2)))
    check("TensorScatter", [normal(2, 3, size, 4), normal(2, 3, count, 4) + 9, first], opset=24, mode=mode)


@pytest.mark.parametrize(
    "types",
    [
        ("int8", "uint8"),
        ("uint16", "int16"),
        ("float32", "int32"),
        ("uint32", "float32"),
        ("int64", "float64"),
        ("bool", "uint8"),
        ("float16", "int16"),
    ],
)
def test_bits_in_another_type(types: tuple[str, str]) -> None:
    source, target = types
    x = (normal(40) * 100).astype(source)
    check("BitCast", [x], opset=26, to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))
