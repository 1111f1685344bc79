"""Counts and predicted times of recurrent layers on a CPU.

Weights are read once per step. A thread passes over its panels forwards in even steps and backwards in odd ones, so what it read last is read first:
of `w` bytes of weights, the min(w, C) bytes that level 2 (of C bytes) holds come from there, and only the others from level 3 or memory. Worked
example, an LSTM of 512 units (4 MiB) on one thread with C = 2 MiB: 2 MiB of every step come from level 2; in one direction, a cache that replaces
what was used least recently would supply none.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.rates import overlapping, reread_bandwidth
from tilewright.kernels.recurrence_form import RecurrenceFacts

BARRIERS_OF_A_REGION = 3
"""A parallel region takes as long as this number of barriers in a team (libgomp, two threads of a Xeon with AVX-512: 0.69 and 0.23 us), so a barrier
takes that fraction of `Machine.dispatch_seconds`."""


def recurrence_counts(facts: RecurrenceFacts, candidates: Columns, machine: Machine) -> Counts:
    """Level 2 supplies the weights once per step and tile of rows."""
    tiles = ceil_divided(facts.rows, candidates["rows"])
    streams = float(facts.steps * facts.stream_bytes)
    return counted(length(candidates), facts.total_flops, facts.weight_bytes + streams, 0.0, facts.steps * tiles * facts.weight_bytes + streams)


def recurrence_estimate(facts: RecurrenceFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate, for the thread with the most panels. Partial panels are charged as whole ones."""
    lanes, level1, level2 = machine.vector_lanes(), machine.cache(1), machine.cache(2)
    assert level1 is not None and level2 is not None, f"{machine.name} lacks the facts about its caches"
    axes = ("workers", "rows", "gates", "vectors", "chains")
    workers, rows, gates, vectors, chains = (np.asarray(candidates[name], dtype=np.float64) for name in axes)
    panels = ceil_divided(facts.units, vectors * lanes)
    own = ceil_divided(panels, workers)
    tiles = ceil_divided(facts.rows, rows)
    fitted = cpu_calibration(machine).contraction

    def tile(height: np.ndarray) -> np.ndarray:
        """Cycles of the products of a tile with that many rows."""
        wide = gates * vectors
        each = overlapping(machine, height * wide / machine.fma_ports, (height + wide) / machine.load_ports, machine.fma_latency_cycles / chains)
        cycles = np.zeros(len(vectors))
        for all_gates, r in facts.products:
            cycles += all_gates / gates * (each * r + fitted.tile_overhead_cycles + height * wide * chains)
        return cycles

    full, rest = np.floor_divide(facts.rows, rows), np.mod(facts.rows, rows)
    of_panel = full * tile(rows) + np.where(rest > 0, tile(np.maximum(rest, 1)), 0.0)
    each_step = facts.steps * own
    panel_bytes = facts.weight_bytes * vectors * lanes / facts.units
    own_bytes = own * panel_bytes
    kept = np.minimum(own_bytes, level2.bytes)
    level_2 = machine.cache_bandwidth(2) / machine.processors
    beyond = reread_bandwidth(machine, facts.weight_bytes, 1)
    again = np.where(panel_bytes * gates / facts.gates > level1.bytes, (tiles - 1) * own_bytes, 0.0)
    epilogue = each_step * facts.rows * vectors * facts.flops / machine.fma_ports
    return Estimate(
        {
            "products": each_step * of_panel / machine.clock_hz,
            "weights": facts.steps * ((kept + again) / level_2 + (own_bytes - kept) / beyond),
            "gates": epilogue / machine.clock_hz,
            "barriers": np.where(workers > 1, facts.steps * machine.dispatch_seconds / BARRIERS_OF_A_REGION, 0.0),
            "memory": counts.memory_bytes / reread_bandwidth(machine, float(counts.memory_bytes.max(initial=0.0)), threads),
            "dispatch": np.full(len(vectors), machine.dispatch_seconds),
        },
        overlapped=("products", "weights"),
        exponent=fitted.transfers,
    )
