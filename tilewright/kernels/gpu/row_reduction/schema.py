"""The schema for reductions over whole rows."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.row_reduction.counts import row_reduction_counts
from tilewright.kernels.gpu.row_reduction.estimate import row_reduction_estimate
from tilewright.kernels.gpu.row_reduction.lower import RowReductionForm, lower_row_reduction, row_reduction_form
from tilewright.kernels.gpu.row_reduction.space import RowReductionFacts, RowReductionSchedule, row_reduction_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[RowReductionFacts, RowReductionForm]:
    """Raises Unsuitable like `row_reduction_form`."""
    form = row_reduction_form(problem)
    return Form(form.facts, form)


ROW_REDUCTION = Schema(
    name="row reduction",
    kinds=("row reduction",),
    schedule=RowReductionSchedule,
    match=match,
    space=lambda facts, machine, options: row_reduction_space(facts, machine),
    counts=lambda facts, candidates, machine: row_reduction_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: row_reduction_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_row_reduction(problem, form.parts, schedule),
)
