"""Predicted times of the `window` schema: small windows that a thread reduces serially for a tile of its output (`schedule.gpu_window`)."""

from __future__ import annotations

import numpy as np

from tilewright.cost.gpu import bandwidth, l2_bandwidth
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.estimate import Estimate
from tilewright.schedule.columns import Columns
from tilewright.schedule.gpu_window import WindowProblem, blocks_of, registers_of, tiles_of

DECODE_INSTRUCTIONS = 40
"""Integer instructions of a thread before its first load: its position taken apart, base addresses."""
ADDRESS_INSTRUCTIONS = 0.5
"""Of each load: offsets are constants but where a row begins."""
IN_FLIGHT = 24
"""Registers that a thread's loads under way may fill before one of them is used."""
TILE_SECTOR_BYTES = 32


def window_cost(rows: Columns, problem: WindowProblem, machine: Machine) -> Estimate:
    """seconds = launch + chain + max(memory, level 2, level 1, issue).

    loads = sum over the loads of a tile (`TiledLoad.count`), level 1 serves 128 bytes a cycle of them; level 2 what the block's tiles read that
    lie side by side along the items, each element once; memory = distinct bytes / min(bandwidth, bytes in flight / latency); issue = loads,
    multiply-adds and addresses / schedulers; chain = rounds of resident blocks * the turns in which a thread's loads come."""
    threads, lanes, items, down = (rows[name].astype(np.float64) for name in ("threads", "lanes", "items", "rows"))
    loads = sum(load.count(down, items) for load in problem.loads) * np.ones(len(threads))
    tiles, blocks = tiles_of(rows, problem), blocks_of(rows, problem)
    resident = resident_blocks(machine, rows["threads"], registers_of(rows, problem), 0)
    at_once = np.minimum(blocks, resident * machine.processors)
    waves = -(-blocks // (resident * machine.processors))
    warps = tiles / machine.warp_size
    busiest = -(-blocks // machine.processors) * machine.processors / blocks
    flight = np.maximum(1.0, np.minimum(loads, IN_FLIGHT / lanes))
    latency = machine.memory_latency_cycles / machine.clock_hz
    reachable = at_once * threads * flight * lanes * 4 / latency
    memory = (problem.bytes_read + problem.bytes_written) / np.minimum(reachable, bandwidth(machine))
    beside = np.maximum(1.0, threads * lanes / problem.inner)
    each = np.zeros(len(threads))
    for load in problem.loads:
        shared = load.along("items", items * beside) / beside
        each = each + load.fixed * load.along("rows", down) * np.minimum(shared, load.along("items", items))
    level2 = (tiles * lanes * 4 * (each + down * items)) / l2_bandwidth(machine)
    rate = machine.processors * machine.clock_hz
    level1 = warps * (loads + down * items) * lanes * busiest / rate
    work = loads * (1 + ADDRESS_INSTRUCTIONS) + down * items * (1 + problem.flops * lanes / 2) + DECODE_INSTRUCTIONS
    issue = warps * work * busiest / (machine.schedulers_per_processor * rate)
    turns = 1 + np.ceil(loads / flight - 1) / 4
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "chain": waves * (1 + turns) * latency,
        "memory": memory,
        "level 2": level2,
        "level 1": level1,
        "issue": issue,
    }
    return Estimate(terms, overlapped=("memory", "level 2", "level 1", "issue"))
