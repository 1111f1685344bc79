"""Predicted times of the `amx` schema on a CPU: cycles of the tile unit and of the loads, the epilogue, and what the caches and memory supply.

A product of tiles takes a cycle for each row of A, a tile load 8 cycles (two rows of 64 bytes a cycle). Worked example: a block of 2x2 tiles of 16
pixels by 16 channels has 4 products (64 cycles) and 4 loads (32 cycles) a chunk of 32 steps: the tile unit is busy throughout. Leaving it, 4 tiles
are stored and 64 vectors go through the epilogue.
"""

from __future__ import annotations

import numpy as np

from tilewright.cost.cpu import ceil_divided
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.schedule.columns import Columns
from tilewright.schedule.cpu_amx import TILE_CHANNELS, CpuAmxProblem

PRODUCT_CYCLES = 16.0
"""Of a tile product (Intel optimization manual, AMX: TDPBF16PS, one in 16 cycles)."""
LOAD_CYCLES = 8.0
"""Of a tile load that hits level 1 (the same, TILELOADD)."""
STORE_CYCLES = 16.0
"""Of a tile store (the same, TILESTORED)."""
EPILOGUE_CYCLES = 6.0
"""Of a vector of sums: a load, the bias, an activation, rounding, a store; measured."""
PIXEL_CYCLES = 4.0
"""Of a pixel's addresses in the epilogue, and again where its row has to be found by a division."""
BLOCK_CYCLES = 60.0
"""Of a block: addresses, and the latency of the first loads and of the last products."""
SINGLE_STORE_CYCLES = 2.0
"""Of one result that does not lie beside its neighbours."""


def estimate_amx(problem: CpuAmxProblem, rows: Columns, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate: those of the part that has most blocks."""
    pixels, m, n = rows["pixels"], rows["pixel_tiles"], rows["channel_tiles"]
    over_rows = rows["over_rows"]
    blocks = ceil_divided(problem.outer * ceil_divided(problem.tiles(over_rows, pixels), m), rows["pixel_parts"])
    panels = ceil_divided(ceil_divided(problem.n, n * TILE_CHANNELS), rows["channel_parts"])
    chunks = problem.steps * (problem.depth // problem.chunk)

    l1, l2 = machine.cache(1), machine.cache(2)
    assert l1 is not None and l2 is not None, f"{machine.name} lacks the facts about its caches"
    b_tile, a_tile = 2.0 * problem.chunk * TILE_CHANNELS, 2.0 * problem.chunk * pixels
    panel_bytes = n * b_tile * chunks
    level_2 = machine.cache_bandwidth(2) / machine.processors / machine.clock_hz  # bytes a cycle
    # B's panel passes for every block of pixels: from level 1 where it fits there beside A's rows, else from level 2
    b_cycles = np.where(panel_bytes + m * a_tile * problem.depth / problem.chunk > 0.75 * l1.bytes, n * b_tile / level_2, 0.0)
    a_cycles = np.where(panels > 1, m * a_tile / level_2, 0.0)
    step = np.maximum(np.maximum(m * n * PRODUCT_CYCLES, (m + n) * LOAD_CYCLES), b_cycles + a_cycles)
    products = blocks * panels * chunks * step

    run = problem.run(over_rows)
    vectors = m * n * pixels * TILE_CHANNELS / machine.vector_lanes()
    each = SINGLE_STORE_CYCLES * machine.vector_lanes() if problem.single_stores else EPILOGUE_CYCLES
    stored = problem.rows * problem.columns / (run * np.where(over_rows, 1, problem.rows))
    epilogue = vectors * each * stored + m * pixels * PIXEL_CYCLES * np.where(over_rows, 2, 1) + m * n * STORE_CYCLES + BLOCK_CYCLES

    result = 2.0 * problem.outer * problem.rows * problem.columns * problem.n
    # parts of the channels read all of A, parts of the pixels all of B
    beyond = machine.cache_bandwidth(3) / machine.processors if machine.cache(3) is not None else machine.memory_bandwidth / threads
    shared = (problem.a_bytes / rows["pixel_parts"] + problem.b_bytes / rows["channel_parts"] + problem.epilogue_bytes / threads) / beyond
    passes = np.where(problem.a_bytes / rows["pixel_parts"] > 0.5 * l2.bytes, panels - 1, 0)
    again = problem.a_bytes / rows["pixel_parts"] * passes / beyond
    memory = (problem.b_bytes + 0.25 * (problem.a_bytes + problem.epilogue_bytes + result)) / machine.memory_bandwidth
    return Estimate(
        {
            "products": products / machine.clock_hz,
            "level 3": shared + again,
            "memory": np.full(len(pixels), memory),
            "epilogue": blocks * panels * epilogue / machine.clock_hz,
            "dispatch": np.full(len(pixels), machine.dispatch_seconds),
        },
        overlapped=("products", "level 3", "memory"),
    )
