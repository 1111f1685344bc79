"""The regions of a chain one after another (`partition.apart`): what they compute, their place among trials, and the text of their schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.compiled import Case
from tests.emulated_gpu import EmulatedServer
from tests.interpreted import check_interpreted
from tests.test_chains import CASES, always, chain_problem, conv, inverted
from tests.test_gpu_chains import any_tiles
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.registry import library
from tilewright.kernels.schema import Numerics
from tilewright.partition.apart import Apart, lower_apart, parts_of
from tilewright.partition.chain_kernel import StripSchedule
from tilewright.partition.judges import lower, ways_of
from tilewright.partition.strip_judge import StripJudge
from tilewright.partition.tile_judge import TileJudge
from tilewright.selection.choice import choose, rank
from tilewright.tuning import serialisation, trials
from tilewright.tuning.trials import Job, Outcome, Timing
from tilewright.tuning.tuning import apart_of

H200, X86 = machine("h200"), machine("x86-avx2")
CHAIN = chain_problem(inverted(16, 32), torch.randn(1, 16, 9, 11))


def apart(problem: Problem, here: Any, threads: int = 1) -> Apart:
    """The regions of a chain by the schedules that the models take."""
    return Apart(tuple(choose(part, here, threads).schedule for part in parts_of(problem)))


def lowered_apart(judge: StripJudge | TileJudge, problem: Problem, schedule: object) -> Lowered:
    return lower_apart(problem, apart(problem, judge.machine, getattr(judge, "threads", 1)), judge.machine)


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("here", [H200, X86], ids=lambda here: here.name)
def test_regions_one_after_another_compute_the_chain(here: Any, name: str) -> None:
    """Their kernels stand for those of chains in whole programs, in the interpreter, with results in between in storage of the chain."""
    module, shape, rows = CASES[name]
    with any_tiles(0) if here.is_gpu else always(rows), mock.patch.object(TileJudge if here.is_gpu else StripJudge, "lower", lowered_apart):
        with mock.patch("tests.test_apart.lower_apart", wraps=lower_apart) as made:
            check_interpreted([Case(name, module, (torch.randn(shape),))], here, 2)
    assert made.called


def test_each_region_has_its_own_kernels() -> None:
    """Also where a region of the canonical chain is no canonical region."""
    for here in (H200, X86):
        made = lower(CHAIN, apart(CHAIN, here), here)
        parts = [lower(part, choose(part, here).schedule, here) for part in parts_of(CHAIN)]
        assert [call.kernel for call in made.calls] == [call.kernel for part in parts for call in part.calls]
        inner = {stage.outputs[0] for stage in CHAIN.region.stages[:-1]}
        assert {name for name, entry in made.storage.items() if entry.source is None} == inner
        assert all(made.storage[name].layout == CHAIN.layouts[name] for name in inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_regions_apart_are_checked_and_timed(dtype: torch.dtype, tmp_path: Path) -> None:
    """The process that measures on a GPU, over an emulated one, with and without halos of results in between."""
    for network in (inverted(8, 32), nn.Sequential(conv(8, 16, 3, 1, 1), conv(16, 16, 3, 2, 1, 16), nn.Conv2d(16, 8, 1))):
        problem = chain_problem(network.to(dtype), torch.randn(1, 8, 8, 4, dtype=dtype))
        server = EmulatedServer(problem, H200, seconds=1e-2)
        program = json.loads(json.dumps(server.program(apart(problem, H200), tmp_path)))
        assert len(program["calls"]) >= 3
        answer = server.trial({"program": program, "mode": "warm"})
        assert "error" not in answer and answer["relative_error"] < (1e-5 if dtype is torch.float32 else 2e-3), answer


def test_schedules_that_do_not_fit_are_refused() -> None:
    fitting = apart(CHAIN, H200)
    foreign = library(H200).schedule("convolution")
    for schedules in (
        fitting.schedules[:2],
        (*fitting.schedules[1:], fitting.schedules[0]),
        (StripSchedule(1, 1, 2), *fitting.schedules[1:]),
        (fitting, *fitting.schedules[1:]),
        (*fitting.schedules[:2], foreign),
        (foreign, *fitting.schedules[1:]),
    ):
        with pytest.raises(Unsuitable):
            lower(CHAIN, Apart(schedules), H200)


def test_regions_apart_are_no_way_of_a_chain() -> None:
    for here in (H200, X86):
        assert not any(isinstance(way.schedule, Apart) for way in ways_of(CHAIN, here, 1))


def test_regions_apart_replace_a_chain_only_in_turns_with_it() -> None:
    """The fastest way of the chain is measured again beside its regions, however much faster they seem."""
    first, second = (Job(CHAIN, way.schedule) for way in ways_of(CHAIN, H200, 1)[:2])
    rest = Job(CHAIN, apart(CHAIN, H200))

    def kept(*times: tuple[Job, float]) -> list[Job]:
        outcomes = [Outcome(job, "measured", timing=Timing.of([seconds])) for job, seconds in times]
        return [outcome.job for outcome, _ in trials._finalists([(outcome, {}) for outcome in sorted(outcomes, key=lambda outcome: outcome.seconds)])]

    assert kept((first, 3.0), (second, 4.0), (rest, 1.0)) == [rest, first]
    assert kept((first, 1.0), (rest, 1.05)) == [first, rest] and kept((first, 1.0), (rest, 3.0)) == []


def test_the_text_of_schedules_apart() -> None:
    for here in (H200, X86):
        schedule = apart(CHAIN, here)
        text = serialisation.schedule_text(schedule)
        serialisation.check_schedule_text(text)
        assert serialisation.schedule_of(text) == schedule and hash(schedule) == hash(replace(schedule))


STRIP = '{"type": "StripSchedule", "rows": 1, "workers": 1}'


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "Apart", "schedules": [1, 2]}',
        '{"type": "Apart", "schedules": [{"rows": 1}]}',
        '{"type": "Apart", "schedules": [{"type": "StripSchedule", "rows": 0, "workers": 1}]}',
        f'{{"type": "Apart", "schedules": [{{"type": "Apart", "schedules": [{STRIP}]}}]}}',
        '{"type": "StripSchedule", "rows": {"type": "StripSchedule"}, "workers": 1}',
        f'{{"type": "Apart", "schedules": [{", ".join(65 * [STRIP])}]}}',
    ],
)  # fmt: skip
def test_texts_that_are_no_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schedule"):
        serialisation.check_schedule_text(text)


def test_libraries_are_not_measured_apart() -> None:
    """A region that a library computes fastest leaves its chain undecided."""

    def chooser(by_library: bool, measured: float | None = 1e-6) -> Any:
        def chosen(problem: Problem, here: Any, threads: int) -> Any:
            found = rank(problem, here, threads, Numerics(vendor=by_library))
            return replace(next(iter(found.library), found.first()) if by_library else found.first(), measured_seconds=measured)

        return chosen

    assert apart_of(CHAIN, H200, 1, chooser(False)) == apart(CHAIN, H200)
    assert apart_of(CHAIN, H200, 1, chooser(True)) is None and apart_of(CHAIN, H200, 1, chooser(False, None)) is None
