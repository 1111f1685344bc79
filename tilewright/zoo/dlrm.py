"""DLRM, the deep learning recommendation model."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tilewright.zoo.common import with_initial_scale


def _perceptron(*widths: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    return layers


class Dlrm(nn.Module):
    """Dense features (N, 13) and table rows (N, tables, lookups) int64 to a click probability (N, 1)."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        # The scale keeps the dot products of pairs near one.
        self.tables = nn.ModuleList(with_initial_scale(nn.Embedding(rows, width), width**-0.5) for _ in range(tables))
        self.bottom = nn.Sequential(*_perceptron(13, 512, 256, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(*_perceptron(pairs + width, 512, 256), nn.Linear(256, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        dense = self.bottom(dense)
        pooled = [table(rows[:, index]).sum(1) for index, table in enumerate(self.tables)]
        features = torch.stack([dense, *pooled], dim=1)
        products = features @ features.transpose(1, 2)
        first, second = torch.tril_indices(features.shape[1], features.shape[1], -1, device=dense.device)
        rate: Tensor = self.top(torch.cat([dense, products[:, first, second]], dim=1))
        return rate


def dlrm() -> nn.Module:
    """Eight tables of 20,000 rows by 64 with sums of four rows each, bottom and top perceptrons, pairwise dot products.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
    The table sizes are ours, of moderate size.
    """
    return Dlrm(tables=8, rows=20000, width=64)
