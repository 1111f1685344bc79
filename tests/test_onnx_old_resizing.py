"""Upsample and Resize of ONNX's operator sets 7 to 10, and sizes from scales in later ones, against onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.test_onnx import model_of
from tilewright.frontend.onnx_import import import_onnx
from tilewright.graph.reference import evaluate


def upsampled(opset: int, mode: str, shape: Sequence[int], factors: tuple[float, float], inside: bool = False) -> onnx.ModelProto:
    """Upsample or Resize of an old set, `inside` the branch of an If."""
    scales = torch.tensor([1.0, 1.0, *factors])
    if opset < 9:
        node = helper.make_node("Upsample", ["x"], ["y"], mode=mode, scales=scales.tolist())
    else:
        node = helper.make_node("Upsample" if opset == 9 else "Resize", ["x", "s"], ["y"], mode=mode)
    if inside:
        branches = [helper.make_graph([node], name, [], [helper.make_tensor_value_info("y", 1, None)]) for name in ("a", "b")]
        node = helper.make_node("If", ["c"], ["z"], then_branch=branches[0], else_branch=branches[1])
    stored = {"s": scales} | ({"c": torch.tensor(True)} if inside else {})
    return model_of([node], {"x": list(shape)}, ["z" if inside else "y"], stored, opset=opset)


def resizes_as_onnxruntime(model: onnx.ModelProto, x: torch.Tensor) -> None:
    """It computes old sets by their own definitions."""
    runtime = pytest.importorskip("onnxruntime")
    (want,) = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(evaluate(import_onnx(model).graph, [x])[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True], ids=["", "in a branch"])
@pytest.mark.parametrize(("mode", "factor"), [("linear", 2.0), ("nearest", 1.5)])
@pytest.mark.parametrize("opset", [7, 9, 10])
def test_old_resizing_keeps_its_coordinates(opset: int, mode: str, factor: float, inside: bool) -> None:
    x = torch.randn(1, 2, 4, 6)
    resizes_as_onnxruntime(upsampled(opset, mode, x.shape, (factor, factor), inside), x)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("opset", [7, 9, 10])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_old_resizing_to_any_size(opset: int, mode: str, data: st.DataObject) -> None:
    """Smaller too with Resize; onnxruntime refuses Upsample by less than 1."""
    height, width = (data.draw(st.integers(1, 12), name) for name in ("height", "width"))
    least = 1 if opset == 10 else 20

    def factor(extent: int, name: str) -> float:
        by_size = data.draw(st.integers(1 if opset == 10 else extent, 3 * extent), f"{name} by size") / extent
        return data.draw(st.sampled_from([by_size, data.draw(st.integers(least, 60), name) / 20]))

    factors = factor(height, "of the height"), factor(width, "of the width")
    sizes = [int(np.float32(f) * np.float32(n)) for f, n in zip(factors, (height, width), strict=True)]
    assume(all(sizes) and sizes != [height, width])  # onnxruntime copies if no size changes, whatever the factors
    resizes_as_onnxruntime(upsampled(opset, mode, (1, 2, height, width), factors), torch.randn(1, 2, height, width))


@pytest.mark.parametrize(("shape", "factors"), [((1, 1, 7, 10), (0.3, 0.7)), ((1, 2, 4, 6), (1 / 3, 0.6)), ((1, 1, 5, 3), (1.3, 0.8))])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_old_resizing_to_smaller_sizes(mode: str, shape: tuple[int, ...], factors: tuple[float, float]) -> None:
    resizes_as_onnxruntime(upsampled(10, mode, shape, factors), torch.randn(shape))


@pytest.mark.parametrize(("size", "scale"), [(3, 5 / 3), (10, 0.7), (7, 11 / 7)])
def test_sizes_from_scales_are_rounded_in_float32(size: int, scale: float) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="linear")
    resizes_as_onnxruntime(model_of([node], {"x": [1, 2, size]}, ["y"], {"s": torch.tensor([1.0, 1.0, scale])}, opset=17), torch.randn(1, 2, size))
