"""Predicted times of reductions over whole rows."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.rates import LOADS_IN_FLIGHT, bandwidth, issue_seconds, l2_bandwidth, latency_seconds, start_seconds
from tilewright.kernels.gpu.row_reduction.counts import sector_waste
from tilewright.kernels.gpu.row_reduction.space import RowReductionFacts


def row_reduction_estimate(facts: RowReductionFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + waves * (latency of loads and of the tree, per stage) + starts of blocks + level 2 + wavefronts + max(memory, issue).

    memory counts the data once, for the busiest processor; level 2 counts what later stages read again and level 1 has not kept. A wavefront is one
    line of level 1 that a warp's load touches."""
    own = gpu_calibration(machine).row_reduction
    rows, threads_per_row = candidates["rows"], candidates["threads_per_row"]
    lanes = np.minimum(candidates["vector_width"], facts.vector_width)
    threads, blocks = counts.threads, counts.blocks
    each = -(-blocks // machine.processors)
    together = np.minimum(each, counts.resident)
    turns = -(-facts.columns // (threads_per_row * lanes))
    cache = machine.cache(1)
    assert cache is not None
    tree = np.log2(threads_per_row) * 2 * cache.latency_cycles / machine.clock_hz * np.maximum(1, threads / 256)
    loads = -(-turns // LOADS_IN_FLIGHT) * latency_seconds(machine)
    waves = np.maximum(1, each / counts.resident)
    passes = facts.stages + 1
    once = sector_waste(facts, candidates) * counts.read_bytes
    warps = blocks * np.ceil(threads / machine.warp_size)
    in_warp = np.minimum(threads, machine.warp_size)
    if facts.row_contiguous:
        lines = np.maximum(1, in_warp // rows)
    else:
        lines = np.maximum(lanes, in_warp // threads_per_row)
    row_bytes = facts.columns * facts.element_bytes
    free = cache.bytes - together * (counts.shared_bytes + machine.shared_reserved_bytes)
    kept = np.clip(own.kept_share * free / (together * rows * row_bytes), 0, 1)
    busiest = each * machine.processors / blocks
    padded = blocks * rows / max(facts.rows, 1) * (turns * threads_per_row * lanes / max(facts.columns, 1))
    work = facts.flops * facts.rows * padded + facts.rows * padded * facts.columns / lanes * 8 * passes
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": waves * own.latency * passes * loads,
        "tree": waves * own.tree * facts.stages * tree,
        "starts": start_seconds(machine, blocks, own.block_cycles),
        "level 2": (counts.level2_bytes - once) * (1 - kept) * busiest / l2_bandwidth(machine),
        "wavefronts": own.line_cycles * each * warps / blocks * turns * passes * lines / machine.clock_hz,
        "memory": counts.memory_bytes / bandwidth(machine) * busiest,
        "issue": issue_seconds(machine, work / machine.warp_size),
    }
    return Estimate(terms, overlapped=("memory", "issue"))
