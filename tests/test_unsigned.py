"""Unsigned integers of 16, 32 and 64 bits, in which PyTorch computes little: compiled from ONNX and compared with NumPy, which wraps as kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper

import tilewright
from tilewright.frontend.imported import unsupported

COUNT = 67  # not a multiple of any number of lanes
BINARY = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.floor_divide, "Mod": np.mod, "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor, "Max": np.maximum, "Min": np.minimum, "Less": np.less, "Greater": np.greater,
    "Equal": np.equal, "LessOrEqual": np.less_equal,
}  # fmt: skip


def outputs_of(nodes: list[Any], names: list[str], **inputs: np.ndarray) -> list[np.ndarray]:
    """The compiled model's results; all of it runs in our kernels."""
    infos = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape)) for name, x in inputs.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in names]
    for result in results:
        result.type.tensor_type.elem_type = 1
    model = helper.make_model(helper.make_graph(nodes, "g", infos, results), opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    tensors = [torch.from_numpy(x) for x in inputs.values()]
    executable = tilewright.compile(model, tuple(tensors), "native")
    assert not unsupported(executable.image.program.graph) and "torch" not in {r.kind for r in executable.image.program.regions}
    got = executable(*tensors)
    return [np.asarray(x) for x in (got if isinstance(got, tuple) else (got,))]


def numbers(dtype: str, least: int = 0) -> np.ndarray:
    """Numbers of all magnitudes, the extremes among them."""
    bits = np.iinfo(dtype).bits
    generator = np.random.default_rng(bits + least)
    values = (
        generator.integers(0, 1 << bits, COUNT, np.uint64, endpoint=False)
        if bits < 64
        else generator.integers(0, np.iinfo("u8").max, COUNT, np.uint64)
    )
    values >>= generator.integers(0, bits, COUNT).astype(np.uint64)
    values[:4] = [np.iinfo(dtype).max, least, np.iinfo(dtype).max, 1]
    return np.maximum(values, np.uint64(least)).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_arithmetic(dtype: str) -> None:
    x, y = numbers(dtype), numbers(dtype, 1)
    nodes = [helper.make_node(name, ["x", "y"], [f"r{name}"]) for name in BINARY]
    got = outputs_of(nodes, [f"r{name}" for name in BINARY], x=x, y=y)
    with np.errstate(over="ignore"):
        for name, result in zip(BINARY, got, strict=True):
            np.testing.assert_array_equal(result, BINARY[name](x, y), err_msg=name)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_what_is_done_to_one_tensor(dtype: str) -> None:
    """Shifts by any number of bits, complements, sums of rows, the greatest, products with a constant near the top of the type."""
    x = numbers(dtype)
    top = np.array(np.iinfo(dtype).max - 2, dtype)
    bits = np.iinfo(dtype).bits
    steps = (np.arange(COUNT) % (bits + 3)).astype(dtype)
    nodes = [
        helper.make_node("BitShift", ["x", "n"], ["left"], direction="LEFT"), helper.make_node("BitShift", ["x", "n"], ["right"], direction="RIGHT"),
        helper.make_node("BitwiseNot", ["x"], ["not"]), helper.make_node("ReduceMax", ["x"], ["greatest"], keepdims=0),
        helper.make_node("Constant", [], ["top"], value=helper.make_tensor("t", helper.np_dtype_to_tensor_dtype(x.dtype), [], [int(top)])),
        helper.make_node("Mul", ["x", "top"], ["product"]), helper.make_node("Greater", ["x", "top"], ["above"]),
        helper.make_node("Cast", ["x"], ["real"], to=1), helper.make_node("Cast", ["x"], ["signed"], to=7),
    ]  # fmt: skip
    names = ["left", "right", "not", "greatest", "product", "above", "real", "signed"]
    got = dict(zip(names, outputs_of(nodes, names, x=x, n=steps), strict=True))
    wide = [int(v) for v in x]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got["left"], np.array([(v << int(n)) % (1 << bits) for v, n in zip(wide, steps, strict=True)], dtype))
        np.testing.assert_array_equal(got["right"], np.array([v >> int(n) for v, n in zip(wide, steps, strict=True)], dtype))
        np.testing.assert_array_equal(got["not"], ~x)
        np.testing.assert_array_equal(got["product"], x * top)
    assert got["greatest"] == x.max()
    np.testing.assert_array_equal(got["above"], x > top)
    np.testing.assert_array_equal(got["real"], x.astype(np.float32))
    np.testing.assert_array_equal(got["signed"], x.astype(np.int64))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_modules_take_them(dtype: torch.dtype) -> None:
    """What PyTorch's export allows: casts, views, copies."""

    class Bytes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32).reshape(4, -1) / 255

    x = torch.arange(16, dtype=torch.int32).to(dtype)
    torch.testing.assert_close(tilewright.compile(Bytes(), x)(x), Bytes()(x))
