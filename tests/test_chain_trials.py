"""Chains as candidates of trials: they are measured as one kernel, recorded, and decided by what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.emulated_gpu import EmulatedServer
from tests.stand_ins import merges_of, stand_ins
from tests.test_chains import chain_problem, conv, graph_of, inverted
from tests.test_records import never
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.partition.apart import Apart, parts_of
from tilewright.partition.chain_kernel import StripSchedule
from tilewright.partition.judges import lower, ways_of
from tilewright.partition.merges import LEAST_GAIN
from tilewright.partition.plan import plan_program
from tilewright.partition.tile_kernel import TileSchedule
from tilewright.selection.choice import choose
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import Measurement, measurement_of
from tilewright.tuning.problems import key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.trials import ROUNDS, TUNING_MODE, Job, Outcome, Timing
from tilewright.tuning.tuning import WAYS, distinct_problems, from_records, recorded_as, recorded_chains, tune

NATIVE, H200 = machine("native"), machine("h200")
MODULE = nn.Sequential(conv(16, 48), conv(48, 48, 3, 1, 1, 48), conv(48, 16))
INPUT = torch.randn(1, 16, 20, 20)


def outcome(problem: Problem, schedule: object, seconds: float, here: Machine) -> Outcome:
    lowered = lower(problem, schedule, here)
    code = "+".join(dict.fromkeys(call.kernel for call in lowered.calls))
    return Outcome(Job(problem, schedule), "measured", "", Timing(seconds, seconds, seconds, 9), TUNING_MODE, code, lowered.schedule)


def planned(records: Records, here: Machine) -> Program:
    return plan_program(graph_of(MODULE, INPUT), here, 1, from_records(records), recorded=recorded_chains(records))


def apart(chain: Problem, here: Machine) -> Apart:
    """The regions of a chain by the schedules that the models take."""
    return Apart(tuple(choose(part, here, 1).schedule for part in parts_of(chain)))


APART = 0.6e-6
"""Seconds of each region one after another."""


@cache
def candidates(here: Machine) -> tuple[tuple[Outcome, Outcome | None], ...]:
    """The problems of the network with their chosen schedules; of chains the second best one, and that of the regions one after another."""
    found: list[tuple[Outcome, Outcome | None]] = []
    for problem in distinct_problems(graph_of(MODULE, INPUT), here, 1):
        if problem.region.kind == "chain":
            found.append((outcome(problem, ways_of(problem, here, 1)[1].schedule, 1.0, here), outcome(problem, apart(problem, here), 1.0, here)))
        else:
            found.append((outcome(problem, choose(problem, here, 1).schedule, 1.0, here), None))
    return tuple(found)


def taking(seconds: float, one: Outcome) -> Outcome:
    return replace(one, timing=Timing(seconds, seconds, seconds, 9))


def recorded(records: Records, ratio: float, here: Machine, regions: bool = True, together: bool = True) -> None:
    """Records a microsecond for each region by itself (without `regions`: for none), `APART` for each region after another (unless `together` is
    False), and for each chain `ratio` of that, with the second best schedule."""
    for own, after_another in candidates(here):
        found = []
        if after_another is not None:
            seconds = APART * len(own.job.problem.region.stages)
            found.append(taking(ratio * seconds, own))
            found += [taking(seconds, after_another)] if together else []
        elif regions:
            found.append(taking(1e-6, own))
        records.add(measurement_of(one, here, recorded_as(here, 1)) for one in found)


@pytest.mark.in_turns
@pytest.mark.parametrize("here", [NATIVE, H200], ids=lambda here: here.name)
@pytest.mark.parametrize(("ratio", "chains"), [(0.5, 1), (1.2, 0)])
def test_what_was_measured_decides(ratio: float, chains: int, here: Machine, tmp_path: Path) -> None:
    """A chain that takes less than the sum of its regions, each by itself, and more than they take one after another, is not taken."""
    with Records(tmp_path / "records.sqlite") as records:
        recorded(records, ratio, here)
        program = planned(records, here)
    assert sum(lowered.region.kind == "chain" for lowered in program.regions) == chains
    decided = [decision for decision in program.search if "measured" in decision.text]
    assert decided and any(decision.taken for decision in decided) == bool(chains)
    for lowered in program.regions:
        if lowered.region.kind == "chain":
            assert lowered.measured_seconds == pytest.approx(ratio * APART * len(lowered.region.stages))
            (apart,) = lowered.comparison.others
            assert apart.measured_seconds == pytest.approx(APART * len(lowered.region.stages))
            entries = [entry for entry in records_of(tmp_path) if entry.kind == "chain"]
            assert lowered.schedule in {entry.description for entry in entries}  # not the one predicted fastest


def records_of(folder: Path) -> list[Measurement]:
    with Records(folder / "records.sqlite", write=False) as records:
        return list(records.all())


@pytest.mark.in_turns
@pytest.mark.parametrize("here", [NATIVE, H200], ids=lambda here: here.name)
@pytest.mark.parametrize("lacking", ["regions", "together"])
def test_a_chain_without_measured_regions_is_predicted(lacking: str, here: Machine, tmp_path: Path) -> None:
    """If its regions were not all measured, or not one after another. On a GPU it is not taken, as no prediction decides there."""
    with Records(tmp_path / "records.sqlite") as records:
        recorded(records, 0.5, here, **{lacking: False})
        program = planned(records, here)
    assert not any("measured" in decision.text for decision in merges_of(program))
    assert not here.is_gpu or not merges_of(program)


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


@pytest.mark.slow
def test_partitions_on_a_gpu_are_measured_and_decided(tmp_path: Path) -> None:
    """Processes that stand in for a GPU's lower all candidates, and of each chain the fastest of its regions apart; a plan takes a chain whose
    recorded time is less than that. Nothing is measured twice, unless another schedule of a region becomes the fastest."""
    graph = graph_of(MODULE, INPUT)
    problems = distinct_problems(graph, H200, 1)
    chains = [problem for problem in problems if problem.region.kind == "chain"]

    def fastest(records: Records, problem: Problem) -> Measurement:
        return records.standing(key_of(problem), "h200")[0]

    def compared(records: Records, chain: Problem) -> tuple[Measurement, Measurement]:
        """The fastest way of a chain, and the regions apart."""
        schedule = Apart(tuple(serialisation.schedule_of(fastest(records, part).schedule) for part in parts_of(chain)))
        standing = records.standing(key_of(chain), "h200")
        (found,) = (entry for entry in standing if entry.schedule == serialisation.schedule_text(schedule))
        return next(entry for entry in standing if entry.description[:5] != "apart"), found

    def decided(records: Records) -> int:
        return len(merges_of(planned(records, H200)))

    with Records(tmp_path / "records.sqlite") as records:
        reports: list[tuple[int, int]] = []
        tuned = tune(problems, H200, 5, records, report=lambda done, total, _: reports.append((done, total)), start=stand_ins)
        assert tuned.failed == 0 and reports[-1] == (tuned.measured, tuned.measured)
        gains = []
        for chain in chains:
            assert len(records.standing(key_of(chain), "h200")) == 1 + min(WAYS, len(ways_of(chain, H200, 1)))
            way, rest = compared(records, chain)
            gains.append(1 - way.seconds / rest.seconds)
            if way.seconds < rest.seconds < 1.05 * way.seconds or rest.seconds < way.seconds:
                assert way.count == rest.count == ROUNDS, "not measured in turns"
        taken = [lowered for lowered in planned(records, H200).regions if lowered.region.kind == "chain"]
        assert bool(taken) == (max(gains) > LEAST_GAIN)
        assert tune(problems, H200, 5, records, start=never).measured == 0
        part = parts_of(chains[0])[0]
        entry = records.standing(key_of(part), "h200")[1]
        records.add([replace(entry, median=1e-9, lower=1e-9, upper=1e-9, date="2099-01-01T00:00:00.000+00:00", count=ROUNDS)])
        reading = sum(any(key_of(stage) == key_of(part) for stage in parts_of(chain)) for chain in chains)
        assert reading and decided(records) == len(chains) - reading, "decided by regions apart that would not be planned"
        again = tune(problems, H200, 5, records, start=stand_ins)
        assert (again.measured, again.failed) == (reading, 0) and decided(records) == len(chains)
        dates = {entry.date for chain in chains for entry in compared(records, chain)}
        tune(problems, H200, 1, records, again=True, start=stand_ins)
        assert dates.isdisjoint({entry.date for chain in chains for entry in compared(records, chain)})


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
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
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}


def test_chains_are_measured_and_right(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    reference = MODULE.double()(INPUT.double())
    module = MODULE.float()
    executable = tilewright.compile(module, (INPUT,), "native", trials=1, records=path, threads=1)
    torch.testing.assert_close(executable(INPUT).double(), reference, rtol=1e-5, atol=1e-5)
    with Records(path, write=False) as records:
        found = [entry for entry in records.all() if entry.kind == "chain"]
    assert found and all(entry.status == "measured" for entry in found), [entry.reason for entry in found]
    apart = [entry for entry in found if entry.description.startswith("apart: ")]
    assert {entry.region for entry in apart} == {entry.region for entry in found}
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
TILES = [
    TileSchedule((3, 4), 64, 1),
    TileSchedule((3, 4, 11), 64, 1),
    TileSchedule((16, 3, 11), 63, 1),
    TileSchedule((16, 3, 11), 64, 1 << 30),
    TileSchedule((16, 3, 11), 64, 1, 7),
    TileSchedule((16, 3, 11), 64, 1, 0, 2),
    TileSchedule((16, 3, 11), 64, 1, 0, 9),
]


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
