"""What maps move, and their grid."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.map.space import PointProblem
from tilewright.kernels.gpu.rates import SIMPLE_REGISTERS


def map_counts(rows: Columns, problem: PointProblem, machine: Machine) -> LaunchCounts:
    """Everything is read once: what several threads need of it comes from level 1."""
    vectors = -(-problem.points // (rows["lanes"] * rows["items"]))
    moved = counted(len(vectors), problem.points * problem.flops, problem.bytes_read, problem.bytes_written)
    return launch_counts(moved, -(-vectors // rows["threads"]), rows["threads"], SIMPLE_REGISTERS, 0, machine)
