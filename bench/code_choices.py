"""How many candidates of a CPU contraction are worth compiling to choose among them by their code: `python -m bench.code_choices [--data FILE ...]`.

A compilation for a core without data compiles the first few candidates if their predictions are close (`tuning/code_choice.py`). For each measured
random contraction the first few that were measured are compiled and analysed, in the order that such a core has: by the models with a share of the
correction of a forest that has seen neither the core nor the problem (`bench.cpu_learned.others_of`). Then every number of candidates and every limit
on how much longer than the first one they may be predicted to take is evaluated: the mean loss of the choice, and the number of compiled candidates.
With "scored", nothing is compiled for candidates of schemas without that flag (`Schema.scored`) alone. Only training data are read. The values in the
package are chosen by hand from the table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.cpu_choice import lines
from bench.cpu_learned import DATA, RANDOM, measured, others_of, rankings, trained
from bench.cpu_score import suits, terms_of
from tilewright.analysis.cpu.loops_operations import Unanalysable
from tilewright.selection.code_score import coefficients_of, linear
from tilewright.selection.learned.cpu import SHARE_ELSEWHERE, predicted
from tilewright.selection.learned.forest import Forest
from tilewright.tuning.code_choice import MARGIN, WORTH_SECONDS

FIRST = 4
"""Number of measured candidates of a problem that are compiled."""
COUNTS = (1, 2, 3, 4)
CLOSE = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, inf)

Row = Mapping[str, Any]


def candidates(forests: Mapping[str, Forest], line: Mapping[str, Any]) -> list[Row]:
    """The first measured candidates of a problem in the order of a core without data: predicted seconds, loss, score (infinite if the code cannot be
    followed). `forests`: without each core."""
    layer = measured(line)
    forest = forests[layer.machine.pipeline]
    ranking = replace(layer.ranking, predicted=predicted(forest, layer.ranking, layer.machine, layer.threads, SHARE_ELSEWHERE))
    known = [int(at) for at in np.argsort(ranking.seconds, kind="stable") if np.isfinite(layer.seconds[at])]
    coefficients, best = coefficients_of(layer.machine.architecture), np.nanmin(layer.seconds)
    rows: list[Row] = []
    for position in known[:FIRST]:
        choice = ranking.choice(position)
        try:
            score = linear(terms_of(layer.problem, choice.schedule, layer.machine, layer.threads), coefficients)
        except Unanalysable:
            score = inf
        loss = float(layer.seconds[position] / best - 1)
        rows.append({"predicted": choice.seconds, "scored": choice.schema.scored, "score": score, "loss": loss})
    return rows


def choice_of(rows: Sequence[Row], count: int, close: float, scored: bool) -> tuple[float, int]:
    """The loss of the choice, and how many candidates are compiled for it; as `code_choice.best`."""
    first = rows[0]
    few = [row for row in rows[:count] if row["predicted"] <= (1 + close) * first["predicted"]]
    if first["predicted"] < WORTH_SECONDS or len(few) < 2 or (scored and not any(row["scored"] for row in few)):
        return first["loss"], 0
    best = min(few, key=lambda row: float(row["score"]))
    return (best if first["score"] < inf and best["score"] < (1 - MARGIN) * first["score"] else first)["loss"], len(few)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[DATA / name for name in RANDOM])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="code_choices")
    options = parser.parse_args()
    layers = [layer for path in options.data for layer in rankings(path)]
    forests = {core: trained(others_of(core, layers)) for core in {layer.machine.pipeline for layer in layers}}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:  # a fork of a process that trained with OpenMP hangs
        found_in = partial(candidates, forests)
        problems = {path.name: list(filter(None, pool.map(found_in, filter(suits, lines(path))))) for path in options.data}
    problems["all"] = [rows for own in problems.values() for rows in own]
    table = Table("file", "problems", "candidates", "close %", "scored", "loss %", "changed", "compiled", box=None)
    results: list[dict[str, Any]] = []
    for (file, own), count, close, scored in itertools.product(problems.items(), COUNTS, CLOSE, (True, False)):
        if count == 1 and (close, scored) != (inf, False):  # the models alone
            continue
        found = [choice_of(rows, count, close, scored) for rows in own]
        loss, compiled = statistics.fmean(loss for loss, _ in found), sum(number for _, number in found)
        changed = sum(loss != rows[0]["loss"] for (loss, _), rows in zip(found, own, strict=True))
        row = {"candidates": count, "close": close if close < inf else None, "scored": scored, "loss": loss, "changed": changed, "compiled": compiled}
        results.append({"file": file, "problems": len(own), **row})
        table.add_row(file, str(len(own)), str(count), f"{100 * close:g}", str(scored), f"{100 * loss:.2f}", str(changed), str(compiled))
    Console(width=140).print(table)
    print(write_results(options.name, {"data": [path.name for path in options.data]}, results))


if __name__ == "__main__":
    main()
