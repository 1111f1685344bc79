"""What bounds the inner loops of CPU kernels: resources that overlap, and what a cache supplies when bytes are read again."""

from __future__ import annotations

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
