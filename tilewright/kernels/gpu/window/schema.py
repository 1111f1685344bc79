"""The schema for small reductions."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.window.counts import window_counts
from tilewright.kernels.gpu.window.estimate import window_estimate
from tilewright.kernels.gpu.window.lower import WindowForm, lower_window, window_form
from tilewright.kernels.gpu.window.space import WindowFacts, WindowSchedule, window_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[WindowFacts, WindowForm]:
    """Raises Unsuitable like `window_form`."""
    form = window_form(problem)
    return Form(form.facts, form)


WINDOW = Schema(
    name="window",
    kinds=("window",),
    schedule=WindowSchedule,
    match=match,
    space=lambda facts, machine, options: window_space(facts, machine),
    counts=lambda facts, candidates, machine: window_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: window_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_window(problem, form.parts, schedule, machine),
)
