"""Quality of choices with few or no trials on the measured layers: tables 8 and 9 of CNNOpt on our own measurements.

    python -m bench.choice_quality bench/data/h200_layers.jsonl.gz --models FOLDER [--shipped] [--name choice_quality_h200]

Every ranking method (`bench.model_comparison`; with `--shipped` also the package's model, as used by `rank`) orders a layer's whole space. LoP@n: the
least time measured among the first n over the least measured of the layer, minus 1. Trials to 95 %, 99 % and 100 %: the place in the order of the
first candidate that takes at most 1.05, 1.01 and 1 times the least. A candidate that failed or was not measured counts as a trial that reaches
nothing, so that the numbers are upper bounds if an earlier candidate was not measured; the first 100 of each method should all be. If nothing in the
order reaches a percentage, the place of the last measured candidate counts.

A second part of the table has the pool of measured candidates in each method's order and in random order. The pool holds every method's favourites,
which makes random order look better than it would over the space.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.model_comparison import Way, ways
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.region import KINDS
from tilewright.kernels.registry import schedule_types, schemas
from tilewright.selection.choice import rank
from tilewright.selection.learned.gpu import model_of
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset
from tilewright.tuning.collecting import ranking_of

TOPS = (1, 10, 30, 100)
LOSSES = {"95": 0.05, "99": 0.01, "100": 0.0}
"""Largest loss for each percentage of the best performance."""
TARGETS = {"lop@1": 0.06, "lop@10": 0.01, "trials_95": 3, "median trials_99": 5, "milliseconds": 100}
"""Target figures: means over layers, except for the median."""
SHIPPED, RANDOM = "shipped", "random order"
SPACE, POOL = "space", "measured"
PERMUTATIONS = 100
"""Number of random orders to average."""
Figures = dict[str, Any]


def places(ranking: Ranking, measured: dataset.MeasuredLayer) -> np.ndarray:
    """The position in the space of every measured candidate, in the order of the columns; -1 if the space does not have it."""
    found: list[np.ndarray] = []
    for kind, columns in measured.schemas.items():
        result = np.full(len(columns["seconds"]), -1)
        start = 0
        for part in ranking.parts:
            count = len(part.estimate.seconds)
            if part.schema.schedule is schedule_types()[kind]:
                space = np.stack([np.asarray(part.candidates[axis], dtype=np.int64) for axis in part.candidates], axis=1)
                rows = np.stack([columns[axis] for axis in part.candidates], axis=1)
                # a space may leave out an axis if it offers only the default
                offered = np.ones(len(rows), dtype=bool)
                for axis in fields(part.schema.schedule):
                    offered &= (columns[axis.name] == axis.default) | (axis.name in part.candidates)
                numbers = np.unique(np.concatenate([space, rows]), axis=0, return_inverse=True)[1].ravel()
                position = np.full(numbers.max() + 1, -1)
                position[numbers[:count]] = start + np.arange(count)
                result = np.maximum(result, np.where(offered, position[numbers[count:]], -1))
            start += count
        found.append(result)
    return np.concatenate(found)


def figures(order: np.ndarray, seconds: np.ndarray, best: float) -> Figures:
    """LoP and trials of an order of positions. `seconds` by position: NaN if not measured, infinite if it failed.

    `lop@n` is None if none of the first n has a time, `trials_N` if nothing in the order reaches N %; `last` is the place of the last candidate with
    a time, `sure` the number of candidates before the first that was not measured."""
    times = seconds[order]
    unknown = np.isnan(times)
    times = np.where(unknown, np.inf, times)
    found: Figures = {}
    for top in TOPS:
        least = float(times[:top].min())
        found[f"lop@{top}"] = least / best - 1 if np.isfinite(least) else None
    for share, loss in LOSSES.items():
        reaching = np.flatnonzero(times <= best * (1 + loss))
        found[f"trials_{share}"] = int(reaching[0]) + 1 if len(reaching) else None
    found["last"] = int(np.flatnonzero(np.isfinite(times)).max(initial=-1)) + 1
    found["sure"] = int(np.argmax(unknown)) if unknown.any() else len(order)
    found |= {f"not measured of {top}": int(unknown[:top].sum()) for top in (30, 100)}
    return found


def averaged(rows: Sequence[Figures]) -> Figures:
    """The means of figures of the same, completely measured pool."""
    names = [*(f"lop@{top}" for top in TOPS), *(f"trials_{share}" for share in LOSSES)]
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


def with_failures(seconds: np.ndarray, ranking: Ranking, failures: Sequence[tuple[str, str]], orders: Mapping[str, np.ndarray]) -> np.ndarray:
    """The times, infinite for those of the orders' first candidates that failed when tried."""
    result = seconds.copy()
    failed = {text for text, _ in failures}
    if failed:
        first = np.unique(np.concatenate([order[: max(TOPS)] for order in orders.values()]))
        for position in first[np.isnan(seconds[first])]:
            if str(ranking.choice(int(position)).schedule) in failed:
                result[position] = np.inf
    return result


def median_milliseconds(call: Callable[[], Any], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spent)


def judge_space(measured: dataset.MeasuredLayer, ranking: Ranking, orders: Mapping[str, np.ndarray]) -> list[Figures]:
    """One row for each order of positions in the ranking. An order may leave out the last ones, variants that only the choice as shipped knows."""
    where = places(ranking, measured)
    times = np.concatenate([columns["seconds"] for columns in measured.schemas.values()])
    seconds = np.full(ranking.candidates, np.nan)
    seconds[where[where >= 0]] = times[where >= 0]
    seconds = with_failures(seconds, ranking, measured.failures, orders)
    names = {schema.schedule.__name__: schema.name for kind in KINDS for schema in schemas(ranking.machine, kind)}
    fastest = min(measured.schemas, key=lambda kind: float(measured.schemas[kind]["seconds"].min(initial=np.inf)))
    rows = []
    for way, order in orders.items():
        chosen = seconds[order[0]]
        rows.append({
            "layer": measured.layer["name"], "over": SPACE, "way": way, "candidates": ranking.candidates, "tried": measured.count,
            **figures(order, seconds, measured.best), "best schema": names[fastest], "best us": 1e6 * measured.best,
            "chosen schema": ranking.choice(int(order[0])).schema.name,
            "chosen us": 1e6 * float(chosen) if np.isfinite(chosen) else None,
        })  # fmt: skip
    return rows


def judge_pool(measured: dataset.MeasuredLayer, ranking: Ranking, orders: Mapping[str, np.ndarray]) -> list[Figures]:
    """One row for each order of the measured candidates that are in the space, and for random order over them."""
    where = places(ranking, measured)
    inside = where >= 0
    seconds = np.concatenate([columns["seconds"] for columns in measured.schemas.values()])[inside]
    best = float(seconds.min())
    found: dict[str, Figures] = {}
    for way, order in orders.items():
        place = np.empty(ranking.candidates, dtype=int)
        place[order] = np.arange(ranking.candidates)
        found[way] = figures(np.argsort(place[where[inside]]), seconds, best)
    permuted = (np.random.default_rng(seed).permutation(len(seconds)) for seed in range(PERMUTATIONS))
    found[RANDOM] = averaged([figures(order, seconds, best) for order in permuted])
    common = {"layer": measured.layer["name"], "over": POOL, "candidates": len(seconds), "tried": len(seconds)}
    return [{**common, "way": way, **row} for way, row in found.items()]


def summaries(rows: Sequence[Figures]) -> list[Figures]:
    """Means and medians over layers for each method. A mean of LoP@n is None if a layer has none; `unreached` counts layers in which nothing reaches
    the percentage, `bounds` those in which an earlier candidate was not measured."""
    result: list[Figures] = []
    for over, way in dict.fromkeys((row["over"], row["way"]) for row in rows):
        own = [row for row in rows if (row["over"], row["way"]) == (over, way)]
        entry: Figures = {"layer": "all", "over": over, "way": way, "layers": len(own)}
        for name in (f"lop@{top}" for top in TOPS):
            values = [row[name] for row in own]
            entry |= {name: None, f"median {name}": None} if None in values else both(name, values)
        for name in (f"trials_{share}" for share in LOSSES):
            entry |= both(name, [row["last"] if row[name] is None else row[name] for row in own])
            entry[f"unreached {name}"] = sum(row[name] is None for row in own)
            entry[f"bounds {name}"] = sum(row[name] is not None and row[name] > row.get("sure", np.inf) for row in own)
        if over == SPACE:
            entry |= {name: sum(row[name] for row in own) for name in ("not measured of 30", "not measured of 100")}
            times = [row["milliseconds"] for row in own if "milliseconds" in row]
            if times:
                entry |= {**both("milliseconds", times), "greatest milliseconds": max(times)}
        result.append(entry)
    return result


def both(name: str, values: Sequence[float]) -> Figures:
    return {name: statistics.fmean(values), f"median {name}": float(statistics.median(values))}


def judge(measured: dataset.MeasuredLayer, machine: Machine, known: Mapping[str, Way], shipped: bool, repeats: int) -> list[Figures]:
    """All rows of one layer, and the time to rank its whole space."""
    problem = dataset.layer_problem(measured.layer)
    ranking = whole = ranking_of(problem, machine)
    orders = {name: way(ranking, machine) for name, way in known.items()}

    def shipped_order() -> tuple[Ranking, np.ndarray]:
        found = rank(problem, machine)
        return found, np.argsort(found.seconds, kind="stable")

    if shipped:
        whole, orders[SHIPPED] = shipped_order()  # its positions are those of `ranking`, then variants
    candidates = judge_space(measured, whole, orders)
    space = median_milliseconds(lambda: ranking_of(problem, machine), repeats)
    for row in candidates:
        if row["way"] == SHIPPED:
            row["milliseconds"] = median_milliseconds(shipped_order, repeats)
        else:
            row["milliseconds"] = space + median_milliseconds(partial(known[row["way"]], ranking, machine), repeats)
    return candidates + judge_pool(measured, ranking, {name: order[order < ranking.candidates] for name, order in orders.items()})


def per_cent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.2f}"


def show(console: Console, rows: Sequence[Figures], means: Sequence[Figures]) -> None:
    """Prints the layers for the most important ranking method, then the means."""
    names = [row["way"] for row in means if row["over"] == SPACE]
    way = next((name for name in (SHIPPED, "ours") if name in names), names[-1])
    layers = Table("layer", "best", "us", "chosen", "us", *(f"LoP@{top} %" for top in TOPS), "95 %", "99 %", "100 %", "not measured", "ms",
                   title=f"each layer's whole space in the order of: {way}", box=None)  # fmt: skip
    for row in rows:
        if (row["over"], row["way"]) == (SPACE, way):
            chosen = "?" if row["chosen us"] is None else f"{row['chosen us']:.2f}"
            trials = ["none" if row[f"trials_{share}"] is None else str(row[f"trials_{share}"]) for share in LOSSES]
            cells = [row["layer"], row["best schema"], f"{row['best us']:.2f}", row["chosen schema"], chosen]
            cells += [per_cent(row[f"lop@{top}"]) for top in TOPS] + trials + [str(row["not measured of 100"]), f"{row['milliseconds']:.0f}"]
            layers.add_row(*cells)
    console.print(layers)
    table = Table("order", "of", *(f"LoP@{top} %" for top in TOPS), "to 95 %", "to 99 %", "to 100 %", "not measured", "ms (most)", box=None,
                  title="means over layers; trials: mean / median")  # fmt: skip
    for row in means:
        trials = [f"{row[f'trials_{share}']:.1f} / {row[f'median trials_{share}']:.1f}" for share in LOSSES]
        spent = f"{row['milliseconds']:.0f} ({row['greatest milliseconds']:.0f})" if "milliseconds" in row else ""
        losses = [per_cent(row[f"lop@{top}"]) for top in TOPS]
        table.add_row(row["way"], row["over"], *losses, *trials, str(row.get("not measured of 100", "")), spent)
    table.add_row("to reach", SPACE, "6.00", "1.00", "", "", "3 /", "/ 5", "", "0", "100")
    console.print(table)


def warn(console: Console, means: Sequence[Figures]) -> None:
    for row in means:
        if row.get("not measured of 30"):
            missing = f"{row['not measured of 30']} candidates among the first 30 of the {row['layers']} layers were not measured"
            console.print(f"warning: {row['way']}: {missing}; its figures are not fair", style="red")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", type=Path, required=True, help="folder of `bench.model_comparison --models`")
    parser.add_argument("--shipped", action="store_true", help="also the machine's model that comes with the package")
    parser.add_argument("--layers", help="only these, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="of timing")
    parser.add_argument("--name", default="choice_quality_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    chosen = [entry for entry in dataset.read(options.file) if not options.layers or entry.layer["name"] in options.layers.split(",")]
    if not chosen:
        parser.error(f"{options.file} has none of the layers")
    machine = identified_machine(chosen[0].machine)
    if options.shipped and model_of(machine.name) is None:
        parser.error(f"no model for {machine.name} comes with the package")
    known = ways(options.models)
    if len(known) == 1:
        parser.error(f"{options.models} has no model; python -m bench.model_comparison FILE --models {options.models}")
    rows: list[Figures] = []
    for entry in chosen:
        start = time.monotonic()
        rows += judge(entry, machine, known, options.shipped, options.repeats)
        print(f"{entry.layer['name']}: {entry.count} candidates measured; {time.monotonic() - start:.0f} s", flush=True)
    means = summaries(rows)
    print(write_results(options.name, {**vars(options), "targets": TARGETS}, [*means, *rows]))
    console = Console(width=170)
    show(console, rows, means)
    warn(console, means)


if __name__ == "__main__":
    main()
