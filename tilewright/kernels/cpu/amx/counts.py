"""What products on tile registers move."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import TILE_CHANNELS
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.amx.space import CpuAmxProblem


def amx_counts(problem: CpuAmxProblem, rows: Columns, machine: Machine) -> Counts:
    """For each block of tiles, tiles of both factors come from level 2, but B's where they stay in level 1 beside A's."""
    m, n = rows["pixel_tiles"], rows["channel_tiles"]
    blocks = problem.outer * ceil_divided(problem.tiles(rows["over_rows"], rows["pixels"]), m)
    panels = ceil_divided(problem.n, n * TILE_CHANNELS)
    chunks = problem.steps * (problem.depth // problem.chunk)
    points = problem.outer * problem.rows * problem.columns
    flops = 2.0 * points * problem.n * problem.steps * problem.depth
    read = problem.a_bytes + problem.b_bytes + problem.epilogue_bytes
    return counted(len(m), flops, read, 2.0 * points * problem.n, blocks * panels * chunks * step_bytes(problem, rows, machine))


def step_bytes(problem: CpuAmxProblem, rows: Columns, machine: Machine) -> np.ndarray:
    """Bytes that one block loads from level 2 for one chunk of the reduction."""
    l1 = machine.cache(1)
    assert l1 is not None, f"{machine.name} lacks the facts about its caches"
    pixels, m, n = rows["pixels"], rows["pixel_tiles"], rows["channel_tiles"]
    b_tile, a_tile = 2.0 * problem.chunk * TILE_CHANNELS, 2.0 * problem.chunk * pixels
    chunks = problem.steps * (problem.depth // problem.chunk)
    near = n * b_tile * chunks + m * a_tile * problem.depth / problem.chunk <= 0.75 * l1.bytes
    return np.where(near & (rows["pixels_first"] == 0), m * a_tile, n * b_tile + m * a_tile)
