"""How good the schedules are that the models choose for this CPU: their favourites and an even sample of the rest, measured on the benchmark layers.

    python -m bench.cpu_choice [R2 R6 ...] [--top 100] [--evenly 200] [--again 20] [--threads 2] [--name cpu_choice]

Loss: the time of the models' first choice over the least of everything measured, minus 1. The fastest `--again` and the first choice are measured
once more in turns, and those times count. The ratio of k is Tuna's (section V): the summed times of the truly best k over those of the k
that the models like best.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.layers import LAYERS, layer
from tilewright.hardware import machine as find_machine
from tilewright.runtime import dataset, plain
from tilewright.runtime.sampling import evenly
from tilewright.runtime.trials import Job, Trials
from tilewright.runtime.tuning import ranking_of

KS = (10, 50)
ROUNDS = 9
MEANS = ("loss", "loss of ten", *(f"ratio of {k}" for k in KS))


def judge(name: str, trials: Trials, machine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the layer's candidates and judges the order."""
    problem = dataset.layer_problem(layer(name))
    ranking = ranking_of(problem, machine, threads=options.threads)
    order = np.argsort(ranking.seconds, kind="stable")
    first = [int(position) for position in order[: options.top]]
    rest = [int(position) for position in evenly(ranking, min(options.evenly, ranking.candidates), seed=1) if int(position) not in set(first)]
    jobs = [Job(problem, ranking.choice(position).schedule, position) for position in (*first, *rest)]
    outcomes = {int(str(outcome.job.key)): outcome for outcome in trials.measure(jobs, options.mode)}
    seconds = {position: outcome.seconds for position, outcome in outcomes.items() if outcome.timing is not None}
    again = sorted(seconds, key=lambda position: seconds[position])[: options.again]
    again += [position for position in first[:1] if position not in again]
    repeated = [Job(problem, ranking.choice(position).schedule, position) for position in again]
    for outcome in trials.remeasure(repeated, ROUNDS, options.mode):
        if outcome.timing is not None:
            seconds[int(str(outcome.job.key))] = outcome.seconds
    best = min(seconds, key=lambda position: seconds[position])
    known = [seconds[position] for position in first if position in seconds]
    truly = sorted(seconds.values())
    return {
        "layer": name, "candidates": ranking.candidates, "measured": len(seconds),
        "failed": {outcome.schedule: outcome.reason for outcome in outcomes.values() if outcome.timing is None},
        "chosen": plain.schedule_text(ranking.choice(first[0]).schedule), "chosen us": 1e6 * seconds[first[0]],
        "predicted us": 1e6 * float(ranking.seconds[first[0]]),
        "best": plain.schedule_text(ranking.choice(best).schedule), "best us": 1e6 * seconds[best],
        "loss": seconds[first[0]] / seconds[best] - 1, "place of the best": int(np.flatnonzero(order == best)[0]) + 1,
        "loss of ten": min(known[:10]) / seconds[best] - 1,
        **{f"ratio of {k}": sum(truly[:k]) / sum(known[:k]) for k in KS if len(known) >= k},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--evenly", type=int, default=200)
    parser.add_argument("--again", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", default="network", choices=("network", "cold", "warm"))
    parser.add_argument("--name", default="cpu_choice")
    options = parser.parse_args()
    machine = find_machine("native")
    rows: list[dict[str, Any]] = []
    means: dict[str, float] = {}
    path: Path | None = None
    with Trials(machine, threads=options.threads) as trials:
        for name in options.layers:
            rows.append(judge(name, trials, machine, options))
            shared = [key for key in MEANS if all(key in row for row in rows)]
            means = {key: statistics.fmean(row[key] for row in rows) for key in shared}
            path = write_results(options.name, vars(options), [{"layer": "all", **means}, *rows])
            print(f"{name}: loss {100 * rows[-1]['loss']:.1f} %", flush=True)
    headings = ("layer", "chosen us", "predicted us", "best us", "loss", "loss of ten", "place of the best", *(f"ratio of {k}" for k in KS))
    table = Table(*headings, "best", box=None, title=f"of {options.top} favourites and {options.evenly} others a layer, {options.threads} threads")
    for row in rows:
        cells = [f"{row[key]:.3g}" if key in row else "–" for key in headings[1:]]
        table.add_row(row["layer"], *cells, str(plain.schedule_of(row["best"])))
    Console(width=200).print(table)
    print({key: round(value, 4) for key, value in means.items()}, path)


if __name__ == "__main__":
    main()
