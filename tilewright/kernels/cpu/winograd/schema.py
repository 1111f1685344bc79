"""The schema of convolutions by transforms of blocks on CPUs."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.winograd.counts import winograd_counts
from tilewright.kernels.cpu.winograd.estimate import winograd_estimate
from tilewright.kernels.cpu.winograd.features import winograd_features
from tilewright.kernels.cpu.winograd.lower import cpu_winograd_form, lower_winograd
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts, CpuWinogradSchedule, cpu_winograd_space, schedule_of
from tilewright.kernels.schema import Form, Schema, in_tile_if
from tilewright.kernels.winograd_form import WinogradForm


def match(problem: Problem, machine: Machine) -> Form[CpuWinogradFacts, WinogradForm]:
    """Raises Unsuitable like `cpu_winograd_form`."""
    form, facts = cpu_winograd_form(problem, machine)
    return Form(facts, form)


WINOGRAD = Schema(
    name="winograd",
    kinds=("contraction",),
    schedule=CpuWinogradSchedule,
    match=match,
    space=lambda facts, machine, options: cpu_winograd_space(facts, machine, options.threads),
    counts=winograd_counts,
    estimate=lambda facts, candidates, counts, machine, options: winograd_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_winograd(problem, form.parts, form.facts, schedule),
    within=in_tile_if(lambda facts, schedule: True),
    made=lambda axes, machine: schedule_of(machine.vector_lanes(), **axes),
    features=lambda facts, candidates, machine, options: winograd_features(facts, candidates, machine, options.threads),
    transforms=True,
)
