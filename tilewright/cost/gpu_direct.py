"""Predicted times of the `direct` schema: the steps of `cost.gpu_steps`, with what its kernels do in one step.

The formulas have the form, and the constants, of the implicit GEMM's, which were fitted to measurements; CAUTION stands for what has not been
measured of these kernels.
"""

from __future__ import annotations

import numpy as np

from tilewright.cost.gpu import ADDRESS_INSTRUCTIONS, FRAGMENT_WAVEFRONTS, SECTOR_BYTES, STEP_INSTRUCTIONS, bandwidth, resident_blocks
from tilewright.cost.gpu_steps import LOADED_LATENCY, BlockStep, on_processors, split_seconds
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.schedule.columns import Columns
from tilewright.schedule.gpu_direct import (
    BANKS,
    CACHED,
    REGISTERS,
    RS,
    SHARED,
    DirectProblem,
    blocks_of,
    extents_of,
    fetches_of,
    multiply_adds_of,
    patch_of,
    read_lanes_of,
    registers_of,
    shared_bytes_of,
    slice_of,
    steps_of,
    stretch_of,
    threads_of,
    wavefronts_of,
)

COPY_INSTRUCTIONS = 7
"""Of one asynchronous copy: the address, its guard, and what the assembler puts around it."""
STRETCH_INSTRUCTIONS = 5
"""Loop control and addresses of one unrolled stretch of channels."""
CAUTION = 1.25
"""By how much the time of the blocks is raised."""


def direct_cost(rows: Columns, problem: DirectProblem, machine: Machine) -> Estimate:
    """For one step (a chunk of C channels under T taps) of one block of W warps that computes K x Y x X outputs, in cycles of a processor:

    fma = C T K Y X / lanes;  issue = W (C (T sums + loads) + copies + loop control) / schedulers, loads of a channel being T Rk / 4 of filters and
    those of the slice;  shared = W C (wavefronts of the loads) + those of the stores of patch and filters, a load's wavefronts being what its bank
    conflicts make of it and no fewer than vectors of its width were measured to take;  l2 = 4 C (patch + T K) / bytes a cycle, sectors of the patch
    counted whole where a chunk has less than a sector's channels (half of the rest is still in level 1 for the next chunk).

    Then `on_processors`: waves, the tail, latencies; and a split as in the implicit GEMM. The sum is bounded from below by the distinct bytes.

    Worked example, fma and reads: register tile 8 x 2 x 4 under 3 x 3 taps is 576 multiply-adds a channel, for which a thread of the RS kernel
    reads 9 * 8 / 4 = 18 vectors of filters and 4 rows of a vector of four and one of two; a warp needs 144 cycles of the processor's four schedulers,
    and shared memory 22 * 1.65 + 4 * 1.3 = 41.5."""
    split, channels = rows["split"], rows["channels"]
    taps = problem.filter_y * problem.filter_x
    threads = threads_of(rows)
    warps = threads // machine.warp_size
    size_k, size_y, size_x = extents_of(rows)
    sums = rows["register_k"] * rows["register_y"] * rows["register_x"]
    products = multiply_adds_of(rows, problem)
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    fma = channels * products * threads / machine.fp32_lanes_per_processor / efficiency

    filter_loads, input_loads, wavefronts = _reads(rows, problem)
    elements, lanes, vectors = fetches_of(rows, problem)
    copied = rows["stages"] > 1
    fetch = np.where(copied, COPY_INSTRUCTIONS * (elements + vectors), elements * (1 + ADDRESS_INSTRUCTIONS / lanes) + 4 * vectors)
    moves = np.where(rows["filters"] == REGISTERS, channels * taps * rows["register_k"], 0)
    control = STRETCH_INSTRUCTIONS * channels / stretch_of(rows, problem) + moves
    issue = warps * (channels * (products + filter_loads + input_loads) + fetch + control + STEP_INSTRUCTIONS) / machine.schedulers_per_processor
    # a copy of four bytes also looks up the lines of level 1, one for each pixel that the warp touches
    lines = np.where(copied, np.minimum(BANKS, BANKS / np.maximum(channels, 1)) / 4, 0.0)
    stored = warps * (elements * (1 + lines) + 4.0 * vectors)
    shared = (warps * channels * wavefronts + stored) * 128 / machine.shared_bytes_per_cycle

    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    patch_rows, patch_columns = patch_of(rows, problem)
    partial = SECTOR_BYTES / np.minimum(SECTOR_BYTES, channels * 4)
    moved = patch_rows * patch_columns * (1 + partial) / 2 + taps * size_k
    level2 = moved * channels * 4 / cache2.bandwidth

    barrier = 2.3 * cache1.latency_cycles + 2 * warps
    # a warp alone waits for its first reads of a channel, and filters that come by the read-only path are in level 2 at first
    late = np.where(rows["filters"] == CACHED, cache2.latency_cycles / 2, 0.8 * cache1.latency_cycles)
    late = np.where(rows["filters"] == REGISTERS, cache2.latency_cycles, late)
    inner = channels * np.where(rows["filters"] == CACHED, products * 1.8 + late, np.maximum(products * 1.8, late)) + cache1.latency_cycles
    latency = LOADED_LATENCY * machine.memory_latency_cycles / np.maximum(rows["stages"] - 1, 1)
    step = BlockStep(fma, issue, shared, level2, np.maximum(inner, latency), barrier)
    resident = resident_blocks(machine, threads, registers_of(rows, problem), shared_bytes_of(rows, problem))
    ends = 4 * machine.memory_latency_cycles + sums * warps / 4
    work = on_processors(step, steps_of(rows, problem), ends, blocks_of(rows, problem), warps, resident, split, rows["cluster"], machine)
    results = problem.images * problem.groups * problem.outputs * problem.height * problem.width
    distinct = problem.bytes_read + problem.filter_bytes + problem.bytes_written + problem.epilogue_bytes
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": CAUTION * work.compute_seconds,
        "memory": np.full(len(threads), distinct / bandwidth(machine)),
        "drain": work.drain_seconds,
        "split": split_seconds(split, rows["cluster"], rows["atomics"], results, size_k * size_y * size_x, work, resident, machine),
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def _reads(rows: Columns, problem: DirectProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one channel: loads of filters and of the slice by a warp, and the cycles of shared memory (or level 1) that they take in all."""
    taps = problem.filter_y * problem.filter_x
    width = np.minimum(4, rows["register_k"])
    filter_loads = taps * rows["register_k"] // width
    filter_cycles = np.maximum(_least_cycles(width), rows["warp_k"] * width / BANKS)
    # the read-only path looks up lines as well
    filter_cycles = np.where(rows["filters"] == SHARED, filter_cycles, 2 * filter_cycles)
    lanes = read_lanes_of(rows, problem)
    slice_rows, slice_columns = slice_of(rows, problem)
    read_rows = np.where(rows["slice"] == RS, slice_rows, rows["register_y"] * problem.filter_y)
    whole, rest = slice_columns // lanes, slice_columns % lanes
    input_loads = read_rows * (whole + (rest % 2) + (rest // 2))
    conflicts = wavefronts_of(rows, problem)
    # what remains of a row meets the banks as the vectors do, with fewer words
    narrow = np.maximum(1.0, conflicts * (rest / lanes)) * ((rest % 2) + (rest // 2))
    input_cycles = read_rows * (whole * np.maximum(_least_cycles(lanes), conflicts) + narrow)
    return filter_loads, input_loads, filter_loads * filter_cycles + input_cycles


def _least_cycles(lanes: np.ndarray) -> np.ndarray:
    """Cycles of a load by a warp without conflicts: of vectors of four as measured, of two between that and one."""
    return np.where(lanes == 4, FRAGMENT_WAVEFRONTS, np.where(lanes == 2, 0.5 + FRAGMENT_WAVEFRONTS / 2, 1.0))
