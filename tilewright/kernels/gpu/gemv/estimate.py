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
from tilewright.kernels.gpu.gemv.space import GATHERED, factor_loads, lanes_of, meeting_sums, steps_of, turns_at_once
from tilewright.kernels.gpu.rates import issue_seconds, l2_bandwidth, latency_seconds, streaming_seconds


def gemv_estimate(facts: ContractionFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + latency of the rounds of loads + meeting in shared memory + max(memory, issue), plus the parts of a split as in
    `contraction_estimate`."""
    along, split = candidates["threads_along_r"], candidates["split"]
    threads, blocks, resident = counts.threads, counts.blocks, counts.resident
    n_lanes, r_lanes = lanes_of(facts)
    lanes = max(n_lanes, r_lanes)
    turns = -(-steps_of(facts, split) // along)
    unrolled = np.minimum(turns, turns_at_once(facts.m))
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    waves = -(-blocks // (resident * machine.processors))
    moved = sector_waste(facts, candidates) * facts.b.bytes + facts.a.bytes + facts.bytes_written + facts.epilogue_bytes
    memory = streaming_seconds(machine, moved, at_once, unrolled * lanes * facts.b.element_bytes)
    sums = facts.m * n_lanes
    phases = 1.0 * (along > 1) + (along > GATHERED)
    added = meeting_sums(facts, candidates)
    widened = lanes * (facts.is_narrow(facts.b) + facts.m * facts.is_narrow(facts.a))
    computed = facts.m * (facts.a.others + lanes * facts.a.arithmetic)
    instructions = turns * (1 + factor_loads(facts) + 4 + facts.m * lanes + widened + computed) + (along > 1) * sums + added
    issue = issue_seconds(machine, blocks * threads * instructions / machine.warp_size)
    cache1 = machine.cache(1)
    assert cache1 is not None
    warps = threads / machine.warp_size
    meeting = phases * 2 * cache1.latency_cycles + warps * ((along > 1) * sums + added)
    part_bytes = float(facts.element_bytes) * facts.batch * facts.m * facts.n * split
    combine = np.where(split > 1, machine.launch_seconds + 2 * part_bytes / l2_bandwidth(machine) + 2 * latency_seconds(machine), 0.0)
    own = gpu_calibration(machine).gemv
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": own.latency * waves * (-(-turns // turns_at_once(facts.m)) * latency_seconds(machine)),
        "tree": own.tree * waves * meeting / machine.clock_hz,
        "memory": memory,
        "issue": own.issue * issue,
        "split": own.split * combine,
    }
    return Estimate(terms, overlapped=("memory", "issue"))
