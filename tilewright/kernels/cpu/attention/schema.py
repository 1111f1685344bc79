"""The schema of attention in one kernel."""

from __future__ import annotations

from typing import Any

from tilewright.hardware.machine import Machine
from tilewright.kernels.attention_form import attention_form
from tilewright.kernels.cpu.attention.estimate import attention_counts, attention_estimate
from tilewright.kernels.cpu.attention.lower import lower_attention
from tilewright.kernels.cpu.attention.space import CpuAttentionSchedule, attention_space
from tilewright.kernels.schema import Matching, Schema, in_tile_if


def schedule_of(axes: Any, machine: Machine) -> CpuAttentionSchedule:
    return CpuAttentionSchedule(lanes=machine.vector_lanes(), **axes)


ATTENTION = Schema(
    name="attention",
    kinds=("attention",),
    schedule=CpuAttentionSchedule,
    match=Matching(attention_form),
    space=lambda facts, machine, options: attention_space(facts, machine),
    counts=attention_counts,
    estimate=lambda facts, candidates, counts, machine, options: attention_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_attention(problem, form.parts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: True),
    made=schedule_of,
)
