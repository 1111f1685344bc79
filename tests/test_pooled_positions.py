"""Positions of window maxima as in PyTorch: the first of equal elements, the last NaN, and never in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compiled import Case, check_native
from tests.draws import IN_THIRDS
from tests.interpreted import check_interpreted
from tests.operator_cases import Function
from tilewright.frontend.torch_import import import_module
from tilewright.graph.reference import evaluate
from tilewright.hardware import machine

INFINITY, NOT_A_NUMBER = float("inf"), float("nan")
EXTENTS = {1: (11,), 2: (5, 7), 3: (4, 5, 3)}
WINDOWS = (
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "padding": 0, "dilation": 2},
)


def fills(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[fills, 2 channels, ...]: random numbers with ties, only the least number, and both with NaN and infinities in between."""
    generator = torch.Generator().manual_seed(rank)
    shape = (2, *EXTENTS[rank])
    ties = torch.randint(0, 3, shape, generator=generator).to(dtype)
    if not dtype.is_floating_point:
        return torch.stack([ties, torch.full(shape, torch.iinfo(dtype).min, dtype=dtype)])
    least = torch.full(shape, -INFINITY)
    choice = torch.rand(shape, generator=generator)
    return torch.stack([ties, least, torch.where(choice < 0.3, NOT_A_NUMBER, ties), torch.where(choice < 0.2, NOT_A_NUMBER, least), -ties / 0])


def pooled(rank: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    greatest: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    adaptive = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[rank - 1]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        results = [greatest(x, **window, return_indices=True) for window in WINDOWS]
        if x.is_floating_point():
            results.append(adaptive(x, 3, return_indices=True))
        return [tensor for pair in results for tensor in pair]

    return function


def cases() -> list[Case]:
    found = [Case(f"rank {rank}", Function(pooled(rank)), (fills(rank),), fixed=True) for rank in EXTENTS]
    return [*found, Case("integers", Function(pooled(2)), (fills(2, torch.int32),), fixed=True), Case("beyond", *beyond(), fixed=True)]


def beyond() -> tuple[Function, tuple[torch.Tensor]]:
    """Windows without a tap within the data: the position is that of the first tap after the left padding, which is outside the data."""
    return Function(lambda x: F.max_pool1d(x, 2, 3, 1, dilation=5, ceil_mode=True, return_indices=True)), (torch.arange(4.0).reshape(1, 1, 4),)


def test_the_cases_are_awkward() -> None:
    values, positions = pooled(1)(fills(1))[:2]
    assert values.isnan().any() and (values == -INFINITY).any() and (positions[1] == torch.tensor([0, *range(10)])).all()
    function, (x,) = beyond()
    assert function(x)[1].item() == 4
    assert F.max_pool1d(torch.tensor([[[NOT_A_NUMBER, 1.0, NOT_A_NUMBER, 2.0]]]), 4, return_indices=True)[1].item() == 2


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name.replace(" ", "_"))
def test_the_definition(case: Case) -> None:
    graph = import_module(case.module.eval(), case.inputs).graph
    for found, wanted in zip(evaluate(graph, case.inputs), case.module(*case.inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), wanted, equal_nan=True)


@IN_THIRDS
def test_kernels(third: int) -> None:
    check_native(cases()[third::3])


def test_kernels_of_a_gpu_in_the_interpreter() -> None:
    check_interpreted([cases()[1], cases()[-1]], machine("a100"))


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    check_native(cases(), target="cuda")
