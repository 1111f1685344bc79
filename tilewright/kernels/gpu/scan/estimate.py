"""Predicted times of cumulative sums and the like."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import SECTOR_WORDS, LaunchCounts
from tilewright.kernels.gpu.rates import LOADS_IN_FLIGHT, bandwidth, l2_bandwidth, latency_seconds
from tilewright.kernels.gpu.scan.space import ScanFacts


def scan_estimate(facts: ScanFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + waves * turns * (latency of loads, of combinations, and of the tree of threads that share a row) + max(memory, level 2).

    Level 2 serves whole sectors. Of adjacent rows a block touches as many elements of each as it has rows. Otherwise what a thread reads comes once,
    since level 1 keeps the sectors of its next elements, but each of its stores touches one."""
    threads_per_row, items = candidates["threads_per_row"], candidates["items"]
    shared = threads_per_row > 1
    cache = machine.cache(1)
    assert cache is not None
    busiest = -(-counts.blocks // machine.processors)
    waves = np.maximum(1, busiest / counts.resident)
    turns = -(-facts.columns // (threads_per_row * items))
    loads = np.where(shared, turns * -(-items // LOADS_IN_FLIGHT), -(-turns // LOADS_IN_FLIGHT)) * latency_seconds(machine)
    exchanged = np.log2(threads_per_row) * 2 * cache.latency_cycles * np.maximum(1, counts.threads / 256)
    combined = (items * 4 + exchanged) / machine.clock_hz
    apart = np.where(shared, items, facts.columns)
    read = SECTOR_WORDS / np.minimum(candidates["rows"], SECTOR_WORDS) if facts.row_contiguous else np.ones(len(items))
    written = read if facts.row_contiguous else np.minimum(apart, SECTOR_WORDS)
    share = busiest * machine.processors / counts.blocks
    terms = {
        "launch": np.full(len(items), machine.launch_seconds),
        "latency": waves * (loads + turns * combined),
        "memory": counts.memory_bytes / bandwidth(machine) * share,
        "level 2": (read * counts.read_bytes + written * counts.result_bytes) / l2_bandwidth(machine) * share,
    }
    return Estimate(terms, overlapped=("memory", "level 2"))
