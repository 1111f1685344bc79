"""The schema of products by warpgroups."""

from __future__ import annotations

from tilewright.kernels.gpu.warpgroup.estimate import pipelined_bound, warpgroup_counts, warpgroup_estimate
from tilewright.kernels.gpu.warpgroup.features import warpgroup_features
from tilewright.kernels.gpu.warpgroup.form import warpgroup_form
from tilewright.kernels.gpu.warpgroup.lower import lower_warpgroup
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule, kind_of, warpgroup_space
from tilewright.kernels.gpu.warpgroup.variants import warpgroup_variants
from tilewright.kernels.schema import Schema, in_tile_if

WARPGROUP = Schema(
    name="warpgroups",
    kinds=("contraction",),
    schedule=WarpgroupSchedule,
    match=warpgroup_form,
    space=lambda facts, machine, options: warpgroup_space(facts, machine, options.numerics),
    counts=warpgroup_counts,
    estimate=lambda facts, candidates, counts, machine, options: warpgroup_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_warpgroup(problem, form.parts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: schedule.staged or schedule.meeting or schedule.sent),
    bound=lambda facts, candidates, counts, machine, share: pipelined_bound(kind_of(facts, candidates), counts, machine, share),
    features=lambda facts, candidates, machine, options: warpgroup_features(facts, candidates, machine),
    variants=warpgroup_variants,
)
