"""How well static analysis ranks measured GPU kernels: a linear combination of what it finds (Tuna), and a time made of named terms.

    python -m bench.gpu_score [--layers 30] [--each 16] [--judged 80] [--jobs 2] [--rows FILE] [--name gpu_score]

Analyses (`tilewright.analysis.gpu`) kernels drawn evenly from bench/data/h200_train.jsonl.gz, by whose measured times the coefficients of the linear
combination are fitted, and kernels of eight of the twenty layers of bench/data/h200_layers.jsonl.gz, which are ranked. "models" are the analytical
estimates that choose without looking at code. Needs no GPU. The analyses take about a third of a second a kernel; --rows keeps them in a file, and
reads them from it where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls
from scipy.stats import spearmanr

from bench.common import write_results
from bench.gpu_analysis import lowered
from bench.regions import ranking_of
from tilewright.analysis.gpu import analysed, busy_cycles
from tilewright.analysis.warps import NotStatic
from tilewright.cost.ranking import Ranking
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Machine
from tilewright.runtime import dataset, plain

DATA = Path(__file__).parent / "data"
JUDGED = ("R2", "R6", "R9", "R1", "D4", "D5", "Y8", "Y12")
BLOCKS = 48
"""Blocks of a grid that are evaluated for each kernel."""
THROUGHPUT = ("fma", "arithmetic", "load and store", "issue", "shared", "level 2", "memory")
"""Terms of which the longest counts, in the time made of terms."""
TOP = 10

Row = dict[str, Any]


def modelled(ranking: Ranking, schedule: Any) -> float | None:
    """Seconds that the analytical models predict."""
    for part in ranking.parts:
        if part.schedule is type(schedule):
            same = np.all([column == getattr(schedule, name) for name, column in part.rows.items()], axis=0)
            if same.any():
                return float(part.estimate.seconds[np.flatnonzero(same)[0]])
    return None


def rows_of(target: str, each: int, measured: dataset.MeasuredLayer) -> list[Row]:
    """Analyses of `each` measured kernels of a layer, drawn evenly; those with atomic additions, whose order is not fixed, left out."""
    machine = find_machine(target)
    times = measured.times()
    texts = sorted(text for text in times if not getattr(plain.schedule_of(text), "atomics", 0))
    chosen = np.random.default_rng(len(texts)).permutation(len(texts))[:each]
    problem, ranking = dataset.layer_problem(measured.layer), ranking_of(measured.layer, machine)
    found: list[Row] = []
    for at in sorted(chosen):
        schedule = plain.schedule_of(texts[at])
        try:
            kernels = analysed(lowered(problem, machine, schedule), machine, BLOCKS)
        except NotStatic as error:
            print(f"{measured.layer['name']} {schedule}: {error}", file=sys.stderr)
            continue
        models = modelled(ranking, schedule)
        row = {"layer": measured.layer["name"], "schedule": str(schedule), "seconds": times[texts[at]], "models": models}
        found.append(row | {"cycles": {name: float(f"{value:.6g}") for name, value in busy_cycles(kernels, machine).items()}})
    return found


def matrix(rows: Sequence[Row], names: Sequence[str]) -> np.ndarray:
    return np.array([[row["cycles"][name] for name in names] for row in rows])


def fitted(rows: Sequence[Row], machine: Machine) -> dict[str, float]:
    """Coefficients, none negative, of the least sum of squared relative errors of the time in cycles."""
    names = list(rows[0]["cycles"])
    cycles = np.array([row["seconds"] for row in rows]) * machine.clock_hz
    weights, _ = nnls(matrix(rows, names) / cycles[:, None], np.ones(len(rows)))
    return dict(zip(names, map(float, weights), strict=True))


def linear(coefficients: Mapping[str, float], rows: Sequence[Row]) -> np.ndarray:
    return matrix(rows, list(coefficients)) @ np.array(list(coefficients.values()))


def terms(machine: Machine, rows: Sequence[Row]) -> np.ndarray:
    """Cycles: launches + the fill and drain of each round of blocks + the longest of THROUGHPUT, or one thread's own work, if that is longer."""
    cache = machine.cache(1)
    assert cache is not None
    whole = {name: matrix(rows, [name])[:, 0] for name in rows[0]["cycles"]}
    through = np.max([whole[name] for name in THROUGHPUT], axis=0)
    alone = whole["thread"] * machine.schedulers_per_processor + whole["barriers"] * cache.latency_cycles
    fill = whole["rounds"] * 2 * machine.memory_latency_cycles
    return whole["launches"] * machine.launch_seconds * machine.clock_hz + fill + np.maximum(through, alone)


def judged(rows: Sequence[Row], score: np.ndarray) -> dict[str, float]:
    """Rank correlation; the paper's top-10 ratio: summed time of the true best ten over that of the ten with the best score; and the time of the
    best over that of the one with the best score."""
    seconds = np.array([row["seconds"] for row in rows])
    order = np.argsort(score, kind="stable")
    best = np.sort(seconds)
    return {
        "rank correlation": float(spearmanr(score, seconds)[0]),
        "top-10 ratio": float(best[:TOP].sum() / seconds[order[:TOP]].sum()),
        "best of top 10": float(best[0] / seconds[order[:TOP]].min()),
    }


def analyses(options: argparse.Namespace) -> tuple[list[Row], list[list[Row]]]:
    """Rows of the training layers together, and of each judged layer. Layers that the file of --rows has are not analysed again."""
    kept: dict[str, list[Row]] = {}
    if options.rows and options.rows.exists():
        kept = {str(rows[0]["layer"]): rows for rows in map(json.loads, options.rows.read_text().splitlines())}
    everything = dataset.read(DATA / "h200_train.jsonl.gz")
    training = everything[:: max(1, len(everything) // options.layers)][: options.layers]
    judging = [entry for entry in dataset.read(DATA / "h200_layers.jsonl.gz") if entry.layer["name"] in options.only.split(",")]
    with ProcessPoolExecutor(options.jobs) as pool:
        for entries, each in ((judging, options.judged), (training, options.each)):
            missing = [entry for entry in entries if entry.layer["name"] not in kept]
            for rows in filter(None, pool.map(partial(rows_of, options.target, each), missing)):
                kept[str(rows[0]["layer"])] = rows
                if options.rows:
                    with open(options.rows, "a") as file:
                        file.write(json.dumps(rows) + "\n")
    return [row for entry in training for row in kept.get(entry.layer["name"], ())], [kept[entry.layer["name"]] for entry in judging]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--layers", type=int, default=30, help="training layers")
    parser.add_argument("--each", type=int, default=16, help="kernels of each training layer")
    parser.add_argument("--judged", type=int, default=80, help="kernels of each judged layer")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default=",".join(JUDGED), help="judged layers")
    parser.add_argument("--rows", type=Path, help="file of the analyses, a layer a line")
    parser.add_argument("--name", default="gpu_score")
    options = parser.parse_args()
    machine = find_machine(options.target)
    known, layers = analyses(options)
    coefficients = fitted(known, machine)
    ways: dict[str, Callable[[Sequence[Row]], np.ndarray]] = {
        "linear": partial(linear, coefficients),
        "terms": partial(terms, machine),
        "models": lambda rows: np.array([row["models"] if row["models"] is not None else np.inf for row in rows]),
    }
    figures = {str(rows[0]["layer"]): {way: judged(rows, score(rows)) for way, score in ways.items()} for rows in layers}
    mean = {way: {name: float(np.mean([f[way][name] for f in figures.values()])) for name in next(iter(figures.values()))[way]} for way in ways}
    names = list(mean["linear"])
    shown = Table("layer", *(f"{way}: {name}" for way in ways for name in names))
    for layer, found in {**figures, "mean": mean}.items():
        shown.add_row(layer, *(f"{found[way][name]:.3f}" for way in ways for name in names))
    Console(width=200).print(shown)
    print({name: float(f"{value:.3g}") for name, value in coefficients.items()})
    if options.name:
        settings = {
            "target": options.target, "training layers": sorted({str(row["layer"]) for row in known}), "training kernels": len(known),
            "judged kernels": {str(rows[0]["layer"]): len(rows) for rows in layers}, "blocks": BLOCKS,
            "coefficients (cycles of each, relative least squares, not negative)": coefficients, "mean": mean,
        }  # fmt: skip
        print(write_results(options.name, settings, [{"layer": layer, **found} for layer, found in figures.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
