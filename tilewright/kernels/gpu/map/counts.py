"""Data movement and grid of maps."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.map.space import MapFacts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, SIMPLE_REGISTERS


def map_counts(facts: MapFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Everything is read once, since level 1 serves data shared by several threads, except scattered operands: whole sectors of these are read, and a
    block uses only the elements of a sector that its elements cover."""
    vectors = -(-facts.points // (candidates["vector_width"] * candidates["items"]))
    sector = SECTOR_BYTES // facts.element_bytes
    covered = np.clip(candidates["threads"] * candidates["items"] * candidates["vector_width"] / facts.inner, 1, sector)
    again = facts.scattered * (sector / covered - 1)
    moved = counted(len(vectors), facts.points * facts.flops, facts.bytes_read, facts.bytes_written, facts.bytes_read + again)
    return launch_counts(moved, -(-vectors // candidates["threads"]), candidates["threads"], SIMPLE_REGISTERS, 0, machine)
