"""The CPU schedules of a region with their predictions: its problem, the space of its schema, the estimate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tilewright.codegen.cpu.amx import amx_form
from tilewright.codegen.cpu.contraction import contraction_problem
from tilewright.codegen.cpu.depthwise import depthwise_form
from tilewright.codegen.cpu.winograd import cpu_winograd_form
from tilewright.cost.cpu import estimate_contraction, estimate_loops
from tilewright.cost.cpu_amx import estimate_amx
from tilewright.cost.cpu_depthwise import estimate_depthwise
from tilewright.cost.cpu_learned import corrected
from tilewright.cost.cpu_winograd import estimate_winograd
from tilewright.cost.ranking import Part, Ranking
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region, Unsuitable
from tilewright.schedule.columns import length
from tilewright.schedule.cpu_amx import cpu_amx_space
from tilewright.schedule.cpu_amx import schedule_of as amx_schedule_of
from tilewright.schedule.cpu_contraction import CpuContractionProblem, cpu_contraction_space, schedule_of
from tilewright.schedule.cpu_depthwise import cpu_depthwise_space
from tilewright.schedule.cpu_depthwise import schedule_of as depthwise_schedule_of
from tilewright.schedule.cpu_loops import LoopSchedule, loop_space
from tilewright.schedule.cpu_winograd import cpu_winograd_space
from tilewright.schedule.cpu_winograd import schedule_of as winograd_schedule_of


def rank(
    region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str], machine: Machine, threads: int
) -> Ranking:
    """The candidates of a region's schema with their predictions, those of the models corrected by what was learned.

    Raises:
        Unsuitable: where the region has no CPU schema.
    """
    return corrected(modelled(region, layouts, values, constants, machine, threads), machine, threads)


def modelled(
    region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str], machine: Machine, threads: int
) -> Ranking:
    """As `rank`, by the models alone."""
    if region.kind == "contraction":
        tiles = rank_tiles(region, layouts, values, constants, machine, threads)
        if tiles is not None:
            return tiles
        direct = rank_contraction(contraction_problem(region, layouts, constants), machine, threads)
        return with_winograd(direct, region, layouts, values, constants, machine, threads)
    if region.kind in ("map", "window", "rows", "prefix"):
        rows, rejected = loop_space(machine)
        plain = Ranking((Part(LoopSchedule, rows, estimate_loops(rows, region, layouts, values, machine, threads)),), rejected)
        return of_depthwise(plain, region, layouts, values, constants, machine, threads) if region.kind == "window" else plain
    raise Unsuitable(f"no CPU schema for a region of kind {region.kind}")


def rank_contraction(problem: CpuContractionProblem, machine: Machine, threads: int) -> Ranking:
    """Tiles of every size. None is feasible only where rows have to be whole and are too long (`longest_row` says up to which length)."""
    rows, rejected = cpu_contraction_space(problem, machine)
    schedule = partial(schedule_of, machine.vector_lanes())
    return Ranking((Part(schedule, rows, estimate_contraction(problem, rows, machine, threads), problem),), rejected)


def with_winograd(
    ranking: Ranking,
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    threads: int,
) -> Ranking:
    """The candidates, and those of Winograd's algorithm where the region is a convolution for it."""
    try:
        _, problem = cpu_winograd_form(region, layouts, values, constants, machine)
    except Unsuitable:
        return ranking
    rows, rejected = cpu_winograd_space(problem, machine, threads)
    part = Part(partial(winograd_schedule_of, machine.vector_lanes()), rows, estimate_winograd(problem, rows, machine, threads), problem)
    return ranking.joined("winograd", part, rejected)


def of_depthwise(
    ranking: Ranking,
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    threads: int,
) -> Ranking:
    """The candidates for a depthwise convolution in place of the one for any window, where the region is one: with the same instructions that one
    has no register tile of several rows, and its prediction knows nothing of instructions."""
    try:
        _, problem = depthwise_form(region, layouts, values, constants, machine)
    except Unsuitable:
        return ranking
    rows, rejected = cpu_depthwise_space(problem, machine)
    if not length(rows):
        return ranking
    schedule = partial(depthwise_schedule_of, machine.vector_lanes())
    return Ranking((Part(schedule, rows, estimate_depthwise(problem, rows, machine, threads), problem),), {**ranking.rejected, **rejected})


def rank_tiles(
    region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str], machine: Machine, threads: int
) -> Ranking | None:
    """The candidates on tile registers, where the region's factors are stored in bfloat16 and the machine has them; None where it does not suit
    them. There are no others then: vectors do a sixteenth of the work in the time, even where most of a tile is empty they are no faster."""
    try:
        _, problem = amx_form(region, layouts, values, constants, machine)
    except Unsuitable:
        return None
    rows, rejected = cpu_amx_space(problem, threads)
    part = Part(partial(amx_schedule_of, machine.vector_lanes()), rows, estimate_amx(problem, rows, machine, threads), problem)
    return Ranking((part,), rejected) if length(rows) else None
