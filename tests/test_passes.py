"""Simplifying passes: their effects, and that results stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tilewright.frontend.torch_import import import_module
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.passes import eliminate_common_subexpressions, fold_constants, merge_views, remove_dead_nodes, simplify
from tilewright.graph.reference import evaluate
from tilewright.ir.graph import Graph


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.operator for node in graph.nodes)


def same_results(before: Graph, after: Graph, *inputs: torch.Tensor) -> None:
    for a, b in zip(evaluate(before, inputs), evaluate(after, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    defined = {*after.inputs, *after.constants}
    for node in after.nodes:
        assert defined.issuperset(node.inputs), f"{node.name} reads a value before it is made"
        defined.update(node.outputs)
    assert defined.issuperset(after.outputs) and set(after.values) == defined | set(after.outputs)


def with_statistics(norm: nn.Module) -> nn.Module:
    for tensor in [*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())]:
        nn.init.uniform_(tensor, 0.5, 1.5)
    return norm


@pytest.mark.parametrize(
    "convolution",
    [
        lambda: nn.Conv2d(4, 6, 3),
        lambda: nn.Conv2d(4, 6, 3, bias=False),
        lambda: nn.Conv2d(4, 6, 3, groups=2),
        lambda: nn.ConvTranspose2d(4, 6, 3, 2),
        lambda: nn.ConvTranspose2d(4, 6, 2, 2, groups=2),
    ],
)
def test_batch_norm_folds_into_convolutions(convolution: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(convolution(), with_statistics(nn.BatchNorm2d(6)), nn.ReLU()).double().eval()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    imported = import_module(module, (x,))
    graph, log = simplify(imported.graph)
    assert set(operators(graph)) <= {"convolution", "interleave", "add", "relu"} and operators(graph)["add"] == 1
    assert "fold_batch_norm" in [entry.name for entry in log]
    same_results(imported.graph, graph, x)


@pytest.mark.parametrize(("stride", "window", "padding", "extra"), [(2, 4, 1, 0), (3, 2, 0, 1), (2, 3, 2, 1), (1, 3, 1, 0), (4, 5, 3, 2)])
def test_transposed_convolution_becomes_convolutions(stride: int, window: int, padding: int, extra: int) -> None:
    module = nn.ConvTranspose2d(2, 4, window, (stride, 1), padding, (extra, 0), bias=False, groups=2).double()
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    imported = import_module(module, (x,))
    graph, _ = simplify(imported.graph)
    assert operators(graph)["convolution"] == min(stride, window) and "transposed_convolution" not in operators(graph)
    assert set(operators(graph)) <= {"convolution", "interleave", "slice", "expand"}
    same_results(imported.graph, graph, x)


def test_batch_norm_folds_into_linear() -> None:
    module = nn.Sequential(nn.Linear(3, 4), with_statistics(nn.BatchNorm1d(4))).double().eval()
    x = torch.randn(2, 3, dtype=torch.float64)
    imported = import_module(module, (x,))
    graph, _ = simplify(imported.graph)
    assert operators(graph) == {"linear": 1, "add": 1}
    same_results(imported.graph, graph, x)


def test_batch_norm_of_a_shared_convolution_is_split() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(2, 3, 1, bias=False), with_statistics(nn.BatchNorm2d(3))

        def forward(self, x: torch.Tensor) -> Any:
            y = self.convolution(x)
            return self.norm(y), y.exp()

    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    imported = import_module(Shared().double().eval(), (x,))
    graph, _ = simplify(imported.graph)
    assert operators(graph) == {"convolution": 1, "mul": 1, "add": 1, "exp": 1}
    same_results(imported.graph, graph, x)


def test_views_merge() -> None:
    def build() -> Graph:
        g = GraphBuilder()
        x = g.input("x", (2, 3, 4), "f64")
        y = g.op("reshape", g.op("reshape", x, shape=(6, 4)), shape=(4, 6))
        p = g.op("permute", g.op("permute", x, axes=(1, 2, 0)), axes=(2, 0, 1))
        q = g.op("permute", g.op("reshape", x, shape=(1, 2, 12)), axes=(1, 0, 2))
        return g.finish([g.pointwise("exp", y), g.pointwise("exp", p), g.pointwise("exp", q)])

    graph = build()
    merged = remove_dead_nodes(merge_views(graph))
    assert operators(merged) == {"reshape": 2, "exp": 3}
    same_results(graph, merged, torch.randn(2, 3, 4, dtype=torch.float64))


def test_common_subexpressions_and_dead_nodes() -> None:
    g = GraphBuilder()
    x = g.input("x", (3,), "f64")
    a, b = g.pointwise("mul", x, 2.0), g.pointwise("mul", x, 2.0)
    g.pointwise("sin", x)
    graph = g.finish([g.pointwise("add", g.pointwise("exp", a), g.pointwise("exp", b))])
    smaller = remove_dead_nodes(eliminate_common_subexpressions(graph))
    assert operators(smaller) == {"mul": 1, "exp": 1, "add": 1}
    same_results(graph, smaller, torch.randn(3, dtype=torch.float64))


def test_constants_fold_in_double_precision() -> None:
    g = GraphBuilder()
    x = g.input("x", (3,), "f32")
    constant = g.constant(torch.rand(3) + 1)
    total = g.pointwise("sub", g.pointwise("add", constant, 1e8), 1e8)
    graph = g.finish([g.pointwise("mul", x, total)])
    folded = fold_constants(graph)
    assert operators(folded) == {"mul": 1}
    (value,) = folded.constants.values()
    # each folded node rounds once to float32, so a sum with 1e8 has float32 precision; intermediate values within a node are not rounded
    assert value.dtype == torch.float32 and value.shape == (3,)
    np.testing.assert_allclose(value, (constant_values(graph) + np.float32(1e8)).astype(np.float32) - np.float32(1e8))


def constant_values(graph: Graph) -> np.ndarray:
    (tensor,) = graph.constants.values()
    return tensor.numpy()


def test_folding_does_not_enlarge_constants_or_remove_outputs() -> None:
    g = GraphBuilder()
    x = g.input("x", (1 << 20,), "f64")
    wide = g.full((1 << 20,), 3.0, "f64")
    small = g.pointwise("exp", g.constant(torch.ones(2, dtype=torch.float64)))
    graph = g.finish([g.pointwise("add", x, wide), small])
    folded, _ = simplify(graph)
    assert operators(folded) == {"expand": 1, "add": 1, "exp": 1}
    assert sum(t.numel() for t in folded.constants.values()) == 3


def test_loop_bodies_are_simplified() -> None:
    module = nn.LSTM(2, 3).double()
    x = torch.randn(4, 1, 2, dtype=torch.float64)
    imported = import_module(module, (x,))
    graph, _ = simplify(imported.graph)
    same_results(imported.graph, graph, x)
    scan = next(node for node in graph.nodes if node.operator == "scan")
    assert scan.attributes["length"] == 4 and operators(scan.attributes["body"])["linear"] == 1


def test_nothing_to_do_returns_the_same_graph() -> None:
    g = GraphBuilder()
    x = g.input("x", (3,), "f64")
    graph = g.finish([g.pointwise("exp", x)])
    result, log = simplify(graph)
    assert result is graph and log == ()


def test_an_element_expanded_to_one_is_a_constant_like_others() -> None:
    """It is contiguous, and its stride is zero."""
    g = GraphBuilder()
    x = g.input("x", (1,), "f32")
    for name in ("a", "b"):
        x = g.pointwise("add", x, g.constant(torch.ones(()).expand(1), name))
    graph, _ = simplify(g.finish([x]))
    same_results(graph, graph, torch.zeros(1))
    assert len(graph.constants) == 1
