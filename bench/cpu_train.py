"""Measured schedules of random convolutions on this CPU, with which the scores of static analysis are fitted.

    python -m bench.cpu_train [--layers 32] [--seconds 100] [--data bench/data/cpu_train.jsonl.gz]

Half of the layers are drawn as in `runtime/sampling.py::random_layers`, half as in `network_layers`; none is one of the twenty that judge. Of each,
the models' twelve favourites are measured, four of the next hundred, and four drawn evenly, all in turns. Layers that the file has are not measured
again, so that it can be made in parts: --seconds begins no further layer after that time. A line of the file: {"layer": {...}, "threads", "mode",
"times": {schedule: seconds}}.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from tilewright.cost.ranking import Ranking
from tilewright.hardware import machine as find_machine
from tilewright.runtime import dataset, plain
from tilewright.runtime.sampling import JUDGED, evenly, network_layers, random_layers
from tilewright.runtime.trials import TUNING_MODE, Job, Trials
from tilewright.runtime.tuning import ranking_of

DATA = Path(__file__).parent / "data" / "cpu_train.jsonl.gz"
FAVOURITES, NEXT, EVENLY = 12, (100, 4), 4
MOST_FLOPS = 1.5e9


def layers(count: int, seed: int) -> list[dict[str, Any]]:
    """Random layers of both kinds in turns."""
    sources = [(layer for layer in draw(seed, JUDGED) if flops(layer) < MOST_FLOPS) for draw in (random_layers, network_layers)]
    pairs = zip(*sources, strict=False)
    return [layer for pair in islice(pairs, -(-count // 2)) for layer in pair][:count]


def flops(layer: dict[str, Any]) -> float:
    return 2.0 * layer["outputs"] * layer["channels"] * layer["height"] * layer["width"] * layer["filter"] ** 2


def sample(ranking: Ranking, seed: int) -> list[int]:
    """Positions to measure: favourites first."""
    order = np.argsort(ranking.seconds, kind="stable")
    behind = order[FAVOURITES : FAVOURITES + NEXT[0]]
    some = np.random.default_rng(seed).choice(behind, min(NEXT[1], len(behind)), replace=False)
    return list(dict.fromkeys(int(place) for place in (*order[:FAVOURITES], *some, *evenly(ranking, min(EVENLY, ranking.candidates), seed))))


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none where there is no file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") as file:
        return list(map(json.loads, file))


def averaged(path: Path) -> list[dict[str, Any]]:
    """One line a layer, with the geometric means of the times of all its runs: where buffers lie differs from run to run, and with it the time."""
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for line in lines(path):
        name = line["layer"]["name"]
        found.setdefault(name, line)
        for text, seconds in line["times"].items():
            times.setdefault(name, {}).setdefault(text, []).append(seconds)
    return [{**line, "times": {text: geometric_mean(own) for text, own in times[name].items()}} for name, line in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    machine, began = find_machine("native"), time.monotonic()
    known = Counter(line["layer"]["name"] for line in lines(options.data))
    drawn = layers(options.layers, options.seed)
    wanted = [layer for run in range(options.runs) for layer in drawn if known[layer["name"]] <= run]
    with Trials(machine, threads=options.threads) as trials:
        for number, layer in enumerate(wanted):
            if time.monotonic() - began > options.seconds:
                print(f"{len(wanted) - number} layers are left")
                break
            problem = dataset.layer_problem(layer)
            ranking = ranking_of(problem, machine, threads=options.threads)
            jobs = [Job(problem, ranking.choice(place).schedule, place) for place in sample(ranking, options.seed)]
            outcomes = trials.remeasure(jobs, options.rounds, TUNING_MODE)
            found = [(plain.schedule_text(outcome.job.schedule), outcome.timing) for outcome in outcomes if outcome.timing is not None]
            times = {text: float(f"{timing.median:.5g}") for text, timing in found}
            line = {"layer": layer, "threads": options.threads, "mode": TUNING_MODE, "times": times}
            with open(options.data, "ab") as file:
                file.write(gzip.compress((json.dumps(line, separators=(",", ":")) + "\n").encode(), 9, mtime=0))
            print(f"{layer['name']}: {len(times)} of {len(jobs)}", flush=True)


if __name__ == "__main__":
    main()
