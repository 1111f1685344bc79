"""From measured layers to a learned model: features of the measured candidates, training, and the quality of the order on held-out layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tilewright.errors import InvalidInput
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import Overheads
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.registry import schedule_types, schemas
from tilewright.kernels.schema import Options, form_of
from tilewright.selection.learned.gpu import ATTENTION_SUFFIX, HALF_PAIRS_SUFFIX, HEAVY_SUFFIX, PAIRS_SUFFIX, STREAMS_SUFFIX, TENSOR_SUFFIX, described
from tilewright.selection.learned.hybrid import Recipe, Samples, join, loss_of_performance, out_of_fold
from tilewright.selection.ranking import Part, estimated
from tilewright.tuning.dataset import MEASURES, MeasuredLayer, layer_problem

BOOSTED = MappingProxyType(
    {"max_iter": 400, "learning_rate": 0.06, "max_leaf_nodes": 127, "max_depth": 12, "min_samples_leaf": 20, "max_features": 0.4}
)
RECIPE = Recipe("gradient_boosting", "formed", "correction", 3.0, options=BOOSTED)
"""How the models in the package are trained."""
HEAVY = replace(RECIPE, record="heavy")
"""How models of problems of many operations are trained."""
STREAMED = Recipe("gradient_boosting", "streams", "correction", 3.0, options=BOOSTED)
"""How models of windows, maps, row reductions and few rows' products are trained."""
TENSOR = Recipe("gradient_boosting", "tensor", "combined", 3.0, 2, BOOSTED)
"""How models of products on tensor cores are trained."""
PAIRED = replace(TENSOR, record="pairs")
"""How models of products of pairs of TF32 numbers are trained."""
HALF_PAIRED = replace(TENSOR, record="half pairs")
"""How models of products of pairs of float16 numbers are trained."""
ATTENTIVE = Recipe("gradient_boosting", "attention", "correction", 3.0, options=BOOSTED)
"""How models of attention on tensor cores are trained."""
RECIPES = MappingProxyType(
    {
        "": RECIPE,
        HEAVY_SUFFIX: HEAVY,
        STREAMS_SUFFIX: STREAMED,
        TENSOR_SUFFIX: TENSOR,
        PAIRS_SUFFIX: PAIRED,
        HALF_PAIRS_SUFFIX: HALF_PAIRED,
        ATTENTION_SUFFIX: ATTENTIVE,
    }
)
"""The models of a machine, by what follows its name."""
TOPS = (1, 10, 30)


def with_trees(recipe: Recipe, count: int) -> Recipe:
    """The recipe with `count` trees."""
    name = "max_iter" if recipe.learner == "gradient_boosting" else "n_estimators"
    return replace(recipe, options={**recipe.options, name: count})


HICCUP = 3.0
"""Ratio to the analytical time above which the time of a single replay reflects a delay of the host, not the kernel."""


def part_of(problem: Problem, kind: str, candidates: Columns, machine: Machine) -> Part | None:
    """Candidates of the schedule type `kind`, which need not be in its schema's space, with counts and estimates; None if the problem does not suit a
    schema of this type."""
    schema = next((schema for schema in schemas(machine, problem.region.kind) if schema.schedule is schedule_types()[kind]), None)
    form = form_of(schema, problem, machine) if schema is not None else None
    if schema is None or form is None or isinstance(form, Unsuitable):
        return None
    return estimated(schema, form.facts, candidates, machine, Options())


@dataclass(frozen=True)
class MeasuredPart:
    """Measured candidates of a schema, with counts and estimates for the machine. `kind`: the type of their schedules; `columns`: their axes and
    MEASURES."""

    kind: str
    part: Part
    machine: Machine
    columns: Mapping[str, np.ndarray]


def measured_parts(measured: MeasuredLayer, machine: Machine) -> list[MeasuredPart]:
    """The layer's candidates of the schemas that its problem suits."""
    problem = layer_problem(measured.layer)
    found: list[MeasuredPart] = []
    for kind, columns in measured.schemas.items():
        part = part_of(problem, kind, {name: column for name, column in columns.items() if name not in MEASURES}, machine)
        if part is not None:
            found.append(MeasuredPart(kind, part, machine, columns))
    return found


def samples_of(layer: Sequence[MeasuredPart], number: int, record: str = RECIPE.record) -> tuple[Samples, list[str]] | None:
    """A layer's rows with the inputs of the learned model, as problem `number`, and the schema of each. Rows of schemas that a model with this
    feature record does not cover are omitted; None if there are no others."""
    parts: list[Samples] = []
    kinds: list[str] = []
    for own in layer:
        known = described(own.part, own.machine, record)
        if known is None:
            continue
        seconds = own.columns["seconds"]
        found = Samples(known.columns, known.counts, seconds, np.full(len(seconds), number), known.analytical)
        good = np.flatnonzero((own.columns["rounds"] > 1) | (seconds < HICCUP * known.analytical))
        parts.append(found.where(good))
        kinds += [own.kind] * len(good)
    return (join(parts), kinds) if kinds else None


def samples(layers: Sequence[MeasuredLayer], machine: Machine, record: str = RECIPE.record) -> tuple[Samples, np.ndarray]:
    """All rows of all layers that a model with this feature record covers, and the schema of each.

    Raises:
        InvalidInput: if there are none.
    """
    known = _rows_of(layers, machine, [record])[record]
    if not known:
        raise _nothing_covered()
    return join([rows for rows, _ in known]), np.array([kind for _, kinds in known for kind in kinds])


def _rows_of(layers: Sequence[MeasuredLayer], machine: Machine, records: Sequence[str]) -> dict[str, list[tuple[Samples, list[str]]]]:
    """For each record the rows of each layer that has any: counts, features and times by formulas with the facts of the machine that measured the
    layer if that is of the same chip."""
    others = {name: identified_machine(name) for name in {measured.machine for measured in layers} - {machine.name}}
    own = {machine.name: machine} | {name: other if other.measured_as == machine.measured_as else machine for name, other in others.items()}
    found: dict[str, list[tuple[Samples, list[str]]]] = {record: [] for record in records}
    for number, measured in enumerate(layers):
        parts = measured_parts(measured, own[measured.machine])
        for record, known in found.items():
            rows = samples_of(parts, number, record)
            if rows is not None:
                known.append(rows)
    return found


def _nothing_covered() -> InvalidInput:
    return InvalidInput("the files hold no measured candidate of a schema that models cover", "collect the measurements again")


def samples_by_model(layers: Sequence[MeasuredLayer], machine: Machine) -> dict[str, Samples]:
    """The rows for each model of RECIPES that covers any.

    Raises:
        InvalidInput: if none covers any.
    """
    found = _rows_of(layers, machine, [recipe.record for recipe in RECIPES.values()])
    known = {suffix: join([rows for rows, _ in parts]) for suffix, recipe in RECIPES.items() if (parts := found[recipe.record])}
    if not known:
        raise _nothing_covered()
    return known


def held_out(rows: Samples, machine: Machine, recipe: Recipe, overheads: Overheads, folds: int) -> np.ndarray:
    """Seconds predicted for each row by a model that was not trained on its layer."""
    return out_of_fold(rows, machine, recipe, overheads, folds)


def quality(rows: Samples, predicted: np.ndarray) -> dict[str, float]:
    """Means over layers of LoP@n among the measured candidates, and of the rank correlation."""
    found: dict[str, list[float]] = {name: [] for name in (*(f"lop@{top}" for top in TOPS), "spearman")}
    for number in np.unique(rows.problem):
        which = rows.problem == number
        for top in TOPS:
            found[f"lop@{top}"].append(loss_of_performance(rows.seconds[which], predicted[which], top))
        first, second = (np.argsort(np.argsort(values[which], kind="stable"), kind="stable") for values in (rows.seconds, predicted))
        found["spearman"].append(float(np.corrcoef(first, second)[0, 1]) if which.sum() > 2 else 1.0)
    return {name: float(np.mean(values)) for name, values in found.items()}
