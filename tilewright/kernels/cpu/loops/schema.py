"""The schemas of loops: with one candidate, loops with the machine's vector width; over rows, how these lie in vectors."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tilewright.hardware.machine import Machine
from tilewright.ir.expr import loads
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.loops.counts import loop_counts
from tilewright.kernels.cpu.loops.estimate import RowFacts, loop_estimate, row_estimate
from tilewright.kernels.cpu.loops.map import lower_map
from tilewright.kernels.cpu.loops.row_reduction import Rows, lower_row_reduction, rows_in
from tilewright.kernels.cpu.loops.scan import lower_scan, scanned_rows
from tilewright.kernels.cpu.loops.space import LoopSchedule, RowSchedule, loop_space, row_space
from tilewright.kernels.cpu.loops.window import has_vectors, lower_window
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[Problem, None]:
    """Accepts any problem of the kind; the estimate reads the region itself."""
    return Form(problem, None)


def loops(kind: str, lower: Callable[[Problem, LoopSchedule], Lowered]) -> Schema[Problem, None, LoopSchedule, Counts]:
    """The schema for one kind of region."""
    return Schema(
        name=kind,
        kinds=(kind,),
        schedule=LoopSchedule,
        match=match,
        space=lambda facts, machine, options: loop_space(machine),
        counts=loop_counts,
        estimate=lambda facts, candidates, counts, machine, options: loop_estimate(counts, machine, options.threads, scalars(facts, machine)),
        lower=lambda problem, form, schedule, machine: lower(problem, schedule),
    )


def scalars(problem: Problem, machine: Machine) -> int:
    """The elements that a window loads one by one, since vectors of its results cannot; 0 if they can, and for other loops."""
    reduce = problem.region.steps[0]
    if problem.region.kind != "window" or has_vectors(problem, machine.vector_lanes()):
        return 0
    return prod(axis.extent or 0 for axis in (*reduce.axes, *reduce.reduction)) * len(list(loads(*reduce.bodies)))


def over_rows(
    kinds: tuple[str, ...], find: Callable[[Problem, Machine], Rows], lower: Callable[[Problem, Rows, RowSchedule], Lowered]
) -> Schema[RowFacts, Rows, RowSchedule, Counts]:
    """The schema for kinds of region over rows, which lie along or across the lanes of vectors."""

    def match(problem: Problem, machine: Machine) -> Form[RowFacts, Rows]:
        rows = find(problem, machine)
        return Form(RowFacts(problem, rows), rows)

    return Schema(
        name=kinds[0],
        kinds=kinds,
        schedule=RowSchedule,
        match=match,
        space=lambda facts, machine, options: row_space(facts.lane_extent, machine),
        counts=lambda facts, candidates, machine: loop_counts(facts.problem, candidates, machine),
        estimate=lambda facts, candidates, counts, machine, options: row_estimate(facts, candidates, counts, machine, options.threads),
        lower=lambda problem, form, schedule, machine: lower(problem, form.parts, schedule),
    )


LOOPS = (
    loops("map", lower_map),
    loops("window", lower_window),
    over_rows(("row reduction", "window"), lambda problem, machine: rows_in(problem, machine.vector_lanes()), lower_row_reduction),
    over_rows(("scan",), lambda problem, machine: scanned_rows(problem), lower_scan),
)
