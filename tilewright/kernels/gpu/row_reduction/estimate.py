"""Predicted times of reductions over whole rows."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import WORD, LaunchCounts
from tilewright.kernels.gpu.rates import (
    LOADS_IN_FLIGHT,
    issue_seconds,
    l2_bandwidth,
    latency_seconds,
    streaming_seconds,
)
from tilewright.kernels.gpu.row_reduction.counts import sector_waste
from tilewright.kernels.gpu.row_reduction.space import RowReductionFacts


def row_reduction_estimate(facts: RowReductionFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + waves * (latency of loads and of the tree, per stage) + max(memory, level 2, issue).

    memory counts the data once, level 2 once more for every later stage; both are scaled by `sector_waste`."""
    owned, threads_per_row = candidates["rows"], candidates["threads_per_row"]
    lanes = np.minimum(candidates["vector_width"], facts.vector_width)
    threads, blocks, resident = counts.threads, counts.blocks, counts.resident
    waves = -(-blocks // (resident * machine.processors))
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    waste = sector_waste(facts, candidates)
    moved = waste * counts.read_bytes + counts.result_bytes
    turns = -(-facts.columns // (threads_per_row * lanes))
    flight = np.minimum(turns, LOADS_IN_FLIGHT)
    memory = streaming_seconds(machine, moved, at_once, flight * lanes * WORD)
    # the first pass is read from memory
    level2 = (counts.level2_bytes - waste * counts.read_bytes) / l2_bandwidth(machine)
    cache = machine.cache(1)
    shared_latency = (cache.latency_cycles if cache else 30.0) / machine.clock_hz
    tree = np.log2(threads_per_row) * 2 * shared_latency * np.maximum(1, threads / 256)
    latency = waves * (
        (facts.stages + 1) * -(-turns // LOADS_IN_FLIGHT) * latency_seconds(machine) / 2 + facts.stages * tree
    )
    padded = blocks * owned / max(facts.rows, 1) * (turns * threads_per_row * lanes / max(facts.columns, 1))
    work = facts.flops * facts.rows * padded + facts.rows * padded * facts.columns / lanes * 8 * (
        facts.stages + 1
    )
    issue = issue_seconds(machine, work / machine.warp_size)
    own = gpu_calibration(machine).row_reduction
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": own.latency * latency,
        "memory": own.memory * memory,
        "l2": level2,
        "issue": own.issue * issue,
    }
    return Estimate(terms, overlapped=("memory", "l2", "issue"))
