"""Tuning: the models' favourite candidates of each problem are measured and recorded, and plans take the best that records know.

What is recorded is not measured again, so that tuning that was interrupted goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import UnsupportedOption
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.plan import Chooser, plan_program
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice, Ranking
from tilewright.tuning import serialisation
from tilewright.tuning.choices import remembered
from tilewright.tuning.code_choice import CodeScores, reads_code
from tilewright.tuning.measurement import Measurement, measurement_of
from tilewright.tuning.problems import code_of, generator, key_of
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.trials import FINALISTS, NEAR, ROUNDS, TUNING_MODE, Job, Outcome, Trials

Report = Callable[[int, int, Outcome | None], None]
"""Called as report(done, total, outcome)."""


OUTSIDE = "recorded, and no candidate of this region"
"""Why a recorded schedule is not chosen: it is of another release, or somebody else wrote the record."""


@dataclass(frozen=True)
class Tuned:
    """How many problems there were, and what became of their candidates: `known` were in the records before, `bounded_out` cannot beat what
    is there by their bounds."""

    problems: int
    known: int
    measured: int
    failed: int
    bounded_out: int = 0


def distinct_problems(
    graph: Graph, machine: Machine, threads: int, precision: str = "fp32", numerics: Numerics = USUAL
) -> list[Problem]:
    """The problems of a graph in the order of execution, each once; parts of loops are left out, which depend on the loop's step."""
    found: dict[str, Problem] = {}

    def collect(problem: Problem, machine: Machine, threads: int) -> Choice:
        if problem.is_whole:
            found.setdefault(key_of(problem), problem)
        return choose(problem, machine, threads, numerics)

    plan_program(graph, machine, threads, collect, precision, numerics)
    return list(found.values())


def recorded_as(machine: Machine, threads: int) -> str:
    """What records name the machine: "native" is another CPU elsewhere, and kernels of two threads are others than those of one."""
    return machine.name if machine.is_gpu else f"{machine.name} {machine.digest[:12]} with {threads} threads"


def current_code(problem: Problem, schedule: Any, machine: Machine) -> str | None:
    """What a record of the schedule made today would name its code; None where it is not lowered."""
    try:
        return code_of(lower(problem, schedule, machine))
    except Unsuitable:
        return None


def is_current(problem: Problem, entry: Measurement, machine: Machine) -> bool:
    """Whether the code that was measured is the one that would be generated today. What made it is asked first: lowering takes longer."""
    if entry.generator == generator(machine):
        return True
    try:
        return current_code(problem, serialisation.schedule_of(entry.schedule), machine) == entry.code
    except (ValueError, KeyError, TypeError):  # of a schema or parameter that there is no more
        return False


def from_records(records: Records, numerics: Numerics = USUAL, models: Chooser | None = None) -> Chooser:
    """Chooses the schedule that was fastest in the records, where its code is still the same; else the models' favourite of those that did not
    fail, or what `models` choose where none is known to. Schedules that `numerics` does not allow are not chosen, however
    fast they were."""

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads, numerics)
        failed: dict[str, list[Measurement]] = {}
        outside = 0
        for entry in records.standing(key_of(problem), recorded_as(machine, threads)):
            if entry.status != "measured":
                failed.setdefault(entry.schedule, []).append(entry)
                continue
            choice = recorded_choice(entry, ranking)
            outside += choice is None
            if choice is not None and is_current(problem, entry, machine):
                return replace(choice, measured_seconds=entry.seconds)
        rejected = {**ranking.rejected, OUTSIDE: outside} if outside else ranking.rejected
        if not failed:
            found = models(problem, machine, threads) if models is not None else ranking.first()
            return replace(found, rejected=rejected)
        for choice in ranking:
            known = failed.get(serialisation.schedule_text(choice.schedule), ())
            if not any(is_current(problem, entry, machine) for entry in known):
                return replace(choice, rejected=rejected)
        return replace(ranking.first(), rejected=rejected)

    return chosen


def recorded_choice(entry: Measurement, ranking: Ranking) -> Choice | None:
    """The candidate that was measured, or None where it is none of these."""
    try:
        return ranking.find(serialisation.schedule_of(entry.schedule))
    except (ValueError, KeyError, TypeError, AttributeError):  # of a schema or parameter that there is no more
        return None


@contextmanager
def chooser_for(machine: Machine, path: str | Path | None, numerics: Numerics = USUAL) -> Iterator[Chooser]:
    """What plans for the machine: records where there are some, else the models. Without a path, the user's records where they exist. `numerics`:
    which ways of rounding are allowed.

    Raises:
        UnsupportedOption: if the path leads to no file.
    """
    place = Path(path) if path is not None else default_path()
    if path is not None and not place.exists():
        raise UnsupportedOption(f"there are no records at {place}", "name a file that `tilewright tune` wrote, or leave the option out")
    with ExitStack() as open_ones:
        scores = open_ones.enter_context(CodeScores(machine)) if reads_code(machine) else None
        models = remembered(numerics, scores)
        yield from_records(open_ones.enter_context(Records(path, write=False)), numerics, models) if place.exists() else models


def tune(
    problems: Sequence[Problem],
    machine: Machine,
    trials: int,
    records: Records,
    *,
    threads: int = 1,
    numerics: Numerics = USUAL,
    report: Report | None = None,
    start: Callable[[], Trials] | None = None,
) -> Tuned:
    """Measures the `trials` candidates of each problem that the models like best, and those near the best again in turns; all are recorded
    at once. Of a problem with records, those are left out that by their lower bound cannot be faster than the fastest recorded. `numerics`:
    which ways of rounding are allowed. `threads`: of a CPU. `start` makes the processes, when there is something to measure; by
    default for GPU 0, or for this CPU.

    Raises:
        TargetNotPresent: if something has to be measured and the machine is not here.
    """
    bounded_out, place = 0, recorded_as(machine, threads)
    wanted: list[tuple[Problem, Any]] = []
    strange: dict[str, set[str]] = {}

    def standing(problem: Problem) -> list[Measurement]:
        """Of the problem's candidates: a schedule that is none of them is never lowered, whoever recorded it."""
        found = records.standing(key_of(problem), place)
        return [entry for entry in found if entry.status == "measured" and entry.schedule not in strange[key_of(problem)]]

    for problem in problems:
        ranking = rank(problem, machine, threads, numerics)
        strange[key_of(problem)] = {entry.schedule for entry in records.standing(key_of(problem), place) if recorded_choice(entry, ranking) is None}
        first = np.argsort(ranking.seconds, kind="stable")[:trials]
        promising = first[may_beat(ranking, machine, _fastest(problem, machine, standing(problem)))[first]]
        wanted += [(problem, ranking.choice(int(position)).schedule) for position in promising]
        bounded_out += len(first) - len(promising)
    jobs = [Job(problem, schedule) for problem, schedule in wanted if not _is_known(problem, schedule, machine, records, place)]
    tell = report or (lambda done, total, outcome: None)
    known, measured, failed = len(wanted) - len(jobs), 0, 0
    tell(known, len(wanted), None)
    if jobs or any(_finalists(problem, machine, standing(problem)) for problem in problems):
        with (start or (lambda: Trials(machine, threads=threads)))() as processes:
            done = known
            for outcome in processes.measure(jobs, TUNING_MODE, finals=True):
                records.add([measurement_of(outcome, machine, place)])
                if not outcome.final:
                    done += 1
                    measured += outcome.status == "measured"
                    failed += outcome.status != "measured"
                    tell(done, len(wanted), outcome)
            for problem in problems:  # those that an earlier, interrupted run left, or that came near the best of one
                finalists = [Job(problem, serialisation.schedule_of(entry.schedule)) for entry in _finalists(problem, machine, standing(problem))]
                if finalists:
                    again = processes.remeasure(finalists, mode=TUNING_MODE)
                    records.add(measurement_of(outcome, machine, place) for outcome in again if outcome.timing)
    return Tuned(len(problems), known, measured, failed, bounded_out)


def may_beat(ranking: Ranking, machine: Machine, seconds: float) -> np.ndarray:
    """For each candidate whether its lower bound allows it to take less than that; all of a schema that has no bound."""
    bounds = [np.zeros(0)]
    for part in ranking.parts:
        known = part.schema.bound is not None
        bounds.append(lower_bound(part.schema, part.facts, part.candidates, machine).seconds if known else np.zeros(length(part.candidates)))
    return np.concatenate(bounds) < seconds


def _fastest(problem: Problem, machine: Machine, standing: Iterable[Measurement]) -> float:
    """The least seconds recorded of code that would be generated today; infinite where there are none."""
    return next((entry.seconds for entry in standing if is_current(problem, entry, machine)), float("inf"))


def _is_known(problem: Problem, schedule: Any, machine: Machine, records: Records, place: str) -> bool:
    """Whether the records have the schedule with the code that it has today, measured or failed."""
    text = serialisation.schedule_text(schedule)
    found = [entry for entry in records.of(key_of(problem), place) if entry.schedule == text and entry.code]
    return any(is_current(problem, entry, machine) for entry in found)


def _finalists(problem: Problem, machine: Machine, standing: Iterable[Measurement]) -> list[Measurement]:
    """The fastest of a problem where several are near each other and one of them was measured only roughly; else nothing."""
    first = list(islice(standing, FINALISTS))
    near = [entry for entry in first if entry.seconds <= NEAR * first[0].seconds]
    if all(entry.count >= ROUNDS for entry in near):
        return []
    current = [entry for entry in near if is_current(problem, entry, machine)]
    return current if len(current) > 1 and any(entry.count < ROUNDS for entry in current) else []
