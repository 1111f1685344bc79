"""What Winograd's algorithm on a CPU moves."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.winograd.space import CpuWinogradProblem
from tilewright.kernels.winograd_transform import FILTER


def winograd_counts(problem: CpuWinogradProblem, rows: Columns, machine: Machine) -> Counts:
    """Filters are those that are packed, transformed. For each panel and block, points of the block and filters of the panel come from level 2:
    the filters once a register tile."""
    points = (rows["output_tile"] + FILTER - 1) ** 2
    tiles, panel = rows["tile"] * rows["blocks"], rows["vectors"] * machine.vector_lanes()
    blocks = ceil_divided(problem.tiles(rows["output_tile"]), tiles) * ceil_divided(problem.outputs, panel)
    pixels = problem.images * problem.height * problem.width
    element = float(problem.element_bytes)
    read = element * pixels * problem.channels + element * points * problem.channels * problem.outputs + problem.epilogue_bytes
    again = element * blocks * points * problem.channels * (tiles + rows["blocks"] * panel)
    flops = 2.0 * points * problem.tiles(rows["output_tile"]) * problem.channels * problem.outputs
    return counted(len(points), flops, read, element * pixels * problem.outputs, again)
