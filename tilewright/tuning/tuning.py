"""Tuning: the best predicted candidates of each problem are measured and recorded, and plans use the fastest recorded schedules.

Recorded candidates are not measured again, so interrupted tuning resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import UnsupportedOption
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.ir.space import Candidate, Comparison
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.registry import library
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.apart import Apart, parts_of
from tilewright.partition.context import Chooser, Recorded, deciding_once
from tilewright.partition.judges import SCHEDULES, lower, ways_of
from tilewright.partition.merges import Measured
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice, Ranking
from tilewright.stages import Stages
from tilewright.text import seconds_text
from tilewright.tuning import serialisation
from tilewright.tuning.choices import remembered
from tilewright.tuning.code_choice import reads_code
from tilewright.tuning.measurement import Measurement, measurement_of
from tilewright.tuning.problems import code_of, generator, key_of
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.trials import ROUNDS, TUNING_MODE, Job, Outcome, Trials, doubtful

Report = Callable[[int, int, Outcome | None], None]
"""Called as report(done, total, outcome)."""
WAYS = 4
"""Maximum number of strips or tiles of a chain that are measured: one kernel of several regions takes long to compile."""

OUTSIDE = "recorded, and no candidate of this region"
"""Why a recorded schedule is not chosen: it is from another release, or the record was written by something else."""


@dataclass(frozen=True)
class Tuned:
    """Number of problems and of their candidates: `known` were already in the records, the lower bounds of `bounded_out` exceed the best recorded
    time, and `repeated` were measured again in turns."""

    problems: int
    known: int
    measured: int
    failed: int
    bounded_out: int = 0
    repeated: int = 0


def distinct_problems(
    graph: Graph,
    machine: Machine,
    threads: int,
    precision: str = "fp32",
    numerics: Numerics = USUAL,
    stages: Stages | None = None,
    chains: bool = True,
    updates: Sequence[tuple[int, int]] = (),
) -> list[Problem]:
    """The distinct problems of a graph in execution order: those of single regions and, if `chains`, of chains that are predicted to gain or to lose
    little; without parts of loops, which depend on the loop's step, and without regions that store some elements of an input, whose other elements
    no trial has. `updates`: as for `plan_program`; layouts depend on them."""
    found: dict[str, Problem] = {}

    def collect(problem: Problem, machine: Machine, threads: int) -> Choice:
        if problem.is_whole and not problem.updates:
            found.setdefault(key_of(problem), problem)
        return choose(problem, machine, threads, numerics)

    def with_parts(chain: Problem, machine: Machine, threads: int, _: Chooser) -> None:
        for problem in (*parts_of(chain), chain):
            found.setdefault(key_of(problem), problem)

    plan_program(graph, machine, threads, collect, precision, numerics, chains=chains, recorded=with_parts, stages=stages, updates=updates)
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
        if entry.generator == generator(machine, problem.region.kind == "chain") and type(schedule) is not library(machine).schedule:
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
        standing = records.standing(key_of(problem), recorded_as(machine, threads)) if records is not None else []
        choice = decided(problem, machine, threads, ranking, standing)
        notes = (*choice.notes, *library_notes(problem, machine, threads, ranking, standing))
        return replace(choice, notes=notes, comparison=with_records(choice.comparison, problem, machine, standing))

    def decided(problem: Problem, machine: Machine, threads: int, ranking: Ranking, standing: Sequence[Measurement]) -> Choice:
        failed: dict[str, list[Measurement]] = {}
        outside = 0
        for entry in standing:
            if entry.status != "measured":
                failed.setdefault(entry.schedule, []).append(entry)
                continue
            choice = recorded_choice(entry, ranking)
            outside += choice is None
            if choice is not None and is_current(problem, entry, machine):
                return replace(ranking.compared(choice), measured_seconds=entry.seconds)
        rejected = {**ranking.rejected, OUTSIDE: outside} if outside else ranking.rejected
        if not failed and models is not None:
            return replace(models(problem, machine, threads), rejected=rejected)
        for choice in ranking:
            known = failed.get(serialisation.schedule_text(choice.schedule), ())
            if not any(is_current(problem, entry, machine) for entry in known):
                return replace(ranking.compared(choice), rejected=rejected)
        return replace(ranking.compared(ranking.first()), rejected=rejected)

    return chosen


def with_records(comparison: Comparison, problem: Problem, machine: Machine, standing: Sequence[Measurement]) -> Comparison:
    """The comparison with the recorded times of the candidates that were not chosen."""

    def measured(other: Candidate) -> float | None:
        its = (entry for entry in standing if entry.status == "measured" and entry.description == other.schedule)
        return next((entry.seconds for entry in its if is_current(problem, entry, machine)), None)

    return replace(comparison, others=tuple(replace(other, measured_seconds=measured(other)) for other in comparison.others))


def recorded_chains(records: Records) -> Recorded:
    """Finds the fastest recorded schedule of a chain whose code is still the same, and the time of its regions apart as they would be planned."""

    def found(chain: Problem, machine: Machine, threads: int, chooser: Chooser) -> Measured | None:
        standing = [entry for entry in records.standing(key_of(chain), recorded_as(machine, threads)) if entry.status == "measured"]
        current = (entry for entry in standing if is_current(chain, entry, machine))
        way = next((entry for entry in current if isinstance(serialisation.schedule_of(entry.schedule), SCHEDULES)), None)
        apart = apart_of(chain, machine, threads, chooser) if way is not None else None
        if way is None or apart is None:
            return None
        text = serialisation.schedule_text(apart)
        seconds = next((entry.seconds for entry in standing if entry.schedule == text and is_current(chain, entry, machine)), None)
        return Measured(serialisation.schedule_of(way.schedule), way.seconds, seconds) if seconds is not None else None

    return found


def apart_of(chain: Problem, machine: Machine, threads: int, chooser: Chooser) -> Apart | None:
    """The regions of a chain by the schedules that were measured fastest; None if one was not measured, or a library computes it, whose operators a
    chain's kernels cannot be measured with."""
    choices = [chooser(part, machine, threads) for part in parts_of(chain)]
    if any(choice.measured_seconds is None or choice.schema is library(machine) for choice in choices):
        return None
    return Apart(tuple(choice.schedule for choice in choices))


def expectations(
    problem: Problem, machine: Machine, threads: int, standing: Sequence[Measurement], numerics: Numerics = USUAL
) -> tuple[str, dict[str, float]]:
    """The schedule that the models take for fastest, and the predicted seconds of those recorded schedules that are candidates (0 without a
    prediction), all as texts."""
    if problem.region.kind == "chain":
        ways = {serialisation.schedule_text(way.schedule): way.seconds for way in ways_of(problem, machine, threads, numerics)}
        return next(iter(ways), ""), ways
    ranking = rank(problem, machine, threads, numerics)
    recorded = {entry.schedule: recorded_choice(entry, ranking) for entry in standing}
    return serialisation.schedule_text(ranking.first().schedule), {text: choice.predicted for text, choice in recorded.items() if choice is not None}


def library_notes(problem: Problem, machine: Machine, threads: int, ranking: Ranking, standing: Sequence[Measurement]) -> tuple[str, ...]:
    """For each candidate of a library, its recorded time and on which machine it was measured, or that there is none."""
    place = recorded_as(machine, threads)
    notes = []
    for choice in ranking.library:
        text = serialisation.schedule_text(choice.schedule)
        entry = next((entry for entry in standing if entry.schedule == text and is_current(problem, entry, machine)), None)
        if entry is None:
            notes.append(f"{choice.schedule}: no recorded time on {place}, so that it is not chosen")
        elif entry.status == "measured":
            notes.append(f"{choice.schedule}: measured {seconds_text(entry.seconds)} on {place}")
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
def chooser_for(
    machine: Machine, path: str | Path | None, numerics: Numerics = USUAL, by_code: bool = True
) -> Iterator[tuple[Chooser, Recorded | None]]:
    """The chooser for the machine, by records if there are any, otherwise by the models, and what was measured of chains, if anything. Without a
    path, the user's records are used if they exist. `numerics`: the kinds of rounding that are allowed. `by_code`: whether compiled code may decide
    between candidates that the models predict alike.

    Raises:
        UnsupportedOption: if there is no file at the path.
    """
    place = Path(path) if path is not None else default_path()
    if path is not None and not place.exists():
        raise UnsupportedOption(f"there are no records at {place}", "name a file that `tilewright tune` wrote, or leave the option out")
    models = remembered(numerics, by_code and reads_code(machine))
    if not place.exists():
        yield from_records(None, numerics, models) if numerics.vendor else models, None
        return
    with Records(path, write=False) as records:
        yield from_records(records, numerics, models), recorded_chains(records)


def tune(
    problems: Sequence[Problem],
    machine: Machine,
    trials: int,
    records: Records,
    *,
    threads: int = 1,
    numerics: Numerics = USUAL,
    again: bool = False,
    report: Report | None = None,
    compiled: Callable[[int, int], None] | None = None,
    start: Callable[[], Trials] | None = None,
) -> Tuned:
    """Measures the `trials` best predicted candidates of each problem (of a chain at most `WAYS`), those of libraries if `numerics` allows them, and
    again in turns those near the best and those far from their predictions; each is recorded immediately. Candidates whose lower bound exceeds the
    best recorded time are skipped. Chains come after all regions, and beside their candidates the regions apart (`partition.apart`), by the
    schedules that were measured fastest.

    `numerics`: the kinds of rounding that are allowed. `threads`: threads of a CPU. `again`: measures what is recorded too; the new times count.
    `compiled` is called, on a CPU, with the number of candidates compiled so far, and of all that have to be. `start` creates the processes if
    there is something to measure; by default for GPU 0, or for this CPU.

    Raises:
        TargetNotPresent: if something has to be measured and the machine is not here.
    """
    bounded_out, place = 0, recorded_as(machine, threads)
    wanted: list[Job] = []
    predictions: dict[str, dict[str, float]] = {}

    def standing(problem: Problem) -> list[Measurement]:
        """The standing measurements of the problem's candidates; recorded schedules that are not candidates are never lowered."""
        found = records.standing(key_of(problem), place)
        return [entry for entry in found if entry.status == "measured" and entry.schedule in predictions[key_of(problem)]]

    def left(problem: Problem) -> list[Measurement]:
        return _left(problem, machine, standing(problem), predictions[key_of(problem)])

    regions = [problem for problem in problems if problem.region.kind != "chain"]
    chains = [problem for problem in problems if problem.region.kind == "chain"]

    def apart() -> list[Job]:
        """The regions of each chain apart, if these were measured, and not yet apart."""
        chooser, found = deciding_once(from_records(records, numerics)), []
        for chain in chains:
            schedule = apart_of(chain, machine, threads, chooser)
            if schedule is not None:
                predictions[key_of(chain)][serialisation.schedule_text(schedule)] = 0.0
                found += [Job(chain, schedule)] if again or not _is_known(chain, schedule, machine, records, place) else []
        return found

    for problem in (*regions, *chains):
        if problem.region.kind == "chain":
            ranked = ways_of(problem, machine, threads, numerics)
            predictions[key_of(problem)] = {serialisation.schedule_text(way.schedule): way.seconds for way in ranked}
            before = {entry.schedule for entry in records.standing(key_of(problem), place)} if again else set()
            most = min(trials, WAYS)
            ways = (*ranked[:most], *(way for way in ranked[most:] if serialisation.schedule_text(way.schedule) in before))
            wanted += [Job(problem, way.schedule, predicted_seconds=way.seconds) for way in ways]
            continue
        ranking = rank(problem, machine, threads, numerics)
        recorded = [choice for entry in records.standing(key_of(problem), place) if (choice := recorded_choice(entry, ranking)) is not None]
        places = np.argsort(ranking.seconds, kind="stable")[:trials]
        first = [ranking.choice(int(position)) for position in places]
        predictions[key_of(problem)] = {serialisation.schedule_text(choice.schedule): choice.predicted for choice in (*recorded, *first)}
        fastest = float("inf") if again else _fastest(problem, machine, standing(problem))
        promising = [choice for choice, may in zip(first, may_beat(ranking, machine, fastest)[places], strict=True) if may]
        bounded_out += len(first) - len(promising)
        chosen = {choice.schedule: choice for choice in (*promising, *ranking.library, *(recorded if again else ()))}
        wanted += [Job(problem, choice.schedule, predicted_seconds=choice.predicted) for choice in chosen.values()]
    jobs = [job for job in wanted if again or not _is_known(job.problem, job.schedule, machine, records, place)]
    tell = report or (lambda done, total, outcome: None)
    known, measured, failed, repeated = len(wanted) - len(jobs), 0, 0, 0
    tell(known, len(wanted), None)
    if jobs or apart() or any(map(left, problems)):
        with (start or (lambda: Trials(machine, threads=threads)))() as processes:
            total, done, built = len(wanted), known, count(1)
            processes.compiled = lambda: compiled(next(built), total - known) if compiled is not None else None
            for some in (regions, chains):
                own = [job for job in jobs if (job.problem.region.kind == "chain") == (some is chains)]
                if some is chains:
                    compared = apart()
                    own = sorted((*own, *compared), key=lambda job: key_of(job.problem))
                    total += len(compared)
                for outcome in processes.measure(own, TUNING_MODE, finals=True):
                    records.add([measurement_of(outcome, machine, place)])
                    repeated += outcome.final
                    if not outcome.final:
                        done += 1
                        measured += outcome.status == "measured"
                        failed += outcome.status != "measured"
                        tell(done, total, outcome)
                for problem in some:  # left by an interrupted run, or close to the best of an earlier one
                    unsettled = [Job(problem, serialisation.schedule_of(entry.schedule)) for entry in left(problem)]
                    if unsettled:
                        outcomes = [outcome for outcome in processes.remeasure(unsettled, mode=TUNING_MODE) if outcome.timing]
                        records.add(measurement_of(outcome, machine, place) for outcome in outcomes)
                        repeated += len(outcomes)
    return Tuned(len(problems), known, measured, failed, bounded_out, repeated)


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


def _left(problem: Problem, machine: Machine, standing: Sequence[Measurement], predicted: Mapping[str, float]) -> list[Measurement]:
    """The candidates of a problem to measure again in turns, if at least one of them was measured only roughly; otherwise empty."""
    places = doubtful([entry.seconds for entry in standing], [predicted[entry.schedule] for entry in standing])
    if all(standing[place].count >= ROUNDS for place in places):
        return []
    current = [entry for entry in (standing[place] for place in places) if is_current(problem, entry, machine)]
    return current if any(entry.count < ROUNDS for entry in current) else []
