"""Tuning: the best predicted candidates of each problem are measured and recorded, and plans use the fastest recorded schedules.

Recorded candidates are not measured again, so interrupted tuning resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from tilewright.kernels.registry import library, lower
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.plan import Chooser, plan_program
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice, Ranking
from tilewright.tuning import serialisation
from tilewright.tuning.choices import remembered
from tilewright.tuning.code_choice import reads_code
from tilewright.tuning.measurement import Measurement, measurement_of
from tilewright.tuning.problems import code_of, generator, key_of
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.trials import FINALISTS, NEAR, ROUNDS, TUNING_MODE, Job, Outcome, Trials

Report = Callable[[int, int, Outcome | None], None]
"""Called as report(done, total, outcome)."""


OUTSIDE = "recorded, and no candidate of this region"
"""Why a recorded schedule is not chosen: it is from another release, or the record was written by something else."""


@dataclass(frozen=True)
class Tuned:
    """Number of problems and of their candidates: `known` were already in the records, and the lower bounds of `bounded_out` exceed the best recorded
    time."""

    problems: int
    known: int
    measured: int
    failed: int
    bounded_out: int = 0


def distinct_problems(
    graph: Graph, machine: Machine, threads: int, precision: str = "fp32", numerics: Numerics = USUAL
) -> list[Problem]:
    """The distinct problems of a graph in execution order: those of single regions, also where regions run in chains; without parts of loops, which
    depend on the loop's step."""
    found: dict[str, Problem] = {}

    def collect(problem: Problem, machine: Machine, threads: int) -> Choice:
        if problem.is_whole:
            found.setdefault(key_of(problem), problem)
        return choose(problem, machine, threads, numerics)

    plan_program(graph, machine, threads, collect, precision, numerics, chains=False)
    return list(found.values())


def recorded_as(machine: Machine, threads: int) -> str:
    """The machine's name in records; for a CPU it includes the machine's identity and the number of threads. "native" is another CPU on another
    machine, and kernels depend on the number of threads. Times that were measured are true whether or not the CPU is calibrated."""
    return machine.name if machine.is_gpu else f"{machine.name} {machine.identity[:12]} with {threads} threads"


def current_code(problem: Problem, schedule: Any, machine: Machine) -> str | None:
    """The name of the code that the schedule would generate today; None if it cannot be lowered."""
    try:
        return code_of(lower(problem, schedule, machine))
    except Unsuitable:
        return None


def is_current(problem: Problem, entry: Measurement, machine: Machine) -> bool:
    """Whether the measured code is the same as would be generated today. The generator is compared first, because lowering takes longer; it does not
    know the version of PyTorch's libraries, which the names of their code state."""
    try:
        schedule = serialisation.schedule_of(entry.schedule)
        if entry.generator == generator(machine) and type(schedule) is not library(machine).schedule:
            return True
        return current_code(problem, schedule, machine) == entry.code
    except (ValueError, KeyError, TypeError):  # the schema or a parameter no longer exists
        return False


def from_records(records: Records | None, numerics: Numerics = USUAL, models: Chooser | None = None) -> Chooser:
    """A chooser of the fastest recorded schedule whose code is still the same. Without one, it chooses the models' favourite among schedules that did
    not fail, or follows `models` if no failures are recorded. Schedules that `numerics` does not allow are never chosen. Without records it only adds
    to the choices which candidates of libraries were not measured."""

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads, numerics)
        failed: dict[str, list[Measurement]] = {}
        outside = 0
        standing = records.standing(key_of(problem), recorded_as(machine, threads)) if records is not None else []
        notes = library_notes(problem, machine, ranking, standing)
        for entry in standing:
            if entry.status != "measured":
                failed.setdefault(entry.schedule, []).append(entry)
                continue
            choice = recorded_choice(entry, ranking)
            outside += choice is None
            if choice is not None and is_current(problem, entry, machine):
                return replace(choice, measured_seconds=entry.seconds, notes=notes)
        rejected = {**ranking.rejected, OUTSIDE: outside} if outside else ranking.rejected
        if not failed:
            found = models(problem, machine, threads) if models is not None else ranking.first()
            return replace(found, rejected=rejected, notes=notes)
        for choice in ranking:
            known = failed.get(serialisation.schedule_text(choice.schedule), ())
            if not any(is_current(problem, entry, machine) for entry in known):
                return replace(choice, rejected=rejected, notes=notes)
        return replace(ranking.first(), rejected=rejected, notes=notes)

    return chosen


def library_notes(problem: Problem, machine: Machine, ranking: Ranking, standing: Sequence[Measurement]) -> tuple[str, ...]:
    """For each candidate of a library, its recorded time on this machine, or that there is none."""
    notes = []
    for choice in ranking.library:
        text = serialisation.schedule_text(choice.schedule)
        entry = next((entry for entry in standing if entry.schedule == text and is_current(problem, entry, machine)), None)
        if entry is None:
            notes.append(f"{choice.schedule}: no recorded time on this machine, so that it is not chosen")
        elif entry.status == "measured":
            notes.append(f"{choice.schedule}: measured {1e6 * entry.seconds:.3g} us")
        else:
            notes.append(f"{choice.schedule}: {entry.status} when it was measured ({entry.reason})")
    return tuple(notes)


def recorded_choice(entry: Measurement, ranking: Ranking) -> Choice | None:
    """The measured candidate; None if it is not in the ranking."""
    try:
        return ranking.find(serialisation.schedule_of(entry.schedule))
    except (ValueError, KeyError, TypeError, AttributeError):  # the schema or a parameter no longer exists
        return None


@contextmanager
def chooser_for(machine: Machine, path: str | Path | None, numerics: Numerics = USUAL) -> Iterator[Chooser]:
    """The chooser for the machine: by records if there are any, otherwise by the models. Without a path, the user's records are used if they exist.
    `numerics`: the kinds of rounding that are allowed.

    Raises:
        UnsupportedOption: if there is no file at the path.
    """
    place = Path(path) if path is not None else default_path()
    if path is not None and not place.exists():
        raise UnsupportedOption(f"there are no records at {place}", "name a file that `tilewright tune` wrote, or leave the option out")
    models = remembered(numerics, reads_code(machine))
    if not place.exists():
        yield from_records(None, numerics, models) if numerics.vendor else models
        return
    with Records(path, write=False) as records:
        yield from_records(records, numerics, models)


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
    """Measures the `trials` best predicted candidates of each problem, those of libraries if `numerics` allows them, and those near the best again in
    turns; each is recorded immediately.
    Candidates whose lower bound exceeds the best recorded time are skipped. `numerics`: the kinds of rounding that are allowed. `threads`: threads of
    a CPU. `start` creates the processes if there is something to measure; by default for GPU 0, or for this CPU.

    Raises:
        TargetNotPresent: if something has to be measured and the machine is not here.
    """
    bounded_out, place = 0, recorded_as(machine, threads)
    wanted: list[tuple[Problem, Any]] = []
    strange: dict[str, set[str]] = {}

    def standing(problem: Problem) -> list[Measurement]:
        """The standing measurements of the problem's candidates; recorded schedules that are not candidates are never lowered."""
        found = records.standing(key_of(problem), place)
        return [entry for entry in found if entry.status == "measured" and entry.schedule not in strange[key_of(problem)]]

    for problem in problems:
        ranking = rank(problem, machine, threads, numerics)
        strange[key_of(problem)] = {entry.schedule for entry in records.standing(key_of(problem), place) if recorded_choice(entry, ranking) is None}
        first = np.argsort(ranking.seconds, kind="stable")[:trials]
        promising = first[may_beat(ranking, machine, _fastest(problem, machine, standing(problem)))[first]]
        wanted += [(problem, ranking.choice(int(position)).schedule) for position in promising]
        wanted += [(problem, choice.schedule) for choice in ranking.library]
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
            for problem in problems:  # finalists left by an interrupted run, or close to the best of an earlier one
                finalists = [Job(problem, serialisation.schedule_of(entry.schedule)) for entry in _finalists(problem, machine, standing(problem))]
                if finalists:
                    again = processes.remeasure(finalists, mode=TUNING_MODE)
                    records.add(measurement_of(outcome, machine, place) for outcome in again if outcome.timing)
    return Tuned(len(problems), known, measured, failed, bounded_out)


def may_beat(ranking: Ranking, machine: Machine, seconds: float) -> np.ndarray:
    """For each candidate, whether its lower bound is below `seconds`; True for schemas without a bound."""
    bounds = [np.zeros(0)]
    for part in ranking.parts:
        known = part.schema.bound is not None
        bounds.append(lower_bound(part.schema, part.facts, part.candidates, machine).seconds if known else np.zeros(length(part.candidates)))
    return np.concatenate(bounds) < seconds


def _fastest(problem: Problem, machine: Machine, standing: Iterable[Measurement]) -> float:
    """The best recorded seconds of code that would be generated today; infinite if there are none."""
    return next((entry.seconds for entry in standing if is_current(problem, entry, machine)), float("inf"))


def _is_known(problem: Problem, schedule: Any, machine: Machine, records: Records, place: str) -> bool:
    """Whether the records have an outcome, measured or failed, of the schedule with today's code."""
    text = serialisation.schedule_text(schedule)
    found = [entry for entry in records.of(key_of(problem), place) if entry.schedule == text and entry.code]
    return any(is_current(problem, entry, machine) for entry in found)


def _finalists(problem: Problem, machine: Machine, standing: Iterable[Measurement]) -> list[Measurement]:
    """The fastest candidates of a problem, if several are close and at least one was measured only roughly; otherwise empty."""
    first = list(islice(standing, FINALISTS))
    near = [entry for entry in first if entry.seconds <= NEAR * first[0].seconds]
    if all(entry.count >= ROUNDS for entry in near):
        return []
    current = [entry for entry in near if is_current(problem, entry, machine)]
    return current if len(current) > 1 and any(entry.count < ROUNDS for entry in current) else []
