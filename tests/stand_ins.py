"""Trials with stand-in processes, small problems for them to measure, and measurements as they would be recorded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.compiled import without_chains
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.library import OPERATORS
from tilewright.ir.problem import Problem
from tilewright.ir.region import MergeDecision, Program
from tilewright.kernels.registry import library, lower
from tilewright.kernels.schema import Numerics
from tilewright.partition.layout_choice import STORAGE
from tilewright.partition.merges import Compared, Timed, compared
from tilewright.runtime.loadable import LoadableProgram
from tilewright.selection.choice import rank
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.problems import code_of, convolution_problem, generator, key_of, text_of
from tilewright.tuning.records import Records
from tilewright.tuning.trials import Trials
from tilewright.tuning.tuning import current_code, distinct_problems, recorded_as

H200 = machine("h200")
FAKES = str(Path(__file__).with_name("fake_workers.py"))
SMALL = convolution_problem(16, 8, 6, 5, 3)
OTHER = convolution_problem(8, 8, 6, 6, 1)


def processes(faults: dict[str, str] | None = None, **options: Any) -> Trials:
    """Trials with two compiling stand-ins and one measuring stand-in."""
    given = json.dumps(faults or {})
    options = {"devices": (0,), "compile_workers": 2, "trial_seconds": 5.0, **options}
    return Trials(H200, measurer=(FAKES, "measure", given), compiler=(FAKES, "compile", given), **options)


def measurement(problem: Problem = SMALL, position: int = 0, seconds: float = 1e-5, **changes: Any) -> Measurement:
    """A measurement of a candidate of the ranking, as it would be recorded."""
    choice = next(islice(rank(problem, H200), position, None))
    entry = Measurement(
        key_of(problem), problem.region.kind, text_of(problem), serialisation.schedule_text(choice.schedule), str(choice.schedule), H200.name, "GPU", "13.0",
        "nvrtc", "network", current_code(problem, choice.schedule, H200) or "", "of another day", "measured", "", seconds, 0.9 * seconds, 1.1 * seconds, 4, False, 1e-7,
        '{"kernel": {"registers": 32}}', "2026-01-02T03:04:05.678+00:00",
    )  # fmt: skip
    return replace(entry, **changes)


def library_record(problem: Problem, operator: str, target: Machine, threads: int = 1, seconds: float = 1e-9, **changes: Any) -> Measurement:
    """A record of a library's operator, by default so fast that it is chosen."""
    schedule = library(target).schedule(operator)
    return replace(
        sample(),
        region=key_of(problem), kind=problem.region.kind, problem=text_of(problem), machine=recorded_as(target, threads),
        schedule=serialisation.schedule_text(schedule), description=str(schedule), code=code_of(lower(problem, schedule, target)),
        generator=generator(target), median=seconds, lower=seconds, upper=seconds, **changes,
    )  # fmt: skip


def record_libraries(
    path: Path, module: nn.Module, inputs: tuple[torch.Tensor, ...], target: Machine, operators: Collection[str] = OPERATORS
) -> None:
    """Records by which a library computes every region of a module that one can compute by some of its operators, on a GPU."""
    with Records(path) as records:
        for problem in distinct_problems(simplify(read(module, inputs).graph)[0], target, 1, numerics=Numerics(vendor=True)):
            if problem.region.kind == "chain":
                continue
            offered = [choice.schedule.operator for choice in rank(problem, target, 1, Numerics(vendor=True)).library]
            records.add([library_record(problem, name, target) for name in offered if name in operators])


def deciding(whether: bool) -> Callable[..., Compared]:
    """A stand-in for `partition.merges.compared` by which every merge is taken, or none, whatever the times are."""

    @dataclass(frozen=True)
    class Decided(Compared):
        @property
        def taken(self) -> bool:
            return whether

    def decided(together: Sequence[Timed], apart: Sequence[Timed], *_: object, **__: object) -> Compared:
        both = compared(together, apart)
        return Decided(both.together, both.apart, both.measured)

    return decided


FAILURE: dict[str, Any] = {"status": "failed", "reason": "hangs", "median": None, "lower": None, "upper": None, "count": 0}


def example() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Network().eval(), (torch.randn(1, 3, 8, 8),)


def problems_of_network() -> list[Problem]:
    module, inputs = example()
    graph, _ = simplify(read(module, inputs).graph)
    with without_chains():
        return distinct_problems(graph, H200, 1)


def stand_ins(faults: dict[str, str] | None = None) -> Trials:
    given = json.dumps(faults or {})
    return Trials(H200, (0,), 1, measurer=(FAKES, "measure", given), compiler=(FAKES, "compile", given))


@lru_cache
def sample(position: int = 0, problem: Problem = SMALL) -> Measurement:
    """A measurement of a problem's candidate."""
    return measurement(problem, position)


def filled(path: Path, count: int = 200) -> list[Measurement]:
    """Fills a store with `count` measurements and returns them."""
    entries = [replace(sample(), reason=f"number {number}") for number in range(count)]
    with Records(path) as records:
        records.add(entries)
    return entries


def database(path: Path, *statements: str) -> None:
    """Executes statements of SQL on a file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


class Network(nn.Module):
    """Two convolutions, of which the second runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def merges_of(program: Program | LoadableProgram) -> list[MergeDecision]:
    """What was decided about merges, without the layouts."""
    return [decision for decision in program.search if decision.kind != STORAGE]
