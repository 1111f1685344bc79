"""Adapts the order of a GPU's candidates to measurements of a minute: constants of the analytical models fitted to them, and a learned correction.

Each is used only if it ranks better: layers of the minute are left out in turn, and the loss of the first choice among their measured candidates
decides between the present order, the fitted constants alone, and the fitted constants with the correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

import numpy as np

from tilewright.errors import InvalidInput
from tilewright.hardware.calibration import GpuCalibration, assumed
from tilewright.hardware.machine import Machine
from tilewright.hardware.measured_order import CONSTANTS, CORRECTED, PRESENT
from tilewright.kernels.schema import Options
from tilewright.selection.learned.gpu import concatenated, described
from tilewright.selection.learned.hybrid import Learned, Recipe, Samples, folds_of, join, train
from tilewright.selection.ranking import Part, estimated
from tilewright.tuning.dataset import MeasuredLayer, layer_of
from tilewright.tuning.refit import Group, fitted, groups_of, parts_of, quality, some_of
from tilewright.tuning.sampling import random_workloads

SEED = 71
"""Seed for drawing the layers that are measured and their candidates: the same on every GPU."""
MOST_LAYERS = 1000
EACH = 12
"""Candidates measured of each layer."""
LEAST_LAYERS = 48
"""Cross-validation within fewer decides little better than chance (docs/learned.md)."""
FOLDS = 3
PRIOR, EVALUATIONS = 0.01, 6
"""Weight of the present constants, and evaluations of the fit."""
MOST_FITTED, MOST_FITTED_EACH = 100, 12
"""Layers of a schema, and candidates of each, to which constants are fitted."""
RECIPE = Recipe(
    "gradient_boosting", "formed", "correction", 3.0,
    options=MappingProxyType({"max_iter": 200, "learning_rate": 0.06, "max_leaf_nodes": 31, "min_samples_leaf": 10, "max_features": 0.4}),
)  # fmt: skip
"""How the correction is trained: fewer and smaller trees than those of the package's models, which see far more kernels."""


@dataclass(frozen=True)
class Order:
    """What ranks candidates: constants of the analytical models, and learned corrections, each of the schemas that it covers."""

    constants: GpuCalibration
    models: tuple[Learned, ...] = ()


@dataclass(frozen=True)
class Adaptation:
    """What a minute's measurements gave. `qualities`: of each order on layers left out, as `refit.quality`; `chosen`: the name of the best;
    `order`: the best, made from all layers. `environment`: GPU, driver and compiler."""

    kernels: int
    layers: int
    qualities: Mapping[str, Mapping[str, float]]
    chosen: str
    order: Order
    environment: Mapping[str, str]


def layers_to_measure() -> Iterator[Mapping[str, str]]:
    """The fixed set, in order: as many are measured as the time allows."""
    return map(layer_of, islice(random_workloads(SEED), MOST_LAYERS))


def adapted(layers: Sequence[MeasuredLayer], machine: Machine, present: Order) -> Adaptation:
    """The order that is best on layers left out; ties keep the simpler one.

    Raises:
        InvalidInput: if there are too few measurements to compare orders.
        UnsupportedOption: if SciPy or scikit-learn is not installed.
    """
    groups = groups_of(layers, machine, np.inf)
    kernels, count = sum(len(group.seconds) for group in groups), len({group.layer for group in groups})
    if count < LEAST_LAYERS:
        raise InvalidInput(
            f"{kernels} kernels of {count} layers were measured, which are too few to adapt to",
            f"measure {LEAST_LAYERS} layers at least, with more --seconds",
        )
    qualities = cross_validated(groups, machine, present)
    chosen = min(qualities, key=lambda name: qualities[name]["lop@1"])
    return Adaptation(kernels, count, qualities, chosen, made(chosen, groups, machine, present), layers[0].environment)


def made(name: str, groups: Sequence[Group], machine: Machine, present: Order) -> Order:
    """The order of that name, fitted to the groups."""
    if name == PRESENT:
        return present
    constants = refitted(groups, machine, present.constants)
    return Order(constants, corrected(groups, machine, constants) if name == CORRECTED else ())


def cross_validated(groups: Sequence[Group], machine: Machine, present: Order) -> dict[str, dict[str, float]]:
    """The quality of each order, each layer predicted from the other folds' layers."""
    folds = folds_of(np.array([group.layer for group in groups]), FOLDS)
    times = {name: [np.zeros(0)] * len(groups) for name in (PRESENT, CONSTANTS, CORRECTED)}
    for fold in range(FOLDS):
        held = [number for number, own in enumerate(folds) if own == fold]
        training = [group for group, own in zip(groups, folds, strict=True) if own != fold]
        constants = refitted(training, machine, present.constants)
        orders = {PRESENT: present, CONSTANTS: Order(constants), CORRECTED: Order(constants, corrected(training, machine, constants))}
        for name, order in orders.items():
            for number, own in zip(held, seconds_of([groups[number] for number in held], machine, order), strict=True):
                times[name][number] = own
    return {name: quality(groups, own) for name, own in times.items()}


def refitted(groups: Sequence[Group], machine: Machine, start: GpuCalibration) -> GpuCalibration:
    """The constants fitted to the groups, of all parts that enough of them use."""
    with assumed(machine, start):
        return fitted(some_of(groups, MOST_FITTED, MOST_FITTED_EACH), machine, parts_of(groups), PRIOR, EVALUATIONS)


def corrected(groups: Sequence[Group], machine: Machine, constants: GpuCalibration, recipe: Recipe = RECIPE) -> tuple[Learned, ...]:
    """A learned correction of the constants' order; none if no candidate is of a schema that models of the recipe's record cover."""
    with assumed(machine, constants):
        rows = [
            Samples(found.columns, found.counts, group.seconds, np.full(len(group.seconds), group.layer), found.analytical)
            for group, part in zip(groups, _parts(groups, machine), strict=True)
            if (found := described(part, machine, recipe.record)) is not None
        ]
        return (train(join(rows), machine, recipe, constants.counted),) if rows else ()


def seconds_of(groups: Sequence[Group], machine: Machine, order: Order) -> list[np.ndarray]:
    """Predicted seconds of each group's candidates."""
    with assumed(machine, order.constants):
        parts = _parts(groups, machine)
        times = [part.estimate.seconds for part in parts]
        for model in order.models:
            known = [(number, found) for number, part in enumerate(parts) if (found := described(part, machine, model.record)) is not None]
            if known:
                together = concatenated([found for _, found in known])
                predicted = model.predicted(together.columns, together.counts, machine, together.analytical)
                ends = np.cumsum([len(found.analytical) for _, found in known])
                for (number, _), own in zip(known, np.split(predicted, ends[:-1]), strict=True):
                    times[number] = own
        return times


def _parts(groups: Sequence[Group], machine: Machine) -> list[Part]:
    """The groups' candidates with their counts and estimates."""
    return [estimated(group.schema, group.facts, group.candidates, machine, Options()) for group in groups]
