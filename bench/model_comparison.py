"""Compares ranking methods: trained on the measured random layers, evaluated on held-out layers; and their orders of a layer's whole space.

    python -m bench.model_comparison bench/data/h200_train.jsonl.gz [--models FOLDER] [--folds 5] [--name model_comparison_h200]

`--models` also trains each on all layers of the file and stores it, for `bench.judged_layers`. CNNOpt's black-box forest sees only sizes and tiles,
its hybrid forest predicts the time from analytical quantities as well; ours predict corrections of the analytical time, or of the order within a
layer, with forests or gradient boosting; the last is trained with quantities relative to the machine's peaks only. `--tensor` compares methods for
candidates on tensor cores, DeepGEMM's closed form (`bench.closed_form`) among them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from bench.closed_form import CLOSED_FORM, closed_form_seconds
from bench.common import write_results
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.selection.learned.gpu import KEPT, STAGES, refined
from tilewright.selection.learned.hybrid import Learned, Recipe, Samples, load, train
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset
from tilewright.tuning.training import BOOSTED, RECIPE, TENSOR, TOPS, held_out, quality, samples

THREADS = 2
"""Threads of one training; scikit-learn releases the interpreter's lock, so that several trainings run at once."""
FOREST = MappingProxyType({"n_estimators": 100, "min_samples_leaf": 2, "max_features": 0.5, "n_jobs": 2})
RECIPES = MappingProxyType(
    {
        "black box": Recipe("random_forest", "own black box", "time", options=FOREST),
        "hybrid forest": Recipe("random_forest", "candidate", "time", options=FOREST),
        "forest correction": Recipe("random_forest", "candidate", "correction", 3.0, options=FOREST),
        "extra trees correction": Recipe("extra_trees", "candidate", "correction", 3.0, options=FOREST),
        "boosted time": Recipe("gradient_boosting", "candidate", "time", 3.0, options=BOOSTED),
        "boosted correction, all weigh the same": Recipe("gradient_boosting", "candidate", "correction", options=BOOSTED),
        "boosted rank": Recipe("gradient_boosting", "candidate", "rank", 3.0, options=BOOSTED),
        "boosted half rank": Recipe("gradient_boosting", "candidate", "rank", 3.0, options=BOOSTED, centred=0.5),
        "boosted relative": Recipe("gradient_boosting", "relative", "correction", 3.0, options=BOOSTED),
        "ours": RECIPE,
    }
)
SHALLOW = MappingProxyType(
    {"max_iter": 400, "learning_rate": 0.05, "max_leaf_nodes": 63, "min_samples_leaf": 10, "max_features": 0.3, "l2_regularization": 5.0}
)
TENSOR_RECIPES = MappingProxyType({
    "boosted time": replace(TENSOR, target="time"), "boosted rank": replace(TENSOR, target="rank"),
    "smaller trees": replace(TENSOR, options=SHALLOW), "ours": TENSOR,
})  # fmt: skip
ANALYTICAL = "analytical"


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_').replace(',', '')}.npz"


Way = Callable[[Ranking, Machine], np.ndarray]
"""A ranking method: the positions of an analytically ranked space, best predicted first."""


def analytical_order(ranking: Ranking, machine: Machine) -> np.ndarray:
    return np.argsort(ranking.seconds, kind="stable")


def learned_order(model: Learned, ranking: Ranking, machine: Machine) -> np.ndarray:
    """The order by a model. A model without analytical features ranks the whole space, others what the analytical models rank best. Forests that are
    not boosted are evaluated entirely, since their first trees alone are less informative."""
    kept = ranking.candidates if model.record == "own black box" else KEPT
    stages = STAGES if model.target in ("correction", "combined") else ()
    return np.argsort(refined(ranking, machine, (model,), kept, stages).seconds, kind="stable")


def ways(folder: Path) -> dict[str, Way]:
    """The analytical ranking method, and that of every model in the folder."""
    found: dict[str, Way] = {ANALYTICAL: analytical_order}
    for name in RECIPES:
        path = file_of(folder, name)
        if path.exists():
            found[name] = partial(learned_order, load(path))
    return found


def orders(ranking: Ranking, machine: Machine, folder: Path) -> dict[str, np.ndarray]:
    """The positions of the space by each ranking method, best predicted first."""
    return {name: way(ranking, machine) for name, way in ways(folder).items()}


def trainers() -> int:
    return max(1, len(os.sched_getaffinity(0)) // THREADS)


def compared(rows: Samples, machine: Machine, folds: int, recipe: Recipe) -> dict[str, float]:
    with threadpool_limits(THREADS):
        return quality(rows, held_out(rows, machine, recipe, gpu_calibration(machine).counted, folds))


def trained(rows: Samples, machine: Machine, recipe: Recipe) -> Learned:
    with threadpool_limits(THREADS):
        return train(rows, machine, recipe, gpu_calibration(machine).counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--models", type=Path, help="folder for the models trained on the whole file")
    parser.add_argument("--tensor", action="store_true", help="compare methods for candidates on tensor cores")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--only", help="recipes to compare, separated by ;")
    parser.add_argument("--no-compare", action="store_true", help="train for --models and compare nothing")
    parser.add_argument("--name", default="model_comparison_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    layers = dataset.read(*options.files)
    machine = identified_machine(layers[0].machine)
    rows, schemas = samples(layers, machine, (TENSOR if options.tensor else RECIPE).record)
    print(f"{len(rows)} kernels of {len(layers)} layers")
    known = TENSOR_RECIPES if options.tensor else RECIPES
    recipes = {name: recipe for name, recipe in known.items() if not options.only or name in options.only.split(";")}
    results: list[dict[str, Any]] = []
    if not options.no_compare:
        kinds = {str(kind): int((schemas == kind).sum()) for kind in np.unique(schemas)}
        settings = {**vars(options), "kernels": len(rows), "layers": len(layers), "schemas": kinds}
        results.append({"model": ANALYTICAL, **quality(rows, rows.expected(machine, gpu_calibration(machine).counted))})
        if options.tensor:
            results.append({"model": CLOSED_FORM, **quality(rows, closed_form_seconds(rows.counts, machine))})
        with ThreadPoolExecutor(trainers()) as pool:
            for name, found in zip(recipes, pool.map(partial(compared, rows, machine, options.folds), recipes.values()), strict=True):
                how = {key: getattr(recipes[name], key) for key in ("learner", "record", "target", "favour", "centred")}
                results.append({"model": name, **found, **how, "options": dict(recipes[name].options)})
                print(name, {key: round(value, 4) for key, value in found.items()}, flush=True)
                write_results(options.name, settings, results)  # what is known stays if a long comparison is interrupted
        show(results)
    if options.models is not None:
        options.models.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(trainers()) as pool:
            for name, model in zip(recipes, pool.map(partial(trained, rows, machine), recipes.values()), strict=True):
                model.save(file_of(options.models, name))


def show(results: list[dict[str, Any]]) -> None:
    table = Table("model", *(f"LoP@{top} %" for top in TOPS), "rank correlation", box=None, title="layers left out, of their measured kernels")
    for row in results:
        table.add_row(row["model"], *(f"{100 * row[f'lop@{top}']:.2f}" for top in TOPS), f"{row['spearman']:.3f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
