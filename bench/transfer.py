"""How well a model trained on one GPU ranks the kernels of another: V100 and H200, each predicted from the other.

    python -m bench.transfer --published FOLDER --ours bench/data/h200_train.jsonl.gz --judged bench/data/h200_layers.jsonl.gz [--name transfer]

All models see only dimensionless quantities, relative to the machine's peaks (the record "relative"), and correct the general analytical model
(`kernels.gpu.counted.counted_cost`, default constants, which were fitted on the V100). Evaluated are orders of the measured direct kernels, RS and S,
of the twenty layers of each machine, none of which is in the training data. The two sets of kernels differ in more than the machine: CNNOpt's keep
columns of the image innermost and stage results in shared memory (`PUBLISHED`), ours keep channels innermost, copy asynchronously and store directly
(`GENERATED`); the counts of `TileCounts` are what they have in common. Twenty layers are few, and one bad first choice moves the mean by some per
cent. So a machine's random layers, of which there are hundreds, are evaluated as well, with the models of the other machine, which did not see them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import published_data
from bench.common import write_results
from bench.fitting import without_failures
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.direct.features import NUMBER as DIRECT
from tilewright.selection.learned.hybrid import Learned, Recipe, Samples, join, train_together
from tilewright.tuning import dataset
from tilewright.tuning.training import TOPS, quality, samples

RECIPES = MappingProxyType(
    {
        "correction": Recipe("gradient_boosting", "relative", "correction", 1.0),
        "rank": Recipe("gradient_boosting", "relative", "rank", 3.0, 1, published_data.BOOSTED, 0.5),
    }
)
ANALYTICAL = "analytical, not corrected"
LEAST_ROWS = 10
"""Random layers with fewer measurements are not evaluated."""
Source = list[tuple[Samples, Machine]]
"""The training data of a model."""


def generally(rows: Samples) -> Samples:
    """The samples without the predictions of their schemas' own analytical models: only the general one exists for both machines."""
    return replace(rows, analytical=None)


def direct(rows: Samples) -> Samples:
    return rows.where(rows.described["schema"] == DIRECT)


def layers_of(layers: Mapping[str, Mapping[str, Samples]]) -> Samples:
    """The samples of the published layers, with each layer as one problem of both kinds."""
    parts = [replace(rows, problem=np.full(len(rows), number)) for number, kinds in enumerate(layers.values()) for rows in kinds.values()]
    return join(parts)


def with_rows(rows: Samples, least: int) -> Samples:
    """The problems with at least `least` measurements."""
    _, numbers, counts = np.unique(rows.problem, return_inverse=True, return_counts=True)
    return rows.where(counts[numbers] >= least)


def predicted(model: Learned, rows: Samples, machine: Machine) -> np.ndarray:
    return model.predicted(rows.described, rows.counts, machine, rows.expected(machine, gpu_calibration(machine).counted))


def compare(
    sources: Mapping[str, Source],
    judged: Mapping[str, tuple[Samples, Machine]],
    recipes: Mapping[str, Recipe],
    seen: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """For every test set: LoP@n and rank correlation, means over its layers, uncorrected and with every model except those whose sources have `seen`
    it."""
    results: list[dict[str, Any]] = []
    for name, (rows, machine) in judged.items():
        found = quality(rows, counted_cost(rows.counts, machine).seconds)
        results.append({"judged": name, "trained": ANALYTICAL, "target": None, "rows": 0, **found})
    for trained, source in sources.items():
        for target, recipe in recipes.items():
            start = time.perf_counter()
            model = train_together(source, recipe, gpu_calibration(source[0][1]).counted)
            seconds = time.perf_counter() - start
            for name, (rows, machine) in judged.items():
                if trained in seen.get(name, ()):
                    continue
                count = sum(len(part) for part, _ in source)
                found = quality(rows, predicted(model, rows, machine))
                results.append({"judged": name, "trained": trained, "target": target, "rows": count, **found, "training seconds": seconds})
            print(f"{trained}, {target}: {seconds:.0f} s", flush=True)
    return sorted(results, key=lambda row: list(judged).index(row["judged"]))


def conclusions(results: list[dict[str, Any]], own: Mapping[str, tuple[str, str]]) -> list[str]:
    """The conclusions from the figures as text. `own`: for each test set, the training on its own machine and that on the other; the first may be
    missing in the results."""
    sentences = []
    for judged, (home, foreign) in own.items():
        rows = [row for row in results if row["judged"] == judged]
        plain = next(row for row in rows if row["trained"] == ANALYTICAL)
        for foreign_row in (row for row in rows if row["trained"] == foreign):
            losses = [100 * row["lop@1"] for row in (foreign_row, plain)]
            verdict = "better" if losses[0] < losses[1] else "worse"
            sentence = f"{judged} with a model of {foreign} ({foreign_row['target']}):"
            sentence += f" LoP@1 {losses[0]:.1f} %, {verdict} than without ({losses[1]:.1f} %)"
            near = [row["lop@1"] for row in rows if (row["trained"], row["target"]) == (home, foreign_row["target"])]
            sentences.append(sentence + "".join(f"; trained on {home} {100 * loss:.1f} %" for loss in near))
    return sentences


def show(console: Console, results: list[dict[str, Any]], sentences: list[str]) -> None:
    table = Table("judged", "trained on", "target", *(f"LoP@{top} %" for top in TOPS), "rank correlation", box=None, title="means over layers")
    for row in results:
        losses = [f"{100 * row[f'lop@{top}']:.2f}" for top in TOPS]
        table.add_row(row["judged"], row["trained"], row["target"] or "", *losses, f"{row['spearman']:.3f}")
    console.print(table)
    for sentence in sentences:
        console.print(sentence)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", type=Path, required=True, help="folder of CNNOpt's measurements")
    parser.add_argument("--published-machine", default="v100")
    parser.add_argument("--ours", type=Path, nargs="+", required=True, help="measured random layers")
    parser.add_argument("--judged", type=Path, required=True, help="the measured benchmark layers")
    parser.add_argument("--name", default="transfer", help="the result file's name in bench/results")
    options = parser.parse_args()
    first = identified_machine(options.published_machine)
    training, layers, _ = published_data.read_folder(options.published, first)
    training = without_failures(training, first, gpu_calibration(first).counted)
    random_layers, judged_layers = dataset.read(*options.ours), dataset.read(options.judged)
    second = identified_machine(random_layers[0].machine)
    every = generally(samples(random_layers, second)[0])
    there, here = f"{first.name} layers", f"{second.name} layers"
    judged = {here: (direct(generally(samples(judged_layers, second)[0])), second), there: (layers_of(layers), first)}
    random_here, random_there = f"{second.name} random layers", f"{first.name} random layers"
    judged |= {random_here: (with_rows(direct(every), LEAST_ROWS), second), random_there: (with_rows(training, LEAST_ROWS), first)}
    sources: dict[str, Source] = {
        first.name: [(training, first)],
        f"{second.name}, direct": [(direct(every), second)],
        f"{second.name}, all schemas": [(every, second)],
        "both, direct": [(training, first), (direct(every), second)],
        "both, all schemas": [(training, first), (every, second)],
    }
    seen = {
        random_set: [name for name, parts in sources.items() if any(trained == machine for _, trained in parts)]
        for random_set, machine in ((random_here, second), (random_there, first))
    }
    results = compare(sources, judged, RECIPES, seen)
    ours = f"{second.name}, direct"
    pairs = {here: (ours, first.name), random_here: (ours, first.name), there: (first.name, ours), random_there: (first.name, ours)}
    sentences = conclusions(results, pairs)
    settings = {**vars(options), "layers": {name: len(np.unique(rows.problem)) for name, (rows, _) in judged.items()}, "conclusions": sentences}
    print(write_results(options.name, settings, results))
    show(Console(width=150), results, sentences)


if __name__ == "__main__":
    main()
