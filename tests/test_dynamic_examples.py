"""Examples of sizes that exporters take for constants: other sizes are served all the same, or what is fixed is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tilewright.errors import InvalidInput


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = x.shape[1] // 2
        return x[:, :middle].softmax(-1) + x[:, x.shape[1] - middle :]


class Begins(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x[:, :4]).sum(1) + x.mean(1)


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("dynamic", [True, {"x": {1: "length"}}], ids=["all", "named"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("module", [Halves(), Begins()], ids=["halves", "begins"])
def test_an_example_of_a_special_size_serves_others(module: nn.Module, length: int, dynamic: Any) -> None:
    """A half of 2 or 3 entries is a single one, and all of 4 is the beginning of 4 entries."""
    if isinstance(module, Halves) and length == 1:
        pytest.skip("half of it is empty")
    executable = tilewright.compile(module, torch.randn(3, length), dynamic=dynamic, wait=True)
    for other in (length, 2, 4, 7, 12) if dynamic is not True or length > 1 else (length,):
        x = torch.randn(3, other)
        torch.testing.assert_close(executable(x), module(x))


@pytest.mark.parametrize("mask", [False, True])
def test_a_batch_of_one_is_free(mask: bool) -> None:
    """If all inputs have it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(3, 5, 3, padding=1)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x)) * scale

    def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 3, 16), torch.randn(5, 1) if mask else torch.randn(batch, 1, 16)

    module = Model().eval()
    executable = tilewright.compile(module, inputs(1), dynamic=True, wait=True)
    for batch in (1,) if mask else (1, 2, 9):
        given = inputs(batch)
        torch.testing.assert_close(executable(*given), module(*given).detach())
    if mask:
        with pytest.raises(InvalidInput, match=r"dimension 0 of x is 2, and the model was compiled for 1 alone.*every size of 1") as caught:
            executable(*inputs(2))
        assert '{"x": {0: "size"}}' in str(caught.value)


def test_a_size_that_the_exporter_fixes_is_exported_again() -> None:
    module = nn.MaxPool1d(2)
    executable = tilewright.compile(module, torch.randn(3, 4, 8), dynamic=True, wait=True)
    for shape in ((5, 4, 8), (3, 4, 12), (2, 4, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(executable(x), module(x))
