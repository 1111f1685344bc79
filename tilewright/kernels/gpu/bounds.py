"""Times that no kernel of a GPU schedule can beat: true lower bounds for whole columns of candidates.

A bound is the largest of named terms, each of which holds alone. Rates are the machine's peaks at its highest clock, never what something was
seen to sustain; work that might be avoided (reads that a cache may serve, addresses, conflicts of banks, barriers) counts as nothing. Kernels that
wait for each other do not overlap: what another kernel takes at least is part of every term of this one, but not of what memory moves for both.

Work is given to processors in whole blocks, and to schedulers in whole warps, which stay where they started. So of u units of work on p
places some place does ceil(u / p) of them (the pigeonhole principle); `busiest` applies it. DeepCuts (PLDI 2021, section 4) multiplies ratios
of the same kind; as they are printed, good kernels exceed the result (`bench.deepcuts`).

There is no term for level 2: its peak is not published for every machine, what was measured of it is no bound, and level 1 may serve what several
blocks of a processor read. What comes into shared memory is counted at the rate of that memory instead, which is that of level 1.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.schema import AnySchema

WIDEST = 4
"""Elements that one instruction loads at most (16 bytes: PTX ISA, vector loads)."""


def lower_bound(schema: AnySchema, facts: Any, candidates: Columns, machine: Machine, rotated_bytes: float = 0.0) -> Estimate:
    """Seconds below which no call under these candidates runs, in a chain of dependent kernels: the longest of the terms.

    `rotated_bytes`: bytes that are touched between two calls with the same buffers, those of one call included; where that is more than level 2
    holds, at least the share 1 - level 2 / rotated of them goes through memory. 0: everything may already be in level 2.

    Raises:
        Unsuitable: for a schema that has no bound.
    """
    if schema.bound is None:
        raise Unsuitable(f"the schema {schema.name} has no bound")
    return schema.bound(facts, candidates, schema.counts(facts, candidates, machine), machine, memory_share(machine, rotated_bytes))


def memory_share(machine: Machine, rotated_bytes: float) -> float:
    """The least share of the bytes of calls in rotation that memory moves.

    Of R distinct bytes a round at most the S that level 2 holds are still there in the next: at least R - S were evicted, so they are read
    again, or were written back. Of 220 MB on an h200 (60 MiB) that is 71 %."""
    level2 = machine.cache(2)
    if level2 is None or rotated_bytes <= level2.bytes:
        return 0.0
    return 1.0 - level2.bytes / rotated_bytes


def busiest(units: np.ndarray, places: int) -> np.ndarray:
    """Units of the place that has most of them, at least."""
    return -(-units // places)


def longest_of(
    machine: Machine,
    *,
    fma: np.ndarray,
    issue: np.ndarray,
    chain: np.ndarray | float,
    shared: np.ndarray | float,
    moved: np.ndarray | float,
    others: np.ndarray,
) -> Estimate:
    """From cycles, and bytes through memory, to seconds; `others`: what the call's other kernels take at least.

    launch: a kernel in a chain of dependent ones takes no less than an empty one there (`Machine.launch_seconds`, measured). Its work may overlap
    the launch, so the two are not added."""
    count = len(fma)

    def full(value: np.ndarray | float) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), count)

    terms = {
        "fma": fma / machine.clock_hz + others,
        "issue": issue / machine.clock_hz + others,
        "chain": full(chain) / machine.clock_hz + others,
        "shared": full(shared) / machine.clock_hz + others,
        "memory": full(moved / machine.memory_bandwidth),
        "launch": machine.launch_seconds + others,
    }
    return Estimate(MappingProxyType(terms), overlapped=tuple(terms))


def fma_cycles(machine: Machine) -> float:
    """Cycles for which a warp's multiply-add occupies the lanes of its scheduler: 1 with 32 lanes a scheduler, 2 with 16."""
    return machine.warp_size * machine.schedulers_per_processor / machine.fp32_lanes_per_processor


def steps_of_busiest(counts: TileCounts, machine: Machine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps of one full part, block steps of the busiest processor, warp steps of the busiest scheduler), the last two at least.

    A tile has `tile_steps`, which `split` blocks divide: s each, and the last the t that remain. Full blocks are pieces of s steps, all blocks of t
    at least, and all steps together could be spread evenly: of each the share of the busiest place."""
    places, schedulers = machine.processors, machine.schedulers_per_processor
    tiles, split, steps, each, warps = counts.tiles, counts.split, counts.tile_steps, counts.steps, counts.warps
    last = np.maximum(steps - (split - 1) * each, 0)
    full = tiles * np.where(last == each, split, split - 1)
    kinds = ((full, each), (tiles * split, last), (tiles * steps, 1))
    blocks = np.maximum.reduce([busiest(count, places) * size for count, size in kinds])
    whole = [busiest(busiest(count, places) * warps, schedulers) * size for count, size in kinds[:2]]
    return each, blocks, np.maximum.reduce([*whole, busiest(tiles * steps * warps, places * schedulers)])


def live(extent: int, tile: np.ndarray, per_thread: np.ndarray) -> np.ndarray:
    """Elements of a thread's `per_thread` along one dimension that must be computed: where the tile is longer than the extent, the compiler may leave
    out what no thread stores, but tile / per_thread threads have to cover the extent."""
    return busiest(np.minimum(extent, tile), tile // per_thread)


def spread(machine: Machine, instructions: float) -> float:
    """Seconds of a kernel of so many instructions of a thread, evenly spread over all schedulers, but a launch at least."""
    cycles = instructions / machine.warp_size / (machine.processors * machine.schedulers_per_processor)
    return max(machine.launch_seconds, cycles / machine.clock_hz)
