"""Data movement and resources of the implicit GEMM."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts, ceil_div
from tilewright.kernels.gpu.gemm.space import ContractionProblem, registers_of, shared_bytes_of, threads_of
from tilewright.kernels.gpu.rates import SECTOR_BYTES


def contraction_counts(rows: Columns, problem: ContractionProblem, machine: Machine) -> TileCounts:
    """Implicit GEMM: the tiles of a `ContractionSchedule`.

    A step is block_k elements of the sum. A warp reads thread_m + thread_n words of each element in vectors of four."""
    bm, bn, bk, tm, tn, split = (np.asarray(rows[k], dtype=np.float64) for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    one = np.ones(len(bm))
    threads = threads_of(rows)
    warps = ceil_div(threads * one, machine.warp_size)
    blocks = ceil_div(problem.m * one, bm) * ceil_div(problem.n * one, bn) * problem.batch * split
    tile_steps = ceil_div(problem.r * one, bk)
    steps = ceil_div(tile_steps, split)
    sectors = 0 * one
    fill = 0 * one
    for operand, extent in ((problem.a, bm), (problem.b, bn)):
        run, runs = (bk, extent) if operand.along == "r" else (extent, bk)
        sectors = sectors + runs * np.maximum(run * operand.element_bytes / SECTOR_BYTES, 1.0)
        fill = fill + extent * bk / operand.lanes / machine.warp_size
    copies = rows["stages"] > 1
    wavefronts = gpu_calibration(machine).gemm.fragment_wavefronts
    loads = bk * sum(np.where(size >= 4, wavefronts * np.floor(size / 4), 1.5) for size in (tm, tn))
    registers = registers_of(rows, problem)
    shared_bytes = shared_bytes_of(rows, problem)
    store_instructions = warps * tm * tn / np.minimum(problem.store_lanes, tn)
    read = one * (problem.a.bytes + problem.b.bytes + problem.epilogue_bytes)
    return TileCounts(
        flops=problem.flops * one,
        read_bytes=read,
        result_bytes=one * problem.bytes_written,
        level2_bytes=blocks * steps * sectors * SECTOR_BYTES + problem.epilogue_bytes,
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
        store_sectors=bm * np.maximum(bn * problem.element_bytes / SECTOR_BYTES, 1.0),
        distinct_bytes=read,
        written_bytes=one * problem.bytes_written * split,
        split=split,
        stages=np.where(copies, rows["stages"], 2) * one,
        reuse_bytes=(bm * problem.a.element_bytes + bn * problem.b.element_bytes) * steps * bk,
    )
