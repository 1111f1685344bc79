"""Predicted times of loop nests of one form."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.rates import reread_bandwidth


def loop_estimate(counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of a region without tiles (map, window, row reduction, scan). Each input is read from memory and the output written once, or
    from the threads' level 3 if it holds them, and the arithmetic runs at half the vector peak (no multiply-adds).

    Worked example: adding two arrays of two million float32 moves 24 MB; at 100 GB/s that is 240 us, and the additions are hidden behind it."""
    supply = np.array([reread_bandwidth(machine, size, threads) for size in counts.memory_bytes])
    peak = machine.peak_flops["fp32"] / machine.processors * min(threads, machine.processors)
    terms = {"memory": counts.memory_bytes / supply, "arithmetic": counts.flops / (peak / 2)}
    return Estimate({**terms, "dispatch": np.full(len(counts), machine.dispatch_seconds)}, overlapped=("memory", "arithmetic"))
