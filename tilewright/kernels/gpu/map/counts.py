"""Data movement and grid of maps."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.map.space import MapFacts
from tilewright.kernels.gpu.rates import SIMPLE_REGISTERS


def map_counts(facts: MapFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Everything is read once: level 1 serves data shared by several threads."""
    vectors = -(-facts.points // (candidates["vector_width"] * candidates["items"]))
    moved = counted(len(vectors), facts.points * facts.flops, facts.bytes_read, facts.bytes_written)
    return launch_counts(moved, -(-vectors // candidates["threads"]), candidates["threads"], SIMPLE_REGISTERS, 0, machine)
