"""Operations and data movement of depthwise convolutions."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.depthwise.space import CpuDepthwiseFacts, reach


def depthwise_counts(facts: CpuDepthwiseFacts, candidates: Columns, machine: Machine) -> Counts:
    """Adjacent rows of tiles both read the input rows that they share."""
    again = np.maximum(reach(facts.input_rows, candidates["tile_rows"]) / (candidates["tile_rows"] * max(facts.input_rows[0], 1)), 1.0)
    points = facts.images * facts.rows * facts.columns * facts.vectors * machine.vector_lanes()
    flops = 2.0 * points * facts.taps[0] * facts.taps[1]
    return counted(len(again), flops, facts.bytes_read, facts.bytes_written, facts.bytes_read * again)
