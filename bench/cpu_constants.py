"""Fits constants of the CPU models to measured random problems: `python -m bench.cpu_constants [--data FILE ...] [--name cpu_constants]`.

The constants are the exponents with which instructions and transfers of an inner loop overlap, lines that threads share, and the bandwidth of
Winograd's filters (`hardware/calibration`). Every pair of values of a grid, the other constants as in the package, is evaluated by the mean loss of
the models' first choice over the problems of each file, and by the mean correlation of the logarithms of predicted and measured times. Only training
data are read. The value in the package is chosen by hand from the table, the same for all files.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.cpu_learned import DATA, RANDOM, Measured, lines, measured, undisturbed
from tilewright.hardware.calibration import assumed, cpu_calibration
from tilewright.kernels.schema import Options

Values = Mapping[tuple[str, str], Sequence[float]]
"""Values of constants, by part and name."""
GRIDS: tuple[Values, ...] = (
    {("contraction", "overlap"): (100.0, 8.0, 4.0, 3.0, 2.0, 1.5), ("contraction", "shared_line"): (0.0, 0.25, 0.5, 1.0)},
    {("contraction", "transfers"): (100.0, 4.0, 3.0, 2.0, 1.5, 1.0), ("winograd", "streamed_share"): (0.2, 0.4, 0.6, 0.8, 1.0, 1.5)},
)


def judged(layer: Measured, values: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """The loss of the first choice, and the correlation of the logarithms, with these constants."""
    ranking, options, constants = layer.ranking, Options(layer.threads), cpu_calibration(layer.machine)
    for (part, name), value in values.items():
        constants = replace(constants, **{part: replace(getattr(constants, part), **{name: value})})
    with assumed(layer.machine, constants):
        estimates = [part.schema.estimate(part.facts, part.candidates, part.counts, layer.machine, options) for part in ranking.parts]
    predicted = np.concatenate([estimate.seconds for estimate in estimates])
    known = np.flatnonzero(np.isfinite(layer.seconds))
    seconds = layer.seconds[known]
    correlation = float(np.corrcoef(np.log(predicted[known]), np.log(seconds))[0, 1]) if len(known) > 2 else float("nan")
    return float(seconds[np.argmin(predicted[known])] / seconds.min() - 1), correlation


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[DATA / name for name in RANDOM])
    parser.add_argument("--name", default="cpu_constants")
    options = parser.parse_args()
    layers = {path.name: [measured(line) for line in lines(path) if undisturbed(line)] for path in options.data}
    table = Table("file", "problems", "constants", "loss %", "correlation", box=None)
    results: list[dict[str, Any]] = []
    for grid in GRIDS:
        for numbers in itertools.product(*grid.values()):
            values = dict(zip(grid, numbers, strict=True))
            named = {name: value for (_, name), value in values.items()}
            for file, own in layers.items():
                found = [judged(layer, values) for layer in own if np.isfinite(layer.seconds).any()]
                loss = statistics.fmean(loss for loss, _ in found)
                correlation = float(np.nanmean([correlation for _, correlation in found]))
                results.append({"file": file, "problems": len(found), **named, "loss": loss, "correlation": correlation})
                shown = ", ".join(f"{name} {value:g}" for name, value in named.items())
                table.add_row(file, str(len(found)), shown, f"{100 * loss:.1f}", f"{correlation:.3f}")
    Console(width=120).print(table)
    print(write_results(options.name, {"data": [path.name for path in options.data]}, results))


if __name__ == "__main__":
    main()
