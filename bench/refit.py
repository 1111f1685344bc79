"""Fits the constants of the GPU's analytical models (`hardware/calibration`) to training data, and shows how the analytical order changes.

    python -m bench.refit FILE ... [--parts steps,gemm,...] [--folds 3] [--name refit_h200 | --write]

A robust least-squares fit of logarithms of time to up to `--each` of the better kernels of up to `--layers` layers of each schema; better kernels
weigh more, and a weak prior keeps constants that the data do not determine at their present values. Layers on which models are evaluated are refused.
LoP@n and rank correlation are those of held-out layers, with present and with fitted constants. `--write` fits to layers of all folds and replaces
the values in the machine's own file; each then names this command, the data and the commit. Train the learned model again afterwards: it corrects
the analytical one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from bench.common import git_commit, write_results
from tilewright.hardware import calibration
from tilewright.hardware import machine as find_machine
from tilewright.hardware.calibration import GpuCalibration, assumed, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.columns import Columns, take
from tilewright.kernels.schema import AnySchema, Options
from tilewright.selection.choice import estimated
from tilewright.selection.learned.hybrid import folds_of, loss_of_performance
from tilewright.tuning import dataset
from tilewright.tuning.sampling import JUDGED, bare
from tilewright.tuning.training import HICCUP, TOPS, part_of

TILED = ("ContractionSchedule", "DirectSchedule", "WinogradSchedule", "FusedWinogradSchedule")
USES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "instructions": (*TILED, "MapSchedule"), "steps": TILED, "gemm": ("ContractionSchedule", "WinogradSchedule", "FusedWinogradSchedule"),
    "direct": ("DirectSchedule",), "winograd": ("WinogradSchedule",), "winograd_fused": ("FusedWinogradSchedule",),
    "window": ("WindowSchedule",), "map": ("MapSchedule",), "row_reduction": ("RowReductionSchedule",), "gemv": ("GemvSchedule",),
})  # fmt: skip
"""Schedule types whose estimates depend on each part of the constants."""
LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType({"scheduler_imbalance": (0.02, 1.0), "overlap": (1.0, 16.0)})
"""Least and largest value of constants that are shares or exponents; others may change by WIDEST."""
WIDEST = 4.0
SCANNED = ("clustered_share_2", "clustered_share_4", "clustered_share_8")
SHARES = tuple(round(1.0 - 0.01 * step, 2) for step in range(0, 30, 2))
"""Constants that decide whether blocks fit, so that times jump, and the values that are tried for each."""
DIGITS = 3
SOFT = 0.1
"""Error of a logarithm beyond which it counts linearly."""
LEAST_QUALITY = 0.25
"""Best time over time: slower kernels are not fitted."""
Name = tuple[str, str]
"""A constant: part and name."""


@dataclass(frozen=True)
class Group:
    """Measured candidates of one schema for one layer. `weight`: the layer's best time over each time."""

    layer: int
    schema: AnySchema
    facts: Any
    candidates: Columns
    seconds: np.ndarray
    weight: np.ndarray

    @property
    def kind(self) -> str:
        return str(self.schema.schedule.__name__)

    def where(self, which: np.ndarray) -> Group:
        return replace(self, candidates=take(self.candidates, which), seconds=self.seconds[which], weight=self.weight[which])


def groups_of(layers: Sequence[dataset.MeasuredLayer], machine: Machine) -> list[Group]:
    """The candidates of all layers. Times of a single replay that a delay of the host made long are left out.

    Raises:
        ValueError: for a layer on which models are evaluated.
    """
    found = []
    for number, entry in enumerate(layers):
        if bare(dataset.layer_workload(entry.layer)) in JUDGED:
            raise ValueError(f"{entry.layer['name']} is a layer on which models are evaluated")
        problem: Problem = dataset.layer_problem(entry.layer)
        best = entry.best
        for kind, columns in entry.schemas.items():
            rows = {name: column for name, column in columns.items() if name not in dataset.MEASURES}
            part = part_of(problem, kind, rows, machine)
            if part is not None and any(kind in kinds for kinds in USES.values()):
                good = (columns["rounds"] > 1) | (columns["seconds"] < HICCUP * part.estimate.seconds)
                group = Group(number, part.schema, part.facts, rows, columns["seconds"], best / columns["seconds"])
                found.append(group.where(np.flatnonzero(good)))
    return found


def some_of(groups: Sequence[Group], layers: int, each: int, seed: int = 0) -> list[Group]:
    """Up to `each` of the better candidates of up to `layers` layers of each schema."""
    generator = np.random.default_rng(seed)
    found = []
    for kind in dict.fromkeys(group.kind for group in groups):
        own = [group for group in groups if group.kind == kind]
        for number in np.sort(generator.permutation(len(own))[:layers]):
            group = own[number]
            better = np.flatnonzero(group.weight > LEAST_QUALITY)
            if len(better):
                found.append(group.where(np.sort(generator.permutation(better)[:each])))
    return found


def predicted(groups: Sequence[Group], machine: Machine, constants: GpuCalibration) -> list[np.ndarray]:
    """Seconds of each group's candidates with other constants."""
    with assumed(machine, constants):
        return [estimated(group.schema, group.facts, group.candidates, machine, Options()).estimate.seconds for group in groups]


def values_of(constants: GpuCalibration, parts: Sequence[str]) -> dict[Name, float]:
    return {(part, name): value for part in parts for name, value in asdict(getattr(constants, part)).items()}


def with_values(constants: GpuCalibration, values: Mapping[Name, float]) -> GpuCalibration:
    for part in dict.fromkeys(part for part, _ in values):
        own = {name: value for (other, name), value in values.items() if other == part}
        constants = replace(constants, **{part: replace(getattr(constants, part), **own)})
    return constants


def fitted(groups: Sequence[Group], machine: Machine, parts: Sequence[str], prior: float, evaluations: int) -> GpuCalibration:
    """The machine's constants with those of the parts fitted to the groups."""
    start = gpu_calibration(machine)
    values = {name: value for name, value in values_of(start, parts).items() if name[1] not in SCANNED}
    scanned = [name for name in values_of(start, parts) if name not in values]
    names, origin = list(values), np.log(list(values.values()))
    bounds = np.array([np.log(LIMITS.get(name, (np.exp(at) / WIDEST, np.exp(at) * WIDEST))) for (_, name), at in zip(names, origin, strict=True)]).T
    sizes = np.cumsum([0, *(len(group.seconds) for group in groups)])
    goal, weight = np.log(np.concatenate([group.seconds for group in groups])), np.concatenate([group.weight for group in groups])
    scale = prior * len(goal) ** 0.5

    def constants_at(logarithms: np.ndarray) -> GpuCalibration:
        return with_values(start, dict(zip(names, map(float, np.exp(logarithms)), strict=True)))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        times = np.concatenate(predicted(groups, machine, constants_at(logarithms)))
        result: np.ndarray = np.r_[(np.log(times) - goal) * weight, (logarithms - origin) * scale]
        return result

    def slopes(logarithms: np.ndarray) -> np.ndarray:
        """Differences quotients; only the estimates that depend on a constant are computed again."""
        before = residuals(logarithms)
        result = np.zeros((len(before), len(names)))
        for column, (part, _) in enumerate(names):
            step = 0.01 if logarithms[column] + 0.01 < bounds[1, column] else -0.01
            moved = logarithms.copy()
            moved[column] += step
            own = [number for number, group in enumerate(groups) if group.kind in USES[part]]
            for number, times in zip(own, predicted([groups[number] for number in own], machine, constants_at(moved)), strict=True):
                rows = slice(sizes[number], sizes[number + 1])
                result[rows, column] = ((np.log(times) - goal[rows]) * weight[rows] - before[rows]) / step
            result[len(goal) + column, column] = scale
        return result

    def loss(constants: GpuCalibration) -> float:
        times = np.concatenate(predicted(groups, machine, constants))
        return float((np.sqrt(1 + ((np.log(times) - goal) * weight / SOFT) ** 2)).sum())

    for name in scanned:
        start = min((start, *(with_values(start, {name: share}) for share in SHARES)), key=loss)
    inside = np.clip(origin, bounds[0] + 1e-6, bounds[1] - 1e-6)
    solution = least_squares(residuals, inside, slopes, loss="soft_l1", f_scale=SOFT, max_nfev=evaluations, bounds=bounds, x_scale=1.0)
    return with_values(start, {name: float(f"{np.exp(x):.{DIGITS}g}") for name, x in zip(names, solution.x, strict=True)})


def quality(groups: Sequence[Group], times: Sequence[np.ndarray]) -> dict[str, float]:
    """Means over layers of LoP@n among all measured candidates, and of the rank correlation; and the mean absolute error of logarithms."""
    found: dict[str, list[float]] = {name: [] for name in (*(f"lop@{top}" for top in TOPS), "spearman", "error")}
    for layer in dict.fromkeys(group.layer for group in groups):
        own = [number for number, group in enumerate(groups) if group.layer == layer]
        seconds, expected = np.concatenate([groups[number].seconds for number in own]), np.concatenate([times[number] for number in own])
        for top in TOPS:
            found[f"lop@{top}"].append(loss_of_performance(seconds, expected, top))
        first, second = (np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (seconds, expected))
        found["spearman"].append(float(np.corrcoef(first, second)[0, 1]) if len(seconds) > 2 else 1.0)
        found["error"].append(float(np.abs(np.log(expected / seconds)).mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


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


def replaced(content: dict[str, Any], constants: GpuCalibration, parts: Sequence[str], fit: str, entry: Mapping[str, Any]) -> dict[str, Any]:
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
    parser.add_argument("--parts", help=f"of {','.join(USES)} (default: those that the data have candidates for)")
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--prior", type=float, default=0.01)
    parser.add_argument("--evaluations", type=int, default=15)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--name", help="of the file of results; none without it")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    layers = dataset.read(*options.files)
    machine = find_machine(layers[0].machine)
    groups = groups_of(layers, machine)
    kinds = {group.kind for group in groups}
    parts = options.parts.split(",") if options.parts else [part for part, users in USES.items() if kinds & set(users)]
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
    path = calibration.FOLDER / f"{machine.name}.json"
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
