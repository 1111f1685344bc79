"""Operations and data movement of products on tile registers."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import TILE_CHANNELS
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.amx.space import CpuAmxFacts


def amx_counts(facts: CpuAmxFacts, candidates: Columns, machine: Machine) -> Counts:
    """Each block of tiles loads tiles of both factors from level 2, except tiles of B that stay in level 1 beside A's."""
    m, n = candidates["pixel_tiles"], candidates["channel_tiles"]
    blocks = facts.outer * ceil_divided(facts.tiles(candidates["over_rows"], candidates["pixels"]), m)
    panels = ceil_divided(facts.n, n * TILE_CHANNELS)
    chunks = facts.steps * (facts.depth // facts.chunk)
    points = facts.outer * facts.rows * facts.columns
    flops = 2.0 * points * facts.n * facts.steps * facts.depth
    read = facts.a_bytes + facts.b_bytes + facts.epilogue_bytes
    return counted(len(m), flops, read, 2.0 * points * facts.n, blocks * panels * chunks * step_bytes(facts, candidates, machine))


def step_bytes(facts: CpuAmxFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Bytes that one block loads from level 2 for one chunk of the reduction."""
    l1 = machine.cache(1)
    assert l1 is not None, f"{machine.name} lacks the facts about its caches"
    pixels, m, n = candidates["pixels"], candidates["pixel_tiles"], candidates["channel_tiles"]
    b_tile, a_tile = 2.0 * facts.chunk * TILE_CHANNELS, 2.0 * facts.chunk * pixels
    chunks = facts.steps * (facts.depth // facts.chunk)
    near = n * b_tile * chunks + m * a_tile * facts.depth / facts.chunk <= 0.75 * l1.bytes
    return np.where(near & (candidates["pixels_first"] == 0), m * a_tile, n * b_tile + m * a_tile)
