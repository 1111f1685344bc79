"""Fits two constants of the CPU models to measured random problems: `python -m bench.cpu_constants [--data FILE ...] [--name cpu_constants]`.

The constants are those of `kernels.cpu.rates` and of lines that threads share (`hardware/calibration`, part "contraction"). Every pair of values from
a grid is evaluated by the mean loss of the models' first choice over the problems of each file, and by the mean correlation of the logarithms of
predicted and measured times. Only training data are read. The value in the package is chosen by hand from the table, the same for all files.
"""

from __future__ import annotations

import argparse
import statistics
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

OVERLAPS = (100.0, 8.0, 4.0, 3.0, 2.0, 1.5)
SHARED_LINES = (0.0, 0.25, 0.5, 1.0)


def judged(layer: Measured, overlap: float, shared_line: float) -> tuple[float, float]:
    """The loss of the first choice, and the correlation of the logarithms, with these constants."""
    ranking, options, present = layer.ranking, Options(layer.threads), cpu_calibration(layer.machine)
    contraction = replace(present.contraction, overlap=overlap, shared_line=shared_line)
    with assumed(layer.machine, replace(present, contraction=contraction)):
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
    table = Table("file", "problems", "overlap", "shared line", "loss %", "correlation", box=None)
    results: list[dict[str, Any]] = []
    for overlap in OVERLAPS:
        for shared in SHARED_LINES:
            for name, own in layers.items():
                found = [judged(layer, overlap, shared) for layer in own if np.isfinite(layer.seconds).any()]
                loss = statistics.fmean(loss for loss, _ in found)
                correlation = float(np.nanmean([correlation for _, correlation in found]))
                values = {"overlap": overlap, "shared_line": shared}
                results.append({"file": name, "problems": len(found), **values, "loss": loss, "correlation": correlation})
                table.add_row(name, str(len(found)), f"{overlap:g}", f"{shared:g}", f"{100 * loss:.1f}", f"{correlation:.3f}")
    Console(width=120).print(table)
    print(write_results(options.name, {"data": [path.name for path in options.data]}, results))


if __name__ == "__main__":
    main()
