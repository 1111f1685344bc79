"""CNNOpt's tables 8 and 9 from its published measurements, with our features and models.

    python -m bench.published_data FOLDER --name published_v100
    python -m bench.published_data FOLDER --compare --name published_v100_training

CNNOpt: "Effective Performance Modeling and Domain-Specific Compiler Optimization of CNNs for GPUs" (PACT 2022); the measurements, and the kernels'
sources from which the meaning of their columns follows, are those of its artifact, github.com/HPCRL/AE-PACT.

FOLDER holds `rs/`, `s/` (stride 1) and `rs_stride2/`, each with `layer_*.csv`; the first two with `train.csv`. Models are trained only on the
`train.csv` files, and rank every configuration of a layer's files (those of `rs` and `s` together if a layer has both). Loss of performance is
against the fastest of the layer's configurations. Columns, from the product rules that all lines obey: H = TH BH x blocks and so on; the S files' W*
are threads of a warp (their product is 32) and B* warps of a block. The S kernel numbers a block's threads along K first, over all its warps, so that
its real warps are along K (`as_numbered`); with these the model's error on held-out problems is smaller. Times are milliseconds. A line of a training
file that is faster than the machine's peak rate, or far faster than the others suggest, is a failed launch.

`--compare` instead compares training recipes by cross-validation over the problems of the `train.csv` files, and reads no layer. Most of these
problems have only the first hundred configurations of their space, nearly all of them without a split of the sum, while a layer has its whole space
with as many configurations of each split. So the comparison reports three kinds of problems by their sizes alone: all, those of the layers' kind (3x3
filters, at most 160 rows), and those whose whole space was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cnnopt import PUBLISHED, printed_cost
from bench.common import write_results
from bench.fitting import fit_overheads, without_failures
from tilewright.errors import InvalidInput, TilewrightError
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.direct.counts import variant_counts
from tilewright.kernels.gpu.direct.features import NUMBER as DIRECT
from tilewright.kernels.gpu.direct.schedule import RS, S
from tilewright.kernels.gpu.features import described as columns_of
from tilewright.selection.learned.hybrid import (
    Learned,
    Recipe,
    Samples,
    join,
    loss_of_performance,
    out_of_fold,
    train,
)

COLUMNS = {"rs": 13, "s": 15}
"""Numbers per line."""
FOLDERS = {"rs": ("rs", 1), "s": ("s", 1), "rs_stride2": ("rs", 2)}
"""Maps a folder to the kind of its lines and the stride."""
TRIED = (1, 10, 30)
SHARES = (95, 99, 100)
BLACK_BOX = Recipe("random_forest", "black box", "time", options={"n_estimators": 100, "max_features": 0.5, "min_samples_leaf": 2})
"""The paper's black-box model: a random forest of problem and tile sizes."""
BOOSTED = {"max_iter": 300, "learning_rate": 0.08, "max_leaf_nodes": 31, "max_depth": 8, "min_samples_leaf": 20, "max_features": 0.3}
HYBRID = Recipe("gradient_boosting", "hybrid", "rank", 3.0, 3, BOOSTED, centred=0.5)
"""The paper's idea, counts and terms of an analytical model as features, with our learner and target."""
DEEPER = BOOSTED | {"max_leaf_nodes": 63, "max_depth": 12}
DETAILED = Recipe("gradient_boosting", "detailed", "rank", 3.0, 4, DEEPER, centred=0.25)
"""The best by cross-validation on the training files, chosen and frozen before any layer was ranked with its features."""
RECIPES = {"black box": BLACK_BOX, "hybrid": HYBRID, "detailed": DETAILED}
"""The learned models that are evaluated on the layers."""
Predict = Callable[[Samples], np.ndarray]
"""Predicted seconds of samples."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of one file, or of several of one kind; `skipped` lines were not numeric."""

    samples: Samples
    skipped: int


def read(path: Path, kind: str, stride: int, machine: Machine) -> Measurements:
    """The measurements of one file.

    Raises:
        InvalidInput: if it cannot be read, or a line of numbers is not a configuration with a time.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read ({error})", "give a folder of the form that the documentation of this command states") from None
    numbers: list[list[float]] = []
    skipped = 0
    for number, line in enumerate(lines, 1):
        try:
            row = [float(part) for part in line.split(",")]
        except ValueError:
            skipped += 1
            continue
        sizes, milliseconds = row[:-1], row[-1]
        if len(row) != COLUMNS[kind] or not np.isfinite(row).all() or milliseconds <= 0 or any(size < 1 or size != int(size) for size in sizes):
            reason = f"{COLUMNS[kind]} numbers: positive whole sizes, then a positive time"
            raise InvalidInput(f"{path}, line {number}: not a measurement", f"a line of {kind} holds {reason}")
        numbers.append(row)
    if not numbers:
        raise InvalidInput(f"{path} holds no measurement", f"its lines are {COLUMNS[kind]} numbers separated by commas")
    return Measurements(_samples(np.array(numbers), kind, stride, machine), skipped)


def _samples(table: np.ndarray, kind: str, stride: int, machine: Machine) -> Samples:
    outputs, height, width, channels, filter_size = table.T[:5]
    one = np.ones(len(table))
    problem = {
        "outputs": outputs, "height": height, "width": width, "channels": channels, "filter_y": filter_size, "filter_x": filter_size,
        "stride_y": one * stride, "stride_x": one * stride,
    }  # fmt: skip
    if kind == "rs":
        tk, th, tw, bk, bh, bw, parts = table.T[5:12]
        rows = {
            "slice": 2 * one, "register_k": tk, "register_y": th, "register_x": tw, "warp_k": bk, "warp_y": one, "warp_x": one,
            "block_k": one, "block_y": bh, "block_x": bw, "channels": one, "split": parts, "stages": one, "filters": one,
        }  # fmt: skip
    else:
        th, tw, tk, wh, ww, wk, bh, bw, bk = table.T[5:14]
        rows = {
            "slice": one, "register_k": tk, "register_y": th, "register_x": tw, "warp_k": wk, "warp_y": wh, "warp_x": ww,
            "block_k": bk, "block_y": bh, "block_x": bw, "channels": one, "split": one, "stages": 2 * one, "filters": 0 * one,
        }  # fmt: skip
    # a number for each problem, equal in every file
    numbers = np.zeros(len(table), dtype=np.int64)
    for column in (outputs, height, width, channels, filter_size, one * stride):
        numbers = numbers * 4099 + column.astype(np.int64)
    described = columns_of(DIRECT, rows, problem)
    return Samples(described, variant_counts(as_numbered(rows), problem, machine, PUBLISHED), table[:, -1] * 1e-3, numbers)


def as_numbered(candidates: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The candidates with a block's real warps when its threads are numbered along K first, then along the row: 32 threads along K, or all along K
    and several along the row. Candidates for which that is not a whole tile are unchanged."""
    along_k, along_x = candidates["warp_k"] * candidates["block_k"], candidates["warp_x"] * candidates["block_x"]
    warp_k = np.gcd(along_k.astype(np.int64), 32)
    warp_x = 32 // warp_k
    whole = (candidates["warp_y"] == 1) & ((along_k <= 32) | (warp_k == 32)) & (along_k % warp_k == 0) & (along_x % warp_x == 0)
    whole &= (along_k % 32 == 0) | (warp_k == along_k)
    real = {"warp_k": warp_k, "warp_x": warp_x, "block_k": along_k / warp_k, "block_x": along_x / warp_x}
    return candidates | {name: np.where(whole, column, candidates[name]) for name, column in real.items()}


def read_folder(folder: Path, machine: Machine) -> tuple[Samples, dict[str, dict[str, Samples]], dict[str, int]]:
    """The training samples of both kinds; the samples of each layer by kind; and the number of skipped lines by file.

    Raises:
        InvalidInput: if the folder has no training file or no layer.
    """
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder", "give the folder that holds rs/, s/ and rs_stride2/")
    skipped: dict[str, int] = {}
    training: list[Samples] = []
    layers: dict[str, dict[str, Samples]] = {}
    for name, (kind, stride) in FOLDERS.items():
        for path in sorted((folder / name).glob("layer_*.csv")):
            found = read(path, kind, stride, machine)
            layer = path.stem.removeprefix("layer_")
            if kind in layers.get(layer, {}):  # the same sizes at stride 1
                layer += "_stride2"
            layers.setdefault(layer, {})[kind] = found.samples
            skipped[f"{name}/{path.name}"] = found.skipped
        if (folder / name / "train.csv").is_file():
            found = read(folder / name / "train.csv", kind, stride, machine)
            training.append(found.samples)
            skipped[f"{name}/train.csv"] = found.skipped
    if not training:
        raise InvalidInput(f"{folder} has no training file", "rs/train.csv or s/train.csv")
    if not layers:
        raise InvalidInput(f"{folder} has no layer", "files like rs/layer_64x56x56_64_3.csv")
    return join(training), layers, skipped


def trials_to(order: np.ndarray, seconds: np.ndarray, loss: float) -> int:
    """Trials until the loss is at most that (0.05: what CNNOpt calls 95 % of the performance)."""
    return int(np.flatnonzero(seconds[order] <= seconds.min() * (1 + loss))[0]) + 1


def judged(seconds: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """The figures of one ranking."""
    figures: dict[str, float] = {f"lop@{tried}": loss_of_performance(seconds, predicted, tried) for tried in TRIED}
    return figures | {f"trials_{share}": trials_to(np.argsort(predicted, kind="stable"), seconds, 1 - share / 100) for share in SHARES}


def evaluate(layers: dict[str, dict[str, Samples]], predict: Predict) -> list[dict[str, Any]]:
    """The figures of every layer and of each of its kinds alone, and as layer "all" the means over layers of ranking both kinds together."""
    results: list[dict[str, Any]] = []
    for name, kinds in layers.items():
        predictions = {kind: predict(samples) for kind, samples in kinds.items()}
        seconds = np.concatenate([samples.seconds for samples in kinds.values()])
        results.append({"layer": name, **judged(seconds, np.concatenate(list(predictions.values())))})
        if len(kinds) > 1:
            results[-1] |= {kind: judged(samples.seconds, predictions[kind]) for kind, samples in kinds.items()}
    keys = [f"lop@{tried}" for tried in TRIED] + [f"trials_{share}" for share in SHARES]
    return [*results, {"layer": "all", **{key: float(np.mean([result[key] for result in results])) for key in keys}}]


def show(console: Console, results: list[dict[str, Any]]) -> None:
    models = list(dict.fromkeys(entry["model"] for entry in results))
    found = {(entry["layer"], entry["model"]): entry for entry in results}
    table = Table("layer", *(f"{name}\n@1 / @10 / @30" for name in models), f"{models[-1]} trials to\n95 % / 99 % / 100 %")
    for layer in dict.fromkeys(entry["layer"] for entry in results):
        losses = [" / ".join(f"{100 * found[layer, model][f'lop@{tried}']:.1f}" for tried in TRIED) for model in models]
        table.add_row(layer, *losses, " / ".join(f"{found[layer, models[-1]][f'trials_{share}']:g}" for share in SHARES))
    console.print(table)
    console.print("loss of performance in per cent, with as many trials; RS and S kernels ranked together where a layer has both")


GROWN = {"n_estimators": 30, "max_depth": 16, "min_samples_leaf": 3, "max_features": 0.4}
CANDIDATES: dict[str, Recipe] = {
    "random forest, hybrid, time": Recipe("random_forest", "hybrid", "time", options=GROWN),
    "gradient boosting, hybrid, rank half centred": replace(HYBRID, seeds=1),
    "gradient boosting, detailed, rank half centred": replace(DETAILED, seeds=1, options=BOOSTED, centred=0.5),
    "deeper trees, detailed, rank half centred": replace(DETAILED, seeds=1, centred=0.5),
    "deeper trees, detailed, rank a quarter centred": replace(DETAILED, seeds=1),
}
"""The training recipes that `--compare` compares."""
FOLDS = 3
LEAST_ROWS = 40
"""Problems with fewer training samples are not evaluated, unless these are their whole space."""
LEAST_WHOLE = 15
FIRST = 100
"""Configurations of a problem's space at which its measurements were cut off."""
LIKE_LAYERS = 160
"""Maximum rows of an image that is as small as those of most layers."""
COMPARED = (1, 3, 10)
PARTNERS = 12
FACTORS = (0.75, 0.85, 0.95, 1.05, 1.15, 1.35)
"""Ratios of the best times of an S and an RS problem that are ranked as one."""


def kinds_of_problems(samples: Samples, numbers: np.ndarray, counts: np.ndarray, first: np.ndarray) -> dict[str, np.ndarray]:
    """Masks over problems, by their sizes and their numbers of samples alone. `numbers`: the problem of each row; `first`: a row of each problem."""
    height, taps = (samples.described[f"problem {name}"][first] for name in ("height", "filter_y"))
    split = np.zeros(len(counts))
    np.maximum.at(split, numbers, samples.described["tile split"])
    enough = counts >= LEAST_ROWS
    return {
        "all": enough,
        "like the layers": enough & (taps == 3) & (height <= LIKE_LAYERS),
        "whole space": (counts >= LEAST_WHOLE) & (counts < FIRST) & (split > 1),
    }


def held_out(samples: Samples, predicted: np.ndarray) -> dict[str, Any]:
    """For each kind of problems their number, and means over them of LoP@1, @3, @10 (a loss above 1 counts as 1) and of the trials to 99 %."""
    _, first, numbers, counts = np.unique(samples.problem, return_index=True, return_inverse=True, return_counts=True)
    kinds = kinds_of_problems(samples, numbers, counts, first)
    figures = np.full((len(counts), len(COMPARED) + 1), np.nan)
    groups = np.split(np.argsort(numbers, kind="stable"), np.cumsum(counts)[:-1])
    for problem in np.flatnonzero(np.any(list(kinds.values()), 0)):
        seconds, ranked = samples.seconds[groups[problem]], predicted[groups[problem]]
        losses = [min(1.0, loss_of_performance(seconds, ranked, tried)) for tried in COMPARED]
        figures[problem] = [*losses, trials_to(np.argsort(ranked, kind="stable"), seconds, 0.01)]
    keys = (*(f"lop@{tried}" for tried in COMPARED), "trials_99")
    return {
        kind: {"problems": int(which.sum())} | dict(zip(keys, map(float, figures[which].mean(0)), strict=True))
        for kind, which in kinds.items()
        if which.any()
    } | {"S beside RS": beside(samples, predicted, groups, first, kinds["like the layers"])}


def beside(samples: Samples, predicted: np.ndarray, groups: list[np.ndarray], first: np.ndarray, like_layers: np.ndarray) -> dict[str, Any]:
    """LoP@1 (a loss above 1 counts as 1) of ranking an S problem and an RS problem as if they were one, like the two kernels of a layer: no other
    figure sees an error between the kernels, which have one training problem in common. Every S problem with 3x3 filters joins random RS problems
    of the layers' kind; the ratio of their best times is made one of FACTORS in both measured and predicted times."""
    slices, taps = samples.described["tile slice"][first], samples.described["problem filter_y"][first]
    enough = np.array([len(group) for group in groups]) >= LEAST_WHOLE
    of_s, of_rs = np.flatnonzero((slices == S) & (taps == 3) & enough), np.flatnonzero((slices == RS) & like_layers)
    random = np.random.default_rng(0)
    losses = []
    for one in of_s:
        for other in random.choice(of_rs, PARTNERS):
            for factor in FACTORS:
                scales = [(groups[problem], scale / samples.seconds[groups[problem]].min()) for problem, scale in ((one, factor), (other, 1.0))]
                seconds, ranked = (np.concatenate([column[rows] * scale for rows, scale in scales]) for column in (samples.seconds, predicted))
                losses.append(min(1.0, loss_of_performance(seconds, ranked, 1)))
    return {"problems": len(of_s)} | ({"lop@1": float(np.mean(losses))} if losses else {})


def compare(folder: Path, machine: Machine, console: Console) -> list[dict[str, Any]]:
    """The figures of every recipe, by cross-validation over problems; only training files are read."""
    paths = {name: folder / name / "train.csv" for name in FOLDERS}
    samples = join([read(path, *FOLDERS[name], machine).samples for name, path in paths.items() if path.is_file()])
    clean = without_failures(samples, machine, gpu_calibration(machine).counted)
    overheads = fit_overheads(clean, machine)
    rows: list[dict[str, Any]] = [{"model": "analytical", **held_out(clean, counted_cost(clean.counts, machine, overheads).seconds)}]
    for name, recipe in CANDIDATES.items():
        rows.append({"model": name, **held_out(clean, out_of_fold(clean, machine, recipe, overheads, FOLDS))})
        console.print(name, f"{100 * rows[-1]['all']['lop@1']:.2f} %")
    kinds = [kind for kind in rows[0] if kind != "model"]
    table = Table("model, by leaving problems out", *(f"{kind} ({rows[0][kind]['problems']})\nLoP@1 / @3 / @10 %" for kind in kinds))
    for row in rows:
        table.add_row(row["model"], *(" / ".join(f"{100 * loss:.2f}" for key, loss in row[kind].items() if key.startswith("lop")) for kind in kinds))
    console.print(table)
    return rows


def reproduce(folder: Path, machine: Machine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains and evaluates all models; returns the settings and the figures, one entry for each model and layer."""
    training, layers, skipped = read_folder(folder, machine)
    clean = without_failures(training, machine, gpu_calibration(machine).counted)
    overheads = fit_overheads(clean, machine)
    learned = {name: train(clean, machine, recipe, overheads) for name, recipe in RECIPES.items()}

    def predictor(model: Learned) -> Predict:
        return lambda samples: model.seconds(samples.described, samples.counts, machine)

    models: dict[str, Predict] = {
        "analytical as printed": lambda samples: printed_cost(samples.counts, machine).seconds,
        "analytical": lambda samples: counted_cost(samples.counts, machine, overheads).seconds,
    } | {name: predictor(model) for name, model in learned.items()}
    settings = {
        "machine": machine.name,
        "training": {"rows": len(training), "dropped as failed launches": len(training) - len(clean), "problems": len(np.unique(clean.problem))},
        "lines skipped": skipped,
        "overheads": asdict(overheads),
    }
    return settings, [{"model": name, **figures} for name, predict in models.items() for figures in evaluate(layers, predict)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", default="v100", help="the catalogue's name of the GPU that was measured")
    parser.add_argument("--name", default="", help="writes bench/results/NAME.json")
    parser.add_argument("--compare", action="store_true", help="compare ways to train on the training files alone, instead of judging layers")
    options = parser.parse_args()
    console = Console(width=170)
    try:
        machine = identified_machine(options.machine)
        if not machine.is_gpu:
            raise InvalidInput(f"{machine.name} is not a GPU", "--machine v100 or rtx2080ti")
        if options.compare:
            settings: dict[str, Any] = {"machine": machine.name, "folds": FOLDS}
            results = compare(options.folder, machine, console)
        else:
            settings, results = reproduce(options.folder, machine)
            show(console, results)
        if options.name:
            console.print(write_results(options.name, settings, results))
    except (TilewrightError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
