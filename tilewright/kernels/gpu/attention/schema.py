"""The schema of attention in one kernel."""

from __future__ import annotations

from tilewright.kernels.attention_form import attention_form
from tilewright.kernels.gpu.attention.bound import attention_bound
from tilewright.kernels.gpu.attention.counts import attention_counts
from tilewright.kernels.gpu.attention.estimate import attention_estimate
from tilewright.kernels.gpu.attention.lower import lower_attention
from tilewright.kernels.gpu.attention.space import AttentionSchedule, attention_space
from tilewright.kernels.schema import Matching, Schema, in_tile_if

ATTENTION = Schema(
    name="attention",
    kinds=("attention",),
    schedule=AttentionSchedule,
    match=Matching(attention_form),
    space=lambda facts, machine, options: attention_space(facts, machine),
    counts=attention_counts,
    estimate=lambda facts, candidates, counts, machine, options: attention_estimate(facts, candidates, counts, machine),
    bound=attention_bound,
    lower=lambda problem, form, schedule, machine: lower_attention(problem, form.parts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: True),
)
