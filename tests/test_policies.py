"""Policies: each kind of merge is taken or refused whatever its times say, results stay right, and predictions decide where trials measured."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.interpreted import run_program
from tests.operator_cases import Applied
from tests.test_attention import attend, operands
from tests.test_chain_trials import INPUT as CHAINED
from tests.test_chain_trials import MODULE, recorded
from tests.test_chains import graph_of, inverted
from tests.test_prologues import Dense
from tests.test_siblings import Attention
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.region import MergeDecision, Program, Ways
from tilewright.partition.merges import BY_MERGES, CHAIN, WHOLE, Compared, Memory, Merge, Policy, gains
from tilewright.partition.plan import plan_program
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import from_records, recorded_chains

CPU, H200 = machine("x86-avx512"), machine("h200")


@dataclass(frozen=True)
class Model:
    """A module with inputs in which merges of a kind are considered for a target."""

    kind: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    target: Machine


def image(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


POOLED = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 24, 3, padding=1), nn.MaxPool2d(2))
MODELS = {
    "chains of a CPU": Model("chain", lambda: inverted(8, 16), image(1, 8, 12, 9), CPU),
    "chains of a GPU": Model("chain", lambda: inverted(8, 16), image(1, 8, 8, 6), H200),
    "siblings of a CPU": Model("siblings", Attention, image(2, 5, 24), CPU),
    "siblings of a GPU": Model("siblings", Attention, image(2, 5, 24), H200),
    "prologues": Model("prologue", lambda: Dense(16, 8, 1, 1), image(1, 16, 6, 5), H200),
    "poolings": Model("pooling", lambda: POOLED.half(), lambda: (torch.randn(1, 16, 12, 12).half(),), H200),
    "attention": Model("join", lambda: Applied(attend), lambda: operands(8, 8, 16, 1, 1), H200),
    "rows": Model("join", lambda: nn.Sequential(nn.Linear(12, 29), nn.Softmax(-1)), image(5, 12), H200),
    "folded images": Model("folded image", lambda: nn.Conv2d(3, 64, 7, 2, 3).half(), lambda: (torch.randn(4, 3, 32, 32).half(),), H200),
    "loops": Model("loop", lambda: nn.LSTM(4, 19), image(3, 2, 4), CPU),
}


def planned(graph: Graph, target: Machine, policy: Policy = BY_MERGES, **options: Any) -> Program:
    chains = True if target.is_gpu else None
    return plan_program(graph, target, 1, policy=policy, chains=chains, **options)


def of_kind(program: Program, kind: str) -> dict[tuple[str, ...], MergeDecision]:
    return {decision.results: decision for decision in program.search if decision.kind == kind and decision.ways is not None}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_decides_about_each_merge(name: str) -> None:
    model = MODELS[name]
    torch.manual_seed(0)
    module, inputs = model.module().eval(), model.inputs()
    graph = graph_of(module, *inputs)
    before = of_kind(planned(graph, model.target), model.kind)
    assert before
    for results, decision in before.items():
        key = frozenset({(model.kind, results)})
        policy = Policy(refused=key) if decision.taken else Policy(taken=key)
        program = planned(graph, model.target, policy)
        found = of_kind(program, model.kind)[results]
        assert found.taken != decision.taken and found.text.endswith(WHOLE) and found.ways == decision.ways
        if inputs[0].dtype is torch.float32:
            check(program, module, inputs)


def check(program: Program, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The program in the interpreter against PyTorch in float64."""
    given = {name: tensor.numpy() for name, tensor in zip(program.graph.inputs, inputs, strict=True)}
    found, faults = run_program(program, given)
    with torch.no_grad():
        expected = tree_leaves(deepcopy(module).double()(*(x.double() for x in inputs)))
    assert not faults
    for name, wanted in zip(program.graph.outputs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found[name]).double().reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_required_chains_exclude_those_that_gain_more() -> None:
    """The best partition with the required chain, also where that costs one which is faster."""
    module, x = inverted(8, 16), torch.randn(1, 8, 12, 9)
    graph = graph_of(module, x)
    longest = max((decision.results for decision in planned(graph, CPU).search), key=len)
    for results in (longest[:2], longest[1:], longest):
        program = planned(graph, CPU, Policy(taken=frozenset({(CHAIN, results)})))
        taken = {decision.results for decision in program.search if decision.taken}
        assert taken == {results}
        assert [tuple(stage.outputs[0] for stage in lowered.region.stages) for lowered in program.regions if lowered.region.stages] == [results]
        check(program, module, (x,))


def test_a_chain_that_is_not_possible_cannot_be_required() -> None:
    refused = Merge(("a", "b"), 1.0, None, "made up", decided=True)
    assert not refused.is_required and not refused.gain and refused.ways is None


@pytest.mark.in_turns
@pytest.mark.parametrize("here", [machine("native"), H200], ids=lambda here: here.name)
@pytest.mark.parametrize("ratio", [0.5, 1.2])
def test_predictions_decide_about_chains_that_were_measured(ratio: float, here: Machine, tmp_path: Path) -> None:
    """The schedule is still the one that was measured to be fastest."""
    graph = graph_of(MODULE, CHAINED)
    with Records(tmp_path / "records.sqlite") as records:
        recorded(records, ratio, here)
        chooser, chains = from_records(records), recorded_chains(records)
        program = plan_program(graph, here, 1, chooser, recorded=chains, policy=Policy(predicted=True))
        measured = plan_program(graph, here, 1, chooser, recorded=chains)
    taken = {decision.results for decision in program.search if decision.taken}
    gaining = {decision.results for decision in program.search if decision.ways is not None and gains(*decision.ways.predicted)}
    assert taken <= gaining and bool(taken) == bool(gaining)
    assert any(decision.taken for decision in measured.search) == (ratio < 1)
    assert all(decision.ways.measured is not None for decision in program.search if decision.ways is not None)


@pytest.mark.parametrize("predicted", [True, False])
def test_predictions_or_measurements_decide_between_two_ways(predicted: bool) -> None:
    both = Compared(1.0, 2.0, (3.0, 2.5), by_prediction=predicted)
    assert both.taken == predicted and both.ways == Ways((1.0, 2.0), (3.0, 2.5))
    assert not Compared(1.0, 2.0, decided=False).taken and Compared(3.0, 2.0, (3.0, 2.0), decided=True).taken
    assert WHOLE in Compared(3.0, 2.0, decided=True).text("a", "b") and WHOLE not in both.text("a", "b")


def test_chains_of_which_a_policy_says_nothing_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are predicted to gain, unless predictions decide about the others."""
    monkeypatch.setattr("tilewright.partition.chains.KEPT", 1e9)
    graph = graph_of(nn.Sequential(inverted(8, 16), inverted(8, 16)), torch.randn(1, 8, 12, 9))
    search = planned(graph, CPU).search
    pairs = [decision.results for decision in search if decision.ways is not None and len(decision.results) == 2]
    one = next(decision.results for decision in search if decision.ways is not None and len(decision.results) == 2 and not decision.taken)
    overlapping = next(results for results in pairs if results[0] == one[1] or results[1] == one[0])
    other = next(results for results in pairs if not {*results} & {*one})
    memory = Memory()
    planned(graph, CPU, taking(one), memory=memory)
    before = taken(planned(graph, CPU, memory=memory.copied()))
    assert one in before and one not in taken(planned(graph, CPU))
    assert {one, other} <= taken(planned(graph, CPU, taking(other), memory=memory.copied()))
    predicted = Policy(taking(other).taken, predicted=True)
    apart = Memory()
    planned(graph, CPU, Policy(refused=taking(*(decision.results for decision in search)).taken), memory=apart)
    assert not taken(planned(graph, CPU, memory=apart.copied()))
    assert taken(planned(graph, CPU, predicted, memory=apart)) == taken(planned(graph, CPU, predicted)) > {other}
    assert taken(planned(graph, CPU, Policy(refused=taking(one).taken), memory=memory.copied())) == before - {one}
    beside = taken(planned(graph, CPU, taking(overlapping), memory=memory.copied()))
    assert overlapping in beside and one not in beside


def taking(*chains: tuple[str, ...]) -> Policy:
    return Policy(taken=frozenset((CHAIN, results) for results in chains))


def taken(program: Program) -> set[tuple[str, ...]]:
    return {decision.results for decision in program.search if decision.taken}


@pytest.mark.parametrize("module", [Attention(), nn.Sequential(inverted(8, 16), inverted(8, 16))], ids=["siblings", "chains"])
def test_a_policy_does_not_follow_the_memory(module: nn.Module) -> None:
    """Neither of siblings nor of chains; but it is what the memory has afterwards."""
    graph = graph_of(module, torch.randn(2, 5, 24) if isinstance(module, Attention) else torch.randn(1, 8, 12, 9))
    memory = Memory()
    before = planned(graph, CPU, memory=memory)
    known = [decision for decision in before.search if decision.ways is not None]
    flipped = {taken: frozenset(d.key for d in known if d.taken == taken) for taken in (True, False)}
    policy = Policy(taken=frozenset() if flipped[True] else flipped[False], refused=flipped[True])
    other = memory.copied()
    program = planned(graph, CPU, policy, memory=other)
    taken = {decision.results for decision in program.search if decision.taken}
    assert taken != {decision.results for decision in before.search if decision.taken}
    assert (memory.chains, memory.siblings) != (other.chains, other.siblings)
    memory.become(other)
    assert (memory.chains, memory.siblings, memory.schedules) == (other.chains, other.siblings, other.schedules)
    again = planned(graph, CPU, memory=memory)
    if isinstance(module, Attention):
        assert {decision.results for decision in again.search if decision.taken} == taken
