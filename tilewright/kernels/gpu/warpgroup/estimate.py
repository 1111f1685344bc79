"""Counts, predicted times and lower bounds of products by warpgroups."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.wgmma import DEPTHS, M
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.ir.estimate import Estimate
from tilewright.ir.intrinsic import LANES
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TensorCounts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import block_of, blocks_of, shared_bytes_of

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
PRODUCER_WARPS = GROUP // WARP
"""Warps of a block that only copy."""
OTHER_REGISTERS = 40
"""Registers of a consumer besides its sums: assumed."""


def warpgroup_counts(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> TensorCounts:
    """Every block reads its rows of both factors from level 2. A step is one of `facts`; `warps` are those that multiply, and each reads a quarter of
    what its warpgroup does from shared memory: 64 rows of one factor, all of the other one."""
    product, one = facts.product, np.ones(len(candidates["columns"]))
    (bm, bn), blocks = block_of(candidates), blocks_of(facts, candidates)
    stages, columns, consumers = np.minimum(candidates["stages"], facts.steps), candidates["columns"], candidates["consumers"]
    warps, threads = PRODUCER_WARPS * consumers, GROUP * (consumers + 1)
    read = one * (product.a.bytes + product.b.bytes + product.epilogue_bytes)
    copied = (bm + bn) * facts.row_bytes
    registers, shared_bytes = columns // 2 + OTHER_REGISTERS, shared_bytes_of(facts, candidates)
    stored = product.bytes_written / (product.batch * product.m * product.n)
    depth = facts.row_bytes // facts.element_bytes
    sums = bm * bn / (warps * WARP)
    return TensorCounts(
        flops=product.flops * one,
        read_bytes=read,
        result_bytes=one * product.bytes_written,
        level2_bytes=np.maximum(blocks * facts.steps * copied + product.epilogue_bytes, read),
        padded_flops=2.0 * blocks * bm * bn * facts.steps * depth,
        blocks=blocks * one,
        warps=warps * one,
        threads=threads * one,
        steps=facts.steps * one,
        tile_steps=facts.steps * one,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads, registers, shared_bytes) * one,
        accumulators=sums,
        step_multiply_adds=depth / DEPTHS[facts.kind] * one,
        step_shared_loads=(M + columns) * facts.row_bytes / PRODUCER_WARPS / machine.shared_bytes_per_cycle,
        step_cached_loads=0 * one,
        step_fill=2 * one,
        step_sectors=copied / SECTOR_BYTES,
        drain_wavefronts=0 * one,
        store_instructions=warps * sums / np.where(candidates["swapped"] > 0, 1, min(product.store_vector, 2)),
        store_sectors=bm * np.maximum(bn * stored / SECTOR_BYTES, 1.0),
        distinct_bytes=read,
        written_bytes=one * product.bytes_written,
        split=one,
        stages=stages * one,
        reuse_bytes=copied * facts.steps * one,
    )


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


def warpgroup_estimate(facts: WarpgroupFacts, candidates: Columns, counts: TensorCounts, machine: Machine) -> Estimate:
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


def warpgroup_bound(facts: WarpgroupFacts, candidates: Columns, counts: TensorCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: products of the busiest processor's blocks at the peak; distinct bytes through memory."""
    tensor, _ = step_seconds(facts, candidates, machine)
    turns = np.ceil(blocks_of(facts, candidates) / machine.processors)
    terms = {"fma": turns * facts.steps * tensor, "memory": share * counts.memory_bytes / bandwidth(machine)}
    return Estimate(terms, overlapped=("fma", "memory"))
