"""Counts, predicted times and lower bounds of products by warpgroups."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.gpu.rates import bandwidth
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import block_of, blocks_of


def warpgroup_counts(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> Counts:
    """Every block reads its rows of both factors from level 2."""
    product = facts.product
    blocks = blocks_of(facts, candidates)
    rows = sum(block_of(candidates))
    read = product.a.bytes + product.b.bytes + product.epilogue_bytes
    asked = blocks * facts.steps * rows * facts.row_bytes + product.epilogue_bytes
    return counted(len(blocks), product.flops, read, product.bytes_written, asked)


def step_seconds(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a processor for one step of a block: of its tensor cores at their peak, and of the copies from level 2 at an equal share of its
    bandwidth."""
    bm, bn = block_of(candidates)
    depth = facts.row_bytes // facts.element_bytes
    cache = machine.cache(2)
    assert cache is not None
    level_2 = cache.bandwidth * machine.clock_hz  # bytes per second of one processor
    tensor: np.ndarray = 2.0 * bm * bn * depth * machine.processors / machine.peak_flops[PEAKS[facts.kind]]
    copied: np.ndarray = (bm + bn) * facts.row_bytes / level_2
    return tensor, copied


def warpgroup_estimate(facts: WarpgroupFacts, candidates: Columns, counts: Counts, machine: Machine) -> Estimate:
    """Seconds of each candidate. A processor works on one block after another: it waits for the memory's latency, then each step takes as long as its
    products or its copies, whichever take longer, and at the end it stores the results. No constant is fitted; nothing was measured.

    Worked example: 128 x 256 and 64 channels in float16 on an h200: products 2 * 128 * 256 * 64 flop / (990 Tflop/s / 132) = 0.56 us."""
    tensor, copied = step_seconds(facts, candidates, machine)
    blocks = blocks_of(facts, candidates)
    turns = np.ceil(blocks / machine.processors)
    latency = machine.memory_latency_cycles / machine.clock_hz
    results = np.prod(block_of(candidates), axis=0) * counts.result_bytes / (facts.product.batch * facts.product.m * facts.product.n)
    stored = results * machine.processors / bandwidth(machine)
    terms = {
        "launch": np.full(len(blocks), machine.launch_seconds),
        "compute": turns * (facts.steps * np.maximum(tensor, copied) + 2 * latency + stored),
        "memory": counts.memory_bytes / bandwidth(machine),
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def warpgroup_bound(facts: WarpgroupFacts, candidates: Columns, counts: Counts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: products of the busiest processor's blocks at the peak; distinct bytes through memory."""
    tensor, _ = step_seconds(facts, candidates, machine)
    turns = np.ceil(blocks_of(facts, candidates) / machine.processors)
    terms = {"fma": turns * facts.steps * tensor, "memory": share * counts.memory_bytes / bandwidth(machine)}
    return Estimate(terms, overlapped=("fma", "memory"))
