"""Operations, data movement and resources of attention on tensor cores. A step is a tile of keys."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.attention_form import SOFTMAX_FLOPS
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.attention.counts import parts_bytes, steps_of_part
from tilewright.kernels.gpu.counts import AttentionCounts, ceil_div
from tilewright.kernels.gpu.rates import SECTOR_BYTES
from tilewright.kernels.gpu.tensor_attention.form import TensorAttentionFacts
from tilewright.kernels.gpu.tensor_attention.space import WARPS_OF_GROUP, registers_of, rows_of, shared_bytes_of, threads_of

MATRIX_BYTES = 128
"""Of one of the matrices that `ldmatrix` loads, each in one cycle of shared memory; a warp's load of single float32 elements has as many."""


def matrix_loads(facts: TensorAttentionFacts, candidates: Columns) -> np.ndarray:
    """Matrices that a warp loads per tile of keys: all keys and values of the tile, and its queries unless it holds them. Of a warpgroup each warp
    has a quarter of the keys and values, which the tensor cores read once for all four."""
    queries = M * rows_of(candidates) * facts.r * (candidates["held"] == 0)
    sharing = np.where(candidates["wide"] > 0, WARPS_OF_GROUP, 1)
    loads: np.ndarray = (queries + candidates["block_n"] * (facts.r + facts.d) / sharing) * facts.element_bytes / MATRIX_BYTES
    return loads


def tensor_attention_counts(facts: TensorAttentionFacts, candidates: Columns, machine: Machine) -> AttentionCounts:
    """Counts of `TensorAttentionSchedule` candidates; `step_multiply_adds` are a warp's products, each of 16 x 8 sums."""
    sizes, depth = facts.attention, facts.shape.depth
    bm, bn = (np.asarray(candidates[axis], dtype=np.float64) for axis in ("block_m", "block_n"))
    one = np.ones(len(bm))
    threads, rows = threads_of(candidates) * one, rows_of(candidates)
    warps = threads / machine.warp_size
    split = candidates["split"] * one
    blocks = ceil_div(sizes.m * one, bm) * sizes.batch * split
    steps = steps_of_part(sizes, candidates)
    registers, shared_bytes = registers_of(facts, candidates), shared_bytes_of(facts, candidates)
    products = rows * (bn / N * (facts.r / depth) + bn / depth * (facts.d / N))
    sectors = bn * sum(np.maximum(length * facts.element_bytes / SECTOR_BYTES, 1) for length in (sizes.r, sizes.d))
    queries = bm * sizes.r * facts.element_bytes
    scores = M * rows * bn / machine.warp_size
    sums = M * rows * facts.d / machine.warp_size
    return AttentionCounts(
        flops=sizes.flops * one,
        read_bytes=sizes.read_bytes * one,
        result_bytes=sizes.bytes_written * one,
        level2_bytes=np.maximum(blocks * (steps * sectors * SECTOR_BYTES + queries) + sizes.other_bytes, sizes.read_bytes),
        padded_flops=blocks * steps * (warps * products * 2 * M * N * depth + threads * scores * (sizes.logit_flops + SOFTMAX_FLOPS)),
        blocks=blocks,
        warps=warps,
        threads=threads,
        steps=steps,
        tile_steps=steps,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads_of(candidates), registers, shared_bytes) * one,
        accumulators=scores + sums,
        step_multiply_adds=products,
        step_shared_loads=matrix_loads(facts, candidates) * one,
        step_cached_loads=0 * one,
        step_fill=bn * (sizes.r / sizes.k_vector + sizes.d / sizes.v_vector) / machine.warp_size,
        step_sectors=sectors,
        drain_wavefronts=0 * one,
        store_instructions=warps * sums / sizes.store_vector,
        store_sectors=bm * np.maximum(sizes.bytes_written / (sizes.batch * sizes.m) / SECTOR_BYTES, 1),
        distinct_bytes=sizes.read_bytes * one,
        written_bytes=np.where(split > 1, parts_bytes(sizes, candidates), sizes.bytes_written * one),
        split=split,
        stages=candidates["stages"] * one,
        reuse_bytes=queries + steps * sectors * SECTOR_BYTES,
    )
