"""Siblings: which products are merged, by which prediction, and results of merged plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.compiled import Case, check_native
from tests.draws import IN_THIRDS, draws
from tests.interpreted import check_interpreted
from tests.operator_cases import Function, randomised
from tests.stand_ins import deciding
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate
from tilewright.hardware import machine
from tilewright.ir.graph import Graph
from tilewright.ir.region import Region
from tilewright.partition import siblings
from tilewright.partition.merges import Memory, Policy, Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.siblings import find_siblings, merge_siblings


class Attention(nn.Module):
    """Q, K and V of one input, without what follows them."""

    def __init__(self, width: int = 24, key: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, key), nn.Linear(width, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        q, k, v = self.query(x), self.key(x), self.value(x)
        return torch.cat([q.sigmoid() * v, k.roll(1, 1)], 2)


class Heads(nn.Module):
    """The heads of an Inception module: two lead to further convolutions, one is concatenated."""

    def __init__(self, channels: int = 8, sizes: tuple[int, int, int] = (6, 8, 12)) -> None:
        super().__init__()
        first, second, third = sizes
        self.one = nn.Sequential(nn.Conv2d(channels, first, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(channels, second, 1, bias=False), nn.BatchNorm2d(second), nn.ReLU(), nn.Conv2d(second, 8, 3, padding=1))
        self.three = nn.Sequential(nn.Conv2d(channels, third, 1, bias=False), nn.BatchNorm2d(third), nn.ReLU(), nn.Conv2d(third, 4, 5, padding=2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x + 0.5)
        return torch.relu(torch.cat([self.one(x), self.two(x), self.three(x)], 1) - 0.1)


def graph_of(module: nn.Module | Callable[..., Any], *inputs: Tensor) -> Graph:
    module = module if isinstance(module, nn.Module) else Function(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(randomised(module).eval(), inputs).graph)[0]


def always(graph: Graph) -> Graph:
    """The graph with the largest merges, as if the models predicted a gain from each."""
    return merge_siblings(graph, predicting(1.0, 2.0)).graph


def predicting(together: float, apart: float) -> siblings.Predict:
    """Predictions of `together` seconds for each region with merged nodes and of `apart` seconds for each other one."""

    def predict(graph: Graph, concerns: Callable[[Region], bool]) -> list[Timed]:
        regions = [Region(node.name, "map", (node,), (), node.inputs, node.outputs) for node in graph.nodes]
        is_merged = any(node.name.endswith(siblings.PART) for node in graph.nodes)
        return [Timed(region, together if is_merged else apart) for region in regions if concerns(region)]

    return predict


def never(*_: object) -> Any:
    raise AssertionError("predicted")


def merged(module: nn.Module | Callable[..., Any], *inputs: Tensor) -> Graph:
    return always(graph_of(module, *inputs))


X = torch.randn(2, 5, 24)
IMAGE = torch.randn(2, 8, 7, 9)


def test_layers_and_their_biases_become_one() -> None:
    graph = graph_of(Attention(), X)
    (group,) = find_siblings(graph)
    assert [[node.operator for node in chain] for chain in group.chains] == [["linear", "add"]] * 3
    result = always(graph)
    (product,) = (node for node in result.nodes if node.operator == "linear")
    assert result.values[product.outputs[0]].shape == (2, 5, 64) and result.values[product.inputs[1]].shape == (64, 24)
    assert sum(node.operator == "slice" for node in result.nodes) == 3 + sum(node.operator == "slice" for node in graph.nodes)


def test_what_follows_heads_alike_is_merged_with_them() -> None:
    graph = graph_of(Heads(), IMAGE)
    (group,) = find_siblings(graph)
    assert [[node.operator for node in chain] for chain in group.chains] == [["convolution", "add", "relu"]] * 3


def constants_differ(x: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, 24 * 24, dtype=x.dtype).reshape(24, 24)
    return F.linear(x, w) * 2 + F.linear(x, w + 1) * 3


def two_readers(x: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, 24 * 24, dtype=x.dtype).reshape(24, 24)
    first, second = F.linear(x, w), F.linear(x, w.T)
    return first.relu() + second.relu() + first


def triangles(x: Tensor) -> Tensor:
    """Where a triangle lies depends on the place in the merged value."""
    w = torch.linspace(-1, 1, 24 * 24, dtype=x.dtype).reshape(24, 24)
    return (F.linear(x, w).relu().tril() + F.linear(x, w.T).relu().tril()).sum(1)


def inserted(x: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, 24 * 24, dtype=x.dtype).reshape(24, 24)
    first, second = F.linear(x, w).clone(), F.linear(x, w.T).clone()
    first[..., 3], second[..., 3] = 0.5, 0.5
    return first * second


@pytest.mark.parametrize(("function", "length"), [(constants_differ, 1), (two_readers, 1), (triangles, 2), (inserted, 1)])
def test_what_follows_siblings_differently_stays_apart(function: Callable[[Tensor], Tensor], length: int) -> None:
    (group,) = find_siblings(graph_of(function, X))
    assert {len(chain) for chain in group.chains} == {length}


def same_weight(x: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, 24 * 24, dtype=x.dtype).reshape(24, 24)
    return F.linear(x, w) * F.linear(x.relu(), w)


def other_windows(x: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, 8 * 4, dtype=x.dtype).reshape(4, 8, 1, 1)
    return F.conv2d(x, w) + F.conv2d(x, w.expand(4, 8, 3, 3).contiguous(), padding=1) + F.conv2d(x, -w, stride=2).mean()


def given_weights(x: Tensor) -> Tensor:
    return F.linear(x, x[0, :, :]) + F.linear(x, x[1, :, :])


@pytest.mark.parametrize(("function", "x"), [(same_weight, X), (other_windows, IMAGE), (given_weights, X)])
def test_other_products_are_no_siblings(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert find_siblings(graph_of(function, x)) == []


def test_predictions_decide_and_are_told() -> None:
    graph = graph_of(Attention(), X)
    faster, slower = merge_siblings(graph, predicting(1e-6, 2e-6)), merge_siblings(graph, predicting(1e-3, 1e-6))
    assert faster.graph is not graph and slower.graph is graph
    (note,) = (decision.text for decision in faster.decisions.values())
    assert note.startswith("linear, linear_1, linear_2 read the same value: ") and "predicted in one product" in note and note.endswith("apart")
    (note,) = (decision.text for decision in slower.decisions.values())
    assert "but stay apart: " in note and "predicted in one product" in note


def test_those_that_are_concatenated_may_stay_apart() -> None:
    """A slice of a merged result would have to be copied into the concatenation."""
    graph = graph_of(Heads(), IMAGE)

    def predict(graph: Graph, concerns: Callable[[Region], bool]) -> list[Timed]:
        sliced = {node.outputs[0] for node in graph.nodes if node.name.endswith(siblings.PART)}
        copies = any(node.operator == "concatenate" and sliced.intersection(node.inputs) for node in graph.nodes)
        return [replace(timed, predicted=timed.predicted + 10 * copies) for timed in predicting(1.0, 2.0)(graph, concerns)]

    found = merge_siblings(graph, predict)
    extents = [found.graph.values[node.outputs[0]].shape[1] for node in found.graph.nodes if node.operator == "convolution"]
    assert sorted(extents) == [4, 6, 8, 20], "the first head is apart, the others are one"
    (note,) = (decision.text for decision in found.decisions.values())
    assert note.partition(" read the same value")[0].count(",") == 1, note


def test_reasons_are_in_the_plan() -> None:
    """On a GPU three products of 128 rows take longer than one with all their columns."""
    program = plan_program(graph_of(Attention(768, 768), torch.randn(1, 128, 768)), machine("h200"), 1)
    told = [reason for entry in program.regions for reason in entry.region.reasons if "read the same value" in reason]
    assert len(told) == 1 and "us predicted in one product" in told[0]
    assert sum(entry.region.kind == "contraction" for entry in program.regions) == 1


def test_a_graph_without_siblings_is_not_predicted() -> None:
    graph = graph_of(same_weight, X)
    assert merge_siblings(graph, never).graph is graph


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (2.0, 1.0)], ids=["together", "apart"])
def test_siblings_are_merged_as_for_another_size(seconds: tuple[float, float]) -> None:
    """The sizes then have the same regions, and no further one is predicted."""
    module = Heads()
    kept: dict[tuple[str, ...], frozenset[str]] = {}
    one = merge_siblings(graph_of(module, IMAGE), predicting(*seconds), kept)
    graph = graph_of(module, torch.randn(5, *IMAGE.shape[1:]))
    another = merge_siblings(graph, never, kept)
    assert [node.name for node in another.graph.nodes] == [node.name for node in one.graph.nodes]
    assert another.decisions.keys() == one.decisions.keys()
    assert all(text.endswith("as for another size") for text in (decision.text for decision in another.decisions.values()))
    assert (another.graph is graph) == (seconds == (2.0, 1.0))


def test_groups_of_which_a_policy_says_nothing_follow_another_size() -> None:
    """Whatever is predicted of them, unless predictions decide."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Heads(), Heads(12)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(y)

    graph = graph_of(Two(), IMAGE, torch.randn(2, 12, *IMAGE.shape[2:]))
    kept: dict[tuple[str, ...], frozenset[str]] = {}
    merge_siblings(graph, predicting(1.0, 2.0), kept)
    first, second = (group.results for group in find_siblings(graph))
    assert kept[first] and kept[second]
    refusing = Policy(refused=frozenset({(siblings.SIBLINGS, first)}))
    merged = merge_siblings(graph, predicting(2.0, 1.0), dict(kept), refusing)
    assert {decision.results: decision.taken for decision in merged.decisions.values() if decision.results in (first, second)}[first] is False
    assert [group.results for group in find_siblings(merged.graph)] == [first]
    by_prediction = merge_siblings(graph, predicting(2.0, 1.0), dict(kept), replace(refusing, predicted=True))
    assert [group.results for group in find_siblings(by_prediction.graph)] == [first, second]


def test_plans_of_further_sizes_merge_the_same_siblings(by_formulas: None) -> None:
    """One product is predicted to gain for a single image only."""
    cpu, module = machine("x86-avx512"), Attention(256, 256)
    decided = []
    for memory in (Memory(), None):
        programs = [plan_program(graph_of(module, torch.randn(batch, 64, 256)), cpu, 2, memory=memory) for batch in (1, 2, 8)]
        decided.append([[merge.taken for merge in program.search if "read the same value" in merge.text] for program in programs])
    together, fresh = decided
    assert fresh == [[True], [False], [False]] and together == [[True]] * 3


CASES: Sequence[tuple[str, nn.Module, Tensor]] = [
    ("attention", Attention(), X),
    ("heads", Heads(), IMAGE),
    ("unaligned heads", Heads(5, (3, 7, 9)), torch.randn(1, 5, 6, 6)),
    ("constants differ", Function(constants_differ), X),
    ("two readers", Function(two_readers), X),
    ("triangles", Function(triangles), X),
    ("inserted", Function(inserted), X),
]


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every merge is predicted to be faster."""
    monkeypatch.setattr(siblings, "compared", deciding(True))


def cases() -> list[Case]:
    return [Case(name, randomised(module), (x,)) for name, module, x in CASES]


@IN_THIRDS
def test_results_on_this_cpu(merging: None, third: int) -> None:
    check_native(cases()[third::3], calls=2)


@IN_THIRDS
@pytest.mark.parametrize("target", ["h200", "v100"])
def test_results_of_interpreted_gpu_kernels(merging: None, target: str, third: int) -> None:
    check_interpreted(cases()[third::3], machine(target))


@settings(max_examples=draws(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    chain=st.lists(st.sampled_from(["bias", "relu", "scale", "gelu", "masked", "tril", "prelu"]), max_size=4),
    image=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_merged_graphs_compute_the_same(sizes: list[int], chain: list[str], image: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    per_channel = (lambda size: (size, 1, 1)) if image else (lambda size: (size,))
    weights = [random(size, 6, 1, 1) if image else random(size, 6) for size in sizes]
    others = [[random(*per_channel(size)) for _ in chain] for size in sizes]
    follow: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bias": lambda y, c: y + c, "relu": lambda y, _: y.relu(), "scale": lambda y, c: c * y, "gelu": lambda y, _: F.gelu(y),
        "masked": lambda y, c: y.masked_fill(c > 0, 2.0), "tril": lambda y, _: y.tril(), "prelu": lambda y, c: torch.where(y > 0, y, c * y),
    }  # fmt: skip

    def function(x: Tensor) -> tuple[Tensor, ...]:
        results = []
        for weight, mine in zip(weights, others, strict=True):
            y = F.conv2d(x, weight) if image else F.linear(x, weight)
            for name, constant in zip(chain, mine, strict=True):
                y = follow[name](y, constant)
            results.append(y)
        return tuple(results)

    x = random(2, 6, 3, 4) if image else random(3, 6)
    graph = graph_of(function, x)
    together = always(graph)
    assert sum(node.operator in ("linear", "convolution") for node in together.nodes) == 1
    inputs = [x.numpy()]
    for mine, other in zip(evaluate(graph, inputs), evaluate(together, inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(other), rtol=1e-5, atol=1e-5)


def test_artifacts_of_merged_plans(merging: None, tmp_path: Any) -> None:
    module = randomised(Attention()).eval()
    path = tmp_path / "merged.tw"
    tilewright.compile(module, (X,), target="native").save(path)
    torch.testing.assert_close(tilewright.load(path)(X), module(X), rtol=1e-4, atol=1e-5)
