"""Data movement and resources of the implicit GEMM."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts, ceil_div
from tilewright.kernels.gpu.gemm.space import PLAIN, ContractionFacts, copied, fetched_width, registers_of, shared_bytes_of, threads_of
from tilewright.kernels.gpu.rates import SECTOR_BYTES


def contraction_counts(facts: ContractionFacts, candidates: Columns, machine: Machine) -> TileCounts:
    """Counts of the implicit GEMM with the tiles of a `ContractionSchedule`.

    A step covers block_k elements of the reduction. For each of them a thread reads thread_m + thread_n words in vectors of four."""
    axes = ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split")
    bm, bn, bk, tm, tn, split = (np.asarray(candidates[axis], dtype=np.float64) for axis in axes)
    one = np.ones(len(bm))
    threads = threads_of(candidates)
    warps = ceil_div(threads * one, machine.warp_size)
    blocks = ceil_div(facts.m * one, bm) * ceil_div(facts.n * one, bn) * facts.batch * split
    tile_steps = ceil_div(facts.r * one, bk)
    steps = ceil_div(tile_steps, split)
    sectors = 0 * one
    fill = 0 * one
    for operand, extent in ((facts.a, bm), (facts.b, bn)):
        run, runs = (bk, extent) if operand.along == "r" else (extent, bk)
        sectors = sectors + runs * np.maximum(run * operand.element_bytes / SECTOR_BYTES, 1.0)
        fill = fill + extent * bk / fetched_width(operand, candidates) / machine.warp_size
    buffers = np.where(copied(candidates), candidates["stages"], 2)
    if "loop" in candidates:
        buffers = np.where(candidates["loop"] == PLAIN, 1, buffers)
    wavefronts = gpu_calibration(machine).gemm.fragment_wavefronts
    loads = 0 * one
    for operand, size in ((facts.a, tm), (facts.b, tn)):
        vector = np.maximum(wavefronts * facts.staged_bytes(operand, copied(candidates)) / facts.element_bytes, 1.0)
        loads = loads + bk * np.where(size >= 4, vector * np.floor(size / 4), 1.5)
    stored = facts.bytes_written / (facts.batch * facts.m * facts.n)
    registers = registers_of(facts, candidates)
    shared_bytes = shared_bytes_of(facts, candidates)
    store_instructions = warps * tm * tn / np.minimum(facts.store_vector, tn)
    read = one * (facts.a.bytes + facts.b.bytes + facts.epilogue_bytes)
    return TileCounts(
        flops=facts.flops * one,
        read_bytes=read,
        result_bytes=one * facts.bytes_written,
        level2_bytes=blocks * steps * sectors * SECTOR_BYTES + facts.epilogue_bytes,
        padded_flops=2.0 * blocks * bm * bn * steps * bk,
        blocks=blocks,
        warps=warps,
        threads=threads * one,
        steps=steps,
        tile_steps=tile_steps,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads, registers, shared_bytes) * one,
        accumulators=tm * tn,
        step_multiply_adds=bk * tm * tn,
        step_shared_loads=loads,
        step_cached_loads=0 * one,
        step_fill=fill,
        step_sectors=sectors,
        drain_wavefronts=0 * one,
        store_instructions=store_instructions,
        store_sectors=bm * np.maximum(bn * stored / SECTOR_BYTES, 1.0),
        distinct_bytes=read,
        written_bytes=np.where(split > 1, facts.batch * facts.m * facts.n * facts.element_bytes * split, one * facts.bytes_written),
        split=split,
        stages=buffers * one,
        reuse_bytes=(bm * facts.a.element_bytes + bn * facts.b.element_bytes) * steps * bk,
    )
