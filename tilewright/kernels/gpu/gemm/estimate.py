"""Predicted times of the implicit GEMM."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import BlockStep, on_processors, split_seconds


def contraction_estimate(facts: ContractionFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate. For one step of one block, in cycles of a processor:

    fma = BM BN BK / lanes;  issue = warps (BK (TM TN + LDS) + loads, conversions, stores, addresses) / schedulers; shared = wavefronts of LDS and
    STS;  l2 = bytes of (BM + BN) BK / (bytes per cycle); through(n) = n times these, overlapped, with the first two scaled for uneven distribution of
    n * warps over the schedulers and for latencies that few warps do not hide;  alone = max(through(1), memory latency / steps ahead) + barrier.

    A processor gets b = ceil(blocks / processors) blocks, r at once (occupancy): floor(b / r) waves of max(through(r), alone) per step, and a last
    one with the rest (the tail). Prologue and epilogue of the pipeline cost some memory latencies per wave. Compute overlaps with the memory traffic
    of the distinct bytes. A split adds its parts' traffic through level 2 and one more launch, or, as a cluster, two barriers and the traffic between
    its blocks.

    Worked example, fma alone: 64 x 64 x 16 on an h200 takes 64 * 64 * 16 / 128 = 512 cycles per step at peak. 3 blocks of two warps give the four
    schedulers 6 warps, so two schedulers have two: a third more, scaled by `scheduler_imbalance`."""
    fitted = gpu_calibration(machine)
    instructions, latencies = fitted.instructions, fitted.steps
    bm, bn, bk, tm, tn, split = (candidates[name] for name in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    copies = candidates["stages"] > 1
    threads, warps = counts.threads, counts.warps
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    fma = counts.step_multiply_adds * threads / machine.fp32_lanes_per_processor / efficiency
    reads = -(-tm // 4) + -(-tn // 4)
    fetch = np.zeros(len(threads))
    stores = np.zeros(len(threads))
    for operand, extent, per_thread in ((facts.a, bm, tm), (facts.b, bn, tn)):
        vectors = extent * bk / (threads * operand.vector_width)
        address = instructions.address + operand.taps * instructions.division / 2 + (8 if operand.guarded else 0)
        pieces = np.where(copies, 0, operand.vector_width if operand.along == "r" else 1)
        fetch = fetch + vectors * (1 + address + pieces)
        if facts.is_narrow(operand):  # copies leave the conversion to every thread that reads the tile
            fetch = fetch + np.where(copies, bk * per_thread, vectors * operand.vector_width)
        # a transposed store is scalar, with two-way bank conflicts
        transposed = (operand.along == "r") & ~copies
        stores = stores + extent * bk / machine.warp_size * np.where(transposed, 2.0, 1.0)
    issue = warps * (counts.step_multiply_adds + bk * reads + fetch + instructions.step) / machine.schedulers_per_processor
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
    step = BlockStep(fma, issue, shared, level2, least, barrier, latencies.overlap)
    ends = latencies.end_latencies * machine.memory_latency_cycles + tm * tn * warps / 4
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
