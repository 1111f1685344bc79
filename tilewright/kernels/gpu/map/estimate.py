"""Predicted times of maps."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.map.space import MapFacts
from tilewright.kernels.gpu.rates import issue_seconds, l2_bandwidth, latency_seconds, start_seconds, streaming_seconds


def map_estimate(facts: MapFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + latency + starts of blocks + sectors read again + max(memory, issue).

    memory = bytes / min(bandwidth, bytes in flight / latency); issue = warp instructions / schedulers. The latency of a block's loads is paid once:
    a processor starts the next block as soon as one ends, and its loads overlap with those of the others."""
    threads, items, lanes = candidates["threads"], candidates["items"], candidates["vector_width"]
    blocks, resident = counts.blocks, counts.resident
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    loads = max(facts.requests - 1, 1)
    in_flight = items * lanes * facts.element_bytes * min(loads, 8)
    memory = streaming_seconds(machine, counts.memory_bytes, at_once, in_flight)
    fitted, own = gpu_calibration(machine).instructions, gpu_calibration(machine).map
    instructions = facts.requests * (1 + fitted.address / 2) + facts.flops * lanes + 2 * fitted.division
    issue = issue_seconds(machine, blocks * threads * items * instructions / machine.warp_size)
    rounds = -(-loads // (8 * 4))
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": np.full(len(threads), own.latency * rounds * latency_seconds(machine)),
        "starts": start_seconds(machine, blocks, own.block_cycles),
        "level 2": own.level_2 * (counts.level2_bytes - counts.read_bytes) / l2_bandwidth(machine),
        "memory": own.memory * memory,
        "issue": own.issue * issue,
    }
    return Estimate(terms, overlapped=("memory", "issue"))
