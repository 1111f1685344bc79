"""What sums of products in register tiles move."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.contraction.space import CpuContractionProblem


def contraction_counts(problem: CpuContractionProblem, rows: Columns, machine: Machine) -> Counts:
    """From level 2 comes A once for each panel with those outermost, else once; and B's panel for each tile where it does not stay in level 1."""
    level2 = b_reads(problem, rows, machine) + problem.a_bytes * a_passes(problem, rows, machine)
    points = problem.outer * problem.rows * problem.columns
    results = float(problem.element_bytes) * (problem.images or points) * problem.n
    flops = 2.0 * points * problem.n * problem.r + problem.row_operations
    return counted(len(level2), flops, problem.a_bytes + problem.b_bytes + problem.epilogue_bytes, results, level2)


def b_reads(problem: CpuContractionProblem, rows: Columns, machine: Machine) -> np.ndarray:
    """Bytes of B that come from level 2 again and again; 0 where a panel stays in level 1 beside A's tile."""
    l1 = machine.cache(1)
    assert l1 is not None, f"{machine.name} lacks the facts about its caches"
    element = float(problem.element_bytes)
    panel = rows["vectors"] * machine.vector_lanes() * problem.r * element
    near = panel + rows["tile_rows"] * rows["tile_columns"] * problem.r * element <= l1.bytes
    return np.where(near, 0.0, panel * tiles_of(problem, rows) * problem.outer * panels_of(problem, rows, machine))


def tiles_of(problem: CpuContractionProblem, rows: Columns) -> np.ndarray:
    """Tiles of pixels for one outer index, partial ones included."""
    tiles: np.ndarray = ceil_divided(problem.rows, rows["tile_rows"]) * ceil_divided(problem.columns, rows["tile_columns"])
    return tiles


def panels_of(problem: CpuContractionProblem, rows: Columns, machine: Machine) -> np.ndarray:
    """Panels of output channels."""
    return ceil_divided(problem.n, rows["vectors"] * machine.vector_lanes())


def a_passes(problem: CpuContractionProblem, rows: Columns, machine: Machine) -> np.ndarray:
    """How often A is read: once a panel (n outermost) or once (m outermost)."""
    return np.where(rows["order"] == 0, panels_of(problem, rows, machine), 1.0)
