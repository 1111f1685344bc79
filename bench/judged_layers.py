"""Measures the twenty benchmark layers on the GPU present: candidates drawn evenly, every model's favourites, neighbours of the best.

    python -m bench.judged_layers evenly FILE [--each 600]
    python -m bench.judged_layers best FILE --models FOLDER [--top 100] [--again 50]

`evenly` appends to FILE candidates drawn independently of predictions, the same number from each schema. `best` adds the first `--top` of every
ranking method (`bench.model_comparison`) and all candidates that differ from the best of a schema in one axis; then the `--again` fastest, and the
first ten of every ranking, are measured again, interleaved, and those times count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.layers import LAYERS, layer
from bench.model_comparison import orders
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.collecting import collect, ranking_of
from tilewright.tuning.sampling import evenly
from tilewright.tuning.trials import Job, Trials

FIRST = 10
"""The number of first candidates of every ranking that are always measured again."""
MOST_NEIGHBOURS = 60
"""Maximum number of neighbours of one candidate."""


def texts(ranking: Ranking, positions: Sequence[int] | np.ndarray) -> list[str]:
    return [serialisation.schedule_text(ranking.choice(int(position)).schedule) for position in positions]


def neighbours(ranking: Ranking, schedule: Any) -> list[int]:
    """Positions of the candidates of the schedule's schema that differ from it in one axis."""
    for start, part in zip(ranking.starts, ranking.parts, strict=False):
        if part.schema.schedule is type(schedule):
            differing = np.sum([column != getattr(schedule, name) for name, column in part.candidates.items()], axis=0)
            near = np.flatnonzero(differing == 1)
            best = near[np.argsort(part.estimate.seconds[near], kind="stable")][:MOST_NEIGHBOURS]
            return [int(start + at) for at in best]
    return []


def fastest_of_each_schema(measured: dataset.MeasuredLayer) -> list[Any]:
    times = measured.times()
    best: dict[type, Any] = {}
    for text in sorted(times, key=lambda text: (times[text], text)):
        schedule = serialisation.schedule_of(text)
        best.setdefault(type(schedule), schedule)
    return list(best.values())


def measure_evenly(trials: Trials, machine: Machine, names: list[str], each: int, path: Path) -> None:
    def choose(described: Any, problem: Problem) -> list[Any]:
        ranking = ranking_of(problem, machine)
        positions = evenly(ranking, each, seed=int(described["outputs"]) * 7919 + int(described["channels"]))
        order = np.random.default_rng(0).permutation(positions)
        return [ranking.choice(int(position)).schedule for position in order]

    start = time.monotonic()
    count = collect(trials, machine, [layer(name) for name in names], choose, path)
    print(f"{count} candidates in {time.monotonic() - start:.0f} s", flush=True)


def measure_best(trials: Trials, machine: Machine, measured: list[dataset.MeasuredLayer], options: argparse.Namespace) -> list[dataset.MeasuredLayer]:
    problems = {str(entry.layer["name"]): dataset.layer_problem(entry.layer) for entry in measured}
    rankings = {name: ranking_of(problem, machine) for name, problem in problems.items()}
    first: dict[str, dict[str, list[str]]] = {}
    jobs: list[Job] = []
    for entry in measured:
        name = str(entry.layer["name"])
        found = orders(rankings[name], machine, options.models)
        first[name] = {way: texts(rankings[name], order[: options.top]) for way, order in found.items()}
        known = set(entry.times())
        near = [text for schedule in fastest_of_each_schema(entry) for text in texts(rankings[name], neighbours(rankings[name], schedule))]
        wanted = dict.fromkeys(text for way in first[name].values() for text in way)
        jobs += [Job(problems[name], serialisation.schedule_of(text), name) for text in dict.fromkeys((*wanted, *near)) if text not in known]
    start = time.monotonic()
    outcomes: dict[str, list[Any]] = {name: [] for name in problems}
    for outcome in trials.measure(jobs):
        outcomes[str(outcome.job.key)].append(outcome)
    print(f"{len(jobs)} candidates in {time.monotonic() - start:.0f} s", flush=True)
    result = []
    for entry in measured:
        name = str(entry.layer["name"])
        both = dataset.merged(entry, dataset.from_outcomes(entry.layer, machine.name, outcomes[name]))
        times = both.times()
        again = sorted(times, key=lambda text: (times[text], text))[: options.again]
        again += [text for way in first[name].values() for text in way[:FIRST] if text in times]
        repeated = [Job(problems[name], serialisation.schedule_of(text), name) for text in dict.fromkeys(again)]
        fine = dataset.from_outcomes(entry.layer, machine.name, trials.remeasure(repeated, options.rounds))
        both = dataset.merged(both, fine)
        before, after = min(times.values()), both.best
        print(f"{name}: {both.count} candidates, {len(repeated)} measured again; best {1e6 * before:.2f} -> {1e6 * after:.2f} us", flush=True)
        result.append(both)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=("evenly", "best"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--each", type=int, default=600)
    parser.add_argument("--models", type=Path, default=Path("build/models"))
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--again", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    machine = identified_machine(options.target)
    names = options.layers.split(",")
    with Trials(machine) as trials:
        if options.mode == "evenly":
            done = {str(entry.layer["name"]) for entry in dataset.read(options.file)} if options.file.exists() else set()
            measure_evenly(trials, machine, [name for name in names if name not in done], options.each, options.file)
            return
        everything = dataset.read(options.file)
        chosen = [entry for entry in everything if entry.layer["name"] in names]
        better = {str(entry.layer["name"]): entry for entry in measure_best(trials, machine, chosen, options)}
        dataset.write(options.file, [better.get(str(entry.layer["name"]), entry) for entry in everything])


if __name__ == "__main__":
    main()
