"""Merges of regions that are no chain: trials measure both ways where their predictions are close, and what they measured decides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.operator_cases import Applied
from tests.test_attention import attend, operands
from tests.test_prologues import Dense
from tests.test_siblings import Attention, graph_of
from tilewright.cli import main
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import loads
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.partition import merges
from tilewright.partition.merges import Timed, compared
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice
from tilewright.tuning.problems import key_of
from tilewright.tuning.tuning import distinct_problems

H200 = machine("h200")
REGION = Region("r", "map", (), (), (), ("r",))


def timed(predicted: float, measured: float | None, share: float = 1.0) -> Timed:
    return Timed(REGION, predicted, lambda: measured, share)


def never() -> float | None:
    raise AssertionError("measured")


@pytest.mark.parametrize(("together", "taken"), [(1.0, True), (3.0, False)])
def test_clear_predictions_decide_alone(together: float, taken: bool) -> None:
    both = compared([Timed(REGION, together, never)], [Timed(REGION, 1.0, never), Timed(REGION, 1.0, never)])
    assert both.taken == taken and both.measured is None


@pytest.mark.parametrize(("measured", "taken"), [(1.5, True), (2.5, False), (None, False)])
def test_measured_seconds_decide_between_close_predictions(measured: float | None, taken: bool) -> None:
    """Predicted to be slower by 5 %, which decides as long as one of the times is missing."""
    both = compared([timed(2.1, measured)], [timed(1.0, 1.0), timed(2.0, 2.0, 0.5)])
    assert both.taken == taken
    assert both.measured == ((measured, 2.0) if measured is not None else None)
    assert ("; measured 1.5 s and 2 s" in both.text("here", "there")) == (measured == 1.5)


def test_trials_are_asked_for_all_regions_of_both_ways() -> None:
    asked: list[int] = []

    def asking(number: int) -> Callable[[], float | None]:
        return lambda: asked.append(number)

    compared([Timed(REGION, 2.0, asking(0)), Timed(REGION, 0.1, asking(1))], [Timed(REGION, 2.0, asking(2))])
    assert asked == [0, 1, 2]


@dataclass(frozen=True)
class Model:
    """A module, its inputs, and whether a problem is that of a merged region."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    merges: Callable[[Problem], bool]


MODELS = {
    "siblings": Model(Attention(768, 768), (torch.randn(1, 128, 768),), lambda problem: 2304 in problem.values[problem.region.outputs[0]].shape),
    "prologues": Model(Dense(64, 32, 1, 1), (torch.randn(1, 64, 28, 28),), lambda problem: computes_factor(problem)),
    "attention": Model(Applied(attend), operands(64, 64, 32, 4, 4), lambda problem: problem.region.kind == "attention"),
}


def computes_factor(problem: Problem) -> bool:
    return problem.region.kind == "contraction" and len({*loads(*problem.region.steps[0].bodies)}) > 2


@pytest.mark.parametrize("name", MODELS)
def test_what_was_measured_decides_about_merges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is predicted, within a limit that holds for these models; the regions of both ways are among those that trials measure."""
    model = MODELS[name]
    graph = graph_of(model.module, *model.inputs)
    monkeypatch.setattr(merges, "MEASURED_LOSS", 10.0)
    asked: set[str] = set()
    for wanted in (True, False):

        def measuring(problem: Problem, machine: Machine, threads: int, seconds: float = 1.0 if wanted else 100.0) -> Choice:
            asked.add(key_of(problem))
            return replace(choose(problem, machine, threads), measured_seconds=seconds if model.merges(problem) else 10.0)

        program = plan_program(graph, H200, 1, measuring, recorded=lambda *_: None)
        values, layouts = ({name: getattr(item, of) for name, item in program.storage.items()} for of in ("value", "layout"))
        problems = [Problem(lowered.region, layouts, values, frozenset(graph.constants)) for lowered in program.regions]
        assert any(model.merges(problem) for problem in problems) == wanted
        reasons = [reason for lowered in program.regions for reason in lowered.region.reasons]
        assert any("; measured " in reason for reason in reasons)
    measured = {key_of(problem) for problem in distinct_problems(graph, H200, 1, chains=False)}
    # attention is decided before layouts are known, and layouts one after the other: what is planned may be stored otherwise than what was measured
    assert asked <= measured if name == "siblings" else len(asked & measured) > 3


class Replaced(nn.Module):
    """A convolution whose result replaces a buffer after a call, and another one of it."""

    before: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 32, 3, padding=1)
        self.register_buffer("before", torch.zeros(1, 64, 28, 28))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(x))
        result: torch.Tensor = self.two(y)
        self.before.copy_(y)
        return result


class Cached(nn.Module):
    """A product that is stored at one position of a buffer."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)
        self.register_buffer("cache", torch.zeros(40, 24))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, self.linear(x))
        return self.cache.sum(0)


UPDATING: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "replaced": (Replaced(), (torch.randn(1, 64, 28, 28),)),
    "one position": (Cached(), (torch.randn(1, 16), torch.tensor([3]))),
}


@pytest.mark.parametrize("name", UPDATING)
def test_trials_measure_the_layouts_of_what_is_updated(name: str) -> None:
    """All regions of the plan but those that store some elements of an input, which a trial does not have."""
    imported = import_module(UPDATING[name][0].eval(), UPDATING[name][1])
    graph = simplify(imported.graph)[0]
    assert imported.updates
    here = machine("x86-avx512")
    measured = {key_of(problem) for problem in distinct_problems(graph, here, 1, updates=imported.updates)}
    planned: dict[str, Problem] = {}

    def collect(problem: Problem, machine: Machine, threads: int) -> Choice:
        planned.setdefault(key_of(problem), problem)
        return choose(problem, machine, threads)

    plan_program(graph, here, 1, collect, chains=False, updates=imported.updates)
    assert planned.keys() - measured == {key for key, problem in planned.items() if problem.updates}
    assert any(problem.updates for problem in planned.values()) == (name == "one position")
    without = {key_of(problem) for problem in distinct_problems(graph, here, 1)}
    assert not planned.keys() <= without


def test_a_compilation_measures_what_it_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Updates reach trials, from `compile` and from the command line."""
    given: list[object] = []

    class Enough(BaseException):
        """The rest is not of interest."""

    def found(*_: object, updates: object = (), **__: object) -> list[Problem]:
        given.append(updates)
        raise Enough

    monkeypatch.setattr(sys.modules["tilewright.compile"], "distinct_problems", found)
    monkeypatch.setattr(sys.modules["tilewright.tuning.tuning"], "distinct_problems", found)
    module, inputs = UPDATING["one position"]
    with pytest.raises(Enough):
        tilewright.compile(module, inputs, "native", trials=1, records=tmp_path / "records.sqlite")
    torch.export.save(torch.export.export(module, inputs), tmp_path / "model.pt2")
    with pytest.raises(Enough):
        main(["tune", str(tmp_path / "model.pt2"), "--target", "native", "--records", str(tmp_path / "records.sqlite")])
    assert len(given) == 2 and given[0] == given[1] and given[0]
