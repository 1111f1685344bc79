"""Predicted times of the `window` schema: small windows that a thread reduces serially for a tile of its output (`kernels.gpu.window.space`)."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.rates import bandwidth, start_seconds
from tilewright.kernels.gpu.window.space import BANKS, TiledLoad, WindowFacts, conflicts_of, guarded_places

DECODE_INSTRUCTIONS = 40
"""Integer instructions of a thread before its first load: decoding its position, base addresses."""
LOAD_INSTRUCTIONS = 1.5
"""Instructions per load: the load and half an address computation, since offsets are constant except at the start of a row."""


def window_estimate(facts: WindowFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """seconds = launch + chain + memory + issue + conflicts + starts of blocks: with few warps on a processor these hardly overlap.

    chain = waves of blocks * memory latency * (loaded_latency * registers loaded + part_latency * guarded parts); memory = distinct bytes / bandwidth
    issue = instructions / schedulers and conflicts = the cycles of `conflicts_of` for all loads, each for the busiest processor."""
    fitted = gpu_calibration(machine).window
    threads, lanes, items, down = (candidates[name].astype(np.float64) for name in ("threads", "vector_width", "items", "rows"))
    counted = [loads_behind_guards(load, candidates, facts) for load in facts.loads]
    loads = sum(counted, np.zeros(len(threads)))
    conflicts = np.zeros(len(threads))
    for count, strides in zip(counted, facts.strides, strict=True):
        conflicts += count * conflicts_of(facts, strides, candidates)
    blocks = counts.blocks
    each = -(-blocks // machine.processors)
    waves = -(-each // counts.resident)
    last_rows, last_items = guarded_places(facts, candidates)
    parts = (1 + last_rows) * (1 + last_items) - 1
    latency = machine.memory_latency_cycles / machine.clock_hz
    work = loads * LOAD_INSTRUCTIONS + down * items * (1 + facts.flops * lanes / 2) + DECODE_INSTRUCTIONS
    warps = each * np.ceil(threads / machine.warp_size)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "chain": waves * latency * (fitted.loaded_latency * loads * lanes + fitted.part_latency * parts),
        "memory": counts.memory_bytes / bandwidth(machine) * each * machine.processors / blocks,
        "issue": fitted.issue_share * warps * work / (machine.schedulers_per_processor * machine.clock_hz),
        "conflicts": warps * conflicts * BANKS * 4 / (machine.shared_bytes_per_cycle * machine.clock_hz),
        "starts": start_seconds(machine, blocks, fitted.block_cycles),
    }
    return Estimate(terms)


def loads_behind_guards(load: TiledLoad, candidates: Columns, facts: WindowFacts) -> np.ndarray:
    """Loads of a tile whose last rows and items are guarded: these reuse only what was loaded before their guards."""
    total = np.full(len(candidates["rows"]), float(load.fixed))
    tile = (candidates["rows"], candidates["items"])
    for (step, reach), count, guarded in zip((load.rows, load.items), tile, guarded_places(facts, candidates), strict=True):
        fresh = min(step, reach)
        along = (count - guarded - 1) * fresh + reach
        for place in range(1, int(guarded.max(initial=0)) + 1):
            along = along + np.where(guarded >= place, min(place * fresh, reach), 0)
        total = total * along
    return total
