"""Operations and data movement of sums of products in register tiles."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.contraction.space import CONSTANT, ORDERS, CpuContractionFacts


def contraction_counts(facts: CpuContractionFacts, candidates: Columns, machine: Machine) -> Counts:
    """Level 2 supplies A once per panel if panels are outermost, otherwise once, and B's panel once per tile if it does not stay in level 1."""
    level2 = b_reads(facts, candidates, machine) + facts.a_bytes * a_passes(facts, candidates, machine)
    points = facts.outer * facts.rows * facts.columns
    results = float(facts.result_bytes) * (facts.images or points) * facts.n
    flops = 2.0 * points * facts.n * facts.r + facts.row_operations
    return counted(len(level2), flops, facts.a_bytes + facts.b_bytes + facts.epilogue_bytes, results, level2)


def b_reads(facts: CpuContractionFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Bytes of B read from level 2, once per tile; 0 if a panel stays in level 1 beside A's tile."""
    l1 = machine.cache(1)
    assert l1 is not None, f"{machine.name} lacks the facts about its caches"
    element = float(facts.element_bytes)
    panel = candidates["vectors"] * machine.vector_lanes() * facts.r * element
    # with the tiles of a single row outermost, all panels are read before the next tile
    alone = (candidates["order"] == ORDERS.index("m")) & (facts.rows == 1)
    near = np.where(alone, one_b(facts), panel) + candidates["tile_rows"] * candidates["tile_columns"] * facts.r * element <= l1.bytes
    return np.where(near, 0.0, panel * tiles_of(facts, candidates) * facts.outer * panels_of(facts, candidates, machine))


def tiles_of(facts: CpuContractionFacts, candidates: Columns) -> np.ndarray:
    """Tiles of pixels for one outer index, partial ones included."""
    tiles: np.ndarray = ceil_divided(facts.rows, candidates["tile_rows"]) * ceil_divided(facts.columns, candidates["tile_columns"])
    return tiles


def one_b(facts: CpuContractionFacts) -> float:
    """Bytes of B for one outer index; if it is no constant, every outer index has its own."""
    return facts.b_bytes if facts.b == CONSTANT else facts.b_bytes / facts.outer


def parts_of(facts: CpuContractionFacts, candidates: Columns) -> np.ndarray:
    """Rows of tiles for one outer index, which threads take one at a time; of a single row, its tiles."""
    extent, tile = (facts.rows, "tile_rows") if facts.rows > 1 else (facts.columns, "tile_columns")
    parts: np.ndarray = ceil_divided(extent, candidates[tile])
    return parts


def panels_of(facts: CpuContractionFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Panels of output channels."""
    return ceil_divided(facts.n, candidates["vectors"] * machine.vector_lanes())


def a_passes(facts: CpuContractionFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """How often A is read: once per panel (n outermost) or once (m outermost)."""
    return np.where(candidates["order"] == 0, panels_of(facts, candidates, machine), 1.0)
