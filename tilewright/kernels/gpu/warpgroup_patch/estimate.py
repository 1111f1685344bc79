"""Counts, predicted times and lower bounds of convolutions by warpgroups over patches. A step is one tap's products with a part of the channels."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TensorCounts
from tilewright.kernels.gpu.warpgroup.estimate import pipelined_counts, pipelined_estimate
from tilewright.kernels.gpu.warpgroup.space import stages_of
from tilewright.kernels.gpu.warpgroup_patch.form import PatchFacts
from tilewright.kernels.gpu.warpgroup_patch.space import blocks_of, channels_of, chunks_each, patch_rows, pixels_of, shared_bytes_of


def patch_counts(facts: PatchFacts, candidates: Columns, machine: Machine) -> TensorCounts:
    """Every block reads its patches, and what it copies to its cluster of the filter's tile of each tap, from level 2."""
    steps = chunks_each(facts, candidates) * facts.base.taps
    pixels, channels, blocks = pixels_of(candidates), channels_of(candidates), blocks_of(facts, candidates)
    copied = (channels / candidates["cluster"] + patch_rows(facts, candidates) / facts.base.taps) * facts.base.row_bytes
    stages, shared_bytes = stages_of(candidates, steps), shared_bytes_of(facts, candidates)
    return pipelined_counts(facts.base, candidates, pixels, channels, blocks, steps, stages, copied, shared_bytes, machine)


def patch_estimate(facts: PatchFacts, candidates: Columns, counts: TensorCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate (`warpgroup.estimate.pipelined_estimate`). A block alone waits for its first patch, and with a single buffer for
    every one; each tap takes its share of that."""
    cache = machine.cache(2)
    assert cache is not None
    each = chunks_each(facts, candidates)
    awaited = np.where(np.minimum(candidates["patches"], each) > 1, 1, each) / (each * facts.base.taps)
    apart = awaited * patch_rows(facts, candidates) * facts.base.row_bytes / (cache.bandwidth * machine.clock_hz)
    stored = candidates["height"] * candidates["width"] * channels_of(candidates)
    return pipelined_estimate(facts.base, stored, candidates, counts, machine, apart)
