"""The schema of sums of products in register tiles."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.contraction.counts import contraction_counts
from tilewright.kernels.cpu.contraction.estimate import contraction_estimate
from tilewright.kernels.cpu.contraction.features import contraction_features
from tilewright.kernels.cpu.contraction.joining import join_decision
from tilewright.kernels.cpu.contraction.lower import contraction_facts, lower_contraction
from tilewright.kernels.cpu.contraction.nest import Nest, flat_nest
from tilewright.kernels.cpu.contraction.space import CpuContractionFacts, CpuContractionSchedule, cpu_contraction_space, schedule_of
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[CpuContractionFacts, Nest]:
    nest = flat_nest(problem)
    return Form(contraction_facts(problem, nest), nest)


CONTRACTION = Schema(
    name="contraction",
    kinds=("contraction",),
    schedule=CpuContractionSchedule,
    match=match,
    space=lambda facts, machine, options: cpu_contraction_space(facts, machine),
    counts=contraction_counts,
    estimate=lambda facts, candidates, counts, machine, options: contraction_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_contraction(problem, form.parts, schedule, machine),
    made=lambda axes, machine: schedule_of(machine.vector_lanes(), **axes),
    features=lambda facts, candidates, machine, options: contraction_features(facts, candidates, machine, options.threads),
    joins=join_decision,
    scored=True,
)
