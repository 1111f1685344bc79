"""Choosing a GPU schedule for a region by the models alone: the space, what it rejects, the predicted order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.codegen.gpu import GpuSchedule
from tilewright.codegen.gpu.map import map_form
from tilewright.codegen.gpu.prefix import prefix_form
from tilewright.codegen.gpu.product import product_form
from tilewright.codegen.gpu.rows import rows_form
from tilewright.codegen.gpu.window import window_form
from tilewright.cost.gpu import Estimate, contraction_cost, gemv_cost, point_cost, prefix_cost, rows_cost
from tilewright.cost.gpu_row_epilogue import with_row_stages
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region, Unsuitable
from tilewright.schedule.columns import Columns, length, row
from tilewright.schedule.gpu_contraction import (
    ContractionProblem,
    ContractionSchedule,
    GemvSchedule,
    contraction_space,
    gemv_space,
)
from tilewright.schedule.gpu_map import MapSchedule, map_space
from tilewright.schedule.gpu_prefix import PrefixSchedule, prefix_space
from tilewright.schedule.gpu_rows import RowsSchedule, rows_space
from tilewright.schedule.gpu_window import WindowSchedule, window_space


@dataclass(frozen=True)
class Choice:
    """One candidate with its prediction; `rejected` counts the infeasible ones by reason, `candidates` the feasible ones."""

    schedule: GpuSchedule
    seconds: float
    terms: Mapping[str, float]
    rejected: Mapping[str, int]
    candidates: int


@dataclass(frozen=True)
class Ranking:
    """Every feasible candidate of a region; iterating gives them from the fastest predicted on, equal ones in the order of the space."""

    parts: tuple[tuple[type[Any], Columns, Estimate], ...]
    rejected: Mapping[str, int]

    @property
    def candidates(self) -> int:
        return sum(length(rows) for _, rows, _ in self.parts)

    @property
    def seconds(self) -> np.ndarray:
        return np.concatenate([estimate.seconds for _, _, estimate in self.parts])

    def __iter__(self) -> Iterator[Choice]:
        starts = np.cumsum([0, *(length(rows) for _, rows, _ in self.parts)])
        for position in np.argsort(self.seconds, kind="stable"):
            number = int(np.searchsorted(starts, position, side="right")) - 1
            schedule, rows, estimate = self.parts[number]
            at = int(position - starts[number])
            terms = {name: float(term[at]) for name, term in estimate.terms.items()}
            yield Choice(
                schedule(**row(rows, at)),
                float(estimate.seconds[at]),
                MappingProxyType(terms),
                self.rejected,
                self.candidates,
            )


def rank(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str] | Mapping[str, Any],
    machine: Machine,
) -> Ranking:
    """The candidates of a region's schema with their predictions.

    Raises:
        Unsuitable: where the region has no GPU schema, or not the form that its schema needs.
    """
    names = frozenset(constants)
    if region.kind == "map":
        point = map_form(region, layouts, values).problem
        rows, rejected = map_space(point, machine)
        return Ranking(((MapSchedule, rows, point_cost(rows, point, machine)),), rejected)
    if region.kind == "window":
        point = window_form(region, layouts, values, names).problem
        rows, rejected = window_space(point, machine)
        return Ranking(((WindowSchedule, rows, point_cost(rows, point, machine)),), rejected)
    if region.kind == "rows":
        owned = rows_form(region, layouts, values).problem
        rows, rejected = rows_space(owned, machine)
        return Ranking(((RowsSchedule, rows, rows_cost(rows, owned, machine)),), rejected)
    if region.kind == "prefix":
        scanned = prefix_form(region, layouts, values).problem
        rows, rejected = prefix_space(scanned, machine)
        return Ranking(((PrefixSchedule, rows, prefix_cost(rows, scanned, machine)),), rejected)
    if region.kind == "contraction":
        return rank_contraction(product_form(region, layouts, values, names).problem, machine)
    raise Unsuitable(f"no GPU schema for a region of kind {region.kind}")


def rank_contraction(problem: ContractionProblem, machine: Machine) -> Ranking:
    """Tiled candidates and those for few rows together."""
    tiled, rejected = contraction_space(problem, machine)
    few, more = gemv_space(problem, machine)
    cost = contraction_cost(tiled, problem, machine)
    if problem.row_stages:
        cost = with_row_stages(cost, tiled, problem, machine)
    parts: list[tuple[type[Any], Columns, Estimate]] = [(ContractionSchedule, tiled, cost)]
    if length(few):
        parts.append((GemvSchedule, few, gemv_cost(few, problem, machine)))
    for reason, count in more.items():
        rejected[f"gemv: {reason}"] = count
    return Ranking(tuple(parts), rejected)


def choose(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str] | Mapping[str, Any],
    machine: Machine,
) -> Choice:
    """The candidate with the least predicted time; deterministic.

    Raises:
        Unsuitable: as `rank`, and where no candidate is feasible.
    """
    ranking = rank(region, layouts, values, constants, machine)
    for choice in ranking:
        return choice
    reasons = ", ".join(f"{reason} ({count})" for reason, count in ranking.rejected.items())
    raise Unsuitable(f"no schedule of region {region.name} is feasible on {machine.name}: {reasons}")
