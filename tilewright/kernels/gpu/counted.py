"""Predicted times from counts alone: one analytical model with fitted constants for every schema that has counts."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import Overheads, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.gpu.counts import TileCounts, ceil_div
from tilewright.kernels.gpu.rates import SECTOR_BYTES

MEMORY_SHARE = 0.85
"""Fraction of the nominal bandwidth that copies reach: assumed."""
MEMORY_OVERLAP = 4.0
"""Exponent with which memory traffic and the processors' work overlap: assumed."""


def busiest(volumes: TileCounts, machine: Machine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of the busiest processor, its number of waves, and the blocks of a partial last wave (0 if all are full)."""
    each = ceil_div(volumes.blocks, machine.processors)
    full = np.floor_divide(each, volumes.resident)
    rest = each - full * volumes.resident
    return each, full + (rest > 0), rest


def step_cycles(volumes: TileCounts, machine: Machine, overheads: Overheads) -> dict[str, np.ndarray]:
    """Cycles of a processor for one step of one block, by resource: fma, issue, shared, level2. `through` combines these; `alone` is the latency of a
    block that has the processor to itself."""
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


def counted_cost(volumes: TileCounts, machine: Machine, overheads: Overheads | None = None) -> Estimate:
    """Analytical model from counts alone, which serves every schema. In cycles of a processor, for n concurrent blocks:

    through(n) = n (fma^o + issue^o + shared^o + level2^o)^(1/o), with o = `overlap`; alone = latency + warps' own chain of instructions;
    step(n) = (through(n)^h + alone^h)^(1/h), with h = `hiding`. The busiest processor gets b = ceil(blocks / processors) blocks, r at once: floor(b /
    r) waves with step(r), and one wave with the rest (the tail). The reduction loop is followed by `drain` for each block. `memory` is a bound by
    distinct bytes. Waves and tail are as in CNNOpt (section 3.2), overlap as in `tilewright.kernels.gpu.steps`. `overheads` default to the machine's
    calibration."""
    v, o = volumes, overheads or gpu_calibration(machine).counted
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
    # the terms are summed, so the memory term is what memory adds to the processors' own time
    return Estimate({"launch": launch, "loop": loop / machine.clock_hz, "drain": drain / machine.clock_hz, "memory": together - compute})
