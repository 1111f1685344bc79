"""How well static analysis ranks measured GPU kernels: by a linear combination of its results (Tuna), and by a time of named terms.

    python -m bench.gpu_score [--layers 30] [--each 12] [--judged 26] [--first 10] [--jobs 2] [--rows FILE] [--constants FILE] [--name gpu_score]

Analyses (`tilewright.analysis.gpu.transactions`) kernels drawn evenly from bench/data/h200_train.jsonl.gz and fits the coefficients of both to their
measured times (least squares of relative errors with no negative linear coefficient; robust least squares of logarithms). Then analyses, for the
twenty layers of bench/data/h200_layers.jsonl.gz, kernels drawn evenly and the `--first` measured ones of the learned and of the analytical ranking
("learned", "models"), which choose without seeing code. Needs no GPU. The analysis takes about half a second per kernel; --rows stores the results in
a file, and reads them from it if it exists. --constants writes what `bench.gpu_seconds` reads. Rank correlation is over the kernels drawn evenly; the
top-10 ratio and the loss of the first choice are over all of a layer's kernels, the loss against the layer's best measured. "rescored" is the loss
when a score chooses among the first of the learned, or of the analytical ranking.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares, nnls
from scipy.stats import spearmanr

from bench.choice_quality import places
from bench.common import write_results
from bench.gpu_analysis import lowered
from bench.gpu_seconds import FAMILIES, KERNEL_COLUMNS, TimeConstants, as_constants, as_numbers, kernel_columns, term_cycles
from bench.layers import LAYERS
from bench.regions import ranking_of
from tilewright.analysis.gpu.transactions import analysed, busy_cycles
from tilewright.analysis.gpu.warps import NotStatic
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Machine
from tilewright.selection.learned.gpu import model_of, refined
from tilewright.tuning import dataset, serialisation

DATA = Path(__file__).parent / "data"
BLOCKS = 24
"""Blocks of a grid that are evaluated for each kernel."""
TOP = 10
START = TimeConstants(1500, 600, 1.1, 0.5, 1.0, 0.5, 20, 5, 1.0, 0.5, 0.5, 1.0, 3.0, 0.5)
"""The starting point of the fit of the terms."""

Row = dict[str, Any]


def rows_of(target: str, each: int, first: int, measured: dataset.MeasuredLayer) -> list[Row]:
    """Analyses of `each` measured kernels of a layer, drawn evenly, and of the `first` measured ones of both rankings, which contain no candidates
    that add in no fixed order."""
    machine = find_machine(target)
    times = measured.times()
    problem = dataset.layer_problem(measured.layer)
    analytical = ranking_of(measured.layer, machine)
    learned = refined(analytical, machine, model_of(machine.name))
    where = dict(zip(times, places(analytical, measured), strict=True))
    texts = [text for text in times if where[text] >= 0]
    even = {texts[at] for at in np.random.default_rng(len(texts)).permutation(len(texts))[:each]}
    firsts = [{texts[at] for at in np.argsort([r.seconds[where[text]] for text in texts])[:first]} for r in (learned, analytical)]
    found: list[Row] = []
    for text in dict.fromkeys([*firsts[0], *firsts[1], *even]):
        try:
            kernels = analysed(lowered(problem, machine, serialisation.schedule_of(text)), machine, BLOCKS)
        except NotStatic as error:
            print(f"{measured.layer['name']} {text}: {error}", file=sys.stderr)
            continue
        row = {"layer": measured.layer["name"], "schedule": text, "seconds": times[text], "best": measured.best, "even": text in even}
        row |= {name: float(ranking.seconds[where[text]]) for name, ranking in (("models", analytical), ("learned", learned))}
        row |= {"first of learned": text in firsts[0], "first of models": text in firsts[1], "columns": kernel_columns(kernels, machine)}
        found.append(row | {"cycles": {name: float(f"{value:.6g}") for name, value in busy_cycles(kernels, machine).items()}})
    return found


def matrix(rows: Sequence[Row], names: Sequence[str]) -> np.ndarray:
    return np.array([[row["cycles"][name] for name in names] for row in rows])


def fitted_linear(rows: Sequence[Row], machine: Machine) -> dict[str, float]:
    """Non-negative coefficients that minimise the sum of squared relative errors of the time in cycles."""
    names = list(rows[0]["cycles"])
    cycles = np.array([row["seconds"] for row in rows]) * machine.clock_hz
    weights, _ = nnls(matrix(rows, names) / cycles[:, None], np.ones(len(rows)))
    return {name: float(weight) for name, weight in zip(names, weights, strict=True) if weight}


def linear(coefficients: Mapping[str, float], rows: Sequence[Row]) -> np.ndarray:
    predicted: np.ndarray = matrix(rows, list(coefficients)) @ np.array(list(coefficients.values()))
    return predicted


def stacked(rows: Sequence[Row]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The kernels of all rows as columns, and the row index of each."""
    columns = {name: np.concatenate([row["columns"][name] for row in rows]) for name in KERNEL_COLUMNS}
    return columns, np.repeat(np.arange(len(rows)), [len(row["columns"]["blocks"]) for row in rows])


def terms(machine: Machine, constants: TimeConstants, rows: Sequence[Row]) -> np.ndarray:
    columns, owner = stacked(rows)
    return np.bincount(owner, term_cycles(columns, machine, constants), len(rows))


def fitted_terms(rows: Sequence[Row], machine: Machine) -> TimeConstants:
    """Constants that minimise a robust sum of squared logarithmic errors."""
    columns, owner = stacked(rows)
    goal = np.log(np.array([row["seconds"] for row in rows]) * machine.clock_hz)
    start = np.array(as_numbers(START))
    lower, upper = np.zeros(len(start)), np.full(len(start), np.inf)
    names = list(asdict(START))
    lower[names.index("overlap")], upper[names.index("overlap")], upper[names.index("imbalance")] = 1.0, 12.0, 1.0

    def errors(numbers: np.ndarray) -> np.ndarray:
        return np.log(np.bincount(owner, term_cycles(columns, machine, as_constants(numbers.tolist())), len(rows))) - goal

    found = least_squares(errors, start, loss="soft_l1", f_scale=0.3, x_scale=start, bounds=(lower, upper))
    return as_constants([float(f"{number:.4g}") for number in found.x])


def judged(rows: Sequence[Row], score: np.ndarray) -> dict[str, float]:
    """The figures of one layer."""
    seconds, best = np.array([row["seconds"] for row in rows]), rows[0]["best"]
    even = np.array([row["even"] for row in rows])
    order = np.argsort(score, kind="stable")
    found = {
        "rank correlation": float(spearmanr(score[even], seconds[even])[0]),
        "top-10 ratio": float(np.sort(seconds)[:TOP].sum() / seconds[order[:TOP]].sum()),
        "loss of the first": float(seconds[order[0]] / best - 1),
    }
    for name in ("learned", "models"):
        which = np.flatnonzero([row[f"first of {name}"] for row in rows])
        found[f"{name} rescored"] = float(seconds[which[np.argmin(score[which])]] / best - 1)
    return found


def analyses(options: argparse.Namespace) -> tuple[list[Row], list[list[Row]]]:
    """Rows of the training layers together, and of each test layer. Layers in the file of --rows are not analysed again."""
    kept: dict[str, list[Row]] = {}
    if options.rows and options.rows.exists():
        kept = {str(rows[0]["layer"]): rows for rows in map(json.loads, options.rows.read_text().splitlines())}
    everything = dataset.read(DATA / "h200_train.jsonl.gz")
    training = everything[:: max(1, len(everything) // options.layers)][: options.layers]
    judging = [entry for entry in dataset.read(DATA / "h200_layers.jsonl.gz") if entry.layer["name"] in options.only.split(",")]
    with ProcessPoolExecutor(options.jobs) as pool:
        for entries, each, first in ((judging, options.judged, options.first), (training, options.each, 0)):
            missing = [entry for entry in entries if entry.layer["name"] not in kept]
            for rows in filter(None, pool.map(partial(rows_of, options.target, each, first), missing)):
                kept[str(rows[0]["layer"])] = rows
                if options.rows:
                    with open(options.rows, "a") as file:
                        file.write(json.dumps(rows) + "\n")
    return [row for entry in training for row in kept.get(entry.layer["name"], ())], [kept[entry.layer["name"]] for entry in judging]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--layers", type=int, default=30, help="training layers")
    parser.add_argument("--each", type=int, default=12, help="kernels of each training layer")
    parser.add_argument("--judged", type=int, default=26, help="kernels of each judged layer, drawn evenly")
    parser.add_argument("--first", type=int, default=10, help="of either ranking")
    parser.add_argument("--constants", type=Path, help="where to write what was fitted")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default=",".join(LAYERS), help="judged layers")
    parser.add_argument("--rows", type=Path, help="file of the analyses, a layer a line")
    parser.add_argument("--name", default="gpu_score")
    options = parser.parse_args()
    machine = find_machine(options.target)
    known, layers = analyses(options)
    coefficients, constants = fitted_linear(known, machine), fitted_terms(known, machine)
    if options.constants:
        shipped = {"linear": {name: float(f"{value:.4g}") for name, value in coefficients.items()}, "terms": asdict(constants)}
        options.constants.write_text(json.dumps({FAMILIES[machine.compute_capability[0]]: shipped}, indent=1) + "\n")
    ways: dict[str, Callable[[Sequence[Row]], np.ndarray]] = {
        "linear": partial(linear, coefficients),
        "terms": partial(terms, machine, constants),
        "models": lambda rows: np.array([row["models"] for row in rows]),
        "learned": lambda rows: np.array([row["learned"] for row in rows]),
    }
    figures = {str(rows[0]["layer"]): {way: judged(rows, score(rows)) for way, score in ways.items()} for rows in layers}
    mean = {way: {name: float(np.mean([f[way][name] for f in figures.values()])) for name in next(iter(figures.values()))[way]} for way in ways}
    shown = Table("mean of the layers", *mean["linear"])
    for way, found in mean.items():
        shown.add_row(way, *(f"{value:.3f}" for value in found.values()))
    Console(width=160).print(shown)
    if options.name:
        settings = {
            "target": options.target, "training layers": sorted({str(row["layer"]) for row in known}), "training kernels": len(known),
            "judged kernels": {str(rows[0]["layer"]): len(rows) for rows in layers}, "blocks": BLOCKS,
            "linear coefficients": coefficients, "constants of the terms": asdict(constants), "mean": mean,
        }  # fmt: skip
        print(write_results(options.name, settings, [{"layer": layer, **found} for layer, found in figures.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
