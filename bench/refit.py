"""Fits the constants of the GPU's analytical models (`hardware/calibration`) to training data, and shows how the analytical order changes.

    python -m bench.refit FILE ... [--parts steps,gemm,...] [--folds 3] [--name refit_h200 | --write]

The fit (`tuning/refit.py`) is to up to `--each` of the better kernels of up to `--layers` layers of each schema. Layers on which models are evaluated
are refused. LoP@n and rank correlation are those of held-out layers, with present and with fitted constants. `--write` fits to layers of all folds
and replaces the values in the machine's own file; each then names this command, the data and the commit. Train the learned model again afterwards: it
corrects the analytical one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import git_commit, write_results
from tilewright.hardware import calibration, identified_machine
from tilewright.hardware.calibration import CpuCalibration, GpuCalibration, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.selection.learned.hybrid import folds_of
from tilewright.tuning import dataset, refit
from tilewright.tuning.refit import USES, Group, fitted, parts_of, predicted, quality, some_of, values_of
from tilewright.tuning.sampling import JUDGED, bare
from tilewright.tuning.training import TOPS


def groups_of(layers: Sequence[dataset.MeasuredLayer], machine: Machine) -> list[Group]:
    """The candidates of all layers. Raises ValueError for a layer on which models are evaluated."""
    for entry in layers:
        if bare(dataset.layer_workload(entry.layer)) in JUDGED:
            raise ValueError(f"{entry.layer['name']} is a layer on which models are evaluated")
    return refit.groups_of(layers, machine)


def judged(groups: Sequence[Group], machine: Machine, constants: Mapping[str, GpuCalibration]) -> dict[str, dict[str, float]]:
    """The quality of all schemas together and of each alone, by the name of the constants and that of the schema."""
    found = {}
    for name, these in constants.items():
        times = predicted(groups, machine, these)
        found[f"{name}, all"] = quality(groups, times)
        for schema in dict.fromkeys(group.schema.name for group in groups):
            own = [number for number, group in enumerate(groups) if group.schema.name == schema]
            found[f"{name}, {schema}"] = quality([groups[number] for number in own], [times[number] for number in own])
    return found


def replaced(
    content: dict[str, Any], constants: GpuCalibration | CpuCalibration, parts: Sequence[str], fit: str, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a calibration file with the parts' values, which come from the new `fit`; fits that nothing comes from are dropped."""
    new = dict(content["parts"])
    for part in parts:
        values = asdict(getattr(constants, part))
        new[part] = {name: {**own, "value": values[name], "fit": fit} for name, own in new[part].items()}
    used = {own["fit"] for entries in new.values() for own in entries.values()}
    fits = {name: found for name, found in {**content["fits"], fit: dict(entry)}.items() if name in used}
    return {**content, "fits": fits, "parts": new}


def text_of(content: Mapping[str, Any]) -> str:
    """A calibration file's text: one line for each constant."""
    parts = [
        f'    "{part}": {{\n' + ",\n".join(f'      "{name}": {json.dumps(own, ensure_ascii=False)}' for name, own in entries.items()) + "\n    }"
        for part, entries in content["parts"].items()
    ]
    head = json.dumps({name: value for name, value in content.items() if name != "parts"}, indent=2, ensure_ascii=False)
    for fit in content["fits"].values():  # short lists stay on one line
        head = head.replace(json.dumps(fit["data"], indent=2).replace("\n", "\n      "), json.dumps(fit["data"]))
    return head[:-2] + ',\n  "parts": {\n' + ",\n".join(parts) + "\n  }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--parts", help=f"of {','.join(USES)} (default: those that enough layers use)")
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--prior", type=float, default=0.01)
    parser.add_argument("--evaluations", type=int, default=15)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--name", help="of the file of results; none without it")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    layers = dataset.read(*options.files)
    if len(machines := {measured.machine for measured in layers}) > 1:
        raise SystemExit(f"the files are of {', '.join(sorted(machines))}: constants are fitted with the facts of one machine")
    machine = identified_machine(layers[0].machine)
    groups = groups_of(layers, machine)
    parts = options.parts.split(",") if options.parts else parts_of(groups)
    count = sum(len(group.seconds) for group in groups)
    print(f"{count} kernels of {len(layers)} layers; parts {', '.join(parts)}", flush=True)
    if options.write:
        write(groups, machine, parts, options)
        return
    rows: list[dict[str, Any]] = []
    folds = folds_of(np.array([group.layer for group in groups]), options.folds)
    for fold in range(options.folds):
        training = [group for group, own in zip(groups, folds, strict=True) if own != fold]
        held = [group for group, own in zip(groups, folds, strict=True) if own == fold]
        new = fitted(some_of(training, options.layers, options.each), machine, parts, options.prior, options.evaluations)
        found = judged(held, machine, {"present": gpu_calibration(machine), "fitted": new})
        values = {f"{part}.{name}": value for (part, name), value in values_of(new, parts).items()}
        rows.append({"fold": fold, "layers": len({group.layer for group in held}), "quality": found, "fitted": values})
        print(f"fold {fold} of {options.folds}", flush=True)
    averages = means(rows)
    if options.name:
        write_results(options.name, {**vars(options), "kernels": count, "layers in all": len(layers)}, [*averages, *rows])
    show(averages)


def write(groups: Sequence[Group], machine: Machine, parts: Sequence[str], options: argparse.Namespace) -> None:
    commit = git_commit()
    if commit.endswith("+changes"):
        raise SystemExit("commit the changes first: the file names the commit that fitted its constants")
    chosen = some_of(groups, options.layers, options.each)
    new = fitted(chosen, machine, parts, options.prior, options.evaluations)
    path = calibration.FOLDER / f"{machine.measured_as}.json"
    note = f"{sum(len(group.seconds) for group in chosen)} kernels of {len({group.layer for group in chosen})} layers, good kernels weighing more"
    entry = {"command": " ".join(["python", *sys.orig_argv[1:]]), "data": list(map(str, options.files)), "data_note": note, "commit": commit[:12]}
    content = replaced(json.loads(path.read_text()), new, parts, f"training data of {commit[:12]}", entry)
    path.write_text(text_of(content))
    print(f"wrote {path}")


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The quality over all folds for each set of constants and schema."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row["quality"]):
        own = [row for row in rows if name in row["quality"]]
        weights = [row["layers"] for row in own]
        constants, schema = name.split(", ")
        averages = {key: float(np.average([row["quality"][name][key] for row in own], weights=weights)) for key in own[0]["quality"][name]}
        found.append({"constants": constants, "schema": schema, **averages})
    return found


def show(averages: Sequence[Mapping[str, Any]]) -> None:
    columns = (*(f"LoP@{top} %" for top in TOPS), "rank correlation", "error")
    table = Table("constants", "schema", *columns, box=None, title="layers left out, analytical order")
    for row in averages:
        losses = (f"{100 * row[f'lop@{top}']:.1f}" for top in TOPS)
        table.add_row(row["constants"], row["schema"], *losses, f"{row['spearman']:.3f}", f"{row['error']:.3f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
