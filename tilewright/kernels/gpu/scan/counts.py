"""Data movement and grid of cumulative sums and the like."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import SIMPLE_REGISTERS
from tilewright.kernels.gpu.scan.space import ScanFacts


def scan_counts(facts: ScanFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Threads that share a row read it twice: for the totals of their chunks, and for the scan. Each element counts as one combination."""
    threads = candidates["rows"] * candidates["threads_per_row"]
    passes = np.where(candidates["threads_per_row"] > 1, 2, 1)
    moved = counted(len(threads), facts.rows * facts.columns, facts.bytes_read, facts.bytes_written, passes * facts.bytes_read)
    return launch_counts(moved, -(-facts.rows // candidates["rows"]), threads, SIMPLE_REGISTERS, threads * facts.accumulator_bytes, machine)
