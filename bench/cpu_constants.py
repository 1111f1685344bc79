"""Fits constants of the CPU models to measured random problems.

    python -m bench.cpu_constants [--data FILE ...] [--name cpu_constants]
    python -m bench.cpu_constants --fit amx --data bench/data/cpu_random_amx.jsonl.gz [--folds 3] [--write]

Without `--fit`, the constants are the exponents with which instructions and transfers of an inner loop overlap, lines that threads share, and the
bandwidth of Winograd's filters (`hardware/calibration`). Every pair of values of a grid, the other constants as in the package, is evaluated by the
mean loss of the models' first choice over the problems of each file, and by the mean correlation of the logarithms of predicted and measured times.
Only training data are read. The value in the package is chosen by hand from the table, the same for all files.

`--fit` fits all constants of one schema's part together, as `bench.refit` does those of GPUs: robust least squares of logarithms of time, in which
better kernels weigh more and a weak prior keeps constants that the data do not determine. Loss and correlation are those of problems left out, with
the present constants and the fitted ones. `--write` fits to all problems and replaces the values in the core's file, with this command, the data and
the commit. Train the forest again afterwards (`bench.cpu_learned --write`): it corrects the models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import git_commit, write_results
from bench.cpu_choice import lines
from bench.cpu_learned import DATA, RANDOM, Measured, measured, undisturbed
from bench.refit import replaced, text_of
from tilewright.hardware import calibration
from tilewright.hardware.calibration import assumed, cpu_calibration
from tilewright.kernels.schema import Options
from tilewright.selection.learned.hybrid import folds_of
from tilewright.selection.ranking import Part, rows_of
from tilewright.tuning.refit import LEAST_QUALITY, SOFT, WIDEST, with_values

Values = Mapping[tuple[str, str], Sequence[float]]
"""Values of constants, by part and name."""
GRIDS: tuple[Values, ...] = (
    {("contraction", "overlap"): (100.0, 8.0, 4.0, 3.0, 2.0, 1.5), ("contraction", "shared_line"): (0.0, 0.25, 0.5, 1.0)},
    {("contraction", "transfers"): (100.0, 4.0, 3.0, 2.0, 1.5, 1.0), ("winograd", "streamed_share"): (0.2, 0.4, 0.6, 0.8, 1.0, 1.5)},
)

FITTED = ("contraction", "winograd", "depthwise", "amx")
"""Parts that `--fit` can fit, which have the names of their schemas."""
LIMITS: Mapping[str, tuple[float, float]] = {
    "overlap": (1.0, 100.0), "transfers": (1.0, 100.0), "product_cycles": (16.0, 64.0), "strided": (1.0, 6.0),
}  # fmt: skip
"""Least and largest value of exponents, of a tile product, which takes 16 cycles at least, and of the time of what is stored in parts over that of
what is stored at once; others may change by WIDEST."""


def judged(layer: Measured, values: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """The loss of the first choice, and the correlation of the logarithms, with these constants."""
    ranking, options = layer.ranking, Options(layer.threads)
    with assumed(layer.machine, with_values(cpu_calibration(layer.machine), values)):
        estimates = [part.schema.estimate(part.facts, part.candidates, part.counts, layer.machine, options) for part in ranking.parts]
    predicted = np.concatenate([estimate.seconds for estimate in estimates])
    known = np.flatnonzero(np.isfinite(layer.seconds))
    seconds = layer.seconds[known]
    correlation = float(np.corrcoef(np.log(predicted[known]), np.log(seconds))[0, 1]) if len(known) > 2 else float("nan")
    return float(seconds[np.argmin(predicted[known])] / seconds.min() - 1), correlation


@dataclass(frozen=True)
class Sample:
    """Better candidates of one schema for a problem, with their times and the best time over each."""

    layer: Measured
    part: Part
    seconds: np.ndarray
    weight: np.ndarray

    def predicted(self, values: Mapping[tuple[str, str], float]) -> np.ndarray:
        """Seconds with these constants."""
        machine, part = self.layer.machine, self.part
        with assumed(machine, with_values(cpu_calibration(machine), values)):
            return part.schema.estimate(part.facts, part.candidates, part.counts, machine, Options(self.layer.threads)).seconds


def samples_of(layers: Sequence[Measured], name: str) -> list[Sample]:
    """The better candidates of the schema of this name."""
    found = []
    for layer in layers:
        best = np.nanmin(layer.seconds)
        for start, part in zip(layer.ranking.starts, layer.ranking.parts, strict=False):
            seconds = layer.seconds[start : start + len(part.estimate.seconds)]
            which = np.flatnonzero(best / seconds > LEAST_QUALITY)  # those that were not measured are NaN
            if part.schema.name == name and len(which):
                found.append(Sample(layer, rows_of(part, which), seconds[which], best / seconds[which]))
    return found


def fitted(samples: Sequence[Sample], name: str, prior: float, evaluations: int) -> dict[tuple[str, str], float]:
    """The values of the part's constants that fit the samples."""
    from scipy.optimize import least_squares

    present = asdict(getattr(cpu_calibration(samples[0].layer.machine), name))
    origin = np.log(list(present.values()))
    bounds = np.log([LIMITS.get(constant, (value / WIDEST, value * WIDEST)) for constant, value in present.items()]).T
    goal, weight = np.log(np.concatenate([sample.seconds for sample in samples])), np.concatenate([sample.weight for sample in samples])

    names = [(name, constant) for constant in present]

    def values_at(logarithms: np.ndarray) -> dict[tuple[str, str], float]:
        return dict(zip(names, np.exp(logarithms).tolist(), strict=True))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        values = values_at(logarithms)
        times = np.concatenate([sample.predicted(values) for sample in samples])
        result: np.ndarray = np.r_[(np.log(times) - goal) * weight, (logarithms - origin) * prior * len(goal) ** 0.5]
        return result

    inside = np.clip(origin, bounds[0] + 1e-6, bounds[1] - 1e-6)
    solution = least_squares(residuals, inside, loss="soft_l1", f_scale=SOFT, max_nfev=evaluations, bounds=bounds, diff_step=0.01)
    return {of: float(f"{value:.3g}") for of, value in values_at(solution.x).items()}


def fit(layers: Sequence[Measured], options: argparse.Namespace) -> None:
    """Prints and stores what fitted constants of `options.fit` make of problems left out, or replaces those in the core's file."""
    samples = samples_of(layers, options.fit)
    cores = {sample.layer.machine.pipeline for sample in samples}
    if len(cores) != 1:
        raise SystemExit(f"constants of {options.fit} are fitted with measurements of one core, not of {', '.join(sorted(cores)) or 'none'}")
    problems = list(dict.fromkeys(sample.layer.name for sample in samples))
    if options.write:
        write(samples, cores.pop(), len(problems), options)
        return
    parts = folds_of(np.array([problems.index(sample.layer.name) for sample in samples]), options.folds)
    found: dict[str, list[tuple[float, float]]] = {"present": [], "fitted": []}
    rows: list[dict[str, Any]] = []
    for fold in range(options.folds):
        values = fitted([sample for sample, own in zip(samples, parts, strict=True) if own != fold], options.fit, options.prior, options.evaluations)
        held = [sample.layer for sample, own in zip(samples, parts, strict=True) if own == fold]
        found["present"] += [judged(layer, {}) for layer in held]
        found["fitted"] += [judged(layer, values) for layer in held]
        rows.append({"fold": fold, "problems": len(held), "fitted": {constant: value for (_, constant), value in values.items()}})
    table = Table("constants", "problems", "loss %", "correlation", box=None)
    means = []
    for which, own in found.items():
        loss, correlation = float(np.mean([loss for loss, _ in own])), float(np.nanmean([correlation for _, correlation in own]))
        means.append({"constants": which, "problems": len(own), "loss": loss, "correlation": correlation})
        table.add_row(which, str(len(own)), f"{100 * loss:.1f}", f"{correlation:.3f}")
    Console(width=120).print(table)
    name = options.name or f"cpu_constants_{options.fit}"
    print(write_results(name, {"data": [path.name for path in options.data], "part": options.fit, "folds": options.folds}, [*means, *rows]))


def write(samples: Sequence[Sample], core: str, problems: int, options: argparse.Namespace) -> None:
    """Fits to all samples, and replaces the values in the core's file."""
    commit = git_commit()
    if commit.endswith("+changes"):
        raise SystemExit("commit the changes first: the file names the commit that fitted its constants")
    constants = with_values(cpu_calibration(samples[0].layer.machine), fitted(samples, options.fit, options.prior, options.evaluations))
    path = calibration.FOLDER / f"{core}.json"
    note = f"{sum(len(sample.seconds) for sample in samples)} kernels of {problems} random problems, good kernels weighing more"
    entry = {"command": " ".join(["python", *sys.orig_argv[1:]]), "data": list(map(str, options.data)), "data_note": note, "commit": commit[:12]}
    path.write_text(text_of(replaced(json.loads(path.read_text()), constants, [options.fit], options.fit, entry)))
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[DATA / name for name in RANDOM])
    parser.add_argument("--fit", choices=FITTED, metavar="PART", help="fit the constants of this schema together")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--prior", type=float, default=0.01)
    parser.add_argument("--evaluations", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="with --fit: into the core's file")
    parser.add_argument("--name", help="of the file of results (default: cpu_constants, and with --fit the part)")
    options = parser.parse_args()
    chosen = {path.name: [line for line in lines(path) if options.fit or undisturbed(line)] for path in options.data}
    known = sorted({line["layer"] for own in chosen.values() for line in own if ":" not in line["layer"]})
    if known:
        parser.error(f"{known[0]} is a problem on which models are evaluated: only random ones are for fitting")
    layers = {file: [layer for layer in map(measured, own) if np.isfinite(layer.seconds).any()] for file, own in chosen.items()}
    if options.fit:
        fit([layer for own in layers.values() for layer in own], options)
        return
    table = Table("file", "problems", "constants", "loss %", "correlation", box=None)
    results: list[dict[str, Any]] = []
    for grid in GRIDS:
        for numbers in itertools.product(*grid.values()):
            values = dict(zip(grid, numbers, strict=True))
            named = {name: value for (_, name), value in values.items()}
            for file, own in layers.items():
                found = [judged(layer, values) for layer in own]
                loss = statistics.fmean(loss for loss, _ in found)
                correlation = float(np.nanmean([correlation for _, correlation in found]))
                results.append({"file": file, "problems": len(found), **named, "loss": loss, "correlation": correlation})
                shown = ", ".join(f"{name} {value:g}" for name, value in named.items())
                table.add_row(file, str(len(found)), shown, f"{100 * loss:.1f}", f"{correlation:.3f}")
    Console(width=120).print(table)
    print(write_results(options.name or "cpu_constants", {"data": [path.name for path in options.data]}, results))


if __name__ == "__main__":
    main()
