"""Predicted times of products of few rows."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.gemv.counts import sector_waste
from tilewright.kernels.gpu.rates import issue_seconds, l2_bandwidth, latency_seconds, streaming_seconds


def gemv_estimate(facts: ContractionFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + latency of the iterations + tree + max(memory, issue), plus the parts of a split as in `contraction_estimate`."""
    threads_along_r, split = candidates["threads_along_r"], candidates["split"]
    threads, blocks, resident = counts.threads, counts.blocks, counts.resident
    along_n = facts.b.along == "own"
    lanes = facts.b.vector_width
    steps = -(-facts.r // ((1 if along_n else lanes) * split))
    turns = -(-steps // threads_along_r)
    size = facts.m * (lanes if along_n else 1)
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    waves = -(-blocks // (resident * machine.processors))
    moved = sector_waste(facts, candidates) * facts.b.bytes + facts.a.bytes + facts.bytes_written + facts.epilogue_bytes
    memory = streaming_seconds(machine, moved, at_once, np.minimum(turns, 8) * lanes * facts.b.element_bytes)
    instructions = turns * (1 + 4 + facts.m * (2 + lanes))
    issue = issue_seconds(machine, blocks * threads * instructions / machine.warp_size)
    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    tree = np.log2(threads_along_r) * (2 * cache1.latency_cycles + size * threads / machine.warp_size / 4) / machine.clock_hz
    latency = waves * (-(-turns // 8) * latency_seconds(machine) + tree)
    part_bytes = float(facts.element_bytes) * facts.batch * facts.m * facts.n * split
    combine = np.where(
        split > 1, machine.launch_seconds + 2 * part_bytes / l2_bandwidth(machine) + 2 * latency_seconds(machine), 0.0
    )
    own = gpu_calibration(machine).gemv
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": own.latency * latency,
        "memory": own.memory * memory,
        "issue": own.issue * issue,
        "split": combine,
    }
    return Estimate(terms, overlapped=("memory", "issue"))
