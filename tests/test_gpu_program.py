"""Small models planned for an absent GPU, run kernel by kernel in the interpreter, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu_cases import interpret
from tilewright.frontend.torch_import import import_module
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program

H200 = machine("h200")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 9, 32)


class Assorted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.cumsum(1) * 2, x.argmax(-1), x.flip(0), x.mean((0, 2)), x.std(-1), torch.cat([x, x * 2], 1)


class ConstantBatch(nn.Module):
    """A product in which only the constant second factor has a batch: the columns of several matrices side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 33, 15))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 50), nn.GELU(), nn.LayerNorm(50), nn.Linear(50, 10), nn.Softmax(-1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        nn.ReLU6(),
        nn.Conv2d(8, 16, 1),
        nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def normalisations() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.InstanceNorm2d(8), nn.Conv2d(8, 6, 3, 2, groups=2))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "build, shape",
    [
        (mlp, (5, 33)),
        (Attention, (2, 9, 32)),
        (convolutions, (2, 3, 18, 18)),
        (normalisations, (1, 4, 9, 9)),
        (Assorted, (3, 20, 7)),
        (ConstantBatch, (17, 15)),
    ],
    ids=["mlp", "attention", "convolutions", "normalisations", "assorted", "constant batch"],
)
def test_planned_for_a_gpu_and_interpreted(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    model = build().eval()
    x = torch.randn(shape)
    graph = import_module(model, (x,)).graph
    found = interpret(plan_program(graph, H200, 1), graph, (x,))
    with torch.no_grad():
        expected = model.double()(x.double())
    for ours, theirs in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)
