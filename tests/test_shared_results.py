"""Results that share memory with each other share it as in PyTorch: a write to one of them reaches the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.operator_cases import once
from tilewright.frontend.torch_export import import_module


class Returning(nn.Module):
    """Returns views of twice its input."""

    def __init__(self, *views: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x) * 2
        return tuple(view(y) for view in self.views)


def kinds(module: nn.Module, x: Tensor) -> list[str]:
    return [output.kind for output in import_module(module, (x,)).outputs]


def check_writes(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Both are equal, also after each in turn is written to."""
    for k in range(len(wanted) + 1):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b)
        if k < len(wanted) and 0 not in wanted[k].stride():
            for results in (got, wanted):
                results[k].mul_(3 + k).add_(1)


def random_view(draw: Random, shape: list[int]) -> Callable[[Tensor], Tensor]:
    """One to three views, one after another."""
    steps: list[Callable[[Tensor], Tensor]] = []
    for _ in range(draw.randint(1, 3)):
        dim, size = draw.randrange(3), draw.randint(1, 3)
        steps.append(
            draw.choice(
                (
                    lambda y, dim=dim: y.transpose(0, dim % y.dim()),
                    lambda y, dim=dim: y.unsqueeze(dim % y.dim()),
                    lambda y, dim=dim, size=size: y.split(size, dim % y.dim())[-1],
                    lambda y, dim=dim, size=size: y.narrow(dim % y.dim(), 0, min(size, y.shape[dim % y.dim()])),
                    lambda y, dim=dim: y.select(dim % y.dim(), -1) if y.dim() > 1 else y,
                    lambda y: y.view(-1) if y.is_contiguous() else y.flip(0),
                    lambda y, size=size: y.unsqueeze(0).expand(size, *y.shape),
                    lambda y: y.detach(),
                )
            )
        )

    def view(y: Tensor) -> Tensor:
        for step in steps:
            y = step(y)
        return y

    return view


@settings(once, max_examples=15)
@given(seed=st.integers(0, 1 << 30))
def test_random_views(seed: int) -> None:
    draw = Random(seed)
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    module = Returning(*(random_view(draw, shape) for _ in range(draw.randint(2, 4))), *([lambda y: y] if draw.random() < 0.5 else [])).eval()
    x = torch.randn(shape)
    with tilewright.compile(module, (x,), target="native", threads=1) as executable:
        check_writes(executable(x), module(x))
        check_writes(executable(x), module(x))  # a call does not depend on what became of earlier results


def test_which_results_are_views_of_others() -> None:
    x = torch.randn(4, 6)
    assert kinds(Returning(lambda y: y, lambda y: y.t()), x) == ["value", "shared"]
    assert kinds(Returning(lambda y: y[1:], lambda y: y.t()), x) == ["shared", "shared"]
    assert kinds(Returning(lambda y: y.t(), lambda y: y + 1), x) == ["value", "value"]  # the only one of its memory
    assert kinds(Returning(*(lambda y, k=k: y.chunk(3, 1)[k] for k in range(3))), x) == ["shared"] * 3
    assert kinds(Returning(lambda y: y.t(), lambda y: y.clone()), x) == ["value", "value"]


def test_a_view_returned_twice_is_one_tensor() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            turned = y.t()
            return y, turned, turned

    x = torch.randn(3, 4)
    y, first, second = tilewright.compile(Twice(), (x,), target="native", threads=1)(x)
    assert first is second and first.data_ptr() == y.data_ptr() and torch.equal(first, 2 * x.t())


def test_views_in_an_artifact(tmp_path: Path) -> None:
    module, x = Returning(lambda y: y[:, 1:3], lambda y: y.t().unsqueeze(0)), torch.randn(4, 6)
    tilewright.compile(module, (x,), target="native", threads=1).save(tmp_path / "views.zip")
    with tilewright.load(tmp_path / "views.zip") as loaded:
        check_writes(loaded(x), module(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_after_a_graph_break(dynamic: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x @ x.transpose(-1, -2), -1)
        first, second = y[:, 0], y.transpose(0, 1)
        torch._dynamo.graph_break()
        first.mul_(2)
        return first + 1, second * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="tilewright", dynamic=dynamic, options={"wait": True})
    with torch.no_grad():
        for size in (96, 128, 96):
            x = torch.randn(size, size, 64)
            for got, wanted in zip(compiled(x), function(x), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_sizes_that_change() -> None:
    module, x = Returning(lambda y: y, lambda y: y[1:], lambda y: y.view(-1)).eval(), torch.randn(4, 6)
    with tilewright.compile(module, (x,), target="native", threads=1, dynamic={"x": {0: "rows"}}, wait=True) as executable:
        for rows in (4, 7, 3):
            x = torch.randn(rows, 6)
            check_writes(executable(x), module(x))


def test_a_program_for_a_range_returns_copies() -> None:
    module, x = Returning(lambda y: torch.softmax(y, -1), lambda y: y, lambda y: y.transpose(1, 2)).eval(), torch.randn(2, 20, 8)
    with tilewright.compile(module, (x,), target="native", threads=1, dynamic={"x": {1: "length"}}, wait=True) as executable:
        for length in (20, 19, 24):
            x = torch.randn(2, length, 8)
            for got, wanted in zip(executable(x), module(x), strict=True):
                torch.testing.assert_close(got, wanted)
        (sizes,) = executable.sizes
        assert isinstance(sizes["length"], range)
