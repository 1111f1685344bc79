"""Tuna's top-k ratio on measured layers: the summed times of the truly best k over those of the k that the models rank best (section V of the paper).

    python -m bench.top_ratio bench/data/h200_layers.jsonl.gz [--name top_ratio_h200]

Direct summation (implicit GEMM and direct kernels), Winograd's algorithm, and all schemas together. Candidates that the models rank among the best
but that were not measured are skipped and counted. They cannot be among the truly best either, so that the ratio is an upper bound if the count is
not 0.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.choice_quality import places
from bench.common import write_results
from tilewright.hardware import identified_machine
from tilewright.selection.learned.gpu import corrected
from tilewright.tuning import dataset
from tilewright.tuning.collecting import ranking_of

KS = (10, 50)
KINDS = {"direct summation": ("contraction", "direct"), "winograd": ("winograd", "winograd fused"), "all": None}


def ratios(measured: dataset.MeasuredLayer, learned: bool) -> list[dict[str, Any]]:
    """One row for each kind of schema that the layer has."""
    machine = identified_machine(measured.machine)
    ranking = ranking_of(dataset.layer_problem(measured.layer), machine)
    if learned:
        ranking = corrected(ranking, machine)
    where = places(ranking, measured)
    times = np.concatenate([columns["seconds"] for columns in measured.schemas.values()])
    seconds = np.full(ranking.candidates, np.nan)
    seconds[where[where >= 0]] = times[where >= 0]
    kind_of = np.concatenate([np.full(len(part.estimate.seconds), part.schema.name) for part in ranking.parts])
    order = np.argsort(ranking.seconds, kind="stable")
    rows = []
    for kind, schemas in KINDS.items():
        own = order if schemas is None else order[np.isin(kind_of[order], schemas)]
        known = seconds[own][~np.isnan(seconds[own])]
        if len(known) < max(KS):
            continue
        row: dict[str, Any] = {"layer": measured.layer["name"], "kind": kind, "learned": learned, "measured": len(known)}
        for k in KS:
            row[f"ratio of {k}"] = float(np.sort(known)[:k].sum() / known[:k].sum())
            row[f"passed over for {k}"] = int(np.flatnonzero(np.cumsum(~np.isnan(seconds[own])) == k)[0]) + 1 - k
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", default="top_ratio_h200")
    options = parser.parse_args()
    layers = dataset.read(options.file)
    rows = [row for layer in layers for learned in (False, True) for row in ratios(layer, learned)]
    table = Table("schemas", "model", "layers", *(f"ratio of {k}" for k in KS), *(f"passed over for {k}" for k in KS), box=None)
    means = []
    for kind in KINDS:
        for learned in (False, True):
            own = [row for row in rows if (row["kind"], row["learned"]) == (kind, learned)]
            names = [f"{what} {k}" for what in ("ratio of", "passed over for") for k in KS]
            mean = {name: statistics.fmean(row[name] for row in own) for name in names}
            means.append({"layer": "all", "kind": kind, "learned": learned, "layers": len(own), **mean})
            table.add_row(kind, "learned" if learned else "analytical", str(len(own)), *(f"{mean[name]:.3f}" for name in names))
    print(write_results(options.name, vars(options), [*means, *rows]))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
