"""Predicted times of the `direct` schema: the model of `kernels.gpu.steps` with the work of one step of its kernels.

The formulas have the form of the implicit GEMM's, with separate constants where reads of the slice differ from reads of fragments.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import WIDEST
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.direct.patch_layout import innermost, lines_read_of, patch_layout_of, read_vector_of
from tilewright.kernels.gpu.direct.resources import fetches_of
from tilewright.kernels.gpu.direct.schedule import (
    BANKS,
    CACHED,
    REGISTERS,
    SHARED,
    DirectFacts,
    extents_of,
    multiply_adds_of,
    patch_of,
    stretch_of,
)
from tilewright.kernels.gpu.gemm.space import PLAIN
from tilewright.kernels.gpu.rates import LINE_BYTES, SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import BlockStep, on_processors, split_seconds

COPY_INSTRUCTIONS = 7
"""Instructions of one asynchronous copy: address, guard, and what the assembler adds."""
STRETCH_INSTRUCTIONS = 5
"""Instructions for loop control and addresses of one unrolled run of channels."""


def direct_estimate(facts: DirectFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate. One step (a chunk of C channels with T taps) of a block of W warps that computes K x Y x X outputs takes, in cycles
    of a processor:

    issue = C T K Y X / lanes + W (C loads + copies + conversions + loop control) / schedulers, with T Rk / 4 loads of filters per channel plus those
    of the slice;  shared = W C (wavefronts of the loads, including bank conflicts) + wavefronts of the stores of patch and filters; l2 = C (patch + T
    K) bytes / (bytes per cycle), where a chunk with fewer channels than a sector loads whole sectors of the patch (half of the excess is still in
    level 1 for the next chunk, but none of it for the next group).

    `on_processors` then adds waves, the tail and latencies; a split is as in the implicit GEMM. Compute overlaps with the memory traffic of the
    distinct bytes. It takes at least a cycle for each line of level 1 that the accesses of a warp touch (`_line_cycles`).

    Worked example, multiply-adds and reads: a register tile of 8 x 2 x 4 with 3 x 3 taps has 576 multiply-adds per channel, for which a thread of the
    RS kernel reads 9 * 8 / 4 = 18 vectors of filters and 4 rows of one vector of four and one of two. A warp needs 144 cycles of the processor's four
    schedulers, and 18 + 4 + 4 = 26 cycles of shared memory without conflicts."""
    fitted = gpu_calibration(machine)
    own, instructions, latencies = fitted.direct, fitted.instructions, fitted.steps
    split, channels = candidates["split"], candidates["channels"]
    taps = facts.filter_y * facts.filter_x
    threads, warps = counts.threads, counts.warps
    size_k, size_y, size_x = extents_of(candidates)
    products = multiply_adds_of(facts, candidates)
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    fma = counts.step_multiply_adds * threads / machine.fp32_lanes_per_processor / efficiency

    layout = patch_layout_of(facts, candidates)
    filter_loads, input_loads, wavefronts = _reads(facts, candidates, layout.load_wavefronts, own.cached_cycles)
    elements, lanes, vectors = fetches_of(facts, candidates)
    copied = candidates["stages"] > 1
    puts = np.where(innermost(candidates, "c"), elements // lanes, elements)
    fetch = np.where(copied, COPY_INSTRUCTIONS * (puts + vectors), puts + elements * instructions.address / lanes + 4 * vectors)
    if facts.stored_bytes < facts.element_bytes:
        uses = np.where(candidates["filters"] == SHARED, 4 * vectors, channels * taps * candidates["register_k"])
        fetch = fetch + elements + uses  # conversions
    moves = np.where(candidates["filters"] == REGISTERS, channels * taps * candidates["register_k"], 0)
    control = STRETCH_INSTRUCTIONS * channels / stretch_of(facts, candidates) + moves
    # multiply-adds occupy issue slots, so all other instructions add to them
    others = warps * (channels * (filter_loads + input_loads) + fetch + control + instructions.step) / machine.schedulers_per_processor
    # a copy also looks up level-1 lines, one for each pixel that the warp touches, unless it is of 16 bytes and bypasses level 1
    lines = np.where(copied & (lanes < WIDEST), BANKS / np.maximum(channels, 1) * own.copy_lines, 0.0)
    stored = warps * (puts * layout.store_wavefronts + elements * lines + 4.0 * vectors)
    shared = (warps * channels * wavefronts + stored) * 128 / machine.shared_bytes_per_cycle

    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    patch_rows, patch_columns = patch_of(facts, candidates)
    partial = SECTOR_BYTES / np.minimum(SECTOR_BYTES, channels * facts.stored_bytes)
    least_partial = SECTOR_BYTES / min(SECTOR_BYTES, facts.channels * facts.stored_bytes) if facts.groups > 1 else 1.0
    moved = patch_rows * patch_columns * (least_partial + partial) / 2 + taps * size_k
    level2 = moved * channels * facts.stored_bytes / cache2.bandwidth

    barrier = latencies.barrier_latencies * cache1.latency_cycles + 2 * warps
    # a single warp waits for its first reads of a channel; filters read through the read-only path start in level 2
    late = np.where(candidates["filters"] == CACHED, cache2.latency_cycles / 2, latencies.fragment_latencies * cache1.latency_cycles)
    late = np.where(candidates["filters"] == REGISTERS, cache2.latency_cycles, late)
    chain = products * latencies.multiply_add_cycles
    inner = channels * np.where(candidates["filters"] == CACHED, chain + late, np.maximum(chain, late)) + cache1.latency_cycles
    latency = latencies.loaded_latency * machine.memory_latency_cycles
    least = np.maximum(inner, latency / np.maximum(candidates["stages"] - 1, 1))
    if "loop" in candidates:
        plain = candidates["loop"] == PLAIN
        least, barrier = np.where(plain, inner, least), np.where(plain, latency + 2 * barrier, barrier)
    step = BlockStep(np.zeros(len(threads)), fma + others, shared, level2, least, barrier, own.overlap)
    ends = latencies.end_latencies * machine.memory_latency_cycles + counts.accumulators * warps / 4
    work = on_processors(step, counts, ends, candidates["cluster"], machine)
    tile = size_k * size_y * size_x
    results = facts.images * facts.groups * facts.outputs * facts.height * facts.width
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": np.maximum(work.compute_seconds, work.blocks_each * _line_cycles(facts, candidates, counts, machine) / machine.clock_hz),
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": work.drain_seconds,
        "split": split_seconds(
            split, candidates["cluster"], candidates["atomics"], results, facts.element_bytes, tile, work, counts.resident, machine
        ),
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def _line_cycles(facts: DirectFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> np.ndarray:
    """Cycles of a block in which level 1 looks up the lines of vectors of channels: of the patch, if it is fetched through registers, and of the
    results of a sum that is not split.

    Worked example: 32 groups of 4 channels of float16 are 256 bytes a pixel. A load of a warp, 8 bytes in each lane, touches 32 pixels, each in its
    own line; a store of 4 bytes, with two lanes for a pixel, touches 16. With 6 loads and 8 stores a warp takes 6 * 32 + 8 * 16 = 320 cycles, and
    with 16 sums of 36 products 16 * 36 / 4 = 144 for its multiply-adds."""
    elements, lanes, _ = fetches_of(facts, candidates)

    def lines(pixels: np.ndarray, channels: int, element_bytes: float) -> np.ndarray:
        found: np.ndarray = np.maximum(1, pixels * min(1, facts.groups * channels * element_bytes / LINE_BYTES))
        return found

    loads = elements / lanes * lines(machine.warp_size * lanes / candidates["channels"], facts.channels, facts.stored_bytes)
    loaded = np.where((candidates["stages"] == 1) & (lanes > 1), counts.steps * loads, 0)
    width = np.minimum(facts.store_vector, candidates["register_k"])
    stored_bytes = facts.bytes_written / (facts.images * facts.groups * facts.outputs * facts.height * facts.width)
    stores = counts.accumulators / width * lines(machine.warp_size / candidates["warp_k"], facts.outputs, stored_bytes)
    cycles: np.ndarray = counts.warps * (loaded + np.where((candidates["split"] == 1) & (width > 1), stores, 0))
    return cycles


def _reads(facts: DirectFacts, candidates: Columns, conflicts: np.ndarray, cached_cycles: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per warp and channel: loads of filters, loads of the slice, and the total cycles of shared memory (or level 1) for both. `conflicts`: cycles of
    a vector load of the slice."""
    taps = facts.filter_y * facts.filter_x
    width = np.minimum(4, candidates["register_k"])
    filter_loads = taps * candidates["register_k"] // width
    filter_cycles = np.maximum(1.0, candidates["warp_k"] * width / BANKS)
    filter_cycles = np.where(candidates["filters"] == SHARED, filter_cycles, cached_cycles * filter_cycles)
    lanes = read_vector_of(facts, candidates)
    read_lines, run, together = lines_read_of(facts, candidates)
    whole, rest = run // lanes, run % lanes
    input_loads = read_lines * (whole + (rest % 2) + (rest // 2)) / together
    # the remainder of a line has the bank conflicts of the vectors, with fewer words
    narrow = np.maximum(1.0, conflicts * (rest / lanes)) * ((rest % 2) + (rest // 2))
    input_cycles = read_lines * (whole * conflicts + narrow) / together
    return filter_loads, input_loads, filter_loads * filter_cycles + input_cycles
