"""Tuna's top-10 and top-50 ratios of depthwise convolutions and batched matrix products on the GPU present, and the loss of the first choice.

    python -m bench.gpu_operators measure FILE [--seconds 330]
    python -m bench.gpu_operators report FILE [--name gpu_operators_h200]

`measure` compiles, checks and times, for each operator (`bench.operators`), the first `--top` candidates of the ranking and `--evenly` others drawn
independently of it, or all if there are no more; then the fastest `--again` and the ranking's first 50 again, interleaved, and those times count.
Complete operators are appended to FILE. `report` needs no GPU: ratios of the measured candidates that the current ranking ranks best.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.choice_quality import places
from bench.common import write_results
from bench.operators import DEPTHWISE, PRODUCTS
from bench.operators import problem as operator_problem
from bench.top_ratio import KS
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.selection.choice import rank
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.sampling import evenly
from tilewright.tuning.trials import Job, Trials

KINDS = {"depthwise": DEPTHWISE, "batched product": PRODUCTS}
ALTERNATING = tuple(name for name in chain(*zip_longest(DEPTHWISE, PRODUCTS)) if name is not None)
"""Both kinds alternately, so that an interrupted run has some of each."""


def measured(trials: Trials, machine: Machine, name: str, options: argparse.Namespace) -> dataset.MeasuredLayer:
    problem = operator_problem(name, machine, 1)
    ranking = rank(problem, machine)
    first = np.argsort(ranking.seconds, kind="stable")[: options.top]
    positions = np.union1d(first, evenly(ranking, min(options.evenly, ranking.candidates), seed=len(name) + ranking.candidates))
    shuffled = np.random.default_rng(0).permutation(positions)
    jobs = [Job(problem, ranking.choice(int(position)).schedule, name) for position in shuffled]
    layer = {"name": name}
    found = dataset.from_outcomes(layer, machine.name, trials.measure(jobs))
    times = found.times()
    wanted = dict.fromkeys(sorted(times, key=lambda text: (times[text], text))[: options.again])
    wanted |= dict.fromkeys(serialisation.schedule_text(ranking.choice(int(position)).schedule) for position in first[: max(KS)])
    again = [Job(problem, serialisation.schedule_of(text), name) for text in wanted if text in times]
    return dataset.merged(found, dataset.from_outcomes(layer, machine.name, trials.remeasure(again, options.rounds)))


def measure(options: argparse.Namespace) -> None:
    machine = identified_machine(options.target)
    done = {str(entry.layer["name"]) for entry in read(options.file)} if options.file.exists() else set()
    start = time.monotonic()
    with Trials(machine) as trials:
        for name in options.operators.split(","):
            if name in done or time.monotonic() - start > options.seconds:
                continue
            found = measured(trials, machine, name, options)
            dataset.append(options.file, found)
            spent = time.monotonic() - start
            print(f"{name}: {found.count} candidates, {len(found.failures)} failed, best {1e6 * found.best:.2f} us; {spent:.0f} s", flush=True)
            for schedule, reason in found.failures[:3]:
                print(f"  {schedule}: {reason[:300]}", flush=True)


def read(path: Path) -> list[dataset.MeasuredLayer]:
    """The operators of a file."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for content in map(json.loads, file):
            schemas = {kind: {name: np.array(column) for name, column in columns.items()} for kind, columns in content["schemas"].items()}
            failures = [(str(schedule), str(reason)) for schedule, reason in content["failures"]]
            found.append(dataset.MeasuredLayer(content["layer"], content["machine"], schemas, failures, content["environment"], content["mode"]))
    return found


def figures(entry: dataset.MeasuredLayer) -> dict[str, Any]:
    """Ratios and losses of one operator. Candidates that were not measured are skipped; `not measured` counts those among the ranking's first 50."""
    machine = identified_machine(entry.machine)
    name = str(entry.layer["name"])
    ranking = rank(operator_problem(name, machine, 1), machine)
    where = places(ranking, entry)
    times = np.concatenate([columns["seconds"] for columns in entry.schemas.values()])
    seconds = np.full(ranking.candidates, np.nan)
    seconds[where[where >= 0]] = times[where >= 0]
    order = seconds[np.argsort(ranking.seconds, kind="stable")]
    known = order[~np.isnan(order)]
    best = np.sort(known)
    kind = next(kind for kind, names in KINDS.items() if name in names)
    row: dict[str, Any] = {"operator": name, "kind": kind, "candidates": ranking.candidates, "measured": len(known)}
    row |= {f"ratio of {k}": float(best[:k].sum() / known[:k].sum()) for k in KS}
    row |= {f"lop@{n}": float(known[:n].min() / best[0] - 1) for n in (1, 10)}
    return row | {"not measured": int(np.isnan(order[: max(KS)]).sum()), "best us": 1e6 * float(best[0]), "chosen us": 1e6 * float(known[0])}


def means(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        names = [*(f"ratio of {k}" for k in KS), "lop@1", "lop@10", "not measured"]
        if own:
            averages = {name: statistics.fmean(row[name] for row in own) for name in names}
            found.append({"operator": "all", "kind": kind, "operators": len(own), **averages})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=("measure", "report"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--operators", default=",".join(ALTERNATING))
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--evenly", type=int, default=200)
    parser.add_argument("--again", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=330, help="no operator is begun later")
    parser.add_argument("--name", default="gpu_operators_h200")
    options = parser.parse_args()
    if options.mode == "measure":
        measure(options)
        return
    rows = [figures(entry) for entry in read(options.file)]
    summary = means(rows)
    table = Table("operator", *(name for name in rows[0] if name != "operator"), box=None)
    for row in [*rows, *summary]:
        cells = (row.get(name) for name in rows[0])
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str("" if cell is None else cell) for cell in cells))
    Console(width=170).print(table)
    if options.name:
        print(write_results(options.name, {"file": str(options.file), "target": options.target}, [*summary, *rows]))


if __name__ == "__main__":
    main()
