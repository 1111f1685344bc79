"""How well static analysis of code ranks measured CPU kernels: by a linear combination (Tuna), a time of named terms, and the models.

    python -m bench.cpu_score [--data bench/data/cpu_random.jsonl.gz] [--layers 40] [--each 24] [--jobs 2] [--first 8] [--write]

Compiles and analyses (`tilewright/selection/code_score.py`) measured kernels of the file that `bench.cpu_choice --random` wrote: for each of its last
--layers contractions measured on an otherwise idle machine, --each kernels, half the models' favourites, half spread evenly over the others. The
coefficients of the linear combination, none negative, minimise the sum of squared relative errors; each layer is evaluated with coefficients fitted
to the other layers. "among n" is the loss of the best score among the models' first n, which is how a compilation chooses. --write fits to all layers
and writes the package's coefficients. The analysis takes about half a second per kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from bench.cpu_choice import kind_of, lines
from bench.cpu_learned import DATA, measured, undisturbed
from tilewright.analysis.cpu.assembly import disassembled
from tilewright.analysis.cpu.loops_operations import Unanalysable
from tilewright.codegen.source import source_text
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import lower
from tilewright.selection.code_score import MODELS, code_terms, linear
from tilewright.toolchain import Binary, SourceFile, compile_kernels
from tilewright.tuning import serialisation

Row = dict[str, Any]
Score = Callable[[Sequence[Row]], np.ndarray]
TOP = 10
OVERLAPPED = ("pipeline", "level 2", "level 3", "memory")


def together(terms: Mapping[str, float]) -> float:
    """Seconds, without fitted constants: the maximum of the overlapping terms, plus starts and dispatch."""
    return max(terms.get(name, 0.0) for name in OVERLAPPED) + terms["starts"] + terms["dispatch"]


def suits(line: Mapping[str, Any]) -> bool:
    """Whether the line has times of a contraction measured on an otherwise idle machine; no other code is analysed."""
    return kind_of(line["layer"]) != "depthwise" and undisturbed(line)


def sample(seconds: np.ndarray, models: np.ndarray, each: int) -> list[int]:
    """At most `each` measured candidates: half the models' favourites, half spread evenly over the others."""
    order = [int(position) for position in np.argsort(models, kind="stable") if np.isfinite(seconds[position])]
    favourites, rest = order[: each // 2], order[each // 2 :]
    return favourites + [rest[at] for at in np.linspace(0, len(rest) - 1, min(each - each // 2, len(rest))).astype(int)]


def rows_of(line: Mapping[str, Any], each: int) -> list[Row]:
    """Measured kernels of a layer with their terms and the models' predictions."""
    layer = measured(line)
    problem, machine, ranking = layer.problem, layer.machine, layer.ranking
    found: list[Row] = []
    for position in sample(layer.seconds, ranking.seconds, each):
        schedule = ranking.choice(position).schedule
        try:
            terms = terms_of(problem, schedule, machine, layer.threads)
        except Unanalysable as error:
            print(f"{layer.name}, {schedule}: {error}", file=sys.stderr)
            continue
        row = {"layer": layer.name, "schedule": serialisation.schedule_text(schedule), "seconds": float(layer.seconds[position])}
        found.append(row | {"models": float(ranking.seconds[position]), "terms": {name: float(f"{value:.6g}") for name, value in terms.items()}})
    return found


def terms_of(problem: Problem, schedule: Any, machine: Machine, threads: int) -> dict[str, float]:
    """The terms of a schedule's code. Raises Unanalysable if its control flow cannot be followed."""
    lowered = lower(problem, schedule, machine)
    kernels = list({kernel.name: kernel for kernel in lowered.kernels}.values())
    sources = [SourceFile(kernel.name, source_text(kernel), "c", (kernel.name,)) for kernel in kernels]
    built = [binary for binary in compile_kernels(sources, machine, workers=1) if isinstance(binary, Binary)]
    pairs = [(kernel, disassembled(binary.path, machine)) for kernel, binary in zip(kernels, built, strict=True)]
    return code_terms(pairs, machine, threads)


def fitted(rows: Sequence[Row]) -> dict[str, float]:
    """Non-negative coefficients that minimise the sum of squared relative errors."""
    names = list(rows[0]["terms"])
    terms = np.array([[row["terms"][name] for name in names] for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    weights, _ = nnls(terms / seconds[:, None], np.ones(len(rows)))
    return dict(zip(names, map(float, weights), strict=True))


def judged(rows: Sequence[Row], score: np.ndarray, first: int) -> dict[str, float]:
    """Rank correlation; the paper's top-10 ratio: summed time of the true best ten over that of the ten with the best score; loss of the first choice
    against the best measured, also when choosing among the models' first."""
    seconds, models = np.array([row["seconds"] for row in rows]), np.array([row["models"] for row in rows])
    order, best = np.argsort(score, kind="stable"), np.sort(seconds)
    few = np.argsort(models, kind="stable")[:first]
    return {
        "rank correlation": float(spearmanr(score, seconds)[0]), "top-10 ratio": float(best[:TOP].sum() / seconds[order[:TOP]].sum()),
        "loss": float(seconds[order[0]] / best[0] - 1), f"loss among {first}": float(seconds[few[np.argmin(score[few])]] / best[0] - 1),
    }  # fmt: skip


def analyses(options: argparse.Namespace) -> tuple[Machine, list[list[Row]]]:
    """The machine, and rows of each layer; if a layer was measured twice, the last line counts."""
    chosen = {line["layer"]: line for line in lines(options.data) if suits(line)}
    last = list(chosen.values())[-options.layers :]
    with ProcessPoolExecutor(options.jobs) as pool:
        return serialisation.decode(last[0]["machine"]), list(filter(None, pool.map(partial(rows_of, each=options.each), last)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / "cpu_random.jsonl.gz")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--each", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--first", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write the coefficients fitted to all layers into the package")
    parser.add_argument("--name", default="cpu_score")
    options = parser.parse_args()
    machine, layers = analyses(options)
    ways: dict[str, Callable[[int], Score]] = {
        "linear": lambda number: _linear(fitted([row for at, rows in enumerate(layers) if at != number for row in rows])),
        "terms": lambda _: lambda rows: np.array([together(row["terms"]) for row in rows]),
        "models": lambda _: lambda rows: np.array([row["models"] for row in rows]),
    }
    figures = [{way: judged(rows, of(number)(rows), options.first) for way, of in ways.items()} for number, rows in enumerate(layers)]
    names = list(figures[0]["models"])
    mean = {way: {name: statistics.fmean(found[way][name] for found in figures) for name in names} for way in ways}
    table = Table("layer", *(f"{way}: {name}" for way in ways for name in names))
    for layer, found in [*((str(rows[0]["layer"]), found) for rows, found in zip(layers, figures, strict=True)), ("mean", mean)]:
        table.add_row(layer, *(f"{found[way][name]:.3f}" for way in ways for name in names))
    Console(width=220).print(table)
    coefficients = fitted([row for rows in layers for row in rows])
    print({name: round(value, 3) for name, value in coefficients.items()})
    if options.write:
        content = {"coefficients": coefficients, "fitted to": options.data.name, "kernels": sum(map(len, layers)), "layers": len(layers)}
        (MODELS / f"cpu_{machine.architecture}.json").write_text(json.dumps(content, indent=1) + "\n")
    if options.name:
        settings = {"kernels": sum(map(len, layers)), "layers": len(layers), "coefficients of all layers": coefficients, "mean": mean}
        results = [{"layer": rows[0]["layer"], "kernels": len(rows), **found} for rows, found in zip(layers, figures, strict=True)]
        print(write_results(options.name, settings, results))
    return 0


def _linear(coefficients: Mapping[str, float]) -> Score:
    return lambda rows: np.array([linear(row["terms"], coefficients) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
