"""Operators with data-dependent indices, the indices to try, and PyTorch's results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROWS, COLUMNS = 7, 12
HUGE = (2**31, 2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1)
EDGES = (ROWS - 1, ROWS, -1, -ROWS, -ROWS - 1)


@dataclass(frozen=True)
class Case:
    """One operator: a function of a table [7, 12] and an index of four elements. `extent`: that of the indexed dimension."""

    name: str
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    extent: int = ROWS


def _lengths(x: torch.Tensor, i: torch.Tensor, mode: str) -> torch.Tensor:
    return F.embedding_bag(i, x, torch.tensor([0, 1]), mode=mode)


CASES = (
    Case("embedding", lambda x, i: F.embedding(i, x)),
    Case("embedding_then", lambda x, i: F.embedding(i.reshape(2, 2), x).relu().sum(1)),
    Case("embedding_product", lambda x, i: F.embedding(i, x) @ x.T),
    Case("embedding_bag_sum", lambda x, i: _lengths(x, i, "sum")),
    Case("embedding_bag_max", lambda x, i: _lengths(x, i, "max")),
    Case("embedding_bag_rows", lambda x, i: F.embedding_bag(i.reshape(2, 2), x, mode="mean")),
    Case("gather_rows", lambda x, i: x.gather(0, i[:, None].expand(4, COLUMNS))),
    Case("gather_columns", lambda x, i: x.T.gather(1, i[None].expand(COLUMNS, 4))),
    Case("index_select", lambda x, i: x.index_select(0, i)),
    Case("index_columns", lambda x, i: x.T.contiguous().index_select(1, i)),
    Case("index", lambda x, i: x[i]),
    Case("index_second", lambda x, i: x.T[:, i]),
    Case("index_two", lambda x, i: x[i, torch.tensor([0, 3, 2, 11])]),
    Case("index_apart", lambda x, i: x.reshape(ROWS, 3, 4)[i, :, torch.tensor([0, 3, 2, 1])]),
    Case("index_mean", lambda x, i: x[i].mean(1)),
    Case("index_softmax", lambda x, i: x[i].softmax(1)),
    Case("take", lambda x, i: x.take(i), ROWS * COLUMNS),
    Case("take_along", lambda x, i: torch.take_along_dim(x, i[:, None], 0)),
    Case("take_along_flat", lambda x, i: torch.take_along_dim(x, i), ROWS * COLUMNS),
    Case("concatenated", lambda x, i: torch.cat([x * 2, x[i], x], 0)),
    Case("padded", lambda x, i: F.pad(x[i], (1, 1, 2, 0))),
    Case("int32", lambda x, i: F.embedding(i.clamp(-(2**31), 2**31 - 1).int(), x)),
    Case("of_an_index", lambda x, i: x[torch.arange(ROWS).flip(0)[i]]),
    Case("one_hot", lambda x, i: F.one_hot(i, ROWS)),
    Case("one_hot_then", lambda x, i: F.one_hot(i.reshape(2, 2), ROWS).float() @ x),
    Case("computed", lambda x, i: x.cumsum(0).index_select(0, i * 2 - i)),
)
NAMES = [case.name for case in CASES]


class Operators(nn.Module):
    """All cases as one module, whose inputs are a table and an index for each case."""

    def forward(self, x: torch.Tensor, *indices: torch.Tensor) -> list[torch.Tensor]:
        return [case.function(x, index) for case, index in zip(CASES, indices, strict=True)]


TABLE = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
RIGHT = torch.tensor([2, 0, 5, 3])


def values_of(case: Case) -> list[int]:
    return [*(edge + (case.extent - ROWS) * (1 if edge > 0 else -1 if edge < -1 else 0) for edge in EDGES), *HUGE]


def of_torch(case: Case, index: torch.Tensor) -> torch.Tensor | None:
    """PyTorch's result, or None if it rejects the index."""
    try:
        return case.function(TABLE, index)
    except (IndexError, RuntimeError):
        return None


def with_index(position: int, index: torch.Tensor) -> list[torch.Tensor]:
    return [TABLE, *(index if k == position else RIGHT for k in range(len(CASES)))]
