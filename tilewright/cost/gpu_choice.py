"""The GPU schedules of a region with their predictions: its problem, the space of its schema, the estimate."""

from __future__ import annotations

from tilewright.codegen.gpu.direct_form import direct_form
from tilewright.codegen.gpu.map import map_form
from tilewright.codegen.gpu.prefix import prefix_form
from tilewright.codegen.gpu.product import product_form
from tilewright.codegen.gpu.rows import rows_form
from tilewright.codegen.gpu.window import window_form
from tilewright.codegen.gpu.winograd import winograd_problem
from tilewright.codegen.winograd import winograd_form
from tilewright.cost.gpu import contraction_cost, gemv_cost, point_cost, prefix_cost, rows_cost
from tilewright.cost.gpu_direct import direct_cost
from tilewright.cost.gpu_row_epilogue import with_row_stages
from tilewright.cost.gpu_window import window_cost
from tilewright.cost.gpu_winograd import winograd_cost
from tilewright.cost.gpu_winograd_fused import fused_winograd_cost
from tilewright.cost.learned import model_of, refined
from tilewright.cost.ranking import Part, Ranking
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.schedule.gpu_contraction import (
    ContractionProblem,
    ContractionSchedule,
    GemvSchedule,
    contraction_space,
    gemv_space,
)
from tilewright.schedule.gpu_direct import DirectSchedule
from tilewright.schedule.gpu_direct_space import direct_space
from tilewright.schedule.gpu_map import MapSchedule, map_space
from tilewright.schedule.gpu_prefix import PrefixSchedule, prefix_space
from tilewright.schedule.gpu_rows import RowsSchedule, rows_space
from tilewright.schedule.gpu_window import WindowSchedule, window_space
from tilewright.schedule.gpu_winograd import WinogradSchedule, winograd_space
from tilewright.schedule.gpu_winograd_fused import FusedWinogradSchedule, fused_winograd_space


def rank(problem: Problem, machine: Machine, atomics: bool = False, learned: bool = True) -> Ranking:
    """The candidates of a region's schema with their predictions. `atomics`: sums may be added in no fixed order. `learned`: where a model was
    trained for the machine, it corrects the analytical predictions of contractions.

    Raises:
        Unsuitable: where the region has no GPU schema, or not the form that its schema needs.
    """
    kind = problem.region.kind
    if kind == "map":
        point = map_form(problem).problem
        rows, rejected = map_space(point, machine)
        return Ranking((Part(MapSchedule, rows, point_cost(rows, point, machine), point),), rejected)
    if kind == "window":
        windows = window_form(problem).problem
        rows, rejected = window_space(windows, machine)
        return Ranking((Part(WindowSchedule, rows, window_cost(rows, windows, machine), windows),), rejected)
    if kind == "rows":
        owned = rows_form(problem).problem
        rows, rejected = rows_space(owned, machine)
        return Ranking((Part(RowsSchedule, rows, rows_cost(rows, owned, machine), owned),), rejected)
    if kind == "prefix":
        scanned = prefix_form(problem).problem
        rows, rejected = prefix_space(scanned, machine)
        return Ranking((Part(PrefixSchedule, rows, prefix_cost(rows, scanned, machine), scanned),), rejected)
    if kind == "contraction":
        product = product_form(problem).problem
        ranking = rank_contraction(product, machine, atomics)
        ranking = with_direct(ranking, problem, machine, atomics)
        ranking = with_winograd(ranking, problem, machine)
        # models are trained with what stores its sums, not with what reduces rows of them
        return refined(ranking, machine, model_of(machine.name)) if learned and not product.row_stages else ranking
    raise Unsuitable(f"no GPU schema for a region of kind {kind}")


def with_direct(ranking: Ranking, problem: Problem, machine: Machine, atomics: bool) -> Ranking:
    """The candidates, and those of direct convolution where the region is one."""
    try:
        facts = direct_form(problem).problem
    except Unsuitable:
        return ranking
    rows, rejected = direct_space(facts, machine, atomics)
    return ranking.joined("direct", Part(DirectSchedule, rows, direct_cost(rows, facts, machine), facts), rejected)


def with_winograd(ranking: Ranking, problem: Problem, machine: Machine) -> Ranking:
    """The candidates, and those of Winograd's algorithm, in three kernels and in one, where the region is a convolution for it."""
    try:
        facts = winograd_problem(problem, winograd_form(problem))
    except Unsuitable:
        return ranking
    rows, rejected = winograd_space(facts, machine)
    ranking = ranking.joined("winograd", Part(WinogradSchedule, rows, winograd_cost(rows, facts, machine), facts), rejected)
    rows, rejected = fused_winograd_space(facts, machine)
    return ranking.joined("winograd fused", Part(FusedWinogradSchedule, rows, fused_winograd_cost(rows, facts, machine), facts), rejected)


def rank_contraction(problem: ContractionProblem, machine: Machine, atomics: bool = False) -> Ranking:
    """Tiled candidates and those for few rows together."""
    tiled, rejected = contraction_space(problem, machine, atomics)
    cost = contraction_cost(tiled, problem, machine)
    if problem.row_stages:
        cost = with_row_stages(cost, tiled, problem, machine)
    ranking = Ranking((Part(ContractionSchedule, tiled, cost, problem),), rejected)
    few, rejected = gemv_space(problem, machine)
    return ranking.joined("gemv", Part(GemvSchedule, few, gemv_cost(few, problem, machine), problem), rejected)
