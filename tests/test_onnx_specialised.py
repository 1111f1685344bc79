"""Inputs of ONNX models that stand for shapes, axes and the like: specialised to the example's values, and checked at each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import tilewright
from tests.onnx_models import evaluated
from tilewright.errors import InvalidInput, UnsupportedOperator, UnsupportedOption
from tilewright.frontend.onnx_import import import_onnx
from tilewright.models import resolve

TYPES = {torch.float32: TensorProto.FLOAT, torch.int64: TensorProto.INT64, torch.bool: TensorProto.BOOL}


def model_of(nodes: list[Any], **inputs: torch.Tensor) -> Any:
    infos = [helper.make_tensor_value_info(name, TYPES[x.dtype], list(x.shape)) for name, x in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


X = torch.arange(24.0).reshape(2, 3, 4)
SHAPE = torch.tensor([4, -1])
RESHAPE = helper.make_node("Reshape", ["x", "s"], ["y"])


def test_a_shape_is_taken_from_the_example_and_checked() -> None:
    executable = tilewright.compile(model_of([RESHAPE], x=X, s=SHAPE), (X, SHAPE), "native")
    assert torch.equal(executable(X, SHAPE), X.reshape(4, 6))
    assert torch.equal(executable(X + 1, SHAPE.clone()), X.reshape(4, 6) + 1)
    for wrong in (torch.tensor([6, -1]), SHAPE.int(), SHAPE[:1], [4, -1], torch.empty(2, dtype=torch.int64, device="meta")):
        with pytest.raises(InvalidInput, match=r"args\[1\].*compiled for the constant \[4, -1\], got") as caught:
            executable(X, wrong)
        assert "\n" not in str(caught.value) and caught.value.remedy
    with pytest.raises(InvalidInput, match=r"with the elements \[6, -1\]"):
        executable(X, torch.tensor([6, -1]))


def test_the_example_may_change_after_compilation() -> None:
    shape = SHAPE.clone()
    executable = tilewright.compile(model_of([RESHAPE], x=X, s=SHAPE), (X, shape), "native")
    shape[0] = 6
    with pytest.raises(InvalidInput, match="compiled for the constant"):
        executable(X, shape)
    assert torch.equal(executable(X, SHAPE), X.reshape(4, 6))


def test_an_artifact_keeps_the_value(tmp_path: Path) -> None:
    executable = tilewright.compile(model_of([RESHAPE], x=X, s=SHAPE), (X, SHAPE), "native")
    executable.save(tmp_path / "m.zip")
    again = tilewright.load(tmp_path / "m.zip")
    assert again.signature == executable.signature
    assert torch.equal(again(X, SHAPE), X.reshape(4, 6))
    with pytest.raises(InvalidInput, match="compiled for the constant"):
        again(X, SHAPE + 1)


def test_values_computed_from_several_inputs() -> None:
    """All inputs behind a shape are specialised, no other."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["t"]), helper.make_node("Concat", ["t", "a"], ["s"], axis=0),
        helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Where", ["c", "r", "r"], ["y"]),
    ]  # fmt: skip
    inputs = {"x": X, "a": torch.tensor([4]), "b": torch.tensor([2]), "c": torch.tensor([True])}
    imported = import_onnx(model_of(nodes, **inputs), list(inputs.values()))
    assert imported.leaves == (0, None, None, 1)
    executable = tilewright.compile(model_of(nodes, **inputs), tuple(inputs.values()), "native")
    assert torch.equal(executable(*inputs.values()), X.reshape(6, 4))


def test_no_more_is_specialised_than_needed() -> None:
    """An integer input that is only data stays an input, and so does one that a function's body needs only in a form that is not used."""
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"], axis=1)]
    index = torch.tensor([2, 0])
    imported = import_onnx(model_of(nodes, x=X, i=index), [X, index])
    assert imported.leaves == (0, 1)


def test_without_an_example_the_error_names_the_input() -> None:
    with pytest.raises(UnsupportedOperator, match="depends on the values of the input s: pass example_inputs") as caught:
        tilewright.compile(model_of([RESHAPE], x=X, s=SHAPE), None, "native")
    assert "\n" not in str(caught.value)


def test_sizes_that_change_specialise_nothing() -> None:
    """A program for other sizes would be made with values that nobody gave."""
    model = model_of([RESHAPE], x=X, s=SHAPE)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    with pytest.raises(UnsupportedOperator, match="depends on the values of the input s: compile the model for one set of sizes"):
        tilewright.compile(model, (X, SHAPE), "native", dynamic=True)
    assert tilewright.compile(model, (X, SHAPE), "native")(X, SHAPE).shape == (4, 6)


def test_data_is_not_specialised() -> None:
    """A count that is computed from floating-point data, or from much data: every call may have another."""
    nodes = [
        helper.make_node("Cast", ["x"], ["n"], to=TensorProto.INT64), helper.make_node("ReduceSum", ["n"], ["k"], keepdims=0),
        helper.make_node("Range", ["zero", "k", "one"], ["r"]), helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
    ]  # fmt: skip
    inputs = {"x": X, "zero": torch.tensor(0), "one": torch.tensor(1)}
    tail = import_onnx(model_of(nodes, **inputs), list(inputs.values())).tail
    assert tail is not None and "computed from the model's inputs, not constant" in tail.nodes[0].reason
    big = torch.ones(2000, dtype=torch.int64)
    nodes[0] = helper.make_node("Identity", ["x"], ["n"])
    assert import_onnx(model_of(nodes, **{**inputs, "x": big}), [big, *list(inputs.values())[1:]]).tail is not None


@pytest.mark.parametrize("condition", [True, False])
def test_a_condition_chooses_a_branch(condition: bool) -> None:
    def branch(operator: str) -> Any:
        return helper.make_graph([helper.make_node(operator, ["x"], ["r"])], operator, [], [helper.make_tensor_value_info("r", 1, list(X.shape))])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs"))
    c = torch.tensor(condition)
    executable = tilewright.compile(model_of([node], x=X - 5, c=c), (X - 5, c), "native")
    assert torch.equal(executable(X - 5, c), 5 - X if condition else (X - 5).abs())
    with pytest.raises(InvalidInput, match=r"args\[1\]"):
        executable(X - 5, ~c)


@given(st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6), st.sampled_from([-2, -1, 1, 2, 3])), min_size=1, max_size=3))
def test_slices(bounds: list[tuple[int, int, int]]) -> None:
    starts, ends, steps = (torch.tensor([b[k] for b in bounds]) for k in range(3))
    axes = torch.arange(len(bounds)) - 3
    node = helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps"], ["y"])
    inputs = {"x": X, "starts": starts, "ends": ends, "axes": axes, "steps": steps}
    function, others, specialised = evaluated(model_of([node], **inputs), list(inputs.values()))
    want = X.numpy()[tuple(slice(*b) for b in bounds)]
    assert not others and specialised == 4
    np.testing.assert_array_equal(function(*inputs.values())[0], want)


def test_values_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model_of([RESHAPE], x=X, s=SHAPE).SerializeToString())
    model = resolve(str(tmp_path / "m.onnx"), None, ["2x3x4", "2:int64=4,-1"])
    assert model.inputs is not None
    x, shape = model.inputs(0)
    assert torch.equal(shape, SHAPE) and x.shape == X.shape
    assert tilewright.compile(model.module, (x, shape), "native")(x, shape).shape == (4, 6)
    for text, words in (
        ("2:int64=4", "2 elements has 1 values"),
        ("2:int64=4,b", "no values"),
        ("1:uint8=300", "no values"),
        ("1:int64=1.5", "no values"),
    ):
        with pytest.raises(UnsupportedOption, match=words):
            model = resolve(str(tmp_path / "m.onnx"), None, [text])
            assert model.inputs is not None
            model.inputs(0)
