"""The schema of products of bfloat16 on tile registers."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.amx.counts import amx_counts
from tilewright.kernels.cpu.amx.estimate import amx_estimate
from tilewright.kernels.cpu.amx.features import amx_features
from tilewright.kernels.cpu.amx.lower import AmxForm, amx_form, lower_amx
from tilewright.kernels.cpu.amx.space import CpuAmxFacts, CpuAmxSchedule, cpu_amx_space, schedule_of
from tilewright.kernels.schema import Form, Schema, in_tile_if


def match(problem: Problem, machine: Machine) -> Form[CpuAmxFacts, AmxForm]:
    """Raises Unsuitable like `amx_form`."""
    form, facts = amx_form(problem, machine)
    return Form(facts, form)


# if tile registers have candidates, no other schema is asked: vectors have a sixteenth of the throughput, less than even a mostly empty tile
AMX = Schema(
    name="amx",
    kinds=("contraction",),
    schedule=CpuAmxSchedule,
    match=match,
    space=lambda facts, machine, options: cpu_amx_space(facts, machine, options.threads),
    counts=amx_counts,
    estimate=lambda facts, candidates, counts, machine, options: amx_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_amx(problem, form.parts, form.facts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: True),
    made=lambda axes, machine: schedule_of(machine.vector_lanes(), **axes),
    features=lambda facts, candidates, machine, options: amx_features(facts, candidates, machine, options.threads),
    alone=True,
    unit="AMX",
)
