"""Counts, predicted times and lower bounds of products by warpgroups."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.wgmma import DEPTHS, STORED, M
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.ir.dtypes import size_of
from tilewright.ir.estimate import Estimate
from tilewright.ir.intrinsic import LANES
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.gpu.counts import HalfPairCounts, PairCounts, TensorCounts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import Work, blocks_each, split_seconds
from tilewright.kernels.gpu.tensor_cores.estimate import FRAGMENT_ROWS, store_cycles
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import (
    block_of,
    blocks_of,
    kind_of,
    meeting_of,
    pairs_of,
    registers_of,
    sent_of,
    shared_bytes_of,
    staged_columns,
    stages_of,
    steps_each,
    threads_of,
    weights_of,
)

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
GROUP_WARPS = GROUP // WARP
SWAPPED_ROWS = 4
"""Rows of m that a store of a warp touches if the factors are swapped."""


def warpgroup_counts(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> TensorCounts:
    """Every block reads its rows of A from level 2, and of B those that it copies to its cluster. A step is one of `facts`."""
    steps = steps_each(facts, candidates)
    bm, bn = block_of(candidates)
    stages = stages_of(candidates, steps)
    shared_bytes = shared_bytes_of(facts, candidates)
    blocks, copied = blocks_of(facts, candidates), (bm + bn * weights_of(candidates) / candidates["cluster"]) * facts.row_bytes
    return pipelined_counts(facts, candidates, bm, bn, blocks, steps, stages, copied, shared_bytes, machine)


def pipelined_counts(
    facts: WarpgroupFacts,
    candidates: Columns,
    bm: np.ndarray,
    bn: np.ndarray,
    blocks: np.ndarray,
    steps: np.ndarray,
    stages: np.ndarray,
    copied: np.ndarray,
    shared_bytes: np.ndarray,
    machine: Machine,
) -> TensorCounts:
    """Counts of blocks of bm x bn results, in `steps` of which each copies so many bytes from level 2. `warps` are those that multiply, and each
    reads a quarter of what its warpgroup does from shared memory: 64 rows of one factor, all of the other one. Parts of a split are written and read
    as float32, unless they meet; then each block stores a share of a tile."""
    product, one = facts.product, np.ones(len(blocks))
    columns, consumers, split = candidates["columns"], candidates["consumers"], candidates["split"]
    warps, threads = GROUP_WARPS * consumers, threads_of(candidates)
    meeting = meeting_of(candidates)
    parts = np.where((split > 1) & ~meeting, split * product.batch * product.m * product.n * float(product.element_bytes), 0)
    read = one * (product.a.bytes + product.b.bytes + product.epilogue_bytes)
    registers = registers_of(candidates)
    stored = product.bytes_written / (product.batch * product.m * product.n)
    depth = facts.row_bytes // facts.element_bytes
    sums = bm * bn / (warps * WARP)
    kind, paired = kind_of(facts, candidates), pairs_of(candidates)
    each = 1 + 2 * paired  # the product of the low parts is left out
    weight_bytes = facts.row_bytes * size_of(STORED[kind]) / facts.element_bytes
    made = TensorCounts if not paired.any() else PairCounts if kind == facts.kind else HalfPairCounts
    return made(
        flops=product.flops * one,
        read_bytes=read,
        result_bytes=one * product.bytes_written,
        level2_bytes=np.maximum(blocks * steps * copied + product.epilogue_bytes + 2 * parts, read),
        padded_flops=2.0 * blocks * bm * bn * steps * depth * each,
        blocks=blocks * one,
        warps=warps * one,
        threads=threads * one,
        steps=steps * one,
        tile_steps=facts.steps * one,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads, registers, shared_bytes) * one,
        accumulators=sums,
        step_multiply_adds=depth / DEPTHS[kind] * each * one,
        step_shared_loads=(M * facts.row_bytes + columns * each * weight_bytes) / GROUP_WARPS / machine.shared_bytes_per_cycle,
        step_cached_loads=0 * one,
        step_fill=2 * one,
        step_sectors=copied / SECTOR_BYTES,
        drain_wavefronts=0 * one,
        store_instructions=warps * sums / np.where(meeting, split, 1) / width_of(facts, candidates),
        store_sectors=bm * np.maximum(bn * stored / SECTOR_BYTES, 1.0),
        distinct_bytes=read,
        written_bytes=one * product.bytes_written,
        split=split * one,
        stages=stages * one,
        reuse_bytes=copied * steps * one,
    )


def step_seconds(kind: str, counts: TensorCounts, machine: Machine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a processor for one step of a block: of its tensor cores at their peak, of reading both factors from shared memory (64 rows of one
    and all of the other for each warpgroup), and of the copies from level 2 at an equal share of its bandwidth."""
    cache = machine.cache(2)
    assert cache is not None
    tensor: np.ndarray = counts.padded_flops / (counts.blocks * counts.steps) * machine.processors / machine.peak_flops[PEAKS[kind]]
    read: np.ndarray = counts.warps * counts.step_shared_loads / machine.clock_hz
    copied: np.ndarray = counts.step_sectors * SECTOR_BYTES / (cache.bandwidth * machine.clock_hz)
    return tensor, read, copied


def warpgroup_estimate(facts: WarpgroupFacts, candidates: Columns, counts: TensorCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate, as `pipelined_estimate`."""
    return pipelined_estimate(facts, np.prod(block_of(candidates), axis=0), candidates, counts, machine)


def width_of(facts: WarpgroupFacts, candidates: Columns) -> np.ndarray:
    """Elements of a store: of pairs of columns in registers, of single ones if swapped, or of vectors in shared memory; each of several pooled
    results, unless parts of a split are stored."""
    most = facts.product.store_vector
    width: np.ndarray = np.where((candidates["staged"] > 0) | meeting_of(candidates), most, np.where(candidates["swapped"] > 0, 1, min(most, 2)))
    pooled: np.ndarray = width * np.where(candidates["split"] == 1, facts.pooled, 1)
    return pooled


def result_cycles(facts: WarpgroupFacts, candidates: Columns, counts: TensorCounts, machine: Machine) -> np.ndarray:
    """Cycles of a processor in which a block stores its results, or its share of a tile whose parts meet. From registers a warp's store touches eight
    rows, or four if swapped; results that the copy engine stores are put in shared memory."""
    swapped, meeting, sent = candidates["swapped"] > 0, meeting_of(candidates), sent_of(candidates)
    elements = counts.warps * counts.accumulators / np.where(meeting, counts.split, 1)
    lines, across = np.where(swapped, SWAPPED_ROWS, FRAGMENT_ROWS), np.where(swapped, M, staged_columns(candidates["columns"]))
    adjacent = np.where(meeting, block_of(candidates)[1], across)
    shared = meeting | (candidates["staged"] > 0)
    stored = store_cycles(facts.product, elements, width_of(facts, candidates), lines, adjacent, shared, machine)
    # a wavefront for the pairs of a warp, behind what is computed of each element
    put = elements * (1 / 2 + facts.product.epilogue_flops / machine.schedulers_per_processor)
    cycles: np.ndarray = np.where(sent, put, stored)
    return cycles


def pipelined_estimate(
    facts: WarpgroupFacts, tile: np.ndarray, candidates: Columns, counts: TensorCounts, machine: Machine, apart: np.ndarray | float = 0.0
) -> Estimate:
    """Seconds of blocks that store `tile` results each. A step (`step_seconds`) of n concurrent blocks takes n times as long as the busiest of tensor
    cores, shared memory and copies, and at least as long as one block alone, which waits for copies that were issued stages - 1 steps before, and
    `apart` seconds for copies that it does not overlap with its products:

    t(n) = max(n through, latency / (stages - 1) + apart, through + apart),  through = max(tensor / share, read, copied / gain)

    A processor with b blocks (or tiles of `persistent` ones) has floor(b / resident) rounds of resident ones, and a last one with the rest; each
    begins with a latency, if it is not the next tile of persistent blocks, and ends with the stores of its results, which take as long as the bytes
    through memory or the accesses of level 1; or, if the copy engine stores them, until they are in shared memory. Blocks of a split that meet store
    a share of their tile each, behind the exchange of `split_seconds`.

    Worked example: 128 x 256 and 64 channels in float16 on an h200: products 2 * 128 * 256 * 64 flop / (990 Tflop/s / 132) = 0.56 us at the peak."""
    product = facts.product
    tensor, read, copied = step_seconds(kind_of(facts, candidates), counts, machine)
    fitted = gpu_calibration(machine).warpgroups
    memory_latency = machine.memory_latency_cycles / machine.clock_hz
    latency = fitted.copy_latencies * memory_latency
    through = np.maximum(np.maximum(tensor / fitted.share, read), copied / fitted.copy_gain)
    alone = np.maximum(through, latency / np.maximum(counts.stages - 1, 1)) + apart / fitted.copy_gain
    meeting = meeting_of(candidates)
    each = blocks_each(counts.blocks, counts.split, meeting, machine)
    full, rest = each // counts.resident, each % counts.resident
    steps = full * np.maximum(counts.resident * through, alone) + (rest > 0) * np.maximum(rest * through, alone)
    rounds = full + (rest > 0)
    results = product.batch * product.m * product.n
    # parts of a split that do not meet are float32 in level 2, other results are in memory at the end
    share = np.where(meeting, 1 / counts.split, counts.split == 1)
    stored = share * tile * (product.bytes_written + product.epilogue_bytes) / results
    ends = np.where(candidates["persistent"] > 0, 1, rounds) * fitted.end_latencies * memory_latency
    cycles = result_cycles(facts, candidates, counts, machine)
    moved = stored * machine.processors / bandwidth(machine)
    # the copy engine stores the results of all but the last tile behind the products of the next ones
    seen = np.where(sent_of(candidates), each * cycles / machine.clock_hz + moved, each * np.maximum(moved, cycles / machine.clock_hz))
    stores = seen / fitted.store_share
    work = Work(counts.steps * steps, ends, each, rounds)
    none = np.zeros(len(each))
    terms = {
        "launch": np.full(len(each), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": ends + stores,
        "split": split_seconds(counts.split, meeting, none, results, product.element_bytes, tile, work, counts.resident, machine),
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def pipelined_bound(kind: str, counts: TensorCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: products of the busiest processor's blocks at the peak; distinct bytes through memory."""
    tensor, _, _ = step_seconds(kind, counts, machine)
    turns = ceil_divided(counts.blocks, machine.processors)
    terms = {"fma": turns * counts.steps * tensor, "memory": share * counts.memory_bytes / bandwidth(machine)}
    return Estimate(terms, overlapped=("fma", "memory"))
