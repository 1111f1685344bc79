"""The schema of convolutions by warpgroups over patches."""

from __future__ import annotations

from functools import partial

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.gpu.warpgroup.estimate import pipelined_bound
from tilewright.kernels.gpu.warpgroup.variants import both_variants
from tilewright.kernels.gpu.warpgroup_patch.estimate import patch_counts, patch_estimate
from tilewright.kernels.gpu.warpgroup_patch.features import patch_features
from tilewright.kernels.gpu.warpgroup_patch.form import PatchFacts, patch_form
from tilewright.kernels.gpu.warpgroup_patch.lower import lower_patches
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule, patch_space, shared_bytes_of
from tilewright.kernels.schema import Schema, in_tile_if


def patch_variants(facts: PatchFacts, candidates: Columns, machine: Machine) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As of other products by warpgroups; none of results that are pooled, which the kernel that adds their parts does. The copy engine stores pixels
    on wgmma's columns alone: then a warpgroup has whole lines, of as many channels as a row of a box has."""
    varied = take(candidates, np.zeros(length(candidates), bool)) if facts.windows else candidates
    sendable = (varied["swapped"] > 0) & facts.base.sendable & (facts.base.product.batch == 1)
    return both_variants(varied, sendable, partial(shared_bytes_of, facts), machine)


WARPGROUP_PATCH = Schema(
    name="warpgroup patches",
    kinds=("contraction",),
    schedule=PatchSchedule,
    match=patch_form,
    space=lambda facts, machine, options: patch_space(facts, machine, options.numerics.tf32),
    counts=patch_counts,
    estimate=lambda facts, candidates, counts, machine, options: patch_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_patches(problem, form.parts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: schedule.staged or schedule.meeting),
    bound=lambda facts, candidates, counts, machine, share: pipelined_bound(facts.base.kind, counts, machine, share),
    features=lambda facts, candidates, machine, options: patch_features(facts, candidates, machine),
    variants=patch_variants,
)
