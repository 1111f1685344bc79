"""Prologues: which maps a contraction computes where it reads their result, by which prediction, and results of such plans."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.compiled import Case, check_native
from tests.draws import draws
from tests.interpreted import check_interpreted
from tests.operator_cases import randomised
from tests.stand_ins import deciding
from tests.test_gpu_half import check
from tests.test_gpu_half import planned as planned_in_half
from tests.test_gpu_precision import ERRORS, computed
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import loads
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Region
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition import prologues
from tilewright.partition.merges import Memory, Policy, Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.prologues import PROLOGUE, choose_prologues, find_prologues
from tilewright.partition.regions import lay_out
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice

H200, CPU = machine("h200"), machine("epyc-9655")


class Dense(nn.Module):
    """Layers of a dense block: each normalises and activates all results before it, which are stored in one buffer."""

    def __init__(self, channels: int = 16, growth: int = 8, layers: int = 2, taps: int = 3, stride: int = 1) -> None:
        super().__init__()
        widths = [channels + growth * number for number in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.products = nn.ModuleList(nn.Conv2d(width, growth, taps, padding=taps // 2, bias=False) for width in widths)
        self.last = nn.Conv2d(channels + growth * layers, growth, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = torch.cat([x, product(torch.relu(norm(x)))], 1)
        return self.last(torch.sigmoid(x))


class Scaled(nn.Module):
    """A product over channels that squeeze-and-excitation scales."""

    def __init__(self, channels: int = 16, outputs: int = 24) -> None:
        super().__init__()
        self.before, self.scale = nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.Conv2d(channels, channels, 1)
        self.product = nn.Conv2d(channels, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(x))
        return self.product(x * torch.sigmoid(self.scale(x.mean((2, 3), keepdim=True))))


class Gated(nn.Module):
    """A matrix product of a gate and what it lets through, which are results too."""

    def __init__(self, width: int = 24, outputs: int = 20) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = self.up(x)
        first, second = values.chunk(2, -1)
        return self.down(torch.tanh(first) * second), values


def graph_of(module: nn.Module, *inputs: Tensor) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(randomised(module).eval(), inputs).graph)[0]


def predicting(graph: Graph, together: float, apart: float) -> prologues.Predict:
    """Predictions of `together` seconds for each contraction that computes a map, and of `apart` for every other region."""

    def predict(values: frozenset[str], concerns: Callable[[Region], bool]) -> list[Timed]:
        regions = lay_out(graph, unstored=values).regions
        return [Timed(region, together if values else apart) for region in regions if concerns(region)]

    return predict


def never(*_: object) -> Any:
    raise AssertionError("predicted")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contractions compute every map that they can."""
    monkeypatch.setattr(prologues, "compared", deciding(True))


def stored_maps(program: Program) -> list[str]:
    """The results of maps that kernels of their own store."""
    return [lowered.region.outputs[0] for lowered in program.regions if lowered.region.kind == "map" and lowered.region.nodes]


IMAGE = torch.randn(1, 16, 9, 10)


def test_maps_before_products_are_found() -> None:
    graph = graph_of(Dense(), IMAGE)
    found = find_prologues(lay_out(graph).regions, graph.outputs)
    assert len(found) == 3 and all(len(maps) == 1 for maps in found.values())
    assert not find_prologues(lay_out(graph_of(nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1)), IMAGE)).regions, ())


@pytest.mark.parametrize(("together", "taken"), [(1.9, True), (2.1, False)])
def test_the_faster_way_is_taken_and_both_times_are_said(together: float, taken: bool) -> None:
    graph = graph_of(Dense(), IMAGE)
    regions = lay_out(graph).regions
    chosen = choose_prologues(regions, graph.outputs, predicting(graph, together, 1.0))
    assert len(chosen.decisions) == 3 and len(chosen.values) == (3 if taken else 0)
    for decision in chosen.decisions.values():
        assert decision.taken == taken and f"{together:.3g} s" in decision.text and "2 s with a kernel of its own" in decision.text


def test_results_and_values_read_twice_stay() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            twice, result = torch.tanh(x), torch.relu(x)
            return self.one(twice), self.two(twice), self.three(result), result

    graph = graph_of(Read(), IMAGE)
    assert not choose_prologues(lay_out(graph).regions, graph.outputs, never).values


def test_another_size_follows_the_first() -> None:
    kept: dict[tuple[str, ...], bool] = {}
    first, second = (graph_of(Dense(), torch.randn(batch, 16, 9, 10)) for batch in (1, 3))
    chosen = choose_prologues(lay_out(first).regions, first.outputs, predicting(first, 0.5, 1.0), kept)
    followed = choose_prologues(lay_out(second).regions, second.outputs, never, kept)
    assert chosen.values and followed.values == chosen.values
    assert followed.decisions and all(one.taken and "as for another size" in one.text for one in followed.decisions.values())
    apart = choose_prologues(lay_out(second).regions, second.outputs, never, dict.fromkeys(kept, False))
    assert not apart.values and {one.text.rpartition(" is not computed where its product reads it: ")[2] for one in apart.decisions.values()} == {
        "as for another size"
    }


def test_maps_of_which_a_policy_says_nothing_follow_another_size() -> None:
    """Whatever is predicted of them, unless predictions decide."""
    graph = graph_of(Dense(), torch.randn(1, 16, 9, 10))
    regions = lay_out(graph).regions
    kept: dict[tuple[str, ...], bool] = {}
    every = choose_prologues(regions, graph.outputs, predicting(graph, 0.5, 1.0), kept).values
    first, *others = kept
    assert others and all(kept.values())
    refusing = Policy(refused=frozenset({(PROLOGUE, first)}))
    chosen = choose_prologues(regions, graph.outputs, predicting(graph, 2.5, 1.0), dict(kept), refusing)
    assert chosen.values == every - frozenset(first[:-1])
    assert not choose_prologues(regions, graph.outputs, predicting(graph, 2.5, 1.0), dict(kept), replace(refusing, predicted=True)).values


def test_plans_say_what_was_decided(always: None) -> None:
    graph = graph_of(Dense(), IMAGE)
    program = plan_program(graph, H200, 1)
    taken = [decision for decision in program.search if decision.taken and "where its product reads it" in decision.text]
    assert len(taken) == 3 and not {decision.results[0] for decision in taken}.intersection(stored_maps(program))
    reasons = [reason for lowered in program.regions for reason in lowered.region.reasons]
    assert sum("with a kernel of its own" in reason for reason in reasons) == 3


def test_a_cpu_computes_no_map_again_for_many_panels() -> None:
    """Each panel of output channels would take three instructions for every element, beside few multiply-adds."""
    program = plan_program(graph_of(Dense(64, 128), torch.randn(1, 64, 14, 14)), CPU, 1, memory=Memory())
    refused = [decision for decision in program.search if "with a kernel of its own" in decision.text]
    assert len(refused) == 3 and not any(decision.taken for decision in refused)


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "dense": lambda: (Dense(), torch.randn(2, 16, 9, 10)),
    "dense_strided": lambda: (Dense(12, 5, 1, 5, 2), torch.randn(1, 12, 11, 7)),
    "scaled": lambda: (Scaled(), torch.randn(2, 16, 8, 9)),
    "gated": lambda: (Gated(), torch.randn(2, 7, 24)),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("target", [H200, machine("v100")])
def test_gpu_kernels_are_right(always: None, name: str, target: Any) -> None:
    module, image = MODULES[name]()
    check_interpreted([Case(name, randomised(module).eval(), (image,))], target)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", MODULES)
def test_cpu_kernels_are_right(always: None, name: str) -> None:
    module, image = MODULES[name]()
    check_native([Case(name, randomised(module).eval(), (image,))])


@given(seed=st.integers(0, 2**31))
@settings(max_examples=draws(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_dense_blocks_are_right(always: None, seed: int) -> None:
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels = random.randint(1, 20)
        module = Dense(channels, random.randint(1, 9), random.randint(1, 2), random.choice([1, 3]), random.randint(1, 2))
        image = torch.randn(random.randint(1, 3), channels, random.randint(2, 9), random.randint(2, 9))
        case = Case("dense", randomised(module).eval(), (image,))
    check_interpreted([case], H200)


def on_tensor_cores(numerics: Numerics, random: Random) -> Any:
    """Chooses any candidate on tensor cores where there is one."""

    def chooser(problem: Problem, machine: Any, threads: int) -> Choice:
        ranking = rank(problem, machine, threads, numerics)
        number = next((number for number, part in enumerate(ranking.parts) if part.schema is TENSOR_CORES), None)
        if number is None or ranking.starts[number] == ranking.starts[number + 1]:
            return ranking.first()
        return ranking.choice(random.randrange(*map(int, ranking.starts[number : number + 2])))

    return chooser


def on_tensor_cores_in(program: Program) -> int:
    """Regions that compute a factor and multiply it on tensor cores."""
    return sum(lowered.schedule.startswith("tensor cores") and len({*loads(*lowered.region.steps[0].bodies)}) > 2 for lowered in program.regions)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_computed_factors_on_tensor_cores(always: None, seed: int, dtype: torch.dtype) -> None:
    """They are rounded as their maps' results would be."""
    random = Random(seed)
    torch.manual_seed(seed)
    block, scaled = Dense(16 * random.randint(1, 2), 8 * random.randint(1, 3), 1, random.choice([1, 3])), Scaled(8 * random.randint(1, 4), 24)
    for made in (block, scaled):
        module = randomised(made).eval().to(dtype)
        channels = next(x for x in module.parameters() if x.dim() == 4).shape[1 if made is block else 0]
        inputs = (torch.randn(random.randint(1, 2), channels, random.randint(5, 9), 8).to(dtype),)
        program = planned_in_half(module, inputs, H200, on_tensor_cores(USUAL, random))
        assert on_tensor_cores_in(program) >= 1
        check(module, inputs, program)


def test_computed_factors_rounded_to_tf32(always: None) -> None:
    module, inputs = randomised(Dense(16, 8, 2, 3)).eval(), (torch.randn(2, 16, 8, 9),)
    numerics = Numerics(tf32=True)
    program = plan_program(graph_of(module, *inputs), H200, 1, on_tensor_cores(numerics, Random(1)), "tf32", numerics)
    assert on_tensor_cores_in(program) == 2
    (found,) = computed(module, inputs, program)
    exact = copy.deepcopy(module).double()(inputs[0].double())
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < ERRORS["tf32"]


def test_float32_stays_float32_on_16_bit_weights() -> None:
    """A product of float32 whose weights alone are of 16 bits must not round what it computes."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32).half())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 1.5
            return torch.nn.functional.linear(torch.sigmoid(y.half().float()), self.weight.float()), y

    graph = graph_of(Mixed(), torch.randn(64, 32))
    program = plan_program(graph, H200, 1)
    assert not any(lowered.schedule.startswith("tensor cores") for lowered in program.regions)
