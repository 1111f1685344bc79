"""Loss of the models' choices on a sealed set: random problems, drawn by a seed after models are frozen, measured once, reported as they fall.

    python -m bench.sealed_set --seed N --trained FILE ... [--data FILE] [--top 40] [--evenly 40] [--resume] [--name sealed_set_h200]

Ten problems of each of six classes (`tilewright.tuning.sampling`): batch above 1, groups or depthwise, dilation or one or three dimensions, plain
3x3, 1x1, first layers; each in one of the `--precisions`. None has the sizes of a problem in the files `--trained`, nor of a layer or operator on
which models were evaluated before.
Of each problem the first `--top` candidates of every ranking (the analytical models, and the choice as shipped) and an even sample are measured; then
the fastest `--again` and the first ten of every ranking once more, interleaved, and those times count.

A seed whose problems were measured is no longer sealed: the command refuses it, and also a tree with changes. `--resume` continues an interrupted run
of the same commit; `--unsealed` measures nevertheless, and the result says so. With `--complete` models made after the set was drawn (and never
trained with it) are judged: only what they choose first and the data lack is measured, in turns with the fastest; with `--judge` nothing is, on any
machine. `--batches` judges the twenty
benchmark layers in the same way, in the place of drawn problems. Problems with candidates on tensor cores have DeepGEMM's order of these too
(`bench.closed_form`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import closed_form, common
from bench.choice_quality import SHIPPED, SPACE, Figures, judge_space, summaries
from bench.judged_layers import texts
from bench.layers import LAYERS, layer
from bench.model_comparison import ANALYTICAL
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.collecting import collect, ranking_of
from tilewright.tuning.sampling import JUDGED, evenly, random_workloads
from tilewright.tuning.trials import Job, Trials
from tilewright.tuning.workloads import FP32, Convolution, text_of

CLASSES = ("batch", "groups", "forms", "3x3", "1x1", "first")
FIRST = 10
"""The number of first candidates of every ranking that are always measured again."""
TARGETS = {"lop@1": 0.05, "lop@10": 0.01}
"""Target figures: means over all problems."""


def drawn(seed: int, trained: Sequence[Path], classes: Sequence[str], each: int, precisions: Sequence[str] = (FP32,)) -> dict[str, str]:
    """The class of every problem of the set, by the problem's text."""
    known = {dataset.layer_workload(entry.layer) for entry in dataset.read(*trained)}
    found = list(islice(random_workloads(seed, classes, JUDGED | known, precisions), each * len(classes)))
    return {text_of(workload): classes[number % len(classes)] for number, workload in enumerate(found)}


def why_not(name: str, seed: int, commit: str, data: Path, resume: bool) -> str | None:
    """The reason why the seed's problems are not measured; None if they are sealed, or an interrupted run of this commit is resumed."""
    if commit.endswith("+changes"):
        return f"the tree is not frozen: commit {commit}"
    before = common.earlier_results(name)
    measured_at = before["commit"] if before is not None and before["settings"].get("seed") == seed else None
    if resume:
        return None if measured_at == commit else f"no run of seed {seed} at commit {commit} is in the results {name}"
    if measured_at is not None:
        return f"the problems of seed {seed} were measured at commit {measured_at}"
    return f"{data} holds measurements" if data.exists() else None


def benchmark(precisions: Sequence[str], batches: Sequence[int]) -> dict[str, str]:
    """The precision of every benchmark layer at these batches, by the problem's text."""
    found = [dataset.layer_workload(layer(name)) for name in LAYERS]
    layers = [one for one in found if isinstance(one, Convolution)]
    return {text_of(replace(one, batch=batch, precision=name)): name for name in precisions for batch in batches for one in layers}


def orders_of(described: Mapping[str, Any], problem: Problem, machine: Machine) -> tuple[Ranking, dict[str, np.ndarray]]:
    """The ranking as shipped, and the positions of its space by each ranking, best predicted first. The analytical one does not order the variants,
    which come last in the space; the closed form orders the candidates on tensor cores alone."""
    numerics = dataset.layer_numerics(described)
    shipped, analytical = rank(problem, machine, numerics=numerics), ranking_of(problem, machine, numerics)
    found = {name: np.argsort(each.seconds, kind="stable") for name, each in ((ANALYTICAL, analytical), (SHIPPED, shipped))}
    closed = closed_form.order(analytical, machine)
    return shipped, found if closed is None else {**found, closed_form.CLOSED_FORM: closed}


def measure(trials: Trials, machine: Machine, names: Sequence[str], options: argparse.Namespace) -> None:
    """Measures every problem that the data lack, then the best of each problem in turns."""

    def choose(described: Any, problem: Problem) -> list[Any]:
        ranking, orders = orders_of(described, problem, machine)
        first = [order[: options.top] for order in orders.values()]
        positions = np.unique(np.concatenate([*first, evenly(ranking, min(options.evenly, ranking.candidates), options.seed)]))
        return [ranking.choice(int(position)).schedule for position in np.random.default_rng(options.seed).permutation(positions)]

    known = {entry.layer["name"] for entry in dataset.read(options.data)} if options.data.exists() else set()
    collect(trials, machine, [{"name": name} for name in names if name not in known], choose, options.data)
    for entry in dataset.read(options.data):
        if any((columns["rounds"] >= options.rounds).any() for columns in entry.schemas.values()):
            continue
        problem = dataset.layer_problem(entry.layer)
        ranking, orders = orders_of(entry.layer, problem, machine)
        times = entry.times()
        fastest = sorted(times, key=lambda text: (times[text], text))[: options.again]
        again = dict.fromkeys((*fastest, *(text for order in orders.values() for text in texts(ranking, order[:FIRST]) if text in times)))
        jobs = [Job(problem, serialisation.schedule_of(text)) for text in again]
        dataset.append(options.data, dataset.from_outcomes(entry.layer, machine.name, trials.remeasure(jobs, options.rounds)))
        print(f"{entry.layer['name']}: {entry.count} candidates, {len(entry.failures)} failed, {len(jobs)} measured again", flush=True)


def complete(trials: Trials, machine: Machine, options: argparse.Namespace) -> None:
    """Measures those of the first candidates of every ranking that the data of a problem lack, in turns with the fastest ones."""
    for entry in dataset.read(options.data):
        problem, times = dataset.layer_problem(entry.layer), entry.times()
        ranking, orders = orders_of(entry.layer, problem, machine)
        known = {*times, *entry.failures}
        new = dict.fromkeys(text for order in orders.values() for text in texts(ranking, order[:FIRST]) if text not in known)
        if new:
            fastest = sorted(times, key=lambda text: (times[text], text))[:FIRST]
            jobs = [Job(problem, serialisation.schedule_of(text)) for text in (*fastest, *new)]
            dataset.append(options.data, dataset.from_outcomes(entry.layer, machine.name, trials.remeasure(jobs, options.rounds)))
            print(f"{entry.layer['name']}: {len(new)} more candidates", flush=True)


def judge(path: Path, machine: Machine, classes: dict[str, str]) -> list[Figures]:
    """A row for each problem and ranking."""
    rows: list[Figures] = []
    for entry in dataset.read(path):
        ranking, orders = orders_of(entry.layer, dataset.layer_problem(entry.layer), machine)
        rows += [{"class": classes[str(entry.layer["name"])], **row} for row in judge_space(entry, ranking, orders)]
    return rows


def means(rows: Sequence[Figures]) -> list[Figures]:
    """Means of each class, then of all."""
    found: list[Figures] = []
    for name in (*dict.fromkeys(row["class"] for row in rows), "all"):
        own = [row for row in rows if name in (row["class"], "all")]
        for mean in summaries(own):
            worst = [row["lop@1"] for row in own if row["way"] == mean["way"] and row["lop@1"] is not None]
            found.append({"class": name, **mean, "worst lop@1": max(worst, default=None)})
    return found


def show(console: Console, rows: Sequence[Figures], averages: Sequence[Figures]) -> None:
    def per_cent(value: float | None) -> str:
        return "?" if value is None else f"{100 * value:.2f}"

    layers = Table("problem", "best", "us", "chosen", "us", "LoP@1 %", "LoP@10 %", title="in the order of the choice as shipped", box=None)
    for row in rows:
        if row["way"] == SHIPPED:
            chosen = "?" if row["chosen us"] is None else f"{row['chosen us']:.2f}"
            cells = [row["best schema"], f"{row['best us']:.2f}", row["chosen schema"], chosen, per_cent(row["lop@1"]), per_cent(row["lop@10"])]
            layers.add_row(row["layer"], *cells)
    console.print(layers)
    table = Table("class", "problems", "order", "LoP@1 %", "worst", "LoP@10 %", "trials to 99 %", box=None)
    for row in averages:
        losses = [per_cent(row[name]) for name in ("lop@1", "worst lop@1", "lop@10")]
        table.add_row(row["class"], str(row["layers"]), row["way"], *losses, f"{row['trials_99']:.1f}")
    table.add_row("to reach", "", SHIPPED, per_cent(TARGETS["lop@1"]), "", per_cent(TARGETS["lop@10"]), "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trained", type=Path, nargs="+", required=True, help="the data sets that the models were trained with")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--each", type=int, default=10, help="problems of each class")
    parser.add_argument("--precisions", default=FP32, help="of the problems, such as fp16,bf16,tf32")
    parser.add_argument("--batches", help="judge the twenty benchmark layers at these batches instead, such as 1,64")
    parser.add_argument("--top", type=int, default=40)
    parser.add_argument("--evenly", type=int, default=40)
    parser.add_argument("--again", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, help="where measurements go (default bench/data/sealed_TARGET_SEED.jsonl.gz)")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--unsealed", action="store_true")
    parser.add_argument("--complete", action="store_true", help="only measure the first choices that the data lack")
    parser.add_argument("--judge", action="store_true", help="measure nothing: judge the data by today's spaces and models, on any machine")
    parser.add_argument("--name", help="the result file's name in bench/results (default sealed_set_TARGET)")
    options = parser.parse_args()
    options.name = options.name or f"sealed_set_{options.target}"
    options.data = options.data or Path(__file__).parent / "data" / f"sealed_{options.target}_{options.seed}.jsonl.gz"
    commit = common.git_commit()
    reason = why_not(options.name, options.seed, commit, options.data, options.resume)
    if reason is not None and not (options.unsealed or options.complete or options.judge):
        parser.error(f"{reason}; --unsealed measures nevertheless")
    machine = identified_machine(options.target)
    precisions = options.precisions.split(",")
    if options.batches:
        classes = benchmark(precisions, [int(batch) for batch in options.batches.split(",")])
        reason = reason or "the layers are those of benchmarks"
    else:
        classes = drawn(options.seed, options.trained, options.classes.split(","), options.each, precisions)
    settings = {**vars(options), "data": options.data.name, "not sealed because": reason, "targets": TARGETS}
    if options.judge:
        before = common.earlier_results(options.name)
        settings["measured at"] = before["settings"].get("measured at", before["commit"]) if before is not None else None
    else:
        common.write_results(options.name, settings, [], commit)  # from now on the seed counts as used
        if options.data.exists():
            dataset.without_remains(options.data)
        with Trials(machine) as trials:
            if options.complete:
                complete(trials, machine, options)
            else:
                measure(trials, machine, list(classes), options)
    rows = judge(options.data, machine, classes)
    averages = means(rows)
    common.write_results(options.name, settings, [*averages, *rows], commit)
    show(Console(width=200), [row for row in rows if row["over"] == SPACE], averages)


if __name__ == "__main__":
    main()
