"""Whether measured kernels keep the bounds: how tight ours are, how many kernels exceed DeepCuts' printed limit, and what pruning leaves.

    python -m bench.bounds_check [FILE ...] [--target h200]

A FILE is a result of scripts/gpu_lowering_check.py (JSON), or a data set (`tilewright.runtime.dataset`). Tightness is bound / measured time.
For every layer the whole space is pruned with the best measured time; "best kept" says whether its fastest measured kernel is among the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import RESULTS
from bench.layers import layer
from bench.regions import ranking_of
from tilewright.cost.bounds import lower_bound, prune
from tilewright.cost.deepcuts import printed_limit
from tilewright.cost.ranking import Part, Ranking
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.region import Unsuitable
from tilewright.runtime import dataset
from tilewright.schedule.columns import Columns, length


@dataclass(frozen=True)
class Measured:
    """One measured kernel: the layer, the schema's parameters, seconds, and the bytes that its buffers rotate through (0: not known)."""

    layer: Mapping[str, Any]
    parameters: Mapping[str, int]
    seconds: float
    rotated_bytes: float = 0.0


def read(path: Path) -> Iterator[Measured]:
    """Every kernel of a file that was measured and right; what was measured once only, being slow, too."""
    if path.suffix == ".json":
        for record in json.loads(path.read_text())["results"]:
            shape = layer(record["layer"])
            for found in record["candidates"]:
                if found["error"] is None:
                    yield Measured(shape, found["parameters"], found["measured_us"] * 1e-6, record["sets"] * bytes_of(shape))
        return
    for entry in dataset.read(path):
        for columns in entry.schemas.values():
            axes = [name for name in columns if name not in dataset.MEASURES]
            for at, seconds in enumerate(columns["seconds"]):
                # how much of level 2 was cold is not known for certain: nothing is assumed of memory
                yield Measured(entry.layer, {name: int(columns[name][at]) for name in axes}, float(seconds))


def bytes_of(shape: Mapping[str, Any]) -> float:
    """Bytes of one set of buffers: input with its border, weights, output."""
    size, stride = shape["filter"], shape["stride"]
    border = 2 * (size // 2)
    inputs = shape["channels"] * (shape["height"] * stride + border) * (shape["width"] * stride + border)
    return 4.0 * (inputs + shape["outputs"] * shape["channels"] * size * size + shape["outputs"] * shape["height"] * shape["width"])


@dataclass(frozen=True)
class Checked:
    """One layer: measured seconds with bound and binding term of each, printed limits kept or not, and what pruning with the best time leaves."""

    name: str
    seconds: np.ndarray
    bound: np.ndarray
    binding: tuple[str, ...]
    printed_seconds: np.ndarray
    feasible: int
    left: int
    best_kept: bool

    @property
    def tightness(self) -> np.ndarray:
        return self.bound / self.seconds


def part_of(ranking: Ranking, parameters: Mapping[str, int]) -> Part:
    """The part of the schema whose axes the parameters are."""
    for part in ranking.parts:
        if set(part.rows) == set(parameters):
            return part
    raise Unsuitable(f"no schema has the axes {', '.join(parameters)}")


def check(measured: list[Measured], machine: Machine) -> Checked:
    """Bounds of the measured kernels of one layer."""
    ranking = ranking_of(measured[0].layer, machine)
    seconds = np.array([m.seconds for m in measured])
    bound, printed = np.zeros(len(seconds)), np.zeros(len(seconds))
    binding = [""] * len(seconds)
    for part in ranking.parts:
        which = [i for i, m in enumerate(measured) if part_of(ranking, m.parameters) is part]
        if not which:
            continue
        rows = {name: np.array([measured[i].parameters[name] for i in which]) for name in part.rows}
        estimate = lower_bound(rows, part.problem, machine, min(measured[i].rotated_bytes for i in which))
        bound[which] = estimate.seconds
        names, terms = estimate.overlapped, np.array([estimate.terms[name] for name in estimate.overlapped])
        for at, number in zip(which, terms.argmax(axis=0), strict=True):
            binding[at] = names[number]
        printed[which] = printed_seconds(rows, part, machine)
    left, kept = pruned(ranking, measured, machine)
    return Checked(str(measured[0].layer["name"]), seconds, bound, tuple(binding), printed, ranking.candidates, left, kept)


def printed_seconds(rows: Columns, part: Part, machine: Machine) -> np.ndarray:
    """Least seconds by DeepCuts' limit as printed; 0 where it prints nothing for the schema."""
    try:
        limit = printed_limit(rows, part.problem, machine).flops(machine)
    except Unsuitable:
        return np.zeros(length(rows))
    return np.divide(part.problem.flops, limit, out=np.full(len(limit), np.inf), where=limit > 0)


def pruned(ranking: Ranking, measured: list[Measured], machine: Machine) -> tuple[int, bool]:
    """How many candidates of the space are left after pruning with the best measured time, and whether the best measured one is among them."""
    best = min(measured, key=lambda m: m.seconds)
    left, kept = 0, False
    for part in ranking.parts:
        try:
            bound = lower_bound(part.rows, part.problem, machine, best.rotated_bytes).seconds
        except Unsuitable:  # a schema without a bound loses nothing
            bound = np.zeros(length(part.rows))
        rest, _ = prune(part.rows, bound, best.seconds)
        left += length(rest)
        if set(part.rows) == set(best.parameters):
            kept |= bool(np.logical_and.reduce([rest[name] == value for name, value in best.parameters.items()]).any())
    return left, kept


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / "gpu_layers_h200.json"])
    parser.add_argument("--target", default="h200")
    options = parser.parse_args()
    machine = find_machine(options.target)
    layers: dict[str, list[Measured]] = {}
    for path in options.files:
        for found in read(path):
            layers.setdefault(str(found.layer["name"]), []).append(found)
    results = [check(measured, machine) for measured in layers.values()]
    table = Table("layer", "measured", "below ours", "tightness of the best", "median", "binding", "above DeepCuts'", "feasible", "left", "best kept")
    for c in results:
        broken, exceeded = int((c.bound > c.seconds).sum()), int((c.printed_seconds > c.seconds).sum())
        best = int(c.seconds.argmin())
        cells = (
            c.name, len(c.seconds), broken, f"{c.tightness[best]:.2f}", f"{np.median(c.tightness):.2f}", c.binding[best], exceeded,
            c.feasible, f"{c.left} ({c.left / c.feasible:.0%})", "yes" if c.best_kept else "NO",
        )  # fmt: skip
        table.add_row(*map(str, cells))
    broken = sum(int((c.bound > c.seconds).sum()) for c in results)
    console = Console(width=150)
    console.print(table)
    count = sum(len(c.seconds) for c in results)
    exceeded = sum(int((c.printed_seconds > c.seconds).sum()) for c in results)
    left, feasible = sum(c.left for c in results), sum(c.feasible for c in results)
    console.print(
        f"{count} measured kernels: {broken} faster than our bound, {exceeded} above DeepCuts' limit as printed; tightness of the best "
        f"{np.mean([c.tightness[c.seconds.argmin()] for c in results]):.2f} on average; pruning leaves {left / feasible:.0%} of {feasible} candidates"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
