"""Data movement and grid of small reductions."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.window.space import WindowFacts, blocks_of, registers_of


def window_counts(facts: WindowFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Everything is read once: level 1 serves data shared by the windows of several threads."""
    moved = counted(len(candidates["threads"]), facts.points * facts.flops, facts.bytes_read, facts.bytes_written)
    return launch_counts(moved, blocks_of(facts, candidates), candidates["threads"], registers_of(facts, candidates), 0, machine)
