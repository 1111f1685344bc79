"""What bounds the inner loops of CPU kernels: resources that overlap, and what a cache supplies when bytes are read again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import p_norm

Cycles = np.ndarray | float


def overlapping(machine: Machine, *cycles: Cycles) -> np.ndarray:
    """Cycles of resources that work at the same time, as their p-norm. A tile whose loads take nearly as long as its multiply-adds, or that has
    hardly enough chains, is slower than the maximum."""
    return p_norm(cycles, cpu_calibration(machine).contraction.overlap)


def reread_bandwidth(machine: Machine, size: float, threads: int) -> float:
    """Bytes per second at which all threads read again `size` bytes that do not stay in level 2."""
    cache = machine.cache(3)
    if cache is None or size > cache.bytes * -(-threads // cache.shared_by):
        return machine.memory_bandwidth
    return max(machine.memory_bandwidth, machine.cache_bandwidth(3) / machine.processors * min(threads, machine.processors))


LINES_IN_FLIGHT = 16
"""Cache lines that a core waits for at a time: the fill buffers of level 1 of Intel's cores from Golden Cove on (12 before); others have about as
many."""


def within_reach(machine: Machine, threads: int) -> Machine:
    """The machine with the bandwidth of memory that the threads reach: of each core what the lines in flight bring within a latency (Little's law),
    or its share of the machine's if that is more. Estimates take the machine's as it is, since their constants were fitted where all cores worked.

    Worked example, xeon-sapphire-rapids: 16 lines of 64 bytes in 270 cycles of 3 GHz are 11.4 GB/s, of two threads 22.8 of its 307."""
    alone = LINES_IN_FLIGHT * machine.caches[0].line_bytes * machine.clock_hz / machine.memory_latency_cycles
    each = max(alone, machine.memory_bandwidth / machine.processors)
    return replace(machine, memory_bandwidth=min(machine.memory_bandwidth, each * min(threads, machine.processors)))
