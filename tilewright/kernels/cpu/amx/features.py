"""Features of products on tile registers for learned models, in addition to axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import FACTOR, TILE_CHANNELS, TILE_PIXELS, TILES
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.amx.space import CHUNK, CpuAmxFacts
from tilewright.kernels.cpu.contraction.space import ACROSS_N, ALONG_N, CONSTANT
from tilewright.kernels.cpu.features import of_factors, of_level

NUMBER = 3


def amx_features(facts: CpuAmxFacts, candidates: Columns, machine: Machine, threads: int) -> dict[str, np.ndarray] | None:
    """The features by name; sizes are binary logarithms. None for products of a single row, which are bound by memory, for empty sums, and where
    threads may compute several parts: no model is trained on these."""
    points, depth = facts.outer * facts.rows * facts.columns, facts.steps * facts.depth
    several = candidates["pixel_parts"] * candidates["channel_parts"] > threads
    if points <= 1 or depth == 0 or facts.n == 0 or several.any():
        return None
    pixels, m, n, over_rows = (candidates[name] for name in ("pixels", "pixel_tiles", "channel_tiles", "over_rows"))
    tiles, panels = facts.outer * facts.tiles(over_rows, pixels), ceil_divided(facts.n, n * TILE_CHANNELS)
    blocks = ceil_divided(tiles, m)
    own_blocks, own_panels = ceil_divided(blocks, candidates["pixel_parts"]), ceil_divided(panels, candidates["channel_parts"])
    a, b = facts.a_bytes / candidates["pixel_parts"], facts.b_bytes / candidates["channel_parts"]
    element = float(size_of(FACTOR))
    a_block, b_block = element * depth * m * pixels, element * depth * n * TILE_CHANNELS
    results = element * points * facts.n
    problem = {
        "problem outer": np.log2(facts.outer), "problem rows": np.log2(facts.rows), "problem columns": np.log2(facts.columns),
        "problem panels": np.log2(facts.n / TILE_CHANNELS), "problem r": np.log2(depth), "problem b": (CONSTANT, ALONG_N, ACROSS_N).index(facts.b),
        "problem reuse": np.log2(element * points * depth / facts.a_bytes), "problem epilogue": np.log2(1 + facts.epilogue_bytes / results),
        "problem chunk": facts.chunk / CHUNK, "problem single stores": facts.single_stores, "schema": NUMBER,
    }  # fmt: skip
    return {name: np.full(length(candidates), float(value)) for name, value in problem.items()} | {
        **of_factors(machine, threads, a, b),
        "second factor, level 3": of_level(machine, 3, threads, b),
        "results, level 2": of_level(machine, 2, threads, np.full(length(candidates), results / threads)),
        "pixels": (m * pixels).astype(np.float64),
        "tile registers": (m * n + m + n) / TILES,
        "tile products": (m * n).astype(np.float64),
        "tile loads": (m + n) / (m * n),
        "rows filled": pixels / TILE_PIXELS,
        "channels filled": facts.n / (panels * n * TILE_CHANNELS),
        "pixels filled": points / (blocks * m * pixels),
        "last column": (facts.run(over_rows) % pixels) / pixels,
        "chunks": np.full(length(candidates), np.log2(depth // facts.chunk)),
        "panel, level 1": of_level(machine, 1, 1, b_block),
        "panel, level 2": of_level(machine, 2, threads, b_block),
        "tile, level 1": of_level(machine, 1, 1, a_block),
        "panel and tile, level 1": of_level(machine, 1, 1, a_block + b_block),
        "rows, level 2": of_level(machine, 2, threads, a_block),
        "panels": np.log2(own_panels),
        "tiles": np.log2(own_blocks),
        "tasks": np.log2(own_blocks * own_panels),
        "balance": blocks * panels / (own_blocks * candidates["pixel_parts"] * own_panels * candidates["channel_parts"]),
    }
