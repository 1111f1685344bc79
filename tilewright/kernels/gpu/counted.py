"""Predicted times from counts alone: one analytical model for every schema that counts, whose constants are fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.gpu.counts import WORD, Counts, ceil_div
from tilewright.kernels.gpu.rates import SECTOR_BYTES


@dataclass(frozen=True)
class Overheads:
    """What the counts do not say, in cycles and instructions or as shares of a machine's facts: constants of the analytical model.

    The defaults were fitted to the training files of CNNOpt's published measurements on a V100 (`fit_overheads`); no benchmark layer among them."""

    multiply_add_share: float = 0.66
    """Of the peak that multiply-adds reach with all else hidden."""
    step_instructions: float = 126.0
    """Of a warp in one step besides multiply-adds and loads: addresses, loop, barriers."""
    fill_instructions: float = 24.0
    """For each warp instruction that fills shared memory: addresses, guards, the store."""
    shared_cycles: float = 0.3
    """Of a processor for one wavefront of shared memory (below one: vector loads fetch several of the counted words)."""
    cached_cycles: float = 6.1
    """For one wavefront by the read-only path: mostly level 2's."""
    fill_cycles: float = 5.0
    overlap: float = 5.5
    """Exponent with which the pipelines of a processor overlap."""
    latency: float = 3.5
    """Global memory latencies that a step waits for where its fill is not ahead of it."""
    latency_ahead: float = 1.6
    """The same where it is (two stages and more)."""
    multiply_add_latency: float = 3.3
    """Cycles that a warp by itself needs for one multiply-add; likewise for one load from shared memory, one by the read-only path, one filling
    instruction, and for a barrier for each warp that meets there."""
    shared_latency: float = 0.2
    cached_latency: float = 24.0
    fill_latency: float = 113.0
    barrier_latency: float = 22.0
    hiding: float = 4.3
    """Exponent with which throughput and the latency of a step overlap."""
    wave_latency: float = 0.1
    """Global memory latencies before and after the loop, a wave of blocks."""
    drain_cycles: float = 0.54
    """Of a processor for each wavefront, store instruction and stored sector after the loop."""
    store_cycles: float = 9.3
    sector_cycles: float = 2.9
    write_factor: float = 2.3
    """Time of a written byte over that of a read one: an atomic addition reads and writes."""
    launch: float = 16.0
    """Launches of a kernel in a chain; the published times are of events around one."""


DEFAULTS = Overheads()
MEMORY_SHARE = 0.85
"""Of the nominal bandwidth that copies reach."""
MEMORY_OVERLAP = 4.0
"""Exponent with which memory traffic and the processors' work overlap."""


def busiest(volumes: Counts, machine: Machine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of the busiest processor, the waves in which it takes them, and the blocks of a last wave that is not full (else 0)."""
    each = ceil_div(volumes.blocks, machine.processors)
    full = np.floor_divide(each, volumes.resident)
    rest = each - full * volumes.resident
    return each, full + (rest > 0), rest


def step_cycles(volumes: Counts, machine: Machine, overheads: Overheads) -> dict[str, np.ndarray]:
    """Cycles of a processor for one step of one block, by what they are spent on: fma, issue, shared, level2, together as `through`; and `alone`,
    how long a block takes that has the processor to itself."""
    v, o = volumes, overheads
    cache2 = machine.cache(2)
    assert cache2 is not None
    fma = v.warps * v.step_multiply_adds * machine.warp_size / machine.fp32_lanes_per_processor / o.multiply_add_share
    loads = v.step_shared_loads + v.step_cached_loads
    issue = (v.warps * (v.step_multiply_adds + loads + o.step_instructions) + v.step_fill * o.fill_instructions) / machine.schedulers_per_processor
    wavefront = 128 / machine.shared_bytes_per_cycle
    shared = wavefront * (v.warps * (v.step_shared_loads * o.shared_cycles + v.step_cached_loads * o.cached_cycles) + v.step_fill * o.fill_cycles)
    level2 = v.step_sectors * SECTOR_BYTES / cache2.bandwidth
    through = (fma**o.overlap + issue**o.overlap + shared**o.overlap + level2**o.overlap) ** (1 / o.overlap)
    alone = (
        np.where(v.stages > 1, o.latency_ahead, o.latency) * machine.memory_latency_cycles
        + o.multiply_add_latency * v.step_multiply_adds
        + o.shared_latency * v.step_shared_loads
        + o.cached_latency * v.step_cached_loads
        + o.fill_latency * v.step_fill / v.warps
        + o.barrier_latency * v.warps
    )
    return {"fma": fma, "issue": issue, "shared": shared, "level2": level2, "through": through, "alone": alone}


def counted_cost(volumes: Counts, machine: Machine, overheads: Overheads = DEFAULTS) -> Estimate:
    """Analytical model from counts alone, so that it serves every schema. In cycles of a processor, for n blocks side by side:

    through(n) = n (fma^o + issue^o + shared^o + level2^o)^(1/o), with o = `overlap`; alone = latency + warps' own chain of instructions;
    step(n) = (through(n)^h + alone^h)^(1/h), with h = `hiding`. The busiest processor gets b = ceil(blocks / processors) blocks, r at once:
    floor(b / r) waves of steps step(r), and one with the rest (the tail). The sum's loop, then `drain` for each block. `memory` is a bound by
    distinct bytes. Waves and tail as in CNNOpt (section 3.2), overlap as in `tilewright.kernels.gpu.rates`."""
    v, o = volumes, overheads
    cycles = step_cycles(v, machine, o)
    one, alone = cycles["through"], cycles["alone"]

    def step(count: np.ndarray) -> np.ndarray:
        total: np.ndarray = ((count * one) ** o.hiding + alone**o.hiding) ** (1 / o.hiding)
        return total

    each, waves, rest = busiest(v, machine)
    full = waves - (rest > 0)
    loop = v.steps * (full * step(v.resident) + np.where(rest > 0, step(np.maximum(rest, 1)), 0))
    drain = o.wave_latency * machine.memory_latency_cycles * waves + each * (
        o.drain_cycles * v.drain_wavefronts + o.store_cycles * v.store_instructions + o.sector_cycles * v.store_sectors
    )
    compute = (loop + drain) / machine.clock_hz
    memory = (v.distinct_bytes + o.write_factor * v.written_bytes) / (MEMORY_SHARE * machine.memory_bandwidth)
    together = (compute**MEMORY_OVERLAP + memory**MEMORY_OVERLAP) ** (1 / MEMORY_OVERLAP)
    launch = np.full(len(v), o.launch * machine.launch_seconds)
    # the terms add up: what memory adds to the processors' own time is its term
    return Estimate({"launch": launch, "loop": loop / machine.clock_hz, "drain": drain / machine.clock_hz, "memory": together - compute})


def printed_cost(volumes: Counts, machine: Machine) -> Estimate:
    """CNNOpt's analytical model as its section 4.3 and its artifact have it, for comparison: the longer of the two movements, transactions of
    128 bytes over bandwidth. Global: fills of shared memory, filters read by the read-only path, stored results. Shared: reads of the input slice
    (and filters of the S kernel) and the staging of results."""
    v = volumes
    rounds = v.blocks * v.steps
    wide = 32 * WORD
    into_shared = rounds * (v.step_fill + v.warps * v.step_cached_loads) + v.blocks * v.store_instructions
    from_shared = rounds * v.warps * v.step_shared_loads + v.blocks * v.drain_wavefronts
    global_seconds = wide * into_shared / machine.memory_bandwidth
    shared_seconds = wide * from_shared / (machine.shared_bytes_per_cycle * machine.clock_hz * machine.processors)
    return Estimate({"global": global_seconds, "shared": shared_seconds}, overlapped=("global", "shared"))
