"""Checked indices of operators that run through PyTorch (scatter and similar), and of ONNX's operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import tilewright
from tilewright.errors import IndexOutOfRange, InvalidModel
from tilewright.runtime.executable import Executable

ROWS = 5
TABLE = torch.arange(20.0).reshape(ROWS, 4)
SOURCE = -torch.arange(12.0).reshape(3, 4) - 1
RIGHT = torch.tensor([0, 4, 2])
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

WRITES: dict[str, Write] = {
    "scatter": lambda x, i, s: x.scatter(0, i[:, None].expand(3, 4), s),
    "scatter_value": lambda x, i, s: x.scatter(0, i[:, None], 7.0),
    "scatter_last": lambda x, i, s: x.T.scatter(-1, i[None].expand(4, 3), s.T),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i[:, None].expand(3, 4), s),
    "scatter_reduce": lambda x, i, s: x.scatter_reduce(0, i[:, None].expand(3, 4), s, "amin", include_self=False),
    "index_add": lambda x, i, s: x.index_add(0, i, s, alpha=2),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "index_fill": lambda x, i, s: x.index_fill(0, i, 3.0),
    "index_put": lambda x, i, s: x.index_put((i,), s),
    "index_put_second": lambda x, i, s: torch.ops.aten.index_put(x.T, [None, i], s.T),
    "assignment": lambda x, i, s: _assigned(x, i, s),
    "put": lambda x, i, s: x.put(i, s[:, 0]),
}


def _assigned(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[i] = s
    return x


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, source: torch.Tensor, *indices: torch.Tensor) -> list[torch.Tensor]:
        return [write(x, index, source) for write, index in zip(WRITES.values(), indices, strict=True)]


@cache
def compiled() -> Executable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tilewright.compile(Writes(), (TABLE, SOURCE, *[RIGHT] * len(WRITES)), "native")


@pytest.mark.parametrize("name", WRITES)
def test_writing_by_index(name: str) -> None:
    """An index that PyTorch rejects gives an error that names the operator, raised before PyTorch sees the index, which would make a GPU unusable for
    the process."""
    position, executable = list(WRITES).index(name), compiled()
    extent = TABLE.numel() if name == "put" else ROWS
    refused = 0
    for value in (extent - 1, extent, -1, -extent, -extent - 1, 2**32, 2**62, -(2**63)):
        index = RIGHT.clone()
        index[1] = value
        inputs = [TABLE, SOURCE, *(index if k == position else RIGHT for k in range(len(WRITES)))]
        try:
            wanted = WRITES[name](TABLE, index, SOURCE)
        except (IndexError, RuntimeError):
            with pytest.raises(IndexOutOfRange, match=rf"index {value} .* of {extent} elements, in indices .* at .*test_index_checks_frontends"):
                executable(*inputs)
            refused += 1
        else:
            torch.testing.assert_close(executable(*inputs)[position], wanted)
    assert refused >= 5


def test_masks_are_left_alone() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.index_put(x, [mask], torch.tensor(9.0))

    mask = torch.rand(ROWS, 4) > 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executable = tilewright.compile(Masked(), (TABLE, mask), "native")
    torch.testing.assert_close(executable(TABLE, mask), Masked()(TABLE, mask))
    assert not executable.image.program.index_checks


# --- ONNX -------------------------------------------------------------------------------------------------------------


def model(
    operator: str, index_shape: Sequence[int], kind: int = TensorProto.INT64, updates: Sequence[int] = (), index: object = None
) -> onnx.ModelProto:
    """One node, named "reader", on a table [5, 4] and an index (optionally constant)."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, 4])]
    constants = []
    if index is None:
        inputs.append(helper.make_tensor_value_info("i", kind, index_shape))
    else:
        constants.append(helper.make_tensor("i", kind, index_shape, np.asarray(index).reshape(-1)))
    names = ["x", "i"]
    if updates:
        names.append("u")
        inputs.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, updates))
    node = helper.make_node(operator, names, ["y"], name="reader")
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


ONNX = {
    "Gather": (model("Gather", [3]), lambda i: i, lambda x, i, u: x[i]),
    "Gather_int32": (model("Gather", [3], TensorProto.INT32), lambda i: i.astype(np.int32), lambda x, i, u: x[i]),
    "GatherElements": (model("GatherElements", [3, 4]), lambda i: np.repeat(i[:, None], 4, 1), lambda x, i, u: np.take_along_axis(x, i, 0)),
    "GatherND": (model("GatherND", [3, 1]), lambda i: i[:, None], lambda x, i, u: x[i[:, 0]]),
    "ScatterElements": (model("ScatterElements", [3, 4], updates=[3, 4]), lambda i: np.repeat(i[:, None], 4, 1), lambda x, i, u: _put(x, i[:, 0], u)),
    "ScatterND": (model("ScatterND", [3, 1], updates=[3, 4]), lambda i: i[:, None], lambda x, i, u: _put(x, i[:, 0], u)),
}


def _put(x: np.ndarray, i: np.ndarray, u: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[i] = u
    return x


@pytest.mark.parametrize("name", ONNX)
def test_operators_of_onnx(name: str) -> None:
    """Negative indices count from the end in all of them."""
    proto, shaped, wanted = ONNX[name]
    table, source = TABLE.numpy(), SOURCE.numpy()
    writes = len(proto.graph.input) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executable = tilewright.compile(proto, target="native")
    for value in (ROWS - 1, ROWS, -1, -ROWS, -ROWS - 1, 2**31 - 1, -(2**31)) + (() if name == "Gather_int32" else (2**32, 2**62, -(2**63))):
        index = shaped(np.array([0, value, 2]))
        inputs = [torch.from_numpy(part) for part in ((table, index, source) if writes else (table, index))]
        if -ROWS <= value < ROWS:
            torch.testing.assert_close(executable(*inputs), torch.from_numpy(wanted(table, index, source)))
        else:
            with pytest.raises(IndexOutOfRange, match=f"index {value} is out of range for a dimension of 5 elements, in .*reader"):
                executable(*inputs)


@pytest.mark.parametrize(("shape", "right", "wrong"), [((), -1, 5), ((), 4, -6), ((2,), [4, -5], [0, 5])], ids=str)
def test_constants_of_onnx_are_checked_when_compiling(shape: tuple[int, ...], right: object, wrong: object) -> None:
    executable = tilewright.compile(model("Gather", shape, index=right), target="native")
    torch.testing.assert_close(executable(TABLE), TABLE[torch.tensor(right)])
    with pytest.raises(InvalidModel, match=r"is out of range for a dimension of 5 elements, in index_select reader"):
        tilewright.compile(model("Gather", shape, index=wrong), target="native")


def test_classes_of_onnx_outside_of_the_depth_are_off_everywhere() -> None:
    """PyTorch's one_hot raises for these."""
    depth = helper.make_tensor("depth", TensorProto.INT64, [], [ROWS])
    off_on = helper.make_tensor("values", TensorProto.FLOAT, [2], [-3.0, 7.0])
    ends = helper.make_tensor_value_info("i", TensorProto.INT64, [8]), helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, ROWS])
    graph = helper.make_graph([helper.make_node("OneHot", ["i", "depth", "values"], ["y"])], "g", [ends[0]], [ends[1]], [depth, off_on])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    index = torch.tensor([0, ROWS - 1, ROWS, -1, -ROWS, -ROWS - 1, 2**62, -(2**63)])
    wanted = torch.full((8, ROWS), -3.0)
    wanted[torch.tensor([0, 1, 3, 4]), torch.tensor([0, ROWS - 1, ROWS - 1, 0])] = 7.0
    torch.testing.assert_close(tilewright.compile(proto, target="native")(index), wanted)
