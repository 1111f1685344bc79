"""Checked indices in every kind of kernel: operands of contractions, windows, row reductions, scans, guarded maps; for a GPU and a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.interpreted import run_program
from tilewright.compile import source_files
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.region import Program
from tilewright.partition.plan import plan_program
from tilewright.toolchain import Binary, compile_kernels

GENERATOR = torch.Generator().manual_seed(0)
TABLE = torch.randn(50, 64, generator=GENERATOR)
IMAGES = torch.randn(2, 5, 14, 14, generator=GENERATOR)
WEIGHTS = torch.randn(64, 96, generator=GENERATOR)
FILTERS = torch.randn(16, 8, 3, 3, generator=GENERATOR)
DEPTHWISE = torch.randn(8, 1, 3, 3, generator=GENERATOR)


@dataclass(frozen=True)
class Case:
    """A function of a table or images and an index of `count` elements below `extent`. `kinds`: kinds of regions with checks, on each machine."""

    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    x: torch.Tensor
    count: int
    extent: int
    kinds: tuple[str, ...]
    slow: bool = True


def _squared(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    rows = F.embedding(i.reshape(4, -1), x)
    return rows @ rows.transpose(1, 2)


CASES = {
    "product": Case(lambda x, i: F.embedding(i, x) @ WEIGHTS, TABLE, 130, 50, ("contraction",), False),
    "product of two rows": Case(lambda x, i: F.embedding(i, x) @ WEIGHTS, TABLE, 2, 50, ("contraction",)),
    "second factor": Case(lambda x, i: WEIGHTS.T @ x.T.index_select(1, i), TABLE, 40, 50, ("contraction",)),
    "both factors": Case(_squared, TABLE, 64, 50, ("contraction", "window")),
    "normalisation": Case(lambda x, i: F.layer_norm(F.embedding(i, x) + 1, (64,)), TABLE, 33, 50, ("row reduction",)),
    "softmax of a product": Case(lambda x, i: (F.embedding(i, x) @ WEIGHTS).softmax(-1), TABLE, 40, 50, ("contraction",)),
    "channels of a convolution": Case(lambda x, i: F.conv2d(x.index_select(1, i), FILTERS, padding=1), IMAGES, 8, 5, ("contraction",), False),
    "rows of a convolution": Case(lambda x, i: F.conv2d(x.index_select(2, i), FILTERS[:, :5], stride=2), IMAGES, 14, 14, ("map", "contraction")),
    "depthwise": Case(lambda x, i: F.conv2d(x.index_select(1, i), DEPTHWISE, padding=1, groups=8), IMAGES, 8, 5, ("window",)),
    "pooling": Case(lambda x, i: F.max_pool2d(x.index_select(2, i), 3, 2, padding=1), IMAGES, 14, 14, ("window",), False),
    "scan": Case(lambda x, i: F.embedding(i, x).cumsum(0), TABLE, 70, 50, ("scan",)),
    "upsampling": Case(lambda x, i: F.interpolate(x.index_select(1, i), scale_factor=2, mode="bilinear"), IMAGES, 6, 5, ("map",)),
    "guards": Case(lambda x, i: F.pad(torch.cat([x[:7], F.embedding(i, x), x], 0), (2, 1, 1, 3)), TABLE, 9, 50, ("map",), False),
    "choice": Case(lambda x, i: torch.where(x[:9] > 0, F.embedding(i, x), 0), TABLE, 9, 50, ("map",)),
    "sums of rows": Case(lambda x, i: F.embedding(i.reshape(10, -1), x).sum(1) * 2, TABLE, 200, 50, ("window",)),
}
EVERY = [
    pytest.param(name, target, marks=[pytest.mark.slow] if case.slow else [], id=f"{name}-{target}")
    for name, case in CASES.items()
    for target in ("h200", "x86-avx2")
]


def planned(case: Case, index: torch.Tensor, target: str) -> Program:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return case.function(x, i)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(import_module(Model(), (case.x, index)).graph)
    return plan_program(graph, machine(target), 2)


@pytest.mark.parametrize(("name", "target"), EVERY)
def test_a_kernel_of_every_kind_checks(name: str, target: str) -> None:
    """In the interpreter: no access out of bounds, no race, and the reported index is the one out of range."""
    case = CASES[name]
    right = torch.randint(case.extent, (case.count,), generator=torch.Generator().manual_seed(1))
    program = planned(case, right, target)
    checking = [lowered.region.kind for lowered in program.regions if lowered.checks]
    assert len(checking) == 1 and checking[0] in case.kinds
    for value in (case.extent - 1, case.extent, -1, 2**32, -(2**63)):
        index = right.clone()
        index[min(3, case.count - 1)] = value
        found: dict[str, list[int]] = {}
        inputs = dict(zip(program.graph.inputs, (case.x.numpy(), index.numpy()), strict=True))
        results, faults = run_program(program, inputs, found)
        assert not faults, faults
        reported = [number for numbers in found.values() for number in numbers if number]
        if 0 <= value < case.extent:
            assert not reported
            np.testing.assert_allclose(results[program.graph.outputs[0]], case.function(case.x, index).numpy(), rtol=1e-3, atol=1e-3)
        else:
            assert reported == [value]


def test_they_compile_for_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    h200 = machine("h200")
    for name in ("product", "channels of a convolution", "pooling", "guards"):
        case = CASES[name]
        sources = source_files(planned(case, torch.zeros(case.count, dtype=torch.long), "h200"), h200)
        assert any("long long *__restrict__ faults" in source.text for source in sources)
        for built in compile_kernels(sources, h200):
            assert isinstance(built, Binary), built
