"""The online-learned search of `bench.search_peer` over the whole space of each benchmark layer, measuring on the GPU present.

    python -m bench.search_live bench/data/h200_layers.jsonl.gz [--trials 192] [--seeds 1] [--name search_live_h200]

Batches are proposed for all layers and measured in the same way as the models' data. LoP@n: the least time among the first n over the layer's least,
the search's own or that in FILE, minus 1; trials to 95 % and 99 % count up to the first within 1.05 and 1.01 times the least, None if there is none.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.search_peer import BATCH, features_of, proposed_batches
from tilewright.hardware import identified_machine
from tilewright.ir.problem import Problem
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset
from tilewright.tuning.collecting import ranking_of
from tilewright.tuning.trials import Job, Trials

TOPS = (1, 10, 30, 100)
SHARES = {"95": 0.05, "99": 0.01}


class Search:
    """The search of one layer: proposes candidates, receives their times and keeps them in the order of the trials."""

    def __init__(self, problem: Problem, ranking: Ranking, seed: int) -> None:
        self.problem, self.ranking = problem, ranking
        self.times: list[float] = []
        self._proposals: Generator[np.ndarray, np.ndarray, None] = proposed_batches(features_of(ranking.parts), BATCH, seed)
        self._asked: np.ndarray | None = None

    def propose(self) -> list[Any]:
        """The schedules of the next batch; empty if all were tried."""
        try:
            told = None if self._asked is None else np.array(self.times[-len(self._asked) :])
            self._asked = self._proposals.send(told)  # type: ignore[arg-type]
        except StopIteration:
            return []
        return [self.ranking.choice(int(position)).schedule for position in self._asked]


def run(searches: dict[str, Search], trials: Trials, count: int) -> None:
    """Runs `count` trials of every search, one batch of all searches at a time."""
    with ThreadPoolExecutor() as pool:
        for _ in range(0, count, BATCH):
            batches = dict(zip(searches, pool.map(Search.propose, searches.values()), strict=True))
            jobs = [Job(searches[name].problem, schedule, (name, at)) for name, batch in batches.items() for at, schedule in enumerate(batch)]
            seconds = {outcome.job.key: outcome.seconds for outcome in trials.measure(jobs)}
            for name, batch in batches.items():
                searches[name].times += [seconds[(name, at)] for at in range(len(batch))]


def figures(times: Sequence[float], best: float) -> dict[str, Any]:
    found: dict[str, Any] = {f"lop@{top}": min(times[:top]) / best - 1 for top in TOPS}
    for share, loss in SHARES.items():
        found[f"trials_{share}"] = next((at for at, seconds in enumerate(times, 1) if seconds <= best * (1 + loss)), None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--trials", type=int, default=192)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--name", default="search_live_h200")
    options = parser.parse_args()
    layers = dataset.read(options.file)
    machine = identified_machine(layers[0].machine)
    problems = {str(layer.layer["name"]): dataset.layer_problem(layer.layer) for layer in layers}
    rankings = {name: ranking_of(problem, machine) for name, problem in problems.items()}
    results: list[dict[str, Any]] = []
    with Trials(machine) as trials:
        for seed in range(options.seeds):
            searches = {name: Search(problem, rankings[name], seed) for name, problem in problems.items()}
            run(searches, trials, options.trials)
            for layer in layers:
                name = str(layer.layer["name"])
                times = searches[name].times
                best = min(layer.best, *times)
                results.append({"layer": name, "seed": seed, "candidates": rankings[name].candidates, **figures(times, best), "best us": 1e6 * best})
    means: dict[str, Any] = {f"lop@{top}": statistics.fmean(row[f"lop@{top}"] for row in results) for top in TOPS}
    for share in SHARES:
        reached = [row[f"trials_{share}"] for row in results]
        means[f"trials_{share}"] = statistics.fmean(options.trials if trial is None else trial for trial in reached)
        means[f"unreached {share}"] = sum(trial is None for trial in reached)
    print(write_results(options.name, vars(options), [{"layer": "all", **means}, *results]))
    table = Table("layer", *(f"LoP@{top} %" for top in TOPS), *(f"to {share} %" for share in SHARES), box=None,
                  title=f"online-learned search over whole spaces, {options.trials} trials")  # fmt: skip
    for row in [*results, {"layer": "mean", **means}]:
        trial = [f"{row[f'trials_{share}']:.0f}" if row[f"trials_{share}"] is not None else "–" for share in SHARES]
        table.add_row(str(row["layer"]), *(f"{100 * row[f'lop@{top}']:.1f}" for top in TOPS), *trial)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
