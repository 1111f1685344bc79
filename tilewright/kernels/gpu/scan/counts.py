"""What cumulative sums and their like move, and their grid."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import SIMPLE_REGISTERS
from tilewright.kernels.gpu.scan.space import PrefixProblem


def prefix_counts(rows: Columns, problem: PrefixProblem, machine: Machine) -> LaunchCounts:
    """Threads that share a row read it twice: for the totals of their chunks, and to scan them. An element is combined once."""
    threads = rows["rows"] * rows["sharers"]
    passes = np.where(rows["sharers"] > 1, 2, 1)
    moved = counted(len(threads), problem.rows * problem.columns, problem.bytes_read, problem.bytes_written, passes * problem.bytes_read)
    return launch_counts(moved, -(-problem.rows // rows["rows"]), threads, SIMPLE_REGISTERS, threads * problem.accumulator_bytes, machine)
