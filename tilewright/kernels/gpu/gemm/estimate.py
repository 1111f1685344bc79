"""Predicted times of the implicit GEMM."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.conflicts import transposing_wavefronts
from tilewright.kernels.gpu.gemm.space import PLAIN, SWIZZLED, ContractionFacts, copied, fetched_width, is_deep, table_entries
from tilewright.kernels.gpu.gemm.tile import GROUP
from tilewright.kernels.gpu.rates import SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import BlockStep, on_processors, split_seconds

TURNING = 2
"""Instructions for the place of a swizzled group: an exclusive or and an addition, where padded rows have constant distances."""


def contraction_estimate(facts: ContractionFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate. For one step of one block, in cycles of a processor:

    fma = BM BN BK / lanes;  issue = warps (BK (TM TN + LDS) + loads, conversions, stores, addresses) / schedulers; shared = wavefronts of LDS and
    STS;  l2 = bytes of (BM + BN) BK / (bytes per cycle); through(n) = n times these, overlapped, with the first two scaled for uneven distribution of
    n * warps over the schedulers and for latencies that few warps do not hide;  alone = max(through(1), memory latency / steps ahead) + barrier.

    A processor gets b = ceil(blocks / processors) blocks, r at once (occupancy): floor(b / r) waves of max(through(r), alone) per step, and a last
    one with the rest (the tail). Prologue and epilogue of the pipeline cost some memory latencies per wave. Compute overlaps with the memory traffic
    of the distinct bytes. A split adds its parts' traffic through level 2 and one more launch, or, as a cluster, two barriers and the traffic between
    its blocks.

    Variants differ in instructions (SWIZZLED: an exclusive or and an addition for each group of four k; a table: one load instead of the divisions of
    each position along r, and the divisions of its entries before the loop), in conflicts of the stores that transpose, in registers and shared
    memory, and in what hides latencies: in a plain loop a block waits for its loads and for two barriers in each step, while others work.

    Worked example, fma alone: 64 x 64 x 16 on an h200 takes 64 * 64 * 16 / 128 = 512 cycles per step at peak. 3 blocks of two warps give the four
    schedulers 6 warps, so two schedulers have two: a third more, scaled by `scheduler_imbalance`."""
    fitted = gpu_calibration(machine)
    instructions, latencies = fitted.instructions, fitted.steps
    bm, bn, bk, tm, tn, split = (candidates[name] for name in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    copies = copied(candidates)
    threads, warps = counts.threads, counts.warps
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    fma = counts.step_multiply_adds * threads / machine.fp32_lanes_per_processor / efficiency
    reads = -(-tm // 4) + -(-tn // 4)
    fetch: np.ndarray = np.zeros(len(threads))
    stores: np.ndarray = np.zeros(len(threads))
    turned = np.zeros(len(threads))
    for operand, extent, own in ((facts.a, bm, tm), (facts.b, bn, tn)):
        vectors = extent * bk / (threads * fetched_width(operand, candidates))
        address = instructions.address + operand.taps * instructions.division / 2 + (8 if operand.guarded else 0)
        pieces = np.where(copies, 0, operand.vector_width if operand.along == "r" else 1)
        fetch = fetch + vectors * (1 + address + pieces)
        # a computed factor: an address is that of the first load plus a distance, or that of a vector along r
        fetch = fetch + vectors * operand.computing(fetched_width(operand, candidates), instructions.address)
        if facts.is_narrow(operand):  # copies leave the conversion to every thread that reads the tile
            fetch = fetch + np.where(copies, bk * own, vectors * operand.vector_width)
        # a transposed store is scalar
        stores = stores + extent * bk / machine.warp_size * transposing_wavefronts(operand, extent, candidates)
        if operand.along == "r" and "layout" in candidates:
            deep = is_deep(operand, candidates)
            turned = turned + np.where(candidates["layout"] == SWIZZLED, TURNING * bk / GROUP * np.where(deep, 1, -(-own // GROUP)), 0)
    before: np.ndarray = np.zeros(len(threads))
    if "table" in candidates:
        # the vectors of a thread's passes along r are at one position
        positions = 1 if facts.a.along == "r" else bm * bk / threads
        divisions = facts.a.taps * instructions.division / 2
        fetch = fetch - candidates["table"] * positions * (divisions - 1)
        stores = stores + candidates["table"] * positions * warps
        before = table_entries(facts, candidates) / machine.warp_size * (divisions + instructions.address) / machine.schedulers_per_processor
    issue = warps * (counts.step_multiply_adds + bk * reads + fetch + turned + instructions.step) / machine.schedulers_per_processor
    shared = (warps * counts.step_shared_loads + stores) * 128 / machine.shared_bytes_per_cycle
    cache2 = machine.cache(2)
    cache1 = machine.cache(1)
    assert cache1 is not None and cache2 is not None
    level2 = counts.step_sectors * SECTOR_BYTES / cache2.bandwidth
    latency = latencies.loaded_latency * machine.memory_latency_cycles
    barrier = latencies.barrier_latencies * cache1.latency_cycles + 2 * warps
    # a single warp waits for its first fragments and for its own chain of multiply-adds
    inner = bk * np.maximum(tm * tn * latencies.multiply_add_cycles, latencies.fragment_latencies * cache1.latency_cycles) + cache1.latency_cycles
    least = np.maximum(inner, latency / np.maximum(candidates["stages"] - 1, 1))
    if "loop" in candidates:
        plain = candidates["loop"] == PLAIN
        least, barrier = np.where(plain, inner, least), np.where(plain, latency + 2 * barrier, barrier)
    step = BlockStep(fma, issue, shared, level2, least, barrier, latencies.overlap)
    ends = latencies.end_latencies * machine.memory_latency_cycles + tm * tn * warps / 4 + before
    work = on_processors(step, counts, ends, candidates["cluster"], machine)
    results = facts.batch * facts.m * facts.n
    cluster, atomics = candidates["cluster"], candidates["atomics"]
    combine = split_seconds(split, cluster, atomics, results, facts.element_bytes, bm * bn, work, counts.resident, machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": work.drain_seconds,
        "split": combine,
    }
    return Estimate(terms, overlapped=("compute", "memory"))
