"""Data movement and grid of products of few rows."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import LaunchCounts, launch_counts
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.gemv.space import lanes_of, meeting_size, turns_at_once
from tilewright.kernels.gpu.rates import SECTOR_BYTES, SIMPLE_REGISTERS


def gemv_counts(facts: ContractionFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Every element of B is read once, and every block reads the rows of A for its columns."""
    threads = candidates["columns"] * candidates["threads_along_r"]
    n_lanes, r_lanes = lanes_of(facts)
    width = candidates["columns"] * n_lanes
    blocks = -(-facts.n // width) * facts.batch * candidates["split"]
    registers = SIMPLE_REGISTERS + facts.m * n_lanes * r_lanes + 4 * turns_at_once(facts.m) * (1 + facts.m)
    shared = meeting_size(width * facts.m, candidates["threads_along_r"]) * facts.element_bytes
    read = facts.a.bytes + facts.b.bytes + facts.epilogue_bytes
    tiles = blocks / (facts.batch * candidates["split"])
    again = sector_waste(facts, candidates) * facts.b.bytes + tiles * facts.a.bytes + facts.epilogue_bytes
    moved = counted(len(threads), facts.flops, read, facts.bytes_written, again)
    return launch_counts(moved, blocks, threads, registers, shared, machine)


def sector_waste(facts: ContractionFacts, candidates: Columns) -> np.ndarray:
    """Bytes of the sectors of B that adjacent threads read, divided by the bytes that they use."""
    lanes = facts.b.stream_width
    elements = candidates["columns"] * lanes if facts.b.along == "own" else np.minimum(candidates["threads_along_r"] * lanes, facts.r)
    adjacent = elements * facts.b.element_bytes
    return np.maximum(1.0, SECTOR_BYTES / adjacent)
