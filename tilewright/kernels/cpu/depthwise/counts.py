"""What depthwise convolutions move."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.depthwise.space import CpuDepthwiseProblem, reach


def depthwise_counts(problem: CpuDepthwiseProblem, rows: Columns, machine: Machine) -> Counts:
    """Neighbouring rows of tiles read some rows of the input both."""
    again = np.maximum(reach(problem.input_rows, rows["tile_rows"]) / (rows["tile_rows"] * max(problem.input_rows[0], 1)), 1.0)
    points = problem.images * problem.rows * problem.columns * problem.vectors * machine.vector_lanes()
    flops = 2.0 * points * problem.taps[0] * problem.taps[1]
    return counted(len(again), flops, problem.bytes_read, problem.bytes_written, problem.bytes_read * again)
