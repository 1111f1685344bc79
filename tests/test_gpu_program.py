"""Whole small models planned for a GPU that is not here, run kernel by kernel in the interpreter, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu_cases import offsets, stored
from tilewright.codegen.interpreter import run
from tilewright.frontend.torch_export import import_module
from tilewright.hardware import machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.graph import Graph
from tilewright.ir.region import Program
from tilewright.partition.plan import plan_program
from tilewright.runtime.packing import prepared

H200 = machine("h200")


def interpret(program: Program, graph: Graph, inputs: tuple[Tensor, ...]) -> list[np.ndarray]:
    """The outputs; fails on anything that the interpreter reports, and on regions that need PyTorch."""
    storage = dict(program.storage)
    for lowered in program.regions:
        storage |= dict(lowered.storage)
    given = dict(zip(graph.inputs, inputs, strict=True)) | dict(graph.constants)
    memory: dict[str, np.ndarray] = {}

    def buffer(name: str) -> np.ndarray:
        if name not in memory:
            item = storage[name]
            source = given.get(name if name in given else item.source or "")
            if source is None:
                memory[name] = np.zeros(item.layout.size, ELEMENT_TYPES[item.value.dtype].numpy)
            else:
                memory[name] = stored(prepared(source.detach().contiguous(), item).numpy().copy(), item.layout)
        return memory[name]

    for lowered in program.regions:
        assert lowered.region.kind != "torch", lowered.region.name
        kernels = {kernel.name: kernel for kernel in lowered.kernels}
        for turn in range(lowered.repeat):
            for call in lowered.calls:
                kernel = kernels[call.kernel]
                # a buffer may be written in parts, or by an earlier turn: races and bounds are what is checked here
                known = [parameter.name for parameter in kernel.parameters]
                report = run(kernel, [buffer(n) for n in call.arguments], [turn] * len(kernel.scalars), known)
                assert report.is_clean, (lowered.region.name, lowered.schedule, report.faults)
    results = []
    for name in graph.outputs:
        item = storage[program.aliases.get(name, name)]
        flat = buffer(program.aliases.get(name, name))
        results.append(flat[offsets(item.layout).ravel()].reshape(item.value.shape))
    return results


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
    """A product whose second factor is constant and alone in having a batch: columns of several matrices side by side."""

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
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.InstanceNorm2d(8), nn.Conv2d(8, 6, 3, 2, groups=2)
    )


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
