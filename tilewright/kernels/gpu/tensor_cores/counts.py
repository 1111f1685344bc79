"""Data movement and resources of the implicit GEMM on tensor cores."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.counts import PairCounts, TensorCounts, ceil_div
from tilewright.kernels.gpu.rates import SECTOR_BYTES
from tilewright.kernels.gpu.tensor_cores.factors import Factors
from tilewright.kernels.gpu.tensor_cores.form import TensorCoreFacts
from tilewright.kernels.gpu.tensor_cores.space import matrices_of, registers_of, shared_bytes_of, sums_of, threads_of

WAVEFRONTS = 4
"""Cycles of shared memory of an `ldmatrix` of four matrices: each has 128 bytes."""


def tensor_core_counts(facts: TensorCoreFacts, candidates: Columns, machine: Machine) -> TensorCounts:
    """Counts of the tiles of a `TensorCoreSchedule`. A step covers block_k elements of the reduction; `step_multiply_adds` are a warp's products,
    each of 16 x 8 sums, and three for pairs of TF32. For each 16 (of TF32 8) elements along k a warp loads four matrices for every 16 rows, and two
    for every 8 columns."""
    axes = ("block_m", "block_n", "block_k", "split")
    bm, bn, bk, split = (np.asarray(candidates[axis], dtype=np.float64) for axis in axes)
    product = facts.product
    one = np.ones(len(bm))
    threads = threads_of(candidates)
    warps = threads / machine.warp_size
    blocks = ceil_div(product.m * one, bm) * ceil_div(product.n * one, bn) * product.batch * split
    tile_steps = ceil_div(product.r * one, bk)
    steps = ceil_div(tile_steps, split)
    rows, columns = matrices_of(candidates)
    turns = bk / facts.shape.depth
    sectors, fill = 0 * one, 0 * one
    for operand, extent in ((product.a, bm), (product.b, bn)):
        run, runs = (bk, extent) if operand.along == "r" else (extent, bk)
        sectors = sectors + runs * np.maximum(run * operand.element_bytes / SECTOR_BYTES, 1.0)
        fill = fill + extent * bk / operand.vector_width / machine.warp_size
    registers, shared_bytes = registers_of(facts, candidates), shared_bytes_of(facts, candidates)
    sums = sums_of(candidates)
    results = product.batch * product.m * product.n
    stored = product.bytes_written / results
    read = one * (product.a.bytes + product.b.bytes + product.epilogue_bytes)
    kind = PairCounts if candidates["pairs"].any() else TensorCounts
    return kind(
        flops=product.flops * one,
        read_bytes=read,
        result_bytes=one * product.bytes_written,
        level2_bytes=blocks * steps * sectors * SECTOR_BYTES + product.epilogue_bytes,
        padded_flops=2.0 * blocks * bm * bn * steps * bk,
        blocks=blocks,
        warps=warps,
        threads=threads * one,
        steps=steps,
        tile_steps=tile_steps,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads, registers, shared_bytes) * one,
        accumulators=sums * one,
        step_multiply_adds=turns * rows * columns * (1 + 2 * candidates["pairs"]),
        step_shared_loads=turns * WAVEFRONTS * (rows + columns / 2),
        step_cached_loads=0 * one,
        step_fill=fill,
        step_sectors=sectors,
        drain_wavefronts=0 * one,
        store_instructions=warps * sums / min(product.store_vector, 2),
        store_sectors=bm * np.maximum(bn * stored / SECTOR_BYTES, 1.0),
        distinct_bytes=read,
        written_bytes=np.where(split > 1, results * product.element_bytes * split, one * product.bytes_written),
        split=split,
        stages=np.maximum(candidates["stages"], 2) * one,
        reuse_bytes=(bm * product.a.element_bytes + bn * product.b.element_bytes) * steps * bk,
    )


def fill_wavefronts(facts: TensorCoreFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Cycles of shared memory in which a block's copies (or stores) fill the tiles of a step: 128 bytes at a time, but one for each instruction."""
    cycles: np.ndarray = np.zeros(len(candidates["block_m"]))
    for operand, extent in ((facts.product.a, candidates["block_m"]), (facts.product.b, candidates["block_n"])):
        each = min(operand.vector_width * facts.element_bytes, WIDEST_BYTES)
        instructions = extent * candidates["block_k"] / operand.vector_width / machine.warp_size
        cycles = cycles + instructions * max(each * machine.warp_size / machine.shared_bytes_per_cycle, 1.0)
    return cycles


def product_flops(facts: Factors) -> int:
    """Operations of one `mma.sync`."""
    return 2 * M * N * facts.shape.depth
