"""The CPU schedules of a region with their predictions: its problem, the space of its schema, the estimate."""

from __future__ import annotations

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
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.schedule.columns import length
from tilewright.schedule.cpu_amx import cpu_amx_space
from tilewright.schedule.cpu_amx import schedule_of as amx_schedule_of
from tilewright.schedule.cpu_contraction import CpuContractionProblem, cpu_contraction_space, schedule_of
from tilewright.schedule.cpu_depthwise import cpu_depthwise_space
from tilewright.schedule.cpu_depthwise import schedule_of as depthwise_schedule_of
from tilewright.schedule.cpu_loops import LoopSchedule, loop_space
from tilewright.schedule.cpu_winograd import cpu_winograd_space
from tilewright.schedule.cpu_winograd import schedule_of as winograd_schedule_of


def rank(problem: Problem, machine: Machine, threads: int) -> Ranking:
    """The candidates of a region's schema with their predictions, those of the models corrected by what was learned.

    Raises:
        Unsuitable: where the region has no CPU schema.
    """
    return corrected(modelled(problem, machine, threads), machine, threads)


def modelled(problem: Problem, machine: Machine, threads: int) -> Ranking:
    """As `rank`, by the models alone."""
    if problem.region.kind == "contraction":
        tiles = rank_tiles(problem, machine, threads)
        if tiles is not None:
            return tiles
        direct = rank_contraction(contraction_problem(problem), machine, threads)
        return with_winograd(direct, problem, machine, threads)
    if problem.region.kind in ("map", "window", "rows", "prefix"):
        rows, rejected = loop_space(machine)
        plain = Ranking((Part(LoopSchedule, rows, estimate_loops(problem, rows, machine, threads)),), rejected)
        return of_depthwise(plain, problem, machine, threads) if problem.region.kind == "window" else plain
    raise Unsuitable(f"no CPU schema for a region of kind {problem.region.kind}")


def rank_contraction(problem: CpuContractionProblem, machine: Machine, threads: int) -> Ranking:
    """Tiles of every size. None is feasible only where rows have to be whole and are too long (`longest_row` says up to which length)."""
    rows, rejected = cpu_contraction_space(problem, machine)
    schedule = partial(schedule_of, machine.vector_lanes())
    return Ranking((Part(schedule, rows, estimate_contraction(problem, rows, machine, threads), problem),), rejected)


def with_winograd(ranking: Ranking, problem: Problem, machine: Machine, threads: int) -> Ranking:
    """The candidates, and those of Winograd's algorithm where the region is a convolution for it."""
    try:
        _, facts = cpu_winograd_form(problem, machine)
    except Unsuitable:
        return ranking
    rows, rejected = cpu_winograd_space(facts, machine, threads)
    part = Part(partial(winograd_schedule_of, machine.vector_lanes()), rows, estimate_winograd(facts, rows, machine, threads), facts)
    return ranking.joined("winograd", part, rejected)


def of_depthwise(ranking: Ranking, problem: Problem, machine: Machine, threads: int) -> Ranking:
    """The candidates for a depthwise convolution in place of the one for any window, where the region is one: with the same instructions that one
    has no register tile of several rows, and its prediction knows nothing of instructions."""
    try:
        _, facts = depthwise_form(problem, machine)
    except Unsuitable:
        return ranking
    rows, rejected = cpu_depthwise_space(facts, machine)
    if not length(rows):
        return ranking
    schedule = partial(depthwise_schedule_of, machine.vector_lanes())
    return Ranking((Part(schedule, rows, estimate_depthwise(facts, rows, machine, threads), facts),), {**ranking.rejected, **rejected})


def rank_tiles(problem: Problem, machine: Machine, threads: int) -> Ranking | None:
    """The candidates on tile registers, where the region's factors are stored in bfloat16 and the machine has them; None where it does not suit
    them. There are no others then: vectors do a sixteenth of the work in the time, even where most of a tile is empty they are no faster."""
    try:
        _, facts = amx_form(problem, machine)
    except Unsuitable:
        return None
    rows, rejected = cpu_amx_space(facts, threads)
    part = Part(partial(amx_schedule_of, machine.vector_lanes()), rows, estimate_amx(facts, rows, machine, threads), facts)
    return Ranking((part,), rejected) if length(rows) else None
