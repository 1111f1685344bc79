"""Checks our bound of direct convolution against CNNOpt's published kernels, and counts those that exceed DeepCuts' limit as printed.

    python -m bench.published_bounds FOLDER [--machine v100] [--name bounds_v100]

FOLDER is that of `bench.published_data`. Measurements faster than the machine's peak rate are failed launches, and left out. The 33 of 97,000
measurements of the published V100 data that are faster than the bound appear to be failed launches too: all are in `train.csv`, and whatever their
size they take 9 to 13 or 36 to 39 us.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.published_data import FOLDERS, read
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import take
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.deepcuts import limit
from tilewright.kernels.gpu.deepcuts_limits import stages_of
from tilewright.kernels.gpu.direct.schedule import DirectFacts
from tilewright.kernels.gpu.direct.schema import DIRECT

PROBLEM_FIELDS = ("outputs", "height", "width", "channels", "filter_y", "filter_x", "stride_y", "stride_x")


@dataclass(frozen=True)
class CheckedFile:
    """Measurements of one file that the peak rate allows: seconds, tightness (bound / measured time), and rate over DeepCuts' limit (above 1:
    exceeded)."""

    name: str
    seconds: np.ndarray
    tightness: np.ndarray
    exceeding: np.ndarray

    @property
    def figures(self) -> dict[str, Any]:
        faster = self.tightness > 1
        times = np.sort(self.seconds[faster] * 1e6)
        return {
            "file": self.name,
            "kernels": len(self.seconds),
            "faster than our bound": int(faster.sum()),
            "microseconds of those": " ".join(f"{time:.1f}" for time in times),
            "largest tightness of the others": float(self.tightness[~faster].max(initial=0)),
            "median tightness": float(np.median(self.tightness)),
            "above DeepCuts' limit": int((self.exceeding > 1).sum()),
        }


def check(path: Path, kind: str, stride: int, machine: Machine) -> CheckedFile:
    """Checks one file, problem by problem."""
    samples = read(path, kind, stride, machine).samples
    described = {name: np.asarray(column) for name, column in samples.described.items()}
    rows = {name.removeprefix("tile "): column.astype(np.int64) for name, column in described.items() if name.startswith("tile ")}
    # their kernels add the parts by atomic operations
    rows |= {name: np.full(len(samples.seconds), value) for name, value in (("filters", int(kind == "rs")), ("cluster", 0), ("atomics", 1))}
    seconds, tightness, exceeding = [], [], []
    for number in np.unique(samples.problem):
        which = np.flatnonzero(samples.problem == number)
        facts = DirectFacts(1, 1, **{name: int(described[f"problem {name}"][which[0]]) for name in PROBLEM_FIELDS})
        which = which[facts.flops / samples.seconds[which] <= machine.peak_flops["fp32"]]
        some, times = take(rows, which), samples.seconds[which]
        seconds.append(times)
        tightness.append(lower_bound(DIRECT, facts, some, machine).seconds / times)
        (stage,) = stages_of(DIRECT, facts, some)  # where their kernels have bank conflicts is not known
        exceeding.append(facts.flops / times / np.maximum(limit(stage.operation, stage.launch, machine).flops(machine), 1e-9))
    return CheckedFile(f"{path.parent.name}/{path.name}", *(np.concatenate(parts) for parts in (seconds, tightness, exceeding)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", default="v100")
    parser.add_argument("--name", default="", help="writes bench/results/NAME.json")
    options = parser.parse_args()
    machine = identified_machine(options.machine)
    files = [
        check(path, kind, stride, machine)
        for name, (kind, stride) in FOLDERS.items()
        for path in sorted((options.folder / name).glob("*.csv"))
        if path.stem == "train" or path.stem.startswith("layer_")
    ]
    results = [found.figures for found in files]
    table = Table(*results[0])
    for result in results:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in result.values()))
    Console(width=150).print(table)
    if options.name:
        print(write_results(options.name, {"machine": options.machine}, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
