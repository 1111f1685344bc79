"""Predicted times of the `amx` schema on a CPU: cycles of the tile unit, loads and epilogue, and the supply from caches and memory.

A product of tiles takes 16 cycles, a tile load from level 1 takes 8 (two rows of 64 bytes per cycle). Worked example: a block of 2x2 tiles of 16
pixels by 16 channels has 4 products (64 cycles) and 4 loads (32 cycles) per chunk of 32 steps: the tile unit is the bottleneck unless level 2
supplies the 4 KB more slowly. At the end of the block, 4 tiles are stored and 64 vectors go through the epilogue. The time to stream data from beyond
level 2 is added, because tile loads wait for it.
"""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import FACTOR, TILE_CHANNELS
from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.amx.counts import step_bytes
from tilewright.kernels.cpu.amx.space import CpuAmxFacts
from tilewright.kernels.cpu.contraction.estimate import copy_seconds
from tilewright.kernels.cpu.contraction.space import CONSTANT

LOAD_CYCLES = 8.0
"""Cycles of a tile load that hits level 1 (TILELOADD)."""
STORE_CYCLES = 16.0
"""Cycles of a tile store (TILESTORED)."""
PIXEL_CYCLES = 1.0
"""Cycles for the addresses of one pixel in the epilogue; three times that if a division has to find its row."""
SINGLE_STORE_CYCLES = 2.0
"""Cycles to store one result that is not adjacent to its neighbours."""


def amx_estimate(facts: CpuAmxFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate, determined by the part with the most blocks."""
    fitted = cpu_calibration(machine).amx
    pixels, m, n = candidates["pixels"], candidates["pixel_tiles"], candidates["channel_tiles"]
    over_rows, pixel_parts, channel_parts = candidates["over_rows"], candidates["pixel_parts"], candidates["channel_parts"]
    blocks = ceil_divided(facts.outer * ceil_divided(facts.tiles(over_rows, pixels), m), pixel_parts)
    panels = ceil_divided(ceil_divided(facts.n, n * TILE_CHANNELS), channel_parts)
    chunks = facts.steps * (facts.depth // facts.chunk)
    each = pixel_parts * channel_parts / threads  # parts that a thread computes

    l2 = machine.cache(2)
    assert l2 is not None, f"{machine.name} lacks the facts about its caches"
    level_2 = fitted.level_2_share * machine.cache_bandwidth(2) / machine.processors / machine.clock_hz  # bytes per cycle
    step = np.maximum(np.maximum(m * n * fitted.product_cycles, (m + n) * LOAD_CYCLES), step_bytes(facts, candidates, machine) / level_2)
    products = each * blocks * panels * chunks * step

    run = facts.run(over_rows)
    vectors = m * n * pixels * TILE_CHANNELS / machine.vector_lanes()
    vector = SINGLE_STORE_CYCLES * machine.vector_lanes() if facts.single_stores else fitted.epilogue_cycles
    stored = facts.rows * facts.columns / (run * np.where(over_rows, 1, facts.rows))
    epilogue = vectors * vector * stored + m * pixels * PIXEL_CYCLES * np.where(over_rows, 3, 1) + m * n * STORE_CYCLES + fitted.block_cycles

    # every part reads its share of both factors from beyond level 2, and A again for every panel if level 2 cannot hold its share
    beyond = machine.cache_bandwidth(3) / machine.processors if machine.cache(3) is not None else machine.memory_bandwidth / threads
    supply = fitted.streamed_share * beyond
    a_share, b_share = facts.a_bytes / pixel_parts, facts.b_bytes / channel_parts
    a_passes = np.where((candidates["pixels_first"] == 0) & (a_share > 0.5 * l2.bytes), panels, 1)
    b_passes = np.where((candidates["pixels_first"] == 1) & (b_share > 0.5 * l2.bytes), blocks, 1)
    results = (counts.result_bytes + facts.epilogue_bytes) / threads
    scattered = np.where((candidates["pixels_first"] == 0) & (panels * channel_parts > 1), fitted.strided, 1.0)
    streamed = each * (a_share * a_passes + b_share * b_passes) + results * scattered
    copy = copy_seconds(facts.b_bytes / size_of(FACTOR), facts.b, machine, threads) if facts.b != CONSTANT else 0.0
    return Estimate(
        {
            "products": products / machine.clock_hz,
            "beyond level 2": streamed / supply,
            "epilogue": each * blocks * panels * epilogue / machine.clock_hz,
            "memory": np.full(len(pixels), facts.b_bytes / machine.memory_bandwidth),
            **({"copy of B": np.full(len(pixels), copy)} if copy else {}),
            "dispatch": np.full(len(pixels), machine.dispatch_seconds),
        },
        overlapped=("beyond level 2", "memory"),
    )
