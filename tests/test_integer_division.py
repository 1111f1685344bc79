"""Integer division by anything: no signal, PyTorch's value where it has one, 0 where it raises."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from operator_cases import Function

import tilewright
from tilewright.codegen import helpers
from tilewright.codegen.c import CPrinter
from tilewright.codegen.cuda import CudaPrinter
from tilewright.codegen.printer import divides_safely
from tilewright.compile import read
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
    """Every pair of the numbers at which division is special."""
    kind = getattr(torch, ELEMENT_TYPES[dtype].torch)
    limits = torch.iinfo(kind)
    numbers = sorted({limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 1, 2, 3, 7, *((-1, -2, -3, -7) if limits.min else ())})
    pairs = torch.cartesian_prod(*(torch.tensor(numbers, dtype=kind) for _ in range(2)))
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def expected(operation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's results; those by 0, and of the least number by -1 (where PyTorch's own division may stop the process), as documented."""
    special = (b == 0) | ((a == torch.iinfo(a.dtype).min) & (b == -1) & (a < 0))
    known = DIVISIONS[operation](a, torch.where(special, 1, b))
    return torch.where(b == 0, 0, torch.where(special, a if "div" in operation else 0, known))


def in_child(function: Callable[[], None]) -> int:
    """The status with which a forked child ends that runs the function: 0, 1 after an exception, or that of a signal."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_kernels_divide_by_anything(dtype: str) -> None:
    a, b = operands(dtype)

    def run() -> None:
        torch.set_num_threads(1)
        model = Function(lambda a, b: tuple(function(a, b) for function in DIVISIONS.values()))
        executable = tilewright.compile(model, (torch.ones_like(a), torch.ones_like(b)), threads=1)
        assert "torch" not in {region.kind for region in executable.image.program.regions}
        for operation, result in zip(DIVISIONS, executable(a, b), strict=True):
            assert torch.equal(result, expected(operation, a, b)), (operation, a, b, result, expected(operation, a, b))

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


def test_a_constant_zero_runs_through_torch_and_raises() -> None:
    x = torch.arange(4)
    for function in DIVISIONS.values():
        graph = read(Function(lambda x, function=function: function(x, 0)), (x,), None).graph  # type: ignore[misc]
        assert [node.operator for node in graph.nodes] == ["torch"]

    def run() -> None:
        executable = tilewright.compile(Function(lambda x: x % 0), (x,), threads=1)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            executable(x)

    assert in_child(run) == 0


def test_a_constant_that_wraps_to_zero() -> None:
    """256 is 0 among the numbers of 8 bits."""
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
