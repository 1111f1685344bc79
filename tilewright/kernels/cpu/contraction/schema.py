"""The schema of sums of products in register tiles."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.contraction.counts import contraction_counts
from tilewright.kernels.cpu.contraction.estimate import estimate_contraction
from tilewright.kernels.cpu.contraction.features import contraction_features
from tilewright.kernels.cpu.contraction.joined import judged
from tilewright.kernels.cpu.contraction.lower import contraction_problem, lower_contraction
from tilewright.kernels.cpu.contraction.nest import Nest, flat_nest
from tilewright.kernels.cpu.contraction.space import CpuContractionProblem, CpuContractionSchedule, cpu_contraction_space, schedule_of
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[CpuContractionProblem, Nest]:
    nest = flat_nest(problem)
    return Form(contraction_problem(problem, nest), nest)


CONTRACTION = Schema(
    name="contraction",
    kinds=("contraction",),
    schedule=CpuContractionSchedule,
    match=match,
    space=lambda facts, machine, options: cpu_contraction_space(facts, machine),
    counts=contraction_counts,
    estimate=lambda facts, rows, counts, machine, options: estimate_contraction(facts, rows, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_contraction(problem, form.parts, schedule, machine),
    made=lambda axes, machine: schedule_of(machine.vector_lanes(), **axes),
    features=lambda facts, rows, machine, options: contraction_features(facts, rows, machine.vector_lanes(), options.threads),
    joined=judged,
    scored=True,
)
