"""The first elements of sorted rows: PyTorch's values, positions where it says which, on CPUs compiled and on GPUs interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewright
from tests.draws import draws
from tests.interpreted import run_program
from tests.operator_cases import Function, once
from tilewright.compile import read
from tilewright.frontend.imported import unsupported
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Many equal ones, and among floats infinities, NaN and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 9, shape, generator=generator)
    if not dtype.is_floating_point:
        return (x % 2 if dtype is torch.bool else x * 28 - (100 if dtype in (torch.int32, torch.int64) else 0)).to(dtype)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -float("nan"), 0.0, -0.0, -1.5, 3.25, 1e-40])
    return torch.where(torch.rand(shape, generator=generator) < 0.5, special[x], torch.randn(shape, generator=generator)).to(dtype)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@settings(once, max_examples=draws(30))
@given(data=st.data())
def test_sorts_and_selections(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 16), min_size=rank, max_size=rank)))
    axis = data.draw(st.integers(-rank, rank - 1)) if rank else -1
    dtype, descending = data.draw(st.sampled_from(TYPES)), data.draw(st.booleans())
    x = numbers(shape, dtype, data.draw(st.integers(0, 999)))
    count = data.draw(st.integers(1, shape[axis] if rank else 1))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values, positions = torch.sort(x, dim=axis, descending=descending, stable=True)
        usual = torch.sort(x, axis, descending)[0], torch.argsort(x, dim=axis, descending=descending, stable=True)
        chosen = () if x.dtype is torch.bool else torch.topk(x, count, axis, descending)
        return values, positions, *usual, *chosen

    with tilewright.compile(Function(function), (x,), target="native", threads=1, unsupported="error") as executable:
        *found, where = executable(x)
        *wanted, _ = function(x)
    for mine, its in zip(found, wanted, strict=True):
        same(mine, its)
    same(torch.gather(x, axis, where), wanted[-1]) if len(wanted) > 4 else same(where, function(x)[3])


def expert_weights(x: Tensor) -> tuple[Tensor, Tensor]:
    """The router of a mixture of experts."""
    weights, experts = torch.topk(torch.softmax(x, -1), 2)
    return weights / weights.sum(-1, keepdim=True), torch.nn.functional.one_hot(experts, 40).permute(2, 1, 0)


CASES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "a router": (expert_weights, torch.randn(3, 40)),
    "eight of rows": (lambda x: torch.topk(x, 8)[0], numbers((5, 300), torch.float32, 1)),
    "eight of rows, where": (lambda x: torch.topk(x, 8)[1], torch.randn(2, 300)),
    "few of all": (lambda x: torch.topk(x.flatten(), 3, largest=False), torch.randn(700)),
    "half precision, along columns": (lambda x: torch.sort(x, dim=0, stable=True), numbers((9, 33), torch.float16, 2)),
    "integers": (lambda x: torch.argsort(x, dim=1, stable=True), numbers((4, 12, 3), torch.int32, 3)),
}


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("target", ["h200", "x86-avx2", "x86-avx512"])
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str, target: str) -> None:
    function, x = CASES[name]
    graph, _ = simplify(read(Function(function), (x,)).graph)
    assert not unsupported(graph)
    wanted = function(x)
    results, faults = run_program(plan_program(graph, machine(target), 1), {graph.inputs[0]: x.numpy()})
    assert not faults
    for output, its in zip(graph.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(torch.from_numpy(results[output]), its, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_it_compiles_for_a_gpu() -> None:
    executable = tilewright.compile(Function(expert_weights), (CASES["a router"][1],), target="h200", unsupported="error")
    assert {row.kind for row in executable.plan.rows} <= {"map", "row reduction", "window"}


def test_it_is_verified() -> None:
    """The order is that of bits, which the reference in float64 reads of float32 too."""
    x = numbers((5, 40), torch.float32, 6)
    assert tilewright.compile(Function(lambda x: torch.topk(x, 4)), (x,), target="native", unsupported="error").verify(x).passed


class Selection(torch.nn.Module):
    """The greatest of each sequence, after a product over it, and of each of its elements."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        return *torch.topk(scores.sum(-1), 3, 1), torch.topk(scores, 2, -1)[0]


@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
def test_free_sizes() -> None:
    module = Selection()
    dynamic = {"x": {0: "batch", 1: "length"}}
    with tilewright.compile(module, (torch.randn(2, 40, 6),), target="native", threads=1, dynamic=dynamic, wait=True) as executable:
        for shape in ((2, 40, 6), (3, 41, 6), (1, 77, 6)):
            x = torch.randn(shape)
            for mine, its in zip(executable(x), module(x.double()), strict=True):
                torch.testing.assert_close(mine.double(), its.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [lambda x: x.sort()[0], lambda x: x[:, :9].double().argsort(stable=True), lambda x: x[:, :0].sort()[0]])
def test_what_pytorch_sorts(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(3, 40)
    with pytest.warns(tilewright.NotCompiled, match="passes over rows of 40|which fill 64 bits|a sort of nothing"):
        executable = tilewright.compile(Function(function), (x,), target="native", threads=1)
    with executable:
        same(executable(x), function(x))
