"""Integer division by any number: no signal, PyTorch's value if it has one, 0 where it raises, and an error for a constant 0."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import tilewright
from tests.operator_cases import Function
from tilewright.codegen import helpers
from tilewright.codegen.c import CPrinter
from tilewright.codegen.cuda import CudaPrinter
from tilewright.codegen.printer import divides_safely
from tilewright.compile import read
from tilewright.errors import InvalidModel
from tilewright.graph.passes import simplify
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var
from tilewright.ir.scalar import OPERATIONS

INTEGERS = ("i64", "i32", "i16", "i8", "u8")
DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": torch.fmod,
}


def operands(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of the special cases of division."""
    kind = getattr(torch, ELEMENT_TYPES[dtype].torch)
    limits = torch.iinfo(kind)
    numbers = sorted({limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 1, 2, 3, 7, *((-1, -2, -3, -7) if limits.min else ())})
    pairs = torch.cartesian_prod(*(torch.tensor(numbers, dtype=kind) for _ in range(2)))
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def expected(operation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's results; for division by 0, and of the least number by -1 (where PyTorch's division may kill the process), the documented ones."""
    special = (b == 0) | ((a == torch.iinfo(a.dtype).min) & (b == -1) & (a < 0))
    known = DIVISIONS[operation](a, torch.where(special, 1, b))
    return torch.where(b == 0, 0, torch.where(special, a if "div" in operation else 0, known))


def in_child(function: Callable[[], None]) -> int:
    """The exit status of a forked child that runs the function: 0, 1 after an exception, or that of a signal."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_kernels_divide_by_anything() -> None:
    pairs = [tensor for dtype in INTEGERS for tensor in operands(dtype)]

    def run() -> None:
        torch.set_num_threads(1)
        model = Function(lambda *pairs: [function(a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True) for function in DIVISIONS.values()])
        executable = tilewright.compile(model, [torch.ones_like(tensor) for tensor in pairs], threads=1)
        assert "torch" not in {region.kind for region in executable.image.program.regions}
        results = iter(executable(*pairs))
        wrong = {
            f"{operation} of {a.dtype}": (result, wanted)
            for a, b in zip(pairs[::2], pairs[1::2], strict=True)
            for operation, result in zip(DIVISIONS, results, strict=False)
            if not torch.equal(result, wanted := expected(operation, a, b))
        }
        assert not wrong, wrong

    assert in_child(run) == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_reference_divides_by_anything(dtype: str) -> None:
    a, b = operands(dtype)
    for operation in DIVISIONS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = OPERATIONS[operation].reference(a.numpy(), b.numpy())
        assert result.dtype == a.numpy().dtype
        np.testing.assert_array_equal(result, expected(operation, a, b).numpy(), operation)


class Divided(nn.Module):
    """A function of a tensor and of three constants: 2, 1, 3; 1, 0, 3; and 256."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, values in {"ones": [2, 1, 3], "zeros": [1, 0, 3], "wraps": 256}.items():
            self.register_buffer(name, torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self)


CONSTANT_DIVISORS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "number": lambda x, m: x // 0,
    "remainder": lambda x, m: x % 0,
    "fmod": lambda x, m: torch.fmod(x, 0),
    "truncated": lambda x, m: torch.div(x, 0, rounding_mode="trunc"),
    "buffer": lambda x, m: x // m.zeros,
    "of a number": lambda x, m: 7 % m.zeros + x,
    "computed": lambda x, m: x % (m.ones - 1),
    "literal": lambda x, m: x // torch.tensor([1, 0, 1]),
    "number that wraps": lambda x, m: x.to(torch.uint8) % 256,
    "tensor that wraps": lambda x, m: x.to(torch.uint8) % m.wraps,
    "known result": lambda x, m: x + 7 // m.zeros,
    "nothing divided": lambda x, m: x[:0] // 0,
    "no zero": lambda x, m: x // m.ones,
    "data": lambda x, m: x // (x + 1),
    "floating": lambda x, m: x.float() // 0,
    "changed": lambda x, m: x // m.zeros.add_(1),
}


@pytest.mark.parametrize("what", CONSTANT_DIVISORS)
def test_a_constant_zero_is_refused_where_pytorch_refuses_it(what: str) -> None:
    x, function = torch.tensor([1, 2, 3]), CONSTANT_DIVISORS[what]
    try:
        Divided(function)(x)
    except RuntimeError:
        with pytest.raises(InvalidModel, match=r"at .*test_integer_division.* divides integers by a constant 0; correct the divisor"):
            simplify(read(Divided(function), (x,), None).graph)
    else:
        simplify(read(Divided(function), (x,), None).graph)


def of_onnx(operator: str, divisor: list[int], known: bool, kind: int = TensorProto.INT64) -> onnx.ModelProto:
    """x / divisor + x for an input x of [3]; with `known` c / divisor + x for a constant c."""
    constants = [helper.make_tensor("b", kind, [3], divisor), helper.make_tensor("c", kind, [3], [7, 8, 9])]
    attributes: dict[str, Any] = {"fmod": 1} if operator == "Mod" and kind == 1 else {}
    nodes = [helper.make_node(operator, ["c" if known else "x", "b"], ["q"], name="divider", **attributes)]
    nodes.append(helper.make_node("Add", ["q", "x"], ["y"]))
    ends = [helper.make_tensor_value_info(name, kind, [3]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize("known", [False, True])
def test_a_constant_zero_of_onnx_is_refused(operator: str, known: bool) -> None:
    """The standard leaves this open; ONNX Runtime rejects the model."""
    for kind in (TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.UINT8):
        with pytest.raises(InvalidModel, match="divider .*divides integers by a constant 0; correct the divisor"):
            simplify(read(of_onnx(operator, [1, 0, 3], known, kind), (), None).graph)
        simplify(read(of_onnx(operator, [1, 2, 3], known, kind), (), None).graph)
    simplify(read(of_onnx(operator, [1, 0, 3], known, TensorProto.FLOAT), (), None).graph)


def test_a_constant_that_wraps_to_zero() -> None:
    """256 is 0 as an 8-bit number."""
    assert not divides_safely(Const(256, "u8")) and not divides_safely(Const(256, "i8")) and not divides_safely(Const(255, "i8"))
    assert divides_safely(Const(255, "u8")) and divides_safely(Const(256, "i16")) and divides_safely(Const(-2, "i8"))


def test_which_divisors_are_known() -> None:
    data = Load("data", (Const(0, INDEX),), INDEX)
    position = Var("i", 5)
    known: list[Expr] = [Const(3, INDEX), Const(-3, INDEX), Apply("add", (position, Const(1, INDEX)), INDEX)]
    unknown: list[Expr] = [Const(0, INDEX), Const(-1, INDEX), position, data, Apply("max", (data, Const(1, INDEX)), INDEX)]
    assert all(divides_safely(divisor) for divisor in known)
    assert not any(divides_safely(divisor) for divisor in unknown)
    assert divides_safely(Apply("broadcast", (Const(3, "i32"),), "i32", 4)) and not divides_safely(Load("data", (position,), "i32"))


@pytest.mark.parametrize("printer", [CPrinter, CudaPrinter])
@pytest.mark.parametrize("operation", DIVISIONS)
def test_constant_divisors_need_no_check(printer: type[CPrinter] | type[CudaPrinter], operation: str) -> None:
    a = Const(17, "i32")
    assert "total" not in printer().text(Apply(operation, (a, Const(3, "i32")), "i32"))
    assert f"tw_total_{operation}_i32" in printer().text(Apply(operation, (a, Const(0, "i32")), "i32"))
    assert f"total_{operation}" in helpers.TOTAL_DIVISIONS
