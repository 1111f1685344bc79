"""The schema of depthwise convolutions in register tiles."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.depthwise.counts import depthwise_counts
from tilewright.kernels.cpu.depthwise.estimate import depthwise_estimate
from tilewright.kernels.cpu.depthwise.features import depthwise_features
from tilewright.kernels.cpu.depthwise.lower import DepthwiseForm, depthwise_form, lower_depthwise
from tilewright.kernels.cpu.depthwise.space import CpuDepthwiseFacts, CpuDepthwiseSchedule, cpu_depthwise_space, schedule_of
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[CpuDepthwiseFacts, DepthwiseForm]:
    """Raises Unsuitable like `depthwise_form`."""
    form, facts = depthwise_form(problem, machine)
    return Form(facts, form)


# asked instead of the loops for any window, which have no tiles of several rows and whose prediction does not cover them
DEPTHWISE = Schema(
    name="depthwise",
    kinds=("window",),
    schedule=CpuDepthwiseSchedule,
    match=match,
    space=lambda facts, machine, options: cpu_depthwise_space(facts, machine),
    counts=depthwise_counts,
    estimate=lambda facts, candidates, counts, machine, options: depthwise_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_depthwise(form.parts, form.facts, schedule, machine),
    made=lambda axes, machine: schedule_of(machine.vector_lanes(), **axes),
    features=lambda facts, candidates, machine, options: depthwise_features(facts, candidates, machine, options.threads),
    alone=True,
)
