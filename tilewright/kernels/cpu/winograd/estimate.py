"""Predicted times of the `winograd` schema on a CPU: instructions of the three steps of a block, and the filters read for each block.

Worked example, AVX-512 with two multiply-add ports, 64 channels, F(4x4), a tile of 14 by 2 vectors: 36 points of 64 steps of 28 multiply-adds take
32,256 cycles for 14 tiles and 32 output channels. The transform of an input tile takes about 190 cycles per vector of channels: 10,600 for the 14
tiles, once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.estimate import Estimate
from tilewright.ir.expr import Apply, Var, walk
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.rates import overlapping
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts
from tilewright.kernels.winograd_transform import FILTER, OUTPUT_TILES, TRANSFORMS, both_sides

SINGLE_STORE_CYCLES = 2.0
"""Cycles to store one result that is not adjacent to its neighbours: a load from the buffer, index arithmetic, the store."""


@lru_cache(maxsize=4)
def transform_operations(output_tile: int) -> tuple[int, int]:
    """Vector additions and multiplications to transform a tile of the input, and a tile of sums."""
    counts = []
    for matrix in (TRANSFORMS[output_tile].inputs, TRANSFORMS[output_tile].outputs):
        span = len(matrix[0])
        lets, _ = both_sides(matrix, [[Var(f"x{i}{j}", None, FLOAT32) for j in range(span)] for i in range(span)])
        counts.append(sum(isinstance(node, Apply) for let in lets for node in walk(let.value)))
    return counts[0], counts[1]


def winograd_estimate(facts: CpuWinogradFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate, determined by the part with the most blocks and panels."""
    fitted = cpu_calibration(machine).winograd
    lanes = machine.vector_lanes()
    size, tile, vectors = candidates["output_tile"], candidates["tile"], candidates["vectors"]
    points, tiles, panel = (size + FILTER - 1) ** 2, tile * candidates["blocks"], vectors * lanes
    blocks = ceil_divided(ceil_divided(facts.tiles(size), tiles), candidates["tile_parts"])
    panels = ceil_divided(ceil_divided(facts.outputs, panel), candidates["panel_parts"])
    operations = np.array([transform_operations(m) for m in OUTPUT_TILES])[np.searchsorted(OUTPUT_TILES, size)]
    stores = max(machine.store_ports, 1.0)

    step = overlapping(machine, tile * vectors / machine.fma_ports, (tile + vectors) / machine.load_ports, machine.fma_latency_cycles)
    one = facts.channels * step + fitted.tile_overhead_cycles + tile * vectors / stores
    products = blocks * panels * points * candidates["blocks"] * one
    # loads, arithmetic and stores of a transform do not overlap: registers cannot hold both a tile and its transform
    inputs = blocks * tiles * (facts.channels // lanes) * (points / machine.load_ports + operations[:, 0] / machine.fma_ports + points / stores)
    stored = size**2 * (SINGLE_STORE_CYCLES * lanes if facts.single_stores else 1 / stores)
    outputs = blocks * panels * tiles * vectors * (points / machine.load_ports + operations[:, 1] / machine.fma_ports + stored)

    level_2 = machine.cache(2)
    assert level_2 is not None, f"{machine.name} lacks the facts about its caches"
    element = float(facts.element_bytes)
    own = element * points * facts.channels * facts.outputs / candidates["panel_parts"]
    beyond = machine.cache_bandwidth(3) / machine.processors if machine.cache(3) is not None else machine.memory_bandwidth / threads
    supply = fitted.streamed_share * beyond
    stay = own + element * points * tiles * (facts.channels + panel) < 0.75 * level_2.bytes
    filters = own / supply * np.where(stay, 1, blocks)
    return Estimate(
        {
            "products": products / machine.clock_hz,
            "filters": filters,
            "memory": counts.memory_bytes / machine.memory_bandwidth,
            "input transform": inputs / machine.clock_hz,
            "output transform": outputs / machine.clock_hz,
            "dispatch": np.full(len(size), machine.dispatch_seconds),
        },
        overlapped=("filters", "memory"),
    )
