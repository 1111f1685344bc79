"""ONNX nodes without an entry in the operator table: they run through ONNX Runtime, or ONNX's reference evaluator where that is not installed."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import tilewright
from tilewright.errors import NotCompiled, UnsupportedOperator
from tilewright.graph import onnx_call

pytestmark = pytest.mark.filterwarnings("ignore::tilewright.errors.NotCompiled")
SHAPES = {"x": [3, 12, 1]}


def model() -> Any:
    """A Fourier transform between two maps."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]), helper.make_node("DFT", ["r"], ["d"], name="spectrum", axis=1), helper.make_node("Mul", ["d", "d"], ["y"])
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in SHAPES.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=generator) for shape in SHAPES.values())


def wanted(*tensors: torch.Tensor) -> np.ndarray:
    result: np.ndarray = ReferenceEvaluator(model()).run(None, dict(zip(SHAPES, (x.numpy() for x in tensors), strict=True)))[0]  # type: ignore[index]
    return result


def test_the_node_runs_and_is_listed() -> None:
    with pytest.warns(
        NotCompiled, match="1 operator runs through ONNX's runtimes:\n.*onnx.DFT of 3x12x2 at spectrum: no definition in the operator table"
    ):
        executable = tilewright.compile(model(), inputs(), "native")
    np.testing.assert_allclose(executable(*inputs()), wanted(*inputs()), rtol=1e-4, atol=1e-5)
    assert [region.kind for region in executable.image.program.regions] == ["map", "torch", "map"]
    assert "onnx.DFT" in str(executable.plan)
    assert executable.verify(*inputs()).passed


def test_it_may_be_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="onnx.DFT of 3x12x2 at spectrum") as caught:
        tilewright.compile(model(), inputs(), "native", unsupported="error")
    assert "ONNX's runtimes" in caught.value.remedy


def test_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    onnx_call._evaluator.cache_clear()
    try:
        with pytest.warns(NotCompiled, match="ONNX's reference evaluator computes it"):
            executable = tilewright.compile(model(), inputs(), "native")
        np.testing.assert_allclose(executable(*inputs()), wanted(*inputs()), rtol=1e-4, atol=1e-5)
    finally:
        onnx_call._evaluator.cache_clear()


def test_an_artifact_keeps_the_node(tmp_path: Path) -> None:
    tilewright.compile(model(), inputs(), "native").save(tmp_path / "m")
    np.testing.assert_allclose(tilewright.load(tmp_path / "m")(*inputs()), wanted(*inputs()), rtol=1e-4, atol=1e-5)


def single(operator: str, **changes: Any) -> str:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    nodes = changes.get("nodes") or [helper.make_node(operator, ["x"], ["y"], domain=changes.get("domain", ""))]
    graph = helper.make_graph(nodes, "g", [value], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    opsets = [helper.make_opsetid("", 19), *([helper.make_opsetid("own", 1)] if "domain" in changes else [])]
    return base64.b64encode(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()).decode()


BAD = {
    "no text": "%%%", "no model": base64.b64encode(b"\xff\xff").decode(), "nothing": "", "another operator": single("Relu"),
    "a random operator": single("RandomUniformLike"), "a domain of others": single("DFT", domain="own"),
    "two nodes": single("", nodes=[helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Relu", ["t"], ["y"])]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_an_artifact_cannot_name_other_models(what: str) -> None:
    (node,) = (n for n in tilewright.compile(model(), inputs(), "native").image.program.graph.nodes if n.operator == "torch")
    (kind, operands), _ = node.attributes["call"][0]
    onnx_call.check_call("onnx.DFT", node.attributes["call"][0])
    with pytest.raises(ValueError, match="is no ONNX model|no model of nodes|model of another operator"):
        onnx_call.check_call("onnx.DFT", [(kind, operands), ("value", BAD[what])])


def test_an_operator_of_another_domain_is_refused() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    node = helper.make_node("FusedMatMul", ["x", "x"], ["y"], domain="com.microsoft")
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("com.microsoft", 1)]
    with pytest.raises(UnsupportedOperator, match="com.microsoft.FusedMatMul"):
        tilewright.compile(helper.make_model(graph, opset_imports=opsets, ir_version=9), torch.ones(4), "native")


def test_float16_runs_elsewhere_node_by_node() -> None:
    nodes = [
        helper.make_node("Sin", ["x"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Exp", ["b"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [5, 7])
    graph = helper.make_graph(nodes, "g", [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    half = torch.randn(5, 7).half()
    executable = tilewright.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), half, "native")
    torch.testing.assert_close(executable(half), half.float().sin().half().float().exp(), rtol=2e-3, atol=2e-3)
