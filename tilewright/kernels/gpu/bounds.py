"""Times that no kernel of a GPU schedule can beat: true lower bounds for whole columns of candidates.

A bound is the maximum of named terms, each a lower bound by itself. Rates are the machine's peaks at its highest clock, never sustained rates. Work
that might be avoided (reads that a cache may serve, addresses, bank conflicts, barriers) counts as zero. Dependent kernels do not overlap: the least
time of the call's other kernels is added to every term except memory, which counts the traffic of all kernels.

Work is assigned to processors in whole blocks, and to schedulers in whole warps, which do not migrate. So if u units of work run on p places, some
place does at least ceil(u / p) of them (the pigeonhole principle); `busiest` applies it. DeepCuts (PLDI 2021, section 4) multiplies ratios of the
same kind; with the formulas as printed, good kernels beat that bound (`kernels.gpu.deepcuts`).

There is no term for level 2: its peak is not published for every machine, measured rates are not bounds, and level 1 may serve reads shared by
several blocks of a processor. Fills of shared memory count at the rate of shared memory instead, which equals that of level 1.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import LaunchCounts, TileCounts
from tilewright.kernels.schema import AnySchema

WIDEST = 4
"""Maximum elements that one instruction loads (16 bytes: PTX ISA, vector loads)."""
WIDEST_BYTES = 16


def lower_bound(schema: AnySchema, facts: Any, candidates: Columns, machine: Machine, rotated_bytes: float = 0.0) -> Estimate:
    """Lower bounds in seconds on a call under each candidate, in a chain of dependent kernels: the maximum of the terms.

    `rotated_bytes`: bytes touched between two calls with the same buffers, including those of one call. If that exceeds level 2, at least the
    fraction 1 - level 2 / rotated of them goes through memory. 0: everything may already be in level 2.

    Raises:
        Unsuitable: for a schema that has no bound.
    """
    if schema.bound is None:
        raise Unsuitable(f"the schema {schema.name} has no bound")
    return schema.bound(facts, candidates, schema.counts(facts, candidates, machine), machine, memory_share(machine, rotated_bytes))


def bound_of_stored(facts: Any, candidates: Columns, counts: LaunchCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds on kernels without tiles in shared memory (windows, maps, reductions of rows, scans): only what they store is certain,
    since loads may be guarded. issue: a warp stores at most 16 bytes per thread with one instruction; at most as many processors as blocks share
    these.

    Worked example, h200: 2^24 floats are 2^17 such stores, 249 on each of 528 schedulers."""
    schedulers = np.minimum(counts.blocks, machine.processors) * machine.schedulers_per_processor
    stores = counts.result_bytes / (WIDEST_BYTES * machine.warp_size) / schedulers
    nothing = np.zeros(len(counts))
    return longest_of(machine, fma=nothing, issue=stores, chain=0.0, shared=0.0, moved=share * counts.result_bytes, others=nothing)


def memory_share(machine: Machine, rotated_bytes: float) -> float:
    """The minimum fraction of the bytes of rotating calls that goes through memory.

    If a round touches R distinct bytes and level 2 holds S, at least R - S of them were evicted before the next round, so they are read again or were
    written back. For 220 MB on an h200 (60 MiB) that is 71 %."""
    level2 = machine.cache(2)
    if level2 is None or rotated_bytes <= level2.bytes:
        return 0.0
    return 1.0 - level2.bytes / rotated_bytes


def busiest(units: np.ndarray, places: int) -> np.ndarray:
    """The minimum number of units at the place that has the most."""
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
    """Converts cycles, and bytes through memory, to seconds. `others`: the minimum seconds of the call's other kernels.

    launch: a kernel in a chain of dependent kernels takes at least as long as an empty one (`Machine.launch_seconds`, measured). Its work may overlap
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
    """Cycles for which a warp's multiply-add occupies the lanes of its scheduler: 1 with 32 lanes per scheduler, 2 with 16."""
    return machine.warp_size * machine.schedulers_per_processor / machine.fp32_lanes_per_processor


def steps_of_busiest(counts: TileCounts, machine: Machine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps of one full part, block steps of the busiest processor, warp steps of the busiest scheduler); the last two are lower bounds.

    The `split` blocks of a tile share its `tile_steps`: s steps each, and the remaining t for the last. The bound is the maximum of three: the full
    blocks, with s steps each; all blocks, with at least t steps each; and all steps, spread evenly."""
    places, schedulers = machine.processors, machine.schedulers_per_processor
    tiles, split, steps, each, warps = counts.tiles, counts.split, counts.tile_steps, counts.steps, counts.warps
    last = np.maximum(steps - (split - 1) * each, 0)
    full = tiles * np.where(last == each, split, split - 1)
    kinds = ((full, each), (tiles * split, last), (tiles * steps, 1))
    blocks = np.maximum.reduce([busiest(count, places) * size for count, size in kinds])
    whole = [busiest(busiest(count, places) * warps, schedulers) * size for count, size in kinds[:2]]
    return each, blocks, np.maximum.reduce([*whole, busiest(tiles * steps * warps, places * schedulers)])


def live(extent: int, tile: np.ndarray, per_thread: np.ndarray) -> np.ndarray:
    """Elements of a thread's `per_thread` along one dimension that must be computed. If the tile is longer than the extent, the compiler may omit
    what no thread stores, but tile / per_thread threads must cover the extent."""
    return busiest(np.minimum(extent, tile), tile // per_thread)


def spread(machine: Machine, instructions: float) -> float:
    """Seconds of a kernel with `instructions` thread instructions in all, spread evenly over all schedulers; at least a launch."""
    cycles = instructions / machine.warp_size / (machine.processors * machine.schedulers_per_processor)
    return max(machine.launch_seconds, cycles / machine.clock_hz)
