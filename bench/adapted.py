"""What `tilewright calibrate` would gain on a GPU that has no data of its own: judged on the H200, whose data are taken for unknown but for a minute.

    python -m bench.adapted [--kernels 200 600 1500 3000] [--each 12] [--name adapted_h200]

Unknown means: no learned model, and neutral constants (`neutral`) where those of the package were fitted on the H200; `counted` is the V100's. The
minute is the first layers of `bench/data/h200_forms.jsonl.gz`, `--each` candidates of each, until `--kernels` are reached: the sampled ones, since
only the first line of a layer counts (later lines hold favourites of models). A third of those samples were drawn with a bias towards the first of an
earlier model of the H200, which a minute elsewhere would not have. All other layers of `h200_forms` and `h200_train` judge, and the twenty layers.
The package's model is cross-validated over the same layers, with its own constants.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from tilewright.hardware import calibration, catalogue
from tilewright.hardware.calibration import GpuCalibration, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.measured_order import CONSTANTS, CORRECTED, PRESENT
from tilewright.selection.learned.hybrid import folds_of
from tilewright.tuning import dataset, training
from tilewright.tuning.adapting import EACH, Order, corrected, cross_validated, refitted, seconds_of
from tilewright.tuning.refit import Group, groups_of, quality, with_values

DATA = Path(__file__).parent / "data"
FORMS, TRAIN, LAYERS = (DATA / f"h200_{name}.jsonl.gz" for name in ("forms", "train", "layers"))
NEUTRAL = {"ratio": 1.0, "cycles": 1.0, "latencies of level 1": 1.0, "latencies of memory": 1.0}
"""By unit."""
FOLDS = 3


def neutral(machine: Machine) -> GpuCalibration:
    """The machine's constants without any of its own measurements: 1 for ratios, cycles and latencies; the V100's fitted exponent and instructions of
    a step; four instructions for an address of 64 bits, and the three that a division is."""
    known = gpu_calibration(machine)
    special = {
        ("instructions", "address"): 4.0, ("instructions", "division"): 3.0, ("instructions", "step"): known.counted.step_instructions,
        ("steps", "overlap"): known.counted.overlap, ("direct", "overlap"): known.counted.overlap,
    }  # fmt: skip
    parts = json.loads((calibration.FOLDER / f"{machine.name}.json").read_text())["parts"]
    units = {(part, name): entry["unit"] for part, entries in parts.items() if hasattr(known, part) for name, entry in entries.items()}
    return with_values(known, {name: special[name] if name in special else NEUTRAL[unit] for name, unit in units.items()})


def first_lines(path: Path) -> Iterator[dataset.MeasuredLayer]:
    """Each layer as it was measured first."""
    seen: set[str] = set()
    for measured in dataset.each_line(path):
        name = str(measured.layer["name"])
        if name not in seen:
            seen.add(name)
            yield measured


def fewer(measured: dataset.MeasuredLayer, each: int, seed: int) -> dataset.MeasuredLayer:
    """The layer with up to `each` of its candidates."""
    owners = np.concatenate([np.full(len(columns["seconds"]), number) for number, columns in enumerate(measured.schemas.values())])
    kept = np.zeros(len(owners), dtype=bool)
    kept[np.random.default_rng([seed, 1]).permutation(len(owners))[:each]] = True
    schemas = {}
    for number, (kind, columns) in enumerate(measured.schemas.items()):
        schemas[kind] = {name: column[kept[owners == number]] for name, column in columns.items()}
    return replace(measured, schemas={kind: columns for kind, columns in schemas.items() if len(columns["seconds"])})


def minute(kernels: int, each: int) -> list[dataset.MeasuredLayer]:
    """The first layers of the file, until there are so many kernels."""
    found: list[dataset.MeasuredLayer] = []
    for number, measured in enumerate(first_lines(FORMS)):
        if sum(layer.count for layer in found) >= kernels:
            break
        if measured.count:
            found.append(fewer(measured, each, number))
    return found


def orders_of(layers: Sequence[dataset.MeasuredLayer], machine: Machine, start: GpuCalibration) -> tuple[dict[str, Order], dict[str, Any]]:
    """The orders adapted to these layers, and their quality in cross-validation within them, which decides between them."""
    groups = groups_of(layers, machine, np.inf)
    constants = refitted(groups, machine, start)
    orders = {CONSTANTS: Order(constants), CORRECTED: Order(constants, corrected(groups, machine, constants))}
    return orders, cross_validated(groups, machine, Order(start))


def package(groups: Sequence[Group], machine: Machine) -> list[np.ndarray]:
    """Predictions by models trained as the package's with the layers of the other folds."""
    folds = folds_of(np.array([group.layer for group in groups]), FOLDS)
    constants = gpu_calibration(machine)
    times = [np.zeros(0)] * len(groups)
    for fold in range(FOLDS):
        held = [number for number, own in enumerate(folds) if own == fold]
        others = [group for group, own in zip(groups, folds, strict=True) if own != fold]
        order = Order(constants, corrected(others, machine, constants, training.RECIPE))
        for number, own in zip(held, seconds_of([groups[number] for number in held], machine, order), strict=True):
            times[number] = own
        print(f"package's model, fold {fold}", flush=True)
    return times


def row(kernels: int, layers: int, order: str, found: Mapping[str, Mapping[str, float]], within: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A line of the results. `found`: the quality on the random layers and on the twenty; `within`: that in cross-validation within the minute."""
    return {"kernels": kernels, "layers": layers, "order": order, **found, "within the minute": within}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", type=int, nargs="+", default=[200, 600, 1500, 3000])
    parser.add_argument("--each", type=int, default=EACH)
    parser.add_argument("--name", help="of the file of results; none without it")
    options = parser.parse_args()
    machine = catalogue()["h200"]
    minutes = {kernels: minute(kernels, options.each) for kernels in options.kernels}
    seen = {str(layer.layer["name"]) for layers in minutes.values() for layer in layers}
    others = [layer for layer in dataset.read(FORMS, TRAIN) if layer.count and str(layer.layer["name"]) not in seen]
    judged = {"random": groups_of(others, machine), "twenty": groups_of(dataset.read(LAYERS), machine)}

    def found(order: Order) -> dict[str, dict[str, float]]:
        return {name: quality(groups, seconds_of(groups, machine, order)) for name, groups in judged.items()}

    start = neutral(machine)
    rows = [row(0, 0, PRESENT, found(Order(start)))]
    for layers in minutes.values():
        count = sum(layer.count for layer in layers)
        orders, within = orders_of(layers, machine, start)
        rows += [row(count, len(layers), name, found(order), within[name]) for name, order in orders.items()]
        rows += [row(count, len(layers), f"{PRESENT}, within the minute", {}, within[PRESENT])]
        print(f"{count} kernels of {len(layers)} layers", flush=True)
    trained = sum(len(group.seconds) for group in judged["random"])
    rows.append(row(trained, len(others), "package's constants", found(Order(gpu_calibration(machine)))))
    rows.append(row(trained, len(others), "package's model", {"random": quality(judged["random"], package(judged["random"], machine))}))
    if options.name:
        counts = {name: len({group.layer for group in groups}) for name, groups in judged.items()}
        print(write_results(options.name, {**vars(options), "judged": counts}, rows))
    show(rows)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("kernels", "order", "set", *(f"LoP@{top} %" for top in training.TOPS), "rank correlation", box=None)
    for entry in rows:
        for name in ("random", "twenty", "within the minute"):
            if entry.get(name):
                losses = (f"{100 * entry[name][f'lop@{top}']:.1f}" for top in training.TOPS)
                table.add_row(str(entry["kernels"]), entry["order"], name, *losses, f"{entry[name]['spearman']:.3f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
