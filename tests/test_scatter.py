"""Writes to positions that data give: what is compiled, what is left to PyTorch, equal indices, and indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tests.draws import draws
from tests.operator_cases import Function
from tilewright.errors import IndexOutOfRange, NotCompiled
from tilewright.frontend.aten_scatter import MOST_COMPARISONS


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> tilewright.Executable:
    """Raises NotCompiled, a warning that is an error here, if PyTorch computes a part."""
    return tilewright.compile(Function(function), inputs)


@settings(max_examples=draws(10), deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(1, 40))
def test_the_last_of_equal_indices_decides(positions: int, count: int, rows: int, width: int) -> None:
    x, values = torch.randn(rows, positions, width), torch.randn(rows, count, width)
    index = torch.randint(positions, (count,))
    if positions * count > MOST_COMPARISONS * (x.numel() + values.numel()):
        return
    wanted = x.clone()
    for number, position in enumerate(index):
        wanted[:, position] = values[:, number]
    torch.testing.assert_close(compiled(lambda x, i, v: x.index_copy(1, i, v), x, index, values)(x, index, values), wanted)


@pytest.mark.parametrize("position", [5, -1, 1 << 40])
def test_indices_out_of_range(position: int) -> None:
    x, values, good = torch.randn(3, 5, 4), torch.randn(3, 1, 4), torch.tensor([4])
    run = compiled(lambda x, i, v: x.index_copy(1, i, v) * 2, x, good, values)
    with pytest.raises(IndexOutOfRange, match=f"index {position} .*5 elements"):
        run(x, torch.tensor([position]), values)
    torch.testing.assert_close(run(x, good, values), x.index_copy(1, good, values) * 2)


def test_negative_indices_where_pytorch_allows_them() -> None:
    x, values, index = torch.randn(5, 4), torch.randn(2, 4), torch.tensor([-1, 0])
    torch.testing.assert_close(compiled(lambda x, i, v: x.index_put((i,), v), x, index, values)(x, index, values), x.index_put((index,), values))
    with pytest.raises(IndexOutOfRange):
        compiled(lambda x, i, v: x.index_put((i,), v), x, index, values)(x, torch.tensor([-6, 0]), values)


def test_many_pairs_of_indices_and_positions_are_left_to_pytorch() -> None:
    x, index = torch.randn(4096), torch.randint(4096, (4096,))
    with pytest.warns(NotCompiled, match="would compare 16777216 pairs"):
        run = compiled(lambda x, i: x.index_put((i,), torch.ones(())) + 1, x, index)
    torch.testing.assert_close(run(x, index), x.index_put((index,), torch.ones(())) + 1)


def test_a_cache_that_calls_change() -> None:
    class Cache(torch.nn.Module):
        keys: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 2, 8, 4))

        def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            self.keys.index_copy_(2, position, token)
            seen = torch.arange(8) <= position
            return torch.nn.functional.scaled_dot_product_attention(token, self.keys, self.keys, seen[None, None, None])

    ours, theirs = Cache(), Cache()
    run = tilewright.compile(ours, (torch.randn(1, 2, 1, 4), torch.tensor([0])))
    for step in range(8):
        token, position = torch.randn(1, 2, 1, 4), torch.tensor([step])
        torch.testing.assert_close(run(token, position), theirs(token, position))
        torch.testing.assert_close(ours.keys, theirs.keys)
