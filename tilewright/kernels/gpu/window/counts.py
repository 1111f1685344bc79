"""What small reductions move, and their grid."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.window.space import WindowProblem, blocks_of, registers_of


def window_counts(rows: Columns, problem: WindowProblem, machine: Machine) -> LaunchCounts:
    """Everything is read once: what windows of several threads have in common comes from level 1."""
    moved = counted(len(rows["threads"]), problem.points * problem.flops, problem.bytes_read, problem.bytes_written)
    return launch_counts(moved, blocks_of(rows, problem), rows["threads"], registers_of(rows, problem), 0, machine)
