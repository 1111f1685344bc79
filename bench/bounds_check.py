"""Checks bounds against measured kernels: how tight ours are, how many kernels exceed DeepCuts' printed limit, and what pruning leaves.

    python -m bench.bounds_check [FILE ...] [--target h200] [--name bounds_h200]

A FILE is a result of scripts/gpu_lowering_check.py (JSON), or a data set (`tilewright.tuning.dataset`). Tightness is bound / measured time.
For every layer the whole space is pruned with the best measured time; "best kept" says whether its fastest measured kernel remains (null: it is no
longer a candidate).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import RESULTS, write_results
from bench.layers import layer
from bench.regions import ranking_of
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.deepcuts_limits import limit_seconds
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.registry import SCHEMAS
from tilewright.kernels.registry import schedule_types
from tilewright.selection.ranking import Part, Ranking
from tilewright.tuning import dataset


@dataclass(frozen=True)
class Measured:
    """One measured kernel: the layer, its schedule, seconds, and the bytes over which its buffers rotate (0: unknown)."""

    layer: Mapping[str, Any]
    schedule: Any
    seconds: float
    rotated_bytes: float = 0.0

    @property
    def parameters(self) -> dict[str, int]:
        """The axes of the schedule."""
        return asdict(self.schedule)


def read(path: Path) -> Iterator[Measured]:
    """Every kernel of a file that was measured and right, including slow ones that were measured only once. Older JSON files name no schema: theirs
    is the implicit GEMM."""
    if path.suffix == ".json":
        types = {schema.name: schema.schedule for schema in SCHEMAS}
        for record in json.loads(path.read_text())["results"]:
            shape = layer(record["layer"])
            for found in record["candidates"]:
                if found["error"] is None:
                    schedule = types[found.get("schema", GEMM.name)](**found["parameters"])
                    yield Measured(shape, schedule, found["measured_us"] * 1e-6, record["sets"] * bytes_of(shape))
        return
    for entry in dataset.read(path):
        for kind, columns in entry.schemas.items():
            made = schedule_types()[kind]
            axes = [name for name in columns if name not in dataset.MEASURES]
            for at, seconds in enumerate(columns["seconds"]):
                # how much of level 2 was cold is not certain: no memory traffic is assumed
                yield Measured(entry.layer, made(**{name: int(columns[name][at]) for name in axes}), float(seconds))


def bytes_of(shape: Mapping[str, Any]) -> float:
    """Bytes of one set of buffers: input with its halo, weights, output."""
    size, stride = shape["filter"], shape["stride"]
    border = 2 * (size // 2)
    inputs = shape["channels"] * (shape["height"] * stride + border) * (shape["width"] * stride + border)
    elements: int = inputs + shape["outputs"] * shape["channels"] * size * size + shape["outputs"] * shape["height"] * shape["width"]
    return 4.0 * elements


@dataclass(frozen=True)
class Checked:
    """One layer: for each kernel the measured seconds, schema, bound and its largest term, and the least seconds by the printed limit; what pruning
    with the best time leaves."""

    name: str
    schemas: np.ndarray
    seconds: np.ndarray
    bound: np.ndarray
    binding: tuple[str, ...]
    printed_seconds: np.ndarray
    feasible: int
    left: int
    best_kept: bool | None

    @property
    def tightness(self) -> np.ndarray:
        ratio: np.ndarray = self.bound / self.seconds
        return ratio


def part_of(ranking: Ranking, schedule: Any) -> Part | None:
    """The candidates of the schedule's schema; None if it has none (today's space may differ from the measured one)."""
    return next((part for part in ranking.parts if part.schema.schedule is type(schedule)), None)


def check(measured: list[Measured], machine: Machine) -> Checked:
    """Bounds of the measured kernels of one layer, except for schemas without candidates for it."""
    ranking = ranking_of(measured[0].layer, machine)
    measured = [m for m in measured if part_of(ranking, m.schedule) is not None]
    seconds = np.array([m.seconds for m in measured])
    bound, printed = np.zeros(len(seconds)), np.zeros(len(seconds))
    binding, schemas = [""] * len(seconds), np.full(len(seconds), "", dtype=object)
    for part in ranking.parts:
        which = [i for i, m in enumerate(measured) if part_of(ranking, m.schedule) is part]
        if not which:
            continue
        rows = {name: np.array([getattr(measured[i].schedule, name) for i in which]) for name in part.candidates}
        estimate = lower_bound(part.schema, part.facts, rows, machine, min(measured[i].rotated_bytes for i in which))
        bound[which], schemas[which] = estimate.seconds, part.schema.name
        names, terms = estimate.overlapped, np.array([estimate.terms[name] for name in estimate.overlapped])
        for at, number in zip(which, terms.argmax(axis=0), strict=True):
            binding[at] = names[number]
        printed[which] = printed_seconds(rows, part, machine)
    left, kept = pruned(ranking, measured, machine)
    return Checked(str(measured[0].layer["name"]), schemas, seconds, bound, tuple(binding), printed, ranking.candidates, left, kept)


def printed_seconds(candidates: Columns, part: Part, machine: Machine) -> np.ndarray:
    """Least seconds by DeepCuts' limit; 0 if it has none for the schema."""
    try:
        return limit_seconds(part.schema, part.facts, candidates, machine)
    except Unsuitable:
        return np.zeros(length(candidates))


def pruned(ranking: Ranking, measured: list[Measured], machine: Machine) -> tuple[int, bool | None]:
    """The number of candidates left after pruning with the best measured time, and whether the best measured one is among them (None if today's space
    does not have it)."""
    best = min(measured, key=lambda m: m.seconds)
    left = 0
    kept: bool | None = None
    for part in ranking.parts:
        bound = np.zeros(length(part.candidates))  # without a bound nothing is pruned
        if part.schema.bound is not None:
            bound = lower_bound(part.schema, part.facts, part.candidates, machine, best.rotated_bytes).seconds
        rest = take(part.candidates, bound <= best.seconds)
        left += length(rest)
        if part is part_of(ranking, best.schedule):
            kept = contains(rest, best.schedule) if contains(part.candidates, best.schedule) else None
    return left, kept


def contains(candidates: Columns, schedule: Any) -> bool:
    """Whether one of the candidates has the schedule's values."""
    return bool(np.logical_and.reduce([column == getattr(schedule, name) for name, column in candidates.items()]).any())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / "gpu_layers_h200.json"])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--name", default="", help="writes bench/results/NAME.json")
    options = parser.parse_args()
    machine = identified_machine(options.target)
    layers: dict[str, list[Measured]] = {}
    for path in options.files:
        for found in read(path):
            layers.setdefault(str(found.layer["name"]), []).append(found)
    results = [check(measured, machine) for measured in layers.values()]
    console = Console(width=150)
    for table in (layer_table(results), schema_table(results)):
        console.print(table)
    if options.name:
        print(write_results(options.name, {"files": [path.name for path in options.files], "target": options.target}, [summary(c) for c in results]))
    return 1 if any((c.bound > c.seconds).any() for c in results) else 0


def summary(checked: Checked) -> dict[str, Any]:
    """The figures of one layer."""
    best = int(checked.seconds.argmin())
    return {
        "layer": checked.name,
        "measured": len(checked.seconds),
        "faster than our bound": int((checked.bound > checked.seconds).sum()),
        "above DeepCuts' limit": int((checked.printed_seconds > checked.seconds).sum()),
        "tightness of the best": float(checked.tightness[best]),
        "largest tightness": float(checked.tightness.max()),
        "median tightness": float(np.median(checked.tightness)),
        "binding of the best": checked.binding[best],
        "feasible": checked.feasible,
        "left by pruning": checked.left,
        "best kept": checked.best_kept,
    }


def layer_table(results: Sequence[Checked]) -> Table:
    """One row per layer, and one for all."""
    table = Table(*summary(results[0]))
    for checked in results:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in summary(checked).values()))
    feasible, left = sum(c.feasible for c in results), sum(c.left for c in results)
    table.add_section()
    table.add_row("all", str(sum(len(c.seconds) for c in results)), *("",) * 6, str(feasible), f"{left} ({left / feasible:.0%})", "")
    return table


def schema_table(results: Sequence[Checked]) -> Table:
    """One row per schema, over all its measured kernels."""
    table = Table("schema", "measured", "faster than our bound", "above DeepCuts' limit", "median tightness", "largest")
    schemas, seconds, bound, printed = (
        np.concatenate([getattr(c, name) for c in results]) for name in ("schemas", "seconds", "bound", "printed_seconds")
    )
    for name in sorted(set(schemas)):
        which = schemas == name
        tightness = bound[which] / seconds[which]
        exceeding = (printed[which] > seconds[which]).sum() if printed[which].any() else "-"
        counts = (name, which.sum(), (tightness > 1).sum(), exceeding, f"{np.median(tightness):.2f}", f"{tightness.max():.2f}")
        table.add_row(*map(str, counts))
    return table


if __name__ == "__main__":
    sys.exit(main())
