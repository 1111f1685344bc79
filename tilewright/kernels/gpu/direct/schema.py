"""The schema of direct convolution."""

from __future__ import annotations

from tilewright.kernels.gpu.direct.bound import direct_bound
from tilewright.kernels.gpu.direct.counts import direct_counts
from tilewright.kernels.gpu.direct.estimate import direct_estimate
from tilewright.kernels.gpu.direct.features import direct_features
from tilewright.kernels.gpu.direct.form import direct_form
from tilewright.kernels.gpu.direct.lower import lower_direct
from tilewright.kernels.gpu.direct.schedule import DirectSchedule
from tilewright.kernels.gpu.direct.space import direct_space
from tilewright.kernels.gpu.direct.variants import direct_variants
from tilewright.kernels.schema import Matching, Schema

DIRECT = Schema(
    name="direct",
    kinds=("contraction",),
    schedule=DirectSchedule,
    match=Matching(direct_form),
    space=lambda facts, machine, options: direct_space(facts, machine, options.numerics.atomics),
    counts=direct_counts,
    estimate=lambda facts, candidates, counts, machine, options: direct_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_direct(problem, form.parts, schedule, machine),
    bound=direct_bound,
    variants=direct_variants,
    features=lambda facts, candidates, machine, options: direct_features(facts, candidates),
    unordered=lambda schedule: bool(schedule.atomics),
    sums=True,
)
