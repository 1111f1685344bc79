"""The schema of attention on tile registers."""

from __future__ import annotations

from tilewright.kernels.cpu.tile_attention.estimate import tile_attention_counts, tile_attention_estimate
from tilewright.kernels.cpu.tile_attention.form import tile_attention_form
from tilewright.kernels.cpu.tile_attention.lower import lower_tile_attention
from tilewright.kernels.cpu.tile_attention.space import TileAttentionSchedule, tile_attention_space
from tilewright.kernels.schema import Schema, in_tile_if

TILE_ATTENTION = Schema(
    name="attention on tile registers",
    kinds=("attention",),
    schedule=TileAttentionSchedule,
    match=tile_attention_form,
    space=lambda facts, machine, options: tile_attention_space(facts, machine),
    counts=tile_attention_counts,
    estimate=lambda facts, candidates, counts, machine, options: tile_attention_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_tile_attention(problem, form.parts, schedule),
    within=in_tile_if(lambda facts, schedule: True),
    unit="AMX",
)
