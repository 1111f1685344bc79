"""Correlation of predicted memory transactions with time: Pearson's coefficient, as in CNNOpt's table 6.

    python -m bench.transactions FILE ... [--target h200] [--name transactions_predicted_h200]

A FILE is a file that `bench.bounds_check` reads: measured kernels of layers. For counts measured by the hardware see scripts/ncu_transactions.py.
"fastest": over the fastest kernel of each layer, as in the paper; "all": over all kernels of all layers; "by layer": the mean of the layers'
coefficients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bounds_check import Measured, part_of, read
from bench.common import RESULTS, write_results
from bench.regions import ranking_of
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.schema import Options
from tilewright.selection.learned.gpu import described
from tilewright.selection.ranking import Part, estimated

SECONDS = "seconds"
WAVEFRONTS, SECTORS, OCCUPANCY = "predicted shared wavefronts", "predicted sectors", "predicted occupancy"

Row = Mapping[str, float]
"""Counts of one kernel by name, and its time as SECONDS."""


def predicted_counts(part: Part, candidates: Columns, machine: Machine) -> dict[str, np.ndarray]:
    """Wavefronts of shared memory, sectors between level 2 and processors, and occupancy in per cent of these candidates of the part's schema (for
    Winograd's algorithm only those of its product); empty for a schema without such counts."""
    found = described(estimated(part.schema, part.facts, candidates, machine, Options()), machine)
    if found is None:
        return {}
    v = found.counts
    rounds = v.blocks * v.steps
    side_by_side = np.minimum(v.resident, -(-v.blocks // machine.processors))
    return {
        WAVEFRONTS: rounds * (v.warps * v.step_shared_loads + v.step_fill) + v.blocks * v.drain_wavefronts,
        SECTORS: rounds * v.step_sectors + v.blocks * v.store_sectors,
        OCCUPANCY: 100 * side_by_side * v.warps * machine.warp_size / machine.threads_per_processor,
    }


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation coefficient; None for fewer than three pairs or no variation."""
    if len(first) < 3 or not np.ptp(first) or not np.ptp(second):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def correlations(rows: Iterable[Row]) -> dict[str, float]:
    """Correlation of each count with the time, over the rows that have both."""
    timed = [row for row in rows if row.get(SECONDS)]
    found = {}
    for name in dict.fromkeys(name for row in timed for name in row if name != SECONDS):
        having = [row for row in timed if name in row]
        value = pearson([row[name] for row in having], [row[SECONDS] for row in having])
        if value is not None:
            found[name] = value
    return found


def summarised(layers: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Correlations over the fastest kernels, over all kernels, by layer, and the mean over layers."""
    timed = {name: [row for row in rows if row.get(SECONDS)] for name, rows in layers.items()}
    by_layer = {name: correlations(rows) for name, rows in timed.items()}
    names = dict.fromkeys(count for found in by_layer.values() for count in found)
    return {
        "fastest": correlations(min(rows, key=lambda row: row[SECONDS]) for rows in timed.values() if rows),
        "all": correlations(row for rows in timed.values() for row in rows),
        "mean by layer": {name: float(np.mean([found[name] for found in by_layer.values() if name in found])) for name in names},
        "by layer": by_layer,
    }


def table(summary: Mapping[str, Any]) -> Table:
    """One row per count."""
    kinds = ("fastest", "all", "mean by layer")
    result = Table("correlation with time", *kinds)
    for name in summary["all"]:
        result.add_row(name, *(f"{summary[kind][name]:.3f}" if name in summary[kind] else "-" for kind in kinds))
    return result


def rows_of(measured: Sequence[Measured], machine: Machine) -> list[Row]:
    """Predicted counts and time of the measured kernels of one layer; those of schemas without counts are left out."""
    ranking = ranking_of(measured[0].layer, machine)
    found: list[Row] = []
    for part in ranking.parts:
        some = [m for m in measured if part_of(ranking, m.schedule) is part]
        rows = {name: np.array([getattr(m.schedule, name) for m in some]) for name in part.candidates}
        if not some or not (counts := predicted_counts(part, rows, machine)):
            continue
        for at in range(length(rows)):
            found.append({SECONDS: some[at].seconds, **{name: float(column[at]) for name, column in counts.items()}})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / "gpu_layers_h200.json"])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--name", default="", help="writes bench/results/NAME.json")
    options = parser.parse_args()
    layers: dict[str, list[Measured]] = {}
    for path in options.files:
        for found in read(path):
            layers.setdefault(str(found.layer["name"]), []).append(found)
    machine = identified_machine(options.target)
    summary = summarised({name: rows_of(measured, machine) for name, measured in layers.items()})
    Console(width=120).print(table(summary))
    if options.name:
        print(write_results(options.name, {"files": [path.name for path in options.files], "target": options.target}, [summary]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
