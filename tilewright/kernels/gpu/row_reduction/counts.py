"""Data movement and grid of reductions over whole rows."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, SIMPLE_REGISTERS
from tilewright.kernels.gpu.row_reduction.space import RowReductionFacts


def row_reduction_counts(facts: RowReductionFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Every stage reads the rows, and so does the final map."""
    threads = candidates["rows"] * candidates["threads_per_row"]
    again = (facts.stages + 1) * sector_waste(facts, candidates) * facts.bytes_read
    moved = counted(len(threads), facts.rows * facts.flops, facts.bytes_read, facts.bytes_written, again)
    return launch_counts(moved, -(-facts.rows // candidates["rows"]), threads, SIMPLE_REGISTERS, threads * facts.accumulator_bytes, machine)


def sector_waste(facts: RowReductionFacts, candidates: Columns) -> np.ndarray:
    """Bytes of the sectors that adjacent threads read, divided by the bytes that they use."""
    width = np.minimum(candidates["vector_width"], facts.vector_width)
    adjacent = (candidates["rows"] if facts.row_contiguous else candidates["threads_per_row"] * width) * facts.element_bytes
    return np.maximum(1.0, SECTOR_BYTES / adjacent)
