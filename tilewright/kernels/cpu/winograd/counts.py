"""Operations and data movement of Winograd's algorithm on a CPU."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.kernels.block_transforms import points_of
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts


def winograd_counts(facts: CpuWinogradFacts, candidates: Columns, machine: Machine) -> Counts:
    """Filters count as packed and transformed. For each panel and block, level 2 supplies the block's points once and the panel's filters once per
    register tile."""
    points = points_of(candidates)
    tiles, panel = candidates["tile"] * candidates["blocks"], candidates["vectors"] * machine.vector_lanes()
    blocks = ceil_divided(facts.tiles(candidates), tiles) * ceil_divided(facts.outputs, panel)
    pixels = facts.images * facts.height * facts.width
    element = float(facts.element_bytes)
    read = float(facts.input_bytes) * pixels * facts.channels + element * points * facts.channels * facts.outputs + facts.epilogue_bytes
    again = element * blocks * points * facts.channels * (tiles + candidates["blocks"] * panel)
    flops = 2.0 * points * facts.tiles(candidates) * facts.channels * facts.outputs
    return counted(len(points), flops, read, float(facts.result_bytes) * pixels * facts.outputs, again)
