"""Layouts by prediction: which alternatives there are, by which prediction they are taken, and results of plans with and without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module as import_module_by_name
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.compiled import Case, check_native, compare
from tests.draws import draws
from tests.interpreted import check_interpreted
from tests.operator_cases import randomised
from tests.random_graphs import random_case
from tests.random_runs import compiled_faults, interpreted_faults
from tests.test_gpu_half import check
from tests.test_gpu_half import planned as planned_in_half
from tilewright.cli import main
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import MergeDecision, Program, Region
from tilewright.partition import layout_choice, merges
from tilewright.partition.layout_choice import STORAGE, Alternative, Chosen, Group, Judge, Judged, choose_layouts, find_alternatives, groups
from tilewright.partition.layouts import BY_RULE, PADDED, STORED, LaidOut, Storing, assign_layouts
from tilewright.partition.merges import Memory, Policy, Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import regions_of
from tilewright.partition.without_kernels import through_torch
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice

H200, CPU = machine("h200"), machine("x86-avx512")


class Norm(nn.Module):
    """A convolution whose result is normalised over pixels, and another one."""

    def __init__(self, before: int = 3, channels: int = 8, after: int = 4, taps: int = 3) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, channels, taps, padding=taps // 2)
        self.norm, self.two = nn.InstanceNorm2d(channels, affine=True), nn.Conv2d(channels, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.norm(self.one(x))))


class Features(nn.Module):
    """Results of several layers, which further layers read."""

    def __init__(self, channels: int = 3, width: int = 8, stride: int = 2) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, width, 3, stride, 1), nn.Conv2d(width, 2 * width, 3, stride, 1)
        self.head, self.pool = nn.Conv2d(width, 5, 1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = torch.relu(self.one(x))
        return first, torch.relu(self.two(first)), self.head(first), self.pool(first) + 1


class Classes(nn.Module):
    """The probability of each class, for every pixel of an enlarged image."""

    def __init__(self, channels: int = 3, classes: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.two(torch.relu(self.one(x))), scale_factor=2, mode="bilinear").softmax(1)


class Block(nn.Module):
    """A depthwise convolution, and a perceptron over the channels of each pixel (ConvNeXt)."""

    def __init__(self, width: int = 8, taps: int = 3) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, taps, padding=taps // 2, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)


class Mixed(nn.Module):
    """Products over channels, and over places."""

    def __init__(self, places: int = 12, channels: int = 10) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(places, 7), nn.Linear(7, places), nn.Linear(channels, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.tanh(self.up(x.transpose(1, 2)))).transpose(1, 2)).softmax(1)


def unpadded(channels: int = 6, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Conv2d(width, channels, 2))


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "norm": lambda: (Norm(), torch.randn(2, 3, 9, 10)),
    "features": lambda: (Features(), torch.randn(2, 3, 11, 12)),
    "classes": lambda: (Classes(), torch.randn(1, 3, 7, 6)),
    "block": lambda: (nn.Sequential(nn.Conv2d(3, 8, 2, 2), Block(), Block()), torch.randn(2, 3, 12, 10)),
    "mixed": lambda: (Mixed(), torch.randn(2, 12, 10)),
    "unpadded": lambda: (unpadded(), torch.randn(2, 6, 9, 8)),
    "depthwise": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 2, 1, groups=4), nn.ReLU(), nn.Conv2d(4, 6, 1)),
        torch.randn(1, 3, 13, 14),
    ),
    "volume": lambda: (nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), nn.InstanceNorm3d(6, affine=True)), torch.randn(1, 2, 4, 5, 6)),
}


def graph_of(module: nn.Module, *inputs: Tensor) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(randomised(module).eval(), inputs).graph)[0]


def judge(seconds: Callable[[Region, LaidOut], float] = lambda region, laid_out: 1.0, gpu: bool = True, measuring: bool = False) -> Judge:
    """Predicts as the function does."""
    return Judge(lambda laid_out, regions: [Timed(region, seconds(region, laid_out)) for region in regions], gpu, measuring)


def laying(graph: Graph) -> Callable[[Storing], LaidOut]:
    parts = regions_of(graph)
    return lambda storing: assign_layouts(graph, parts, storing=storing)


def alternatives(graph: Graph, gpu: bool = True, measuring: bool = False) -> dict[str, list[Storing]]:
    found: dict[str, list[Storing]] = {}
    for one in find_alternatives(graph, laying(graph)(BY_RULE), judge(gpu=gpu, measuring=measuring)):
        found.setdefault(one.value, []).append(one.storing)
    return found


def never() -> LaidOut:
    raise AssertionError("laid out")


def decisions(program: Program) -> list[MergeDecision]:
    return [decision for decision in program.search if decision.kind == STORAGE]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Every alternative is taken; the groups are listed."""
    asked: list[Group] = []

    def taken(self: Judge, group: Group, *_: object) -> Judged:
        asked.append(group)
        return Judged(True, "1 us predicted so, 2 us by rule")

    monkeypatch.setattr(Judge, "compare", taken)
    monkeypatch.setattr(Judge, "counts", lambda self, *_: True)
    return asked


# What alternatives there are


def test_values_that_all_readers_read_as_they_are_stored_have_none() -> None:
    chain = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.Flatten())
    assert alternatives(graph_of(chain, torch.randn(1, 4, 8, 8)), measuring=True).keys() == {"input"}  # its padded copy
    assert not alternatives(graph_of(chain, torch.randn(1, 4, 8, 8)))
    assert not alternatives(graph_of(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3)), torch.randn(2, 5, 8)))


def test_statistics_of_planes_want_rows() -> None:
    graph = graph_of(Norm(), torch.randn(2, 3, 9, 10))
    found = alternatives(graph, measuring=True)
    (result,) = graph.outputs
    assert found["x"] == [Storing(guarded=frozenset({"x"}))] and found[result] == [Storing(apart=frozenset({result}))]
    (stored,) = found.keys() - {"x", result}
    assert dict(found[stored][0].orders) == {stored: (0, 1, 2, 3)} and len(found[stored]) == 1


def test_products_want_channels_of_what_they_read() -> None:
    assert alternatives(graph_of(unpadded(), torch.randn(2, 6, 9, 8)))["input"] == [Storing(apart=frozenset({"input"}))]


def test_rows_longer_than_channels_are_wanted_by_windows_of_gpus() -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 6, 1))
    for size, gpu, wanted in ((9, True, 1), (5, True, 0), (9, False, 0)):
        assert (
            sum(bool(storing.orders) for ways in alternatives(graph_of(module, torch.randn(1, 3, size, size)), gpu).values() for storing in ways)
            == wanted
        )


def test_loops_of_cpus_need_measured_times() -> None:
    """Their estimates do not depend on the order of what they read."""
    graph = graph_of(Norm(), torch.randn(2, 3, 9, 10))
    assert not any(storing.orders for ways in alternatives(graph, gpu=False).values() for storing in ways)
    assert any(storing.orders for ways in alternatives(graph, gpu=False, measuring=True).values() for storing in ways)


# How they are decided


@pytest.mark.parametrize(("seconds", "taken"), [(0.9, True), (1.1, False)])
def test_the_faster_way_is_taken_and_both_times_are_said(seconds: float, taken: bool) -> None:
    graph = graph_of(Norm(), torch.randn(2, 3, 9, 10))
    rows = next(name for name, (storing, *_) in alternatives(graph).items() if storing.orders)

    def predicted(region: Region, laid_out: LaidOut) -> float:
        return seconds if rows in region.outputs and laid_out.layouts[rows].order == row_major((2, 8, 9, 10)).order else 1.0

    chosen = choose_layouts(graph, laying(graph), judge(predicted))
    layout = chosen.laid_out.layouts[rows]
    assert layout.order == (row_major if taken else channels_last)(layout.shape).order
    (decision,) = (decision for decision in chosen.laid_out.considered if decision.results == (rows,))
    said = f"{1 + 1 + seconds:.3g} s predicted so, 3 s by rule"
    assert decision.taken == taken and said in decision.text
    (region,) = (region for region in chosen.laid_out.regions if rows in region.outputs)
    assert decision.text in region.reasons


def test_alternatives_that_change_different_regions_are_compared_together() -> None:
    module = nn.Sequential(*(Norm(3, 8, 3) for _ in range(3)))
    graph = graph_of(module, torch.randn(1, 3, 6, 7))
    laid = laying(graph)
    rows = [one for one in find_alternatives(graph, laid(BY_RULE), judge()) if one.storing.orders]
    assert len(rows) == 3
    other = laid(Storing({name: order for one in rows for name, order in one.storing.orders.items()}))
    found = groups(rows, laid(BY_RULE), other)
    assert len(found) == 3
    for one, group in zip(rows, found, strict=True):
        assert group.alternatives == (one,)
        direct = {region.name for region in laid(BY_RULE).regions if one.value in (*region.inputs, *region.outputs)}
        for regions, others in ((group.before, group.after), (group.after, group.before)):
            names = {region.name for region in regions}
            assert names == {region.name for region in others} and len(names & direct) == len(direct) == 2
    changed = [region.name for group in found for region in group.after]
    assert len(changed) == len({*changed}) == 9  # with the products that read what the normalisations store, whose order follows


def test_refused_together_they_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second product reads what the first normalisation stores in its input's order, and stores what the second one reads."""
    module = nn.Sequential(*(part for _ in range(2) for part in (nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True))))
    graph = graph_of(module, torch.randn(1, 8, 9, 9))
    compared: list[list[str]] = []

    class Last(Judge):
        """Takes the last product's result alone."""

        def compare(self, group: Group, *_: object) -> Judged:
            compared.append([one.value for one in group.alternatives])
            return Judged(compared[-1] == [products[-1]], "")

    products = [node.outputs[0] for node in graph.nodes if node.operator == "add"]
    both = [one for one in find_alternatives(graph, laying(graph)(BY_RULE), judge()) if one.value in products]
    monkeypatch.setattr(layout_choice, "find_alternatives", lambda *_: both)
    chosen = choose_layouts(graph, laying(graph), Last(lambda *_: [], True))
    assert products in compared and [products[0]] in compared and len(products) == 2
    assert [value for (value, _), taken in chosen.decided.items() if taken] == products[1:]
    orders = [chosen.laid_out.layouts[name].order for name in products]
    assert orders == [channels_last((1, 8, 7, 7)).order, row_major((1, 8, 5, 5)).order]


def test_another_size_follows_the_first() -> None:
    def never(*_: object) -> Any:
        raise AssertionError("predicted")

    first, second = (graph_of(unpadded(), torch.randn(batch, 6, 9, 8)) for batch in (1, 3))
    chosen = choose_layouts(
        first, laying(first), judge(lambda region, laid_out: 0.1 if f"input{PADDED}" in (*region.inputs, *region.outputs) else 1.0, gpu=False)
    )
    assert chosen.decided["input", "copied with channels innermost for the sums that read it"]
    again = choose_layouts(second, laying(second), Judge(never, False), earlier=chosen.decided)
    assert f"input{PADDED}" in again.laid_out.layouts and not again.decided
    memory = Memory()
    programs = [plan_program(graph, CPU, 1, memory=memory) for graph in (first, second)]
    assert memory.layouts and decisions(programs[0]) and not decisions(programs[1])
    orders = [{name: entry.layout.order for name, entry in program.storage.items() if name in program.graph.values} for program in programs]
    assert orders[0] == orders[1]


def test_results_that_replace_inputs_stay_where_they_are() -> None:
    graph = graph_of(Features(), torch.randn(2, 3, 11, 12))
    every = find_alternatives(graph, laying(graph)(BY_RULE), judge())
    some = find_alternatives(graph, laying(graph)(BY_RULE), judge(), frozenset({graph.outputs[0]}))
    assert {one.value for one in every} - {one.value for one in some} == {graph.outputs[0]}


# What is gained


def test_a_gpu_stores_planes_for_their_statistics() -> None:
    """An instance normalisation over many pixels: its kernel reads whole sectors of memory."""
    graph = graph_of(Norm(3, 32, 16, 9), torch.randn(1, 3, 128, 128))
    program = plan_program(graph, H200, 1)
    taken = [decision for decision in decisions(program) if decision.taken and "d0 d1 d2 d3" in decision.text]
    assert len(taken) == 1 and program.storage[taken[0].results[0]].layout.order == row_major((1, 32, 128, 128)).order
    assert sum(part.predicted_seconds for part in program.regions) < 0.95 * by_rule(graph, H200)


def test_a_cpu_copies_an_image_of_many_channels_that_is_not_padded() -> None:
    graph = graph_of(nn.Conv2d(64, 32, 3), torch.randn(1, 64, 56, 56))
    program = plan_program(graph, CPU, 1)
    (copied,) = (decision for decision in decisions(program) if decision.results == ("input",))
    assert copied.taken and sum(part.predicted_seconds for part in program.regions) < 0.8 * by_rule(graph, CPU)
    assert program.storage[f"input{PADDED}"].layout.order == channels_last((1, 64, 56, 56)).order


def depthwise(channels: int, taps: int = 3, stride: int = 1, padding: int = 1) -> nn.Module:
    return nn.Conv2d(channels, channels, taps, stride, padding, groups=channels)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("module", [depthwise(64), depthwise(64, 5, 2, 0), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2)], ids=str)
def test_a_cpu_copies_what_a_window_of_channels_stores(module: nn.Module) -> None:
    """Its elements would be loaded one by one for rows of the result."""
    graph = graph_of(nn.Sequential(nn.Conv2d(32, 64, 1), module), torch.randn(1, 32, 56, 56))
    program = plan_program(graph, CPU, 1)
    (decision,) = (decision for decision in decisions(program) if decision.results == graph.outputs)
    assert decision.taken and "only measured times" not in decision.text
    assert any(decision.text in part.region.reasons for part in program.regions)
    layout = program.storage[graph.outputs[0] + STORED].layout
    assert layout.order == channels_last(layout.shape).order
    assert sum(part.predicted_seconds for part in program.regions) < 0.8 * by_rule(graph, CPU)


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        (nn.Sequential(nn.Conv2d(5, 8, 1), depthwise(8)), True), (nn.Sequential(nn.Conv2d(5, 8, 1), nn.MaxPool2d((1, 3))), True),
        (depthwise(5), False), (depthwise(5, 3, 2, 0), False), (nn.MaxPool2d((3, 1), 2), False), (nn.MaxPool2d((1, 3), 2), False),
    ],
    ids=str,
)  # fmt: skip
def test_windows_along_rows_need_measured_times(module: nn.Module, counts: bool) -> None:
    """At stride 2 compilers make vectors of rows that the estimate takes to be loaded one by one."""
    graph = graph_of(module, torch.randn(1, 5, 9, 10))
    laid_out = laying(graph)(BY_RULE)
    (window,) = (region for region in laid_out.regions if region.kind == "window")
    assert judge(gpu=False).counts(window, laid_out) == counts
    assert (graph.outputs[0] in alternatives(graph, gpu=False)) == (counts and len(graph.nodes) > 1)


def test_sums_of_short_rows_need_measured_times() -> None:
    class Short(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(2)

    laid_out = laying(graph_of(Short(), torch.randn(4, 5, 3, 6)))(BY_RULE)
    assert [(region.kind, judge(gpu=False).counts(region, laid_out)) for region in laid_out.regions] == [("window", False)]


def by_rule(graph: Graph, target: Machine) -> float:
    """Predicted seconds without alternatives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.partition.predictions.choose_layouts", lambda graph, laid, *_: Chosen(laid(BY_RULE)))
        return sum(part.predicted_seconds for part in plan_program(graph, target, 1).regions)


def test_what_was_measured_decides_between_close_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MEASURED_LOSS", 10.0)
    graph = graph_of(nn.Conv2d(64, 32, 3, padding=1), torch.randn(1, 64, 56, 56))
    (result,) = graph.outputs

    def copies(problem: Problem) -> bool:
        return problem.region.kind == "map" and problem.layouts[problem.region.outputs[0]].is_row_major

    for wanted in (True, False):

        def measuring(problem: Problem, machine: Machine, threads: int, seconds: float = 0.1 if wanted else 100.0) -> Choice:
            rows = problem.layouts[problem.region.outputs[0]].is_row_major
            return replace(choose(problem, machine, threads), measured_seconds=seconds if copies(problem) else 10.0 if rows else 9.0)

        program = plan_program(graph, CPU, 1, measuring, recorded=lambda *_: None)
        (decision,) = (decision for decision in decisions(program) if decision.results == (result,))
        assert decision.taken == wanted and "; measured " in decision.text


def test_predictions_decide_about_layouts_where_a_policy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was measured, or decided for another size."""
    monkeypatch.setattr(merges, "MEASURED_LOSS", 10.0)
    graph = graph_of(nn.Conv2d(64, 32, 3, padding=1), torch.randn(1, 64, 56, 56))
    (plain,) = (decision for decision in decisions(plan_program(graph, CPU, 1)) if decision.results == graph.outputs)
    found = set()
    for seconds in (1e-9, 1e9):

        def measuring(problem: Problem, machine: Machine, threads: int, seconds: float = seconds) -> Choice:
            rows = problem.layouts[problem.region.outputs[0]].is_row_major
            copies = rows and problem.region.kind == "map"
            return replace(choose(problem, machine, threads), measured_seconds=seconds if copies else 2.0 if rows else 1.0)

        memory = Memory()
        for policy in (Policy(), Policy(predicted=True)):
            program = plan_program(graph, CPU, 1, measuring, recorded=lambda *_: None, memory=memory, policy=policy)
            (decision,) = (decision for decision in decisions(program) if decision.results == graph.outputs)
            assert "; measured " in decision.text
            found.add((policy.predicted, decision.taken))
    assert found == {(False, True), (False, False), (True, plain.taken)}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_only_measured_times_decide_whether_bounds_are_compared(gpu: bool, guarded: bool) -> None:
    region = Region("r", "contraction", (), (), (), ("r",))
    way = Storing(guarded=frozenset({"v"})) if guarded else BY_RULE
    group = Group((Alternative("v", way, "another way"),), (region,), (region,))
    before, after = laying(graph_of(unpadded(), torch.randn(1, 6, 9, 8)))(BY_RULE), laying(graph_of(unpadded(), torch.randn(1, 6, 9, 8)))(BY_RULE)
    for by_prediction in (False, True):
        one = Judge(
            lambda laid_out, _: [Timed(region, 0.95 if laid_out is after else 1.0, lambda: 0.5 if laid_out is after else 1.0)],
            gpu, True, by_prediction=by_prediction,
        )  # fmt: skip
        judged = one.compare(group, before, after, never)
        assert judged.taken == (not (guarded and by_prediction)) and "; measured " in judged.times
        assert ("only measured times decide" in judged.times) == (not judged.taken)


def test_explain_lists_the_alternatives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 64, 3, padding=1))
    torch.export.save(torch.export.export(layers.eval(), (torch.randn(1, 3, 224, 224),)), tmp_path / "layers.pt2")
    assert main(["explain", str(tmp_path / "layers.pt2"), "--fusion", "--target", "h200"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "copied from where it is stored with channels innermost, for all that reads it: " in said and "by rule" in said


def test_predictions_decide_on_a_gpu() -> None:
    module, x = MODULES["norm"]()
    graph = simplify(import_module(module.eval(), (x,)).graph)[0]
    found = [str(decision) for decision in plan_program(graph, H200, 1).search if "by rule" in str(decision)]
    assert found and not [text for text in found if "comparing bounds" in text or "only measured times" in text]


# Results


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("target", [H200, machine("v100")], ids=["h200", "v100"])
def test_gpu_kernels_are_right(always: list[Group], name: str, target: Machine) -> None:
    module, x = MODULES[name]()
    check_interpreted([Case(name, randomised(module).eval(), (x,))], target)
    assert always


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", MODULES)
def test_cpu_kernels_are_right(always: list[Group], name: str) -> None:
    module, x = MODULES[name]()
    check_native([Case(name, randomised(module).eval(), (x,))])
    assert always or name == "depthwise"


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["norm", "features", "block"])
def test_kernels_of_16_bit_modules_are_right(always: list[Group], name: str, dtype: torch.dtype) -> None:
    module, x = MODULES[name]()
    module, inputs = randomised(module).eval().to(dtype), (x.to(dtype),)
    check(module, inputs, planned_in_half(module, inputs, H200, choose))
    assert always


def test_results_that_are_copied_keep_their_precision(always: list[Group]) -> None:
    """What they are copied from is stored in their type, whatever other values are stored in."""
    program = plan_program(graph_of(Features(), torch.randn(2, 3, 11, 12)), H200, 1, precision="fp16")
    stored = [entry for name, entry in program.storage.items() if name.endswith(STORED)]
    assert stored and all(entry.value.dtype == "f32" for entry in stored)


@pytest.mark.slow
@given(seed=st.integers(0, 2**31))
@settings(max_examples=draws(6), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_modules_are_right(always: list[Group], seed: int) -> None:
    cases = []
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number in range(2):
            channels, width, batch = random.randint(1, 9), random.randint(1, 12), random.randint(1, 3)
            module = random.choice(
                [
                    lambda: Norm(channels, width, random.randint(1, 8), random.choice([1, 3, 5])),
                    lambda: Features(channels, width, random.randint(1, 2)),
                    lambda: Classes(channels, width),
                    lambda: nn.Sequential(nn.Conv2d(channels, width, 2), Block(width, random.choice([1, 3, 5])), nn.ReLU(), nn.Conv2d(width, 3, 1)),
                    lambda: unpadded(channels, width),
                ]
            )()
            image = torch.randn(batch, channels, random.randint(4, 11), random.randint(4, 11))
            cases.append(Case(str(number), randomised(module).eval(), (image,)))
    check_interpreted(cases, H200)
    check_native(cases)


@given(
    kind=st.sampled_from(["depthwise", "max", "mean"]), before=st.booleans(), after=st.booleans(), batch=st.integers(1, 2), channels=st.integers(1, 20),
    size=st.tuples(st.integers(7, 12), st.integers(7, 12)), taps=st.integers(1, 7), stride=st.integers(1, 2), padded=st.booleans(),
)  # fmt: skip
@settings(max_examples=draws(6), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_windows_are_right_by_rule_and_with_every_alternative(
    kind: str, before: bool, after: bool, batch: int, channels: int, size: tuple[int, int], taps: int, stride: int, padded: bool
) -> None:
    padding = taps // 2 if padded else 0
    pools: dict[str, nn.Module] = {"max": nn.MaxPool2d(taps, stride, padding), "mean": nn.AvgPool2d(taps, stride, padding)}
    window = pools.get(kind, depthwise(channels, taps, stride, padding))
    parts = [*([nn.Conv2d(5, channels, 1)] if before else []), window, *([nn.Conv2d(channels, 7, 1)] if after else [])]
    case = Case(kind, randomised(nn.Sequential(*parts)).eval(), (torch.randn(batch, 5 if before else channels, *size),))
    check_native([case])
    for taken in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Judge, "compare", lambda self, group, *_, taken=taken: Judged(taken, "1 us predicted so, 2 us by rule"))
            check_native([case])


@given(first=st.integers(0, 2**20))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs_are_right(always: list[Group], first: int) -> None:
    cases = [random_case(seed) for seed in range(first, first + draws(4))]
    assert not any(interpreted_faults(cases, "h200")) and not any(compiled_faults(cases, "native"))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["the region that stores it", "the copy", "a reader"])
def test_regions_around_a_copied_result_can_run_through_pytorch(always: list[Group], which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = MODULES["features"]()
    module = randomised(module).eval()

    def without_one(*arguments: Any, **keywords: Any) -> Program:
        program = plan_program(*arguments, **{**keywords, "chains": False})
        first = program.graph.outputs[0]
        ways: Sequence[Callable[[Region], bool]] = (
            lambda region: first + STORED in region.outputs,
            lambda region: first in region.outputs,
            lambda region: first + STORED in region.inputs and bool(region.nodes),
        )
        (at, *_) = (index for index, part in enumerate(program.regions) if ways[which](part.region))
        return through_torch(program, {at: ["tried"]})

    monkeypatch.setattr(import_module_by_name("tilewright.compile"), "plan_program", without_one)
    executable = tilewright.compile(module, (x,), target="native", threads=2)
    assert any(row.kind == "torch" for row in executable.plan.rows)
    compare(Case("", module, (x,)), executable(x), (x,))
    assert executable.verify(x).passed


class Both(nn.Module):
    """A result of the model, and a convolution of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.a(x))
        return y, self.b(y)


def test_other_copies_of_a_copied_result_can_run_through_pytorch(always: list[Group]) -> None:
    """Such as those in another type; each is of the result, as the graph knows it."""
    program = plan_program(graph_of(Both().half(), torch.randn(1, 8, 9, 9).half()), machine("x86-avx512"), 1, chains=False)
    first = program.graph.outputs[0]
    regions = [part.region for part in program.regions]
    copies = [at for at, region in enumerate(regions) if not region.nodes and first + STORED in region.inputs and first not in region.outputs]
    assert copies
    for at in copies:
        lost = through_torch(program, {at: ["tried"]}).regions[at].region
        assert lost.kind == "torch" and lost.inputs == (first,) and lost.outputs == regions[at].outputs


def test_verification_and_artifacts_know_copied_results(always: list[Group], tmp_path: Any) -> None:
    module, x = MODULES["features"]()
    module = randomised(module).eval()
    executable = tilewright.compile(module, (x,), target="native", threads=2)
    assert executable.verify(x).passed
    executable.save(tmp_path / "model.zip")
    compare(Case("", module, (x,)), tilewright.load(tmp_path / "model.zip")(x), (x,))


def test_the_layout_of_a_value_with_one_place_has_no_alternative() -> None:
    assert not alternatives(graph_of(nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, track_running_stats=True)), torch.randn(1, 3, 1, 1)))
