"""What reductions over whole rows move, and their grid."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import WORD, LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, SIMPLE_REGISTERS
from tilewright.kernels.gpu.row_reduction.space import RowsProblem


def rows_counts(rows: Columns, problem: RowsProblem, machine: Machine) -> LaunchCounts:
    """Every stage reads the rows, and so does what is made of the reductions in the end."""
    threads = rows["rows"] * rows["sharers"]
    again = (problem.stages + 1) * sector_waste(rows, problem) * problem.bytes_read
    moved = counted(len(threads), problem.rows * problem.flops, problem.bytes_read, problem.bytes_written, again)
    return launch_counts(moved, -(-problem.rows // rows["rows"]), threads, SIMPLE_REGISTERS, threads * problem.accumulator_bytes, machine)


def sector_waste(rows: Columns, problem: RowsProblem) -> np.ndarray:
    """Bytes of the sectors that neighbouring threads read, over those that they need of them."""
    adjacent = (rows["rows"] if problem.row_contiguous else rows["sharers"] * np.minimum(rows["lanes"], problem.lanes)) * WORD
    return np.maximum(1.0, SECTOR_BYTES / adjacent)
