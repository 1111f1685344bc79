"""Predicted times of cumulative sums and their like."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.rates import LOADS_IN_FLIGHT, SIMPLE_REGISTERS, bandwidth, latency_seconds
from tilewright.kernels.gpu.scan.space import PrefixProblem


def prefix_cost(rows: Columns, problem: PrefixProblem, machine: Machine) -> Estimate:
    """Prefix: seconds = launch + waves * turns of the serial scans + memory."""
    owned, sharers = rows["rows"], rows["sharers"]
    blocks = -(-problem.rows // owned)
    resident = resident_blocks(machine, owned * sharers, SIMPLE_REGISTERS, owned * sharers * problem.accumulator_bytes)
    waves = -(-blocks // (resident * machine.processors))
    chunk = -(-problem.columns // sharers)
    passes = np.where(sharers > 1, 2, 1)
    latency = waves * (
        passes * -(-chunk // LOADS_IN_FLIGHT) * latency_seconds(machine) + sharers * 4 / machine.clock_hz
    )
    memory = np.full(len(owned), (problem.bytes_read + problem.bytes_written) / bandwidth(machine))
    terms = {"launch": np.full(len(owned), machine.launch_seconds), "latency": latency, "memory": memory}
    return Estimate(terms)
