"""Predicted times of the `winograd` schema on a CPU: instructions of the three steps of a block, and the filters read for each block.

Worked example, AVX-512 with two multiply-add ports, 64 channels, F(4x4), a tile of 14 by 2 vectors: 36 points of 64 steps of 28 multiply-adds take
32,256 cycles for 14 tiles and 32 output channels. The transform of an input tile takes about 190 cycles per vector of channels: 10,600 for the 14
tiles, once.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.block_transforms import elements_of, of_each, points_of, tile_of, works
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.rates import overlapping
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts, working_bytes

SINGLE_STORE_CYCLES = 2.0
"""Cycles to store one result that is not adjacent to its neighbours: a load from the buffer, index arithmetic, the store."""


def winograd_estimate(facts: CpuWinogradFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate, determined by the part with the most blocks and panels."""
    fitted = cpu_calibration(machine).winograd
    lanes = machine.vector_lanes()
    (rows, columns), tile, vectors = tile_of(candidates), candidates["tile"], candidates["vectors"]
    points, tiles, panel = points_of(candidates), tile * candidates["blocks"], vectors * lanes
    blocks = ceil_divided(ceil_divided(facts.tiles(candidates), tiles), candidates["tile_parts"])
    panels = ceil_divided(ceil_divided(facts.outputs, panel), candidates["panel_parts"])
    work = np.zeros((len(tile), 2, 2))
    for which, transform in of_each(candidates):
        work[which] = [(each.arithmetic, each.scratch / 2) for each in works(transform)]
    (in_arithmetic, in_scratch), (out_arithmetic, out_scratch) = work[:, 0].T, work[:, 1].T
    elements = elements_of(candidates)
    stores = max(machine.store_ports, 1.0)

    step = overlapping(machine, tile * vectors / machine.fma_ports, (tile + vectors) / machine.load_ports, machine.fma_latency_cycles)
    one = facts.channels * step + fitted.tile_overhead_cycles + tile * vectors / stores
    products = blocks * panels * points * candidates["blocks"] * one
    # loads, arithmetic and stores of a transform do not overlap: registers cannot hold both a tile and its transform
    of_input = (elements + in_scratch) / machine.load_ports + in_arithmetic / machine.fma_ports + (points + in_scratch) / stores
    inputs = blocks * tiles * (facts.channels // lanes) * of_input
    stored = rows * columns * (SINGLE_STORE_CYCLES * lanes if facts.single_stores else 1 / stores) + out_scratch / stores
    outputs = blocks * panels * tiles * vectors * ((points + out_scratch) / machine.load_ports + out_arithmetic / machine.fma_ports + stored)

    level_2 = machine.cache(2)
    assert level_2 is not None, f"{machine.name} lacks the facts about its caches"
    element = float(facts.element_bytes)
    own = element * points * facts.channels * facts.outputs / candidates["panel_parts"]
    beyond = machine.cache_bandwidth(3) / machine.processors if machine.cache(3) is not None else machine.memory_bandwidth / threads
    supply = fitted.streamed_share * beyond
    stay = own + element * points * tiles * (facts.channels + panel) < 0.75 * level_2.bytes
    filters = own / supply * np.where(stay, 1, blocks)
    # points are written once and read for each panel, sums are written and read once
    moved = element * points * blocks * tiles * ((1 + panels) * facts.channels + 2 * panels * panel)
    workspaces = np.where(working_bytes(facts, candidates, lanes) > 0.75 * level_2.bytes, moved / supply, 0.0)
    terms = {
        "products": products / machine.clock_hz,
        "filters": filters,
        "memory": counts.memory_bytes / machine.memory_bandwidth,
        "input transform": inputs / machine.clock_hz,
        "output transform": outputs / machine.clock_hz,
        "dispatch": np.full(len(tile), machine.dispatch_seconds),
    }
    if workspaces.any():
        terms["workspaces"] = workspaces
    return Estimate(terms, overlapped=("filters", "memory"))
