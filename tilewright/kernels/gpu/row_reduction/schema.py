"""The schema for reductions over whole rows."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.row_reduction.counts import rows_counts
from tilewright.kernels.gpu.row_reduction.estimate import rows_cost
from tilewright.kernels.gpu.row_reduction.lower import RowsForm, lower_rows, rows_form
from tilewright.kernels.gpu.row_reduction.space import RowsProblem, RowsSchedule, rows_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[RowsProblem, RowsForm]:
    """Raises Unsuitable as `rows_form`."""
    form = rows_form(problem)
    return Form(form.problem, form)


ROW_REDUCTION = Schema(
    name="row reduction",
    kinds=("rows",),
    schedule=RowsSchedule,
    match=match,
    space=lambda facts, machine, options: rows_space(facts, machine),
    counts=lambda facts, rows, machine: rows_counts(rows, facts, machine),
    estimate=lambda facts, rows, counts, machine, options: rows_cost(rows, facts, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_rows(problem, form.parts, schedule),
)
