"""The schema for cumulative sums and their like."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.scan.counts import prefix_counts
from tilewright.kernels.gpu.scan.estimate import prefix_cost
from tilewright.kernels.gpu.scan.lower import PrefixForm, lower_prefix, prefix_form
from tilewright.kernels.gpu.scan.space import PrefixProblem, PrefixSchedule, prefix_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[PrefixProblem, PrefixForm]:
    """Raises Unsuitable as `prefix_form`."""
    form = prefix_form(problem)
    return Form(form.problem, form)


SCAN = Schema(
    name="scan",
    kinds=("prefix",),
    schedule=PrefixSchedule,
    match=match,
    space=lambda facts, machine, options: prefix_space(facts, machine),
    counts=lambda facts, rows, machine: prefix_counts(rows, facts, machine),
    estimate=lambda facts, rows, counts, machine, options: prefix_cost(rows, facts, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_prefix(problem, form.parts, schedule),
)
