"""From measured layers to a learned model: the features of what was measured, training, and how good the order is on layers left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.cost.candidates import described
from tilewright.cost.gpu_choice import rank
from tilewright.cost.hybrid import Recipe, Samples, join, loss_of_performance, out_of_fold
from tilewright.cost.learned import part_of
from tilewright.cost.volumes import Overheads
from tilewright.errors import InvalidInput
from tilewright.hardware.machine import Machine
from tilewright.runtime.dataset import MeasuredLayer, layer_problem

RECIPE = Recipe(record="candidate", target="correction", favour=1.0)
"""How the models that come with the package are trained."""
TOPS = (1, 10, 30)


@dataclass(frozen=True)
class Known:
    """The measured candidates of one layer that the spaces of today contain; `texts` are positions (schema, row) in the measured columns."""

    samples: Samples
    schemas: tuple[str, ...]
    lost: int


def samples_of(measured: MeasuredLayer, machine: Machine, number: int) -> Known:
    """The layer's rows with what the learned model reads of them, as problem `number`. `lost` counts those that no space contains any more, or whose
    schema the model does not know."""
    problem = layer_problem(measured.layer)
    ranking = rank(problem.region, problem.layouts, problem.values, problem.constants, machine, learned=False)
    parts: list[Samples] = []
    schemas: list[str] = []
    lost = 0
    for kind, columns in measured.schemas.items():
        part = next((part for part in ranking.parts if getattr(part.schedule, "__name__", "") == kind), None)
        if part is None:
            lost += len(columns["seconds"])
            continue
        chosen, which = part_of(part, dict(columns))
        known = described(chosen, machine)
        if known is None:
            lost += len(columns["seconds"])
            continue
        lost += len(columns["seconds"]) - len(which)
        parts.append(Samples(known.columns, known.volumes, columns["seconds"][which], np.full(len(which), number), known.analytical))
        schemas += [kind] * len(which)
    if not parts:
        raise InvalidInput(f"layer {measured.layer['name']} has no measured candidate of a known space", "collect the measurements again")
    return Known(join(parts), tuple(schemas), lost)


def samples(layers: Sequence[MeasuredLayer], machine: Machine) -> tuple[Samples, np.ndarray, int]:
    """All rows of all layers, the schema of each row, and how many were lost (see `samples_of`)."""
    known = [samples_of(measured, machine, number) for number, measured in enumerate(layers)]
    schemas = np.array([schema for entry in known for schema in entry.schemas])
    return join([entry.samples for entry in known]), schemas, sum(entry.lost for entry in known)


def held_out(rows: Samples, machine: Machine, recipe: Recipe, overheads: Overheads, folds: int) -> np.ndarray:
    """Seconds predicted of each row by a model that saw nothing of its layer."""
    return out_of_fold(rows, machine, recipe, overheads, folds)


def quality(rows: Samples, predicted: np.ndarray) -> dict[str, float]:
    """Means over layers of LoP@n among the candidates measured, and of the rank correlation."""
    found: dict[str, list[float]] = {name: [] for name in (*(f"lop@{top}" for top in TOPS), "spearman")}
    for number in np.unique(rows.problem):
        which = rows.problem == number
        for top in TOPS:
            found[f"lop@{top}"].append(loss_of_performance(rows.seconds[which], predicted[which], top))
        first, second = (np.argsort(np.argsort(values[which], kind="stable"), kind="stable") for values in (rows.seconds, predicted))
        found["spearman"].append(float(np.corrcoef(first, second)[0, 1]) if which.sum() > 2 else 1.0)
    return {name: float(np.mean(values)) for name, values in found.items()}
