"""The schema for small reductions."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.window.counts import window_counts
from tilewright.kernels.gpu.window.estimate import window_cost
from tilewright.kernels.gpu.window.lower import WindowForm, lower_window, window_form
from tilewright.kernels.gpu.window.space import WindowProblem, WindowSchedule, window_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[WindowProblem, WindowForm]:
    """Raises Unsuitable as `window_form`."""
    form = window_form(problem)
    return Form(form.problem, form)


WINDOW = Schema(
    name="window",
    kinds=("window",),
    schedule=WindowSchedule,
    match=match,
    space=lambda facts, machine, options: window_space(facts, machine),
    counts=lambda facts, rows, machine: window_counts(rows, facts, machine),
    estimate=lambda facts, rows, counts, machine, options: window_cost(rows, facts, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_window(problem, form.parts, schedule, machine),
)
