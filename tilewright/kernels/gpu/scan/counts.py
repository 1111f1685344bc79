"""Data movement and grid of cumulative sums and the like."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import WORD, LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import SIMPLE_REGISTERS
from tilewright.kernels.gpu.scan.space import ScanFacts


def scan_counts(facts: ScanFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Data are read once. A thread that shares its row has the elements of a turn in registers, and two totals in shared memory. An element counts as
    one combination."""
    threads = candidates["rows"] * candidates["threads_per_row"]
    shared = candidates["threads_per_row"] > 1
    registers = SIMPLE_REGISTERS + np.where(shared, candidates["items"] * (facts.accumulator_bytes // WORD), 0)
    moved = counted(len(threads), facts.rows * facts.columns, facts.bytes_read, facts.bytes_written)
    blocks = -(-facts.rows // candidates["rows"])
    return launch_counts(moved, blocks, threads, registers, 2 * threads * shared * facts.accumulator_bytes, machine)
