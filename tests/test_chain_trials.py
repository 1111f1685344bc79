"""Chains as candidates of trials: they are measured as one kernel, recorded, and decided by what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.emulated_gpu import EmulatedServer
from tests.stand_ins import stand_ins
from tests.test_chains import chain_problem, conv, graph_of, inverted
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.partition.chain_kernel import StripSchedule
from tilewright.partition.chains import parts_of
from tilewright.partition.judges import lower, ways_of
from tilewright.partition.plan import plan_program
from tilewright.partition.tile_kernel import TileSchedule
from tilewright.selection.choice import choose
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import Measurement, measurement_of
from tilewright.tuning.problems import key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.trials import TUNING_MODE, Job, Outcome, Timing
from tilewright.tuning.tuning import distinct_problems, from_records, recorded_as, recorded_chains, tune

NATIVE, H200 = machine("native"), machine("h200")
MODULE = nn.Sequential(conv(16, 48), conv(48, 48, 3, 1, 1, 48), conv(48, 16))
INPUT = torch.randn(1, 16, 20, 20)


def outcome(problem: Problem, schedule: object, seconds: float, here: Machine) -> Outcome:
    lowered = lower(problem, schedule, here)
    code = "+".join(dict.fromkeys(call.kernel for call in lowered.calls))
    return Outcome(Job(problem, schedule), "measured", "", Timing(seconds, seconds, seconds, 9), TUNING_MODE, code, lowered.schedule)


def planned(records: Records, here: Machine) -> Program:
    return plan_program(graph_of(MODULE, INPUT), here, 1, from_records(records), recorded=recorded_chains(records))


def recorded(records: Records, ratio: float, here: Machine, regions: bool = True) -> None:
    """Records a microsecond for each region, and for each chain `ratio` of what its regions take, with the second best schedule that can be lowered."""
    for problem in distinct_problems(graph_of(MODULE, INPUT), here, 1):
        if problem.region.kind == "chain":
            found = outcome(problem, ways_of(problem, here, 1)[1].schedule, ratio * 1e-6 * len(problem.region.stages), here)
        else:
            found = outcome(problem, choose(problem, here, 1).schedule, 1e-6, here)
        if regions or problem.region.kind == "chain":
            records.add([measurement_of(found, here, recorded_as(here, 1))])


@pytest.mark.parametrize("here", [NATIVE, H200], ids=lambda here: here.name)
@pytest.mark.parametrize(("ratio", "chains"), [(0.5, 1), (2.0, 0)])
def test_what_was_measured_decides(ratio: float, chains: int, here: Machine, tmp_path: Path) -> None:
    with Records(tmp_path / "records.sqlite") as records:
        recorded(records, ratio, here)
        program = planned(records, here)
    assert sum(lowered.region.kind == "chain" for lowered in program.regions) == chains
    decided = [decision for decision in program.search if "measured" in decision.text]
    assert decided and any(decision.taken for decision in decided) == bool(chains)
    for lowered in program.regions:
        if lowered.region.kind == "chain":
            assert lowered.measured_seconds == pytest.approx(ratio * 1e-6 * len(lowered.region.stages))
            (apart,) = lowered.comparison.others
            assert apart.measured_seconds == pytest.approx(1e-6 * len(lowered.region.stages))
            entries = [entry for entry in records_of(tmp_path) if entry.kind == "chain"]
            assert lowered.schedule in {entry.description for entry in entries}  # not the one predicted fastest


def records_of(folder: Path) -> list[Measurement]:
    with Records(folder / "records.sqlite", write=False) as records:
        return list(records.all())


@pytest.mark.parametrize("here", [NATIVE, H200], ids=lambda here: here.name)
def test_a_chain_whose_regions_were_not_all_measured_is_predicted(here: Machine, tmp_path: Path) -> None:
    """On a GPU it is not taken, as no prediction decides there."""
    with Records(tmp_path / "records.sqlite") as records:
        recorded(records, 0.5, here, regions=False)
        program = planned(records, here)
    assert not any("measured" in decision.text for decision in program.search)
    assert not here.is_gpu or not program.search


def test_each_partition_of_a_path_on_a_gpu_is_a_candidate() -> None:
    """Chains that are predicted to gain or to lose little, and all of their regions apart; failures to lower are outcomes of trials."""
    problems = {key_of(problem): problem for problem in distinct_problems(graph_of(MODULE, INPUT), H200, 1)}
    chains = [problem for problem in problems.values() if problem.region.kind == "chain"]
    assert {len(chain.region.stages) for chain in chains} == {2, 3}
    for chain in chains:
        assert {key_of(part) for part in parts_of(chain)} <= problems.keys()
        schedules = [way.schedule for way in ways_of(chain, H200, 1)]
        assert len(schedules) > 1 and len(set(schedules)) == len(schedules)
        assert [serialisation.schedule_of(serialisation.schedule_text(schedule)) for schedule in schedules] == schedules
        serialisation.check_schedule_text(serialisation.schedule_text(schedules[0]))


def test_partitions_on_a_gpu_are_measured_and_decided(tmp_path: Path) -> None:
    """Processes that stand in for a GPU's lower all candidates; a plan takes the chain whose recorded time is less than those of its regions."""
    graph = graph_of(MODULE, INPUT)
    problems = distinct_problems(graph, H200, 1)
    with Records(tmp_path / "records.sqlite") as records:
        tuned = tune(problems, H200, 2, records, start=stand_ins)
        assert tuned.failed == 0 and tuned.measured > len(problems)
        program = planned(records, H200)
        best = {key_of(problem): records.standing(key_of(problem), "h200")[0].seconds for problem in problems}
    gains = [sum(best[key_of(part)] for part in parts_of(problem)) - best[key_of(problem)] for problem in problems if problem.region.kind == "chain"]
    assert max(gains) > 0 and any(lowered.region.kind == "chain" for lowered in program.regions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_of_each_kind_are_checked_and_timed(dtype: torch.dtype, tmp_path: Path) -> None:
    """The process that measures on a GPU, over an emulated one: without and with chunks of channels, and rows that clusters exchange."""
    problem = chain_problem(inverted(8, 32).to(dtype), torch.randn(1, 8, 8, 4, dtype=dtype))
    server, kinds = EmulatedServer(problem, H200, seconds=1e-2), set()
    for way in ways_of(problem, H200, 1):
        assert isinstance(way.schedule, TileSchedule)
        kind = (way.schedule.chunk > 0, way.schedule.exchanged > 0)
        if kind in kinds:
            continue
        kinds.add(kind)
        program = json.loads(json.dumps(server.program(way.schedule, tmp_path)))
        answer = server.trial({"program": program, "mode": "warm"})
        assert "error" not in answer and answer["relative_error"] < (1e-5 if dtype is torch.float32 else 2e-3), answer
    assert kinds == ({(False, False), (True, False), (False, True), (True, True)} if dtype is torch.float32 else {(False, False), (True, False)})


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
        schedule = ways_of(problem, NATIVE, 1)[0].schedule
        assert serialisation.schedule_of(serialisation.schedule_text(schedule)) == schedule
        assert [kernel.name for kernel in lower(decoded, schedule, NATIVE).kernels] == [
            kernel.name for kernel in lower(problem, schedule, NATIVE).kernels
        ]


STRIPS = [StripSchedule(3, 1, 9), StripSchedule(1 << 30, 1, 2), StripSchedule(0, 1, 2)]
TILES = [TileSchedule((3, 4), 64, 1), TileSchedule((3, 4, 11), 64, 1), TileSchedule((16, 3, 11), 63, 1), TileSchedule((16, 3, 11), 64, 1 << 30), TileSchedule((16, 3, 11), 64, 1, 7), TileSchedule((16, 3, 11), 64, 1, 0, 2), TileSchedule((16, 3, 11), 64, 1, 0, 9)]


@pytest.mark.parametrize("schedule", [*STRIPS, *TILES, TileSchedule((16, 0, 11), 64, 1), TileSchedule((16, 3, 11), 0, 0)])
def test_recorded_schedules_that_are_no_candidates_are_not_lowered(schedule: object) -> None:
    problem = chain_problem(inverted(16, 32), torch.randn(1, 16, 9, 11))
    for here in (NATIVE, H200):
        with pytest.raises(Unsuitable):
            lower(problem, schedule, here)


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
