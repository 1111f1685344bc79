"""Sizes that ONNX files, .pt2 files and exported programs leave free, all of them or some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import tilewright
from tilewright.errors import InvalidInput, UnsupportedOption

DYNAMIC = torch.export.Dim.DYNAMIC


def test_exported_programs() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    program = torch.export.export(module, (torch.randn(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch", max=9)},))
    executable = tilewright.compile(program, torch.randn(4, 3), dynamic=True)
    for n in (4, 2, 1, 9):
        x = torch.randn(n, 3)
        torch.testing.assert_close(executable(x), module(x).detach())
    with pytest.raises(InvalidInput, match="10, and the model was exported for 0 to 9"):
        executable(torch.randn(10, 3))
    own = tilewright.compile(program, dynamic=True)
    assert [list(sizes.values()) for sizes in own.sizes] == [[2]], "the example inputs of the program"
    fixed = tilewright.compile(program, torch.randn(4, 3))
    torch.testing.assert_close(fixed(torch.ones(4, 3)), module(torch.ones(4, 3)).detach())


def test_onnx_models() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Expand", ["one", "s"], ["e"])]
    nodes += [helper.make_node("Concat", ["m", "e"], ["y"], axis=1)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]), helper.make_tensor_value_info("one", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor("w", TensorProto.FLOAT, [3, 5], list(range(15)))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    executable = tilewright.compile(model, (torch.randn(2, 3), torch.randn(2, 1)), dynamic=True)
    for n in (2, 5, 1):
        x, one = torch.randn(n, 3), torch.randn(n, 1)
        wanted = torch.cat([x @ torch.arange(15.0).view(3, 5), one.expand(n, 3)], 1)
        torch.testing.assert_close(executable(x, one), wanted)
    with pytest.raises(InvalidInput, match=r"\[batch, 1\]"):
        executable(torch.randn(3, 3), torch.randn(4, 1))
    with pytest.raises(InvalidInput, match="pass example_inputs"):
        tilewright.compile(model, dynamic=True)
    assert isinstance(model, onnx.ModelProto)


def joined_model() -> onnx.ModelProto:
    """Rows of one input, all of them multiplied by a matrix, beside columns of another; some sizes are named, others are not."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("ReduceSum", ["z", "last"], ["t"]),
        helper.make_node("Add", ["m", "t"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "rows", 3]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, 1, "columns"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [3, 5], list(range(15))), helper.make_tensor("last", TensorProto.INT64, [1], [2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def joined(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x @ torch.arange(15.0).view(3, 5) + z.sum(2, keepdim=True)


def joined_inputs(batch: int, rows: int, columns: int, other: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, rows, 3), torch.randn(batch if other is None else other, 1, columns)


def test_some_sizes_of_a_file(tmp_path: Path) -> None:
    """Those that are named; one name may be that of two of the file's sizes, and the others are those of the example."""
    onnx.save(joined_model(), tmp_path / "m.onnx")
    dynamic = {"x": {0: "n"}, "z": {0: "n", 2: torch.export.Dim("k", min=2, max=9)}}
    executable = tilewright.compile(tmp_path / "m.onnx", joined_inputs(2, 4, 6), dynamic=dynamic, wait=True)
    for batch, columns in ((2, 6), (5, 6), (1, 2), (5, 9)):
        given = joined_inputs(batch, 4, columns)
        torch.testing.assert_close(executable(*given), joined(*given))
    assert {"n": 5, "k": 9} in executable.sizes
    with pytest.raises(InvalidInput, match="rows is 5, and the model was compiled for 4 alone"):
        executable(*joined_inputs(2, 5, 6))
    with pytest.raises(InvalidInput, match=r"batch is 2 and z.shape\[0\] is 1, and `dynamic` calls both n"):
        executable(*joined_inputs(2, 4, 6, 1))
    with pytest.raises(InvalidInput, match="k is 10, and `dynamic` gives 2 to 9"):
        executable(*joined_inputs(2, 4, 10))
    own = tilewright.compile(joined_model(), joined_inputs(3, 4, 6), dynamic={"x": {1: torch.export.Dim.AUTO}}, wait=True)
    given = joined_inputs(3, 7, 6)
    torch.testing.assert_close(own(*given), joined(*given))
    assert {"rows": 7} in own.sizes


def test_examples_that_do_not_fit_a_file() -> None:
    with pytest.raises(InvalidInput, match=r"batch is 2 and z.shape\[0\] is 3, and `dynamic` calls both n"):
        tilewright.compile(joined_model(), joined_inputs(2, 4, 6, 3), dynamic={"x": {0: "n"}, "z": {0: "n"}})
    x, z = joined_inputs(2, 4, 6)
    for dynamic in (True, {"x": {0: "n"}}):
        with pytest.raises(InvalidInput, match="input x: expected the shape"):
            tilewright.compile(joined_model(), (torch.cat([x, x], -1), z), dynamic=dynamic)


@pytest.mark.parametrize(
    "dynamic, words",
    [
        ({"w": {0: "n"}}, "dynamic names the inputs w; the inputs are x, z"),
        ({"x": {2: "n"}}, r"dynamic names dimension 2 of x, which is not free in the model; leave it out \(its free sizes are batch, rows, z"),
        ({"x": {3: "n"}}, "a tensor of 3 dimensions"),
        ({"x": {-3: "n"}, "z": {0: "n", 2: 2 * torch.export.Dim("k")}}, "dynamic derives"),
        ({"x": {0: None}}, "names no sizes"),
        ({"x": {}}, "names no sizes"),
        ({}, "names no sizes"),
        (False, "names no sizes"),
        ("batch", "names no sizes"),
        ({"x": {0: 3.5}}, "name it"),
    ],
)
def test_sizes_that_a_file_does_not_leave_free(dynamic: Any, words: str) -> None:
    with pytest.raises(UnsupportedOption, match=words):
        tilewright.compile(joined_model(), joined_inputs(2, 4, 6), dynamic=dynamic)


def test_one_size_of_a_file_has_one_name() -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "ab"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(UnsupportedOption, match="dynamic calls dimension 0 of b m, and n as well, which is the same size of the model, batch"):
        tilewright.compile(model, (torch.ones(2, 3), torch.ones(2, 3)), dynamic={"a": {0: "n"}, "b": {0: "m"}})


class Mixing(nn.Module):
    """Attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, 2)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("batch", [2, 1])
def test_some_sizes_of_an_exported_program(batch: int, tmp_path: Path) -> None:
    """With the others fixed a sequence has programs for ranges of its lengths, whatever the batch."""
    module = Mixing().eval()
    program = torch.export.export(module, (torch.randn(3, 6, 16),), dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},))
    torch.export.save(program, tmp_path / "m.pt2")
    executable = tilewright.compile(tmp_path / "m.pt2", torch.randn(batch, 6, 16), dynamic={"x": {1: "length"}}, wait=True)
    for length in (6, 9, 20):
        x = torch.randn(batch, length, 16)
        torch.testing.assert_close(executable(x), module(x).detach())
    assert executable.sizes == ({"length": range(2, 17)}, {"length": range(17, 25)})
    with pytest.raises(InvalidInput, match=rf"x.shape\[0\] is 4, and the model was compiled for {batch} alone"):
        executable(torch.randn(4, 6, 16))
    with pytest.raises(UnsupportedOption, match="dimension 2 of x, which is not free"):
        tilewright.compile(program, torch.randn(batch, 6, 16), dynamic={"x": {2: "width"}})
    with pytest.raises(InvalidInput, match="2 inputs for a model of 1"):
        tilewright.compile(program, (torch.randn(2, 6, 16), torch.randn(6, 6)), dynamic={"x": {1: "length"}})
