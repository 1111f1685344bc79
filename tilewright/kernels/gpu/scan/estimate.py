"""Predicted times of cumulative sums and the like."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.rates import LOADS_IN_FLIGHT, bandwidth, latency_seconds
from tilewright.kernels.gpu.scan.space import ScanFacts


def scan_estimate(facts: ScanFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + waves * iterations of the serial scans + memory."""
    threads_per_row = candidates["threads_per_row"]
    waves = -(-counts.blocks // (counts.resident * machine.processors))
    chunk = -(-facts.columns // threads_per_row)
    passes = np.where(threads_per_row > 1, 2, 1)
    latency = waves * (passes * -(-chunk // LOADS_IN_FLIGHT) * latency_seconds(machine) + threads_per_row * 4 / machine.clock_hz)
    memory = counts.memory_bytes / bandwidth(machine)
    terms = {"launch": np.full(len(threads_per_row), machine.launch_seconds), "latency": latency, "memory": memory}
    return Estimate(terms)
