"""Chains as candidates of trials: they are measured as one kernel, recorded, and decided by what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.test_chains import chain_problem, conv, graph_of, inverted
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.partition.chain_kernel import StripSchedule
from tilewright.partition.chains import lower, parts_of
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import measurement_of
from tilewright.tuning.problems import key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.trials import TUNING_MODE, Job, Outcome, Timing
from tilewright.tuning.tuning import distinct_problems, from_records, recorded_as, recorded_chains, strips_of

NATIVE = machine("native")
MODULE = nn.Sequential(conv(16, 48), conv(48, 48, 3, 1, 1, 48), conv(48, 16))
INPUT = torch.randn(1, 16, 20, 20)


def outcome(problem: Problem, schedule: object, seconds: float) -> Outcome:
    lowered = lower(problem, schedule, NATIVE)
    code = "+".join(dict.fromkeys(call.kernel for call in lowered.calls))
    return Outcome(Job(problem, schedule), "measured", "", Timing(seconds, seconds, seconds, 9), TUNING_MODE, code, lowered.schedule)


def planned(records: Records) -> Program:
    return plan_program(graph_of(MODULE, INPUT), NATIVE, 1, from_records(records), recorded=recorded_chains(records))


def recorded(records: Records, ratio: float) -> None:
    """Records a microsecond for each region, and for each chain `ratio` of what its regions take."""
    for problem in distinct_problems(graph_of(MODULE, INPUT), NATIVE, 1):
        if problem.region.kind == "chain":
            found = outcome(problem, strips_of(problem, NATIVE, 1)[0].schedule, ratio * 1e-6 * len(problem.region.stages))
        else:
            found = outcome(problem, choose(problem, NATIVE, 1).schedule, 1e-6)
        records.add([measurement_of(found, NATIVE, recorded_as(NATIVE, 1))])


@pytest.mark.parametrize(("ratio", "chains"), [(0.5, 1), (2.0, 0)])
def test_what_was_measured_decides(ratio: float, chains: int, tmp_path: Path) -> None:
    with Records(tmp_path / "records.sqlite") as records:
        recorded(records, ratio)
        program = planned(records)
    assert sum(lowered.region.kind == "chain" for lowered in program.regions) == chains
    decided = [decision for decision in program.search if "measured" in decision.text]
    assert decided and any(decision.taken for decision in decided) == bool(chains)
    for lowered in program.regions:
        if lowered.region.kind == "chain":
            assert lowered.measured_seconds == pytest.approx(ratio * 1e-6 * len(lowered.region.stages))


def test_a_chain_whose_regions_were_not_all_measured_is_predicted(tmp_path: Path) -> None:
    with Records(tmp_path / "records.sqlite") as records:
        for problem in distinct_problems(graph_of(MODULE, INPUT), NATIVE, 1):
            if problem.region.kind == "chain":
                found = outcome(problem, strips_of(problem, NATIVE, 1)[0].schedule, 1.0)
                records.add([measurement_of(found, NATIVE, recorded_as(NATIVE, 1))])
        assert not any("measured" in decision.text for decision in planned(records).search)


def test_chains_are_measured_and_right(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    reference = MODULE.double()(INPUT.double())
    module = MODULE.float()
    executable = tilewright.compile(module, (INPUT,), "native", trials=2, records=path, threads=1)
    torch.testing.assert_close(executable(INPUT).double(), reference, rtol=1e-5, atol=1e-5)
    with Records(path, write=False) as records:
        found = [entry for entry in records.all() if entry.kind == "chain"]
    assert found and all(entry.status == "measured" for entry in found), [entry.reason for entry in found]
    assert any("; measured" in decision.text for decision in executable.image.program.search)


def test_problems_of_a_chain_are_those_of_its_regions() -> None:
    """A chain is identified by where its regions end; its regions are the problems that they are by themselves."""
    graph = graph_of(MODULE, INPUT)
    problems = distinct_problems(graph, NATIVE, 1)
    alone = []

    def collect(problem: Problem, *given: object) -> object:
        alone.append(key_of(problem))
        return choose(problem, NATIVE, 1)

    plan_program(graph, NATIVE, 1, collect, chains=False)  # type: ignore[arg-type]
    chained = [problem for problem in problems if problem.region.kind == "chain"]
    assert chained
    for problem in chained:
        assert {key_of(part) for part in parts_of(problem)} <= set(alone)
        first, *others = problem.region.stages
        other = replace(first, steps=(*first.steps, *(step for stage in others for step in stage.steps)), outputs=problem.region.outputs)
        assert key_of(replace(problem, region=replace(problem.region, stages=(other,)))) != key_of(problem)
        decoded = serialisation.decode(serialisation.encode(problem))
        assert key_of(decoded) == key_of(problem)
        schedule = strips_of(problem, NATIVE, 1)[0].schedule
        assert serialisation.schedule_of(serialisation.schedule_text(schedule)) == schedule
        assert [kernel.name for kernel in lower(decoded, schedule, NATIVE).kernels] == [
            kernel.name for kernel in lower(problem, schedule, NATIVE).kernels
        ]


@pytest.mark.parametrize("schedule", [StripSchedule(3, 1, 9), StripSchedule(1 << 30, 1, 2), StripSchedule(0, 1, 2)])
def test_recorded_strips_that_are_no_candidates_are_not_lowered(schedule: StripSchedule) -> None:
    problem = chain_problem(inverted(16, 32), torch.randn(1, 16, 9, 11))
    with pytest.raises(Unsuitable):
        lower(problem, schedule, NATIVE)


def test_reference_of_a_chain() -> None:
    module = nn.Sequential(conv(8, 16, 3, 1, 1), conv(16, 16, 3, 2, 1, 16), nn.Conv2d(16, 8, 1)).eval()
    problem = chain_problem(module, torch.randn(2, 8, 9, 7))
    inputs = {name: torch.randn(problem.values[name].shape) for name in problem.region.inputs}
    (result,) = reference_results(problem, inputs).values()
    first, second, third = (stage.inputs for stage in problem.region.stages)

    def layer(x: torch.Tensor, names: tuple[str, ...], stride: int, groups: int) -> torch.Tensor:
        own = [inputs[name].double() for name in names if name in inputs and name in problem.constants]
        weight = next(tensor for tensor in own if tensor.dim() == 4)
        bias = next(tensor for tensor in own if tensor is not weight).reshape(-1)
        return nn.functional.conv2d(x, weight, bias, stride, weight.shape[2] // 2, 1, groups)

    data = next(inputs[name].double() for name in first if name not in problem.constants)
    expected = layer(layer(layer(data, first, 1, 1).relu(), second, 2, 16).relu(), third, 1, 1)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
