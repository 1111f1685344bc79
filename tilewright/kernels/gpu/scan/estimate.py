"""Predicted times of cumulative sums and their like."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.rates import LOADS_IN_FLIGHT, bandwidth, latency_seconds
from tilewright.kernels.gpu.scan.space import PrefixProblem


def prefix_cost(rows: Columns, problem: PrefixProblem, counts: LaunchCounts, machine: Machine) -> Estimate:
    """Prefix: seconds = launch + waves * turns of the serial scans + memory."""
    sharers = rows["sharers"]
    waves = -(-counts.blocks // (counts.resident * machine.processors))
    chunk = -(-problem.columns // sharers)
    passes = np.where(sharers > 1, 2, 1)
    latency = waves * (
        passes * -(-chunk // LOADS_IN_FLIGHT) * latency_seconds(machine) + sharers * 4 / machine.clock_hz
    )
    memory = counts.memory_bytes / bandwidth(machine)
    terms = {"launch": np.full(len(sharers), machine.launch_seconds), "latency": latency, "memory": memory}
    return Estimate(terms)
