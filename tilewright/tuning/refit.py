"""Fits the constants of the GPU's analytical models (`hardware/calibration`) to measured layers, and evaluates the order that they give.

A robust least-squares fit of logarithms of time to some of the better kernels of each schema's layers; better kernels weigh more, and a weak prior
keeps constants that the data do not determine at their present values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from tilewright.errors import UnsupportedOption
from tilewright.hardware.calibration import CpuCalibration, GpuCalibration, assumed, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.columns import Columns, take
from tilewright.kernels.schema import AnySchema, Options
from tilewright.selection.learned.hybrid import loss_of_performance
from tilewright.selection.ranking import estimated
from tilewright.tuning import dataset
from tilewright.tuning.training import HICCUP, TOPS, part_of

TILED = ("ContractionSchedule", "DirectSchedule", "WinogradSchedule", "FusedWinogradSchedule")
USES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "instructions": (*TILED, "MapSchedule"), "steps": TILED, "gemm": ("ContractionSchedule", "WinogradSchedule", "FusedWinogradSchedule"),
    "direct": ("DirectSchedule",), "winograd": ("WinogradSchedule",), "winograd_fused": ("FusedWinogradSchedule",),
    "window": ("WindowSchedule",), "map": ("MapSchedule",), "row_reduction": ("RowReductionSchedule",), "gemv": ("GemvSchedule",),
    "warpgroups": ("WarpgroupSchedule", "PatchSchedule"),
})  # fmt: skip
"""Schedule types whose estimates depend on each part of the constants."""
LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType({
    "scheduler_imbalance": (0.02, 1.0), "kept_share": (0.02, 1.0), "overlap": (1.0, 16.0), "share": (0.3, 1.0), "store_share": (0.02, 1.0),
})  # fmt: skip
"""Least and largest value of constants that are shares or exponents; others may change by WIDEST."""
WIDEST = 4.0
SCANNED = ("clustered_share_2", "clustered_share_4", "clustered_share_8")
SHARES = tuple(round(1.0 - 0.01 * step, 2) for step in range(0, 30, 2))
"""Constants that decide whether blocks fit, so that times jump, and the values that are tried for each."""
DIGITS = 3
SOFT = 0.1
"""Error of a logarithm beyond which it counts linearly."""
LEAST_LAYERS = 3
"""Layers with candidates that use a part, for it to be fitted: fewer would fit their noise."""
LEAST_QUALITY = 0.25
"""Best time over time: slower kernels are not fitted."""
Constants = TypeVar("Constants", GpuCalibration, CpuCalibration)
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


def parts_of(groups: Sequence[Group]) -> list[str]:
    """The parts of the constants that enough of the groups' layers use."""
    return [part for part, users in USES.items() if len({group.layer for group in groups if group.kind in users}) >= LEAST_LAYERS]


def groups_of(layers: Sequence[dataset.MeasuredLayer], machine: Machine, hiccup: float = HICCUP) -> list[Group]:
    """The candidates of all layers. Times of a single replay that exceed the prediction by the factor `hiccup`, as a delay of the host makes them,
    are left out."""
    found = []
    for number, entry in enumerate(layers):
        problem: Problem = dataset.layer_problem(entry.layer)
        best = entry.best
        for kind, columns in entry.schemas.items():
            rows = {name: column for name, column in columns.items() if name not in dataset.MEASURES}
            part = part_of(problem, kind, rows, machine)
            if part is not None and any(kind in kinds for kinds in USES.values()):
                good = (columns["rounds"] > 1) | (columns["seconds"] < hiccup * part.estimate.seconds)
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


def with_values(constants: Constants, values: Mapping[Name, float]) -> Constants:
    """The constants with other values, by part and name."""
    for part in dict.fromkeys(part for part, _ in values):
        own = {name: value for (other, name), value in values.items() if other == part}
        constants = replace(constants, **{part: replace(getattr(constants, part), **own)})
    return constants


def fitted(groups: Sequence[Group], machine: Machine, parts: Sequence[str], prior: float, evaluations: int) -> GpuCalibration:
    """The machine's constants with those of the parts fitted to the groups.

    Raises:
        UnsupportedOption: if SciPy is not installed.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UnsupportedOption("fitting constants needs SciPy", "pip install tilewright[train]") from None
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

    def loss(own: Sequence[Group], constants: GpuCalibration) -> float:
        errors = (np.log(times / group.seconds) * group.weight for group, times in zip(own, predicted(own, machine, constants), strict=True))
        return sum(float(np.sqrt(1 + (error / SOFT) ** 2).sum()) for error in errors)

    for name in scanned:
        choices = [with_values(start, {name: share}) for share in SHARES]
        ends = zip(groups, *(predicted(groups, machine, constants) for constants in (choices[0], choices[-1])), strict=True)
        own = [group for group, most, least in ends if not np.array_equal(most, least)]
        start = min((start, *choices), key=partial(loss, own)) if own else start
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
