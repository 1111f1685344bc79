"""The schema for maps."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.map.counts import map_counts
from tilewright.kernels.gpu.map.estimate import point_cost
from tilewright.kernels.gpu.map.lower import MapForm, lower_map, map_form
from tilewright.kernels.gpu.map.space import MapSchedule, PointProblem, map_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[PointProblem, MapForm]:
    """Raises Unsuitable as `map_form`."""
    form = map_form(problem)
    return Form(form.problem, form)


MAP = Schema(
    name="map",
    kinds=("map",),
    schedule=MapSchedule,
    match=match,
    space=lambda facts, machine, options: map_space(facts, machine),
    counts=lambda facts, rows, machine: map_counts(rows, facts, machine),
    estimate=lambda facts, rows, counts, machine, options: point_cost(rows, facts, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_map(problem, form.parts, schedule),
)
