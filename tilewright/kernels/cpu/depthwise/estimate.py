"""Predicted times of the `depthwise` schema on a CPU: instructions of a register tile, and the input rows read for each row of tiles.

Worked example, AVX-512 with two multiply-add and two load ports, 3 x 3 taps with stride 1, a tile of 2 x 7 pixels: 126 multiply-adds take 63 cycles;
36 loads of the input and (if it is not in registers) 18 of the filter take 27; then 14 stores. A tile of one pixel would load 9 vectors for 9
multiply-adds.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.depthwise.space import ORDERS, CpuDepthwiseFacts, filters_held, reach
from tilewright.kernels.cpu.rates import overlapping


def depthwise_estimate(facts: CpuDepthwiseFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate, determined by the slowest thread."""
    fitted = cpu_calibration(machine).depthwise
    tile_rows, tile_columns, vectors, order = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"], candidates["order"]
    taps = facts.taps[0] * facts.taps[1]
    held = filters_held(facts, candidates, machine)
    stores = max(machine.store_ports, 1.0)

    def tile(down: np.ndarray, across: np.ndarray) -> np.ndarray:
        size = down * across
        lines, span = reach(facts.input_rows, np.maximum(down, 1)), reach(facts.input_columns, np.maximum(across, 1))
        # sums and inputs that do not fit into registers are spilled: stored and loaded once more for every row
        beyond = np.maximum(size + span + 1 - machine.vector_registers, 0)
        loads = (lines * (span + 2 * beyond) + np.where(held, 0, down * taps)) / machine.load_ports
        work = overlapping(machine, size * taps / machine.fma_ports, loads, taps * machine.fma_latency_cycles / 3)
        return np.where(size > 0, work + size / stores + fitted.tile_overhead_cycles, 0.0)

    def unit(down: np.ndarray) -> np.ndarray:
        rest = facts.columns % tile_columns
        cycles: np.ndarray = vectors * (facts.columns // tile_columns * tile(down, tile_columns) + tile(down, rest))
        return cycles

    full, rest = facts.rows // tile_rows, facts.rows % tile_rows
    along = ceil_divided(facts.rows, tile_rows)
    tasks = facts.images * (facts.vectors // vectors) * along
    # with rows outermost the partial last row of tiles belongs to a single thread
    mean = (full * unit(tile_rows) + unit(rest)) / along
    one = np.where(order == ORDERS.index("c"), mean, np.where(full > 0, unit(tile_rows), unit(rest)))
    instructions = ceil_divided(tasks, threads) * (one + fitted.task_overhead_cycles) / machine.clock_hz

    level_2 = counts.level2_bytes / (machine.cache_bandwidth(2) / machine.processors * min(threads, machine.processors))
    moved, level_3 = facts.bytes_read + facts.bytes_written, machine.cache(3)
    supply = machine.cache_bandwidth(3) if level_3 is not None and moved < level_3.bytes else machine.memory_bandwidth
    # prefetchers follow adjacent lines: a block's vectors, or whole rows if it has all channels. A wide tile returns to each row only after long
    whole = facts.vectors == vectors
    stream = vectors * np.where(whole, reach(facts.input_columns, tile_columns), 1)
    jumps = np.where((order == ORDERS.index("c")) & ~whole, fitted.scattered, 1.0) * (1 + 1 / stream + (tile_columns - 1) / fitted.wide_tile)
    terms = {"instructions": fitted.visible * instructions, "L2 to registers": level_2, "memory": moved / supply * jumps}
    return Estimate({**terms, "dispatch": np.full(len(tile_rows), machine.dispatch_seconds)})
