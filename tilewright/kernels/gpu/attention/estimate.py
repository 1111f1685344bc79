"""Predicted times of attention in one kernel."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.attention_form import SOFTMAX_FLOPS, AttentionFacts
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.attention.counts import reads_of
from tilewright.kernels.gpu.attention.space import columns_of, is_converted, sharing_of
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import BlockStep, Work, on_processors, split_seconds

BARRIERS = 3
"""Barriers of a block for each tile of keys with one buffer; with two there is one fewer."""
ROW_INSTRUCTIONS = 20
"""Instructions of a thread for each of its rows and tiles of keys, besides exchanges and the rescaling of sums: the maximum against minus infinity,
the exponential of the factor, the total, addresses of the weights."""
EXCHANGE = 2
"""Instructions with which a thread combines a value of its row with that of another thread: the exchange and the combination."""


def attention_estimate(facts: AttentionFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate. For one tile of keys of one block, in cycles of a processor:

    fma = threads (TM (TN R + BN C) + TM TN (logit + softmax) + TM (C + row)) / lanes, with C = D / (threads a row) columns of values per thread;
    issue = warps (these + conversions of 16-bit keys and values + loads from shared memory + copies + TM (exchanges + C)) / schedulers; shared =
    wavefronts of both products' loads, of the weights stored, and of the copies;  level 2 = BN (R + D) bytes / (bytes per cycle);  alone = a warp's
    own chain of loads and multiply-adds, and barriers.  Waves, tail, occupancy and overlap are those of the implicit GEMM (`kernels.gpu.steps`). The
    queries are read in the prologue.

    Worked example, fma of the products alone: 64 queries x 64 keys, r = d = 64: 2 * 64 * 64 * 64 / 128 lanes = 4096 cycles at peak on an h200."""
    fitted = gpu_calibration(machine)
    instructions, latencies = fitted.instructions, fitted.steps
    bm, bn, tm, tn = (candidates[name] for name in ("block_m", "block_n", "thread_m", "thread_n"))
    threads, warps, stages = counts.threads, counts.warps, candidates["stages"]
    columns = columns_of(facts, candidates)
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    softmax = tm * tn * (facts.logit_flops + SOFTMAX_FLOPS) + tm * (columns + ROW_INSTRUCTIONS)
    arithmetic = counts.step_multiply_adds + softmax
    fma = arithmetic * threads / machine.fp32_lanes_per_processor / efficiency
    reads = reads_of(facts, candidates, machine)
    weights = tm * tn / np.where(tm % 4 == 0, 4, np.where(tm % 2 == 0, 2, 1))
    exchanged = EXCHANGE * tm * np.log2(sharing_of(candidates))
    fetched = counts.step_fill * machine.warp_size / threads
    fetch = fetched * (np.where(stages > 0, 1, 2) + instructions.address)
    fetch = fetch + np.where(is_converted(facts, candidates, False), bn * (facts.r + facts.d) / threads, 0)
    widened = np.where(is_converted(facts, candidates, True), tn * facts.r + bn * columns, 0)
    issue = warps * (arithmetic + widened + reads.loads + weights + exchanged + fetch + instructions.step) / machine.schedulers_per_processor
    filled = np.where(stages > 0, facts.stored_bytes, facts.element_bytes) * (facts.r + facts.d)
    stored = bn * (facts.element_bytes * bm + filled) / machine.shared_bytes_per_cycle
    shared = warps * counts.step_shared_loads * 128 / machine.shared_bytes_per_cycle + stored
    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    level2 = counts.step_sectors * SECTOR_BYTES / cache2.bandwidth
    latency = latencies.loaded_latency * machine.memory_latency_cycles
    barrier = (BARRIERS - (stages > 1)) * (latencies.barrier_latencies * cache1.latency_cycles + 2 * warps)
    # a single warp waits for its fragments and for its own multiply-adds, and for what copies do not run ahead: with one buffer half a turn
    fragment = latencies.fragment_latencies * cache1.latency_cycles
    chain = facts.r * np.maximum(tm * tn * latencies.multiply_add_cycles, fragment)
    chain = chain + bn * np.maximum(tm * columns * latencies.multiply_add_cycles, fragment)
    chain = chain + softmax * latencies.multiply_add_cycles + exchanged / EXCHANGE * cache1.latency_cycles
    least = np.where(stages > 1, np.maximum(chain, latency), chain + np.where(stages > 0, np.maximum(latency - chain / 2, 0), 2 * latency))
    step = BlockStep(fma, issue, shared, level2, least, barrier, latencies.overlap)
    loads = bm * facts.r / facts.q_vector / threads
    prologue = latency + warps * loads * (instructions.address + facts.q_flops * facts.q_vector + facts.q_vector) / machine.schedulers_per_processor
    ends = latencies.end_latencies * machine.memory_latency_cycles + prologue + tm * columns * warps / 4
    work = on_processors(step, counts, ends, np.zeros(len(threads)), machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": work.drain_seconds,
        "parts": parts_seconds(facts, candidates, counts, work, machine),
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def parts_seconds(facts: AttentionFacts, candidates: Columns, counts: TileCounts, work: Work, machine: Machine) -> np.ndarray:
    """Seconds of the kernel that puts parts of the keys together, and of their traffic; 0 for undivided keys."""
    none, results = np.zeros(len(counts)), facts.batch * facts.m * (facts.d + 2)
    return split_seconds(candidates["split"], none, none, results, facts.element_bytes, none, work, counts.resident, machine)
