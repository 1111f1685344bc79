"""What small reductions move, and their grid."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.window.space import WindowFacts, blocks_of, registers_of


def window_counts(facts: WindowFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Everything is read once: what windows of several threads have in common comes from level 1."""
    moved = counted(len(candidates["threads"]), facts.points * facts.flops, facts.bytes_read, facts.bytes_written)
    return launch_counts(moved, blocks_of(facts, candidates), candidates["threads"], registers_of(facts, candidates), 0, machine)
