"""What products of few rows move, and their grid."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.gemm.space import ContractionProblem
from tilewright.kernels.gpu.rates import SECTOR_BYTES, SIMPLE_REGISTERS


def gemv_counts(rows: Columns, problem: ContractionProblem, machine: Machine) -> LaunchCounts:
    """Every element of B is read once, and every block reads the rows of A that meet its columns."""
    threads = rows["columns"] * rows["sharers"]
    along_n, lanes = problem.b.along == "own", problem.b.lanes
    blocks = -(-problem.n // (rows["columns"] * (lanes if along_n else 1))) * problem.batch * rows["split"]
    size = problem.m * (lanes if along_n else 1)
    read = problem.a.bytes + problem.b.bytes + problem.epilogue_bytes
    tiles = blocks / (problem.batch * rows["split"])
    again = sector_waste(rows, problem) * problem.b.bytes + tiles * problem.a.bytes + problem.epilogue_bytes
    moved = counted(len(threads), problem.flops, read, problem.bytes_written, again)
    return launch_counts(moved, blocks, threads, SIMPLE_REGISTERS + size + 8 * (lanes + problem.m), threads * size * problem.element_bytes, machine)


def sector_waste(rows: Columns, problem: ContractionProblem) -> np.ndarray:
    """Bytes of the sectors that neighbouring threads read of B, over those that they need of them."""
    lanes = problem.b.lanes
    adjacent = (rows["columns"] * lanes if problem.b.along == "own" else np.minimum(rows["sharers"] * lanes, problem.r)) * problem.b.element_bytes
    return np.maximum(1.0, SECTOR_BYTES / adjacent)
