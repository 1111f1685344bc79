"""Attention as a single region, with random inputs and PyTorch's results in float64, and its execution under any schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from tests.gpu_cases import Case, execute
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import JoinDecision
from tilewright.partition.regions import lay_out


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Joining:
    """A judge that joins whatever can be joined as attention, and nothing else."""

    def __call__(self, *steps: object) -> JoinDecision:
        return JoinDecision(False, "not asked for")

    def in_one(self, *steps: object) -> JoinDecision:
        return JoinDecision(True, "asked for")


def regions_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Graph, Any, tuple[str, ...]]:
    """The graph, its regions with attention joined wherever it can be, and the names of the inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imported = read(Function(function).eval(), tuple(inputs))
    graph, _ = simplify(imported.graph)
    names = tuple(graph.inputs[k] for k in imported.leaves if k is not None)
    return graph, lay_out(graph, Joining()), names  # type: ignore[arg-type]


def attention_case(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Case:
    """The only region of a function, which is attention. Its expected result is PyTorch's in float64."""
    graph, laid_out, names = regions_of(function, inputs)
    (region,) = laid_out.regions
    assert region.kind == "attention", (region.kind, region.reasons)
    expected = function(*(x.double() if x.is_floating_point() else x for x in inputs)).numpy()
    tensors = {**graph.constants, **dict(zip(names, inputs, strict=True))}
    arrays = {name: x.contiguous().numpy() for name, x in tensors.items()}
    return Case(region, laid_out.layouts, laid_out.values, {name: arrays[name] for name in region.inputs}, expected)


def check_case(case: Case, schedule: object, machine: Machine, tolerance: float = 2e-5) -> None:
    """Interprets the region under a schedule, and compares with the expected result, NaN and infinities included."""
    found = execute(case, lower(case.problem, schedule, machine))
    scale = max(1.0, float(np.abs(case.expected[np.isfinite(case.expected)]).max(initial=0.0)))
    np.testing.assert_allclose(found, case.expected, rtol=tolerance, atol=tolerance * scale)
