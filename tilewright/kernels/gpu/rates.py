"""Predicted times of GPU schedules from data movement, issue slots, latency and occupancy, for whole columns of candidates at once.

Facts of a machine come from `Machine`, fitted constants from `hardware.calibration`. The form of the model follows DeepCuts (PLDI 2021) for the
product of bounds by global memory, shared memory, balance and resources; CNNOpt (PACT 2022) for waves and the tail; and Little's law for bytes in
flight (Volkov, Better Performance at Lower Occupancy, 2010).
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine

LOADS_IN_FLIGHT = 4
"""Independent loads that the compiler issues ahead per thread in a serial loop."""
SIMPLE_REGISTERS = 40
"""Assumed registers per thread in maps, row reductions and scans, and in products of few rows besides accumulators and loads."""
SECTOR_BYTES = 32
"""Minimum bytes of a memory transaction."""
LINE_BYTES = 128
"""Bytes that level 1 looks up in a cycle, in four sectors."""


def bandwidth(machine: Machine) -> float:
    """Bytes per second that copies from memory reach: measured if known, otherwise 85 % of nominal."""
    return machine.sustained_memory_bandwidth or 0.85 * machine.memory_bandwidth


def l2_bandwidth(machine: Machine) -> float:
    """Bytes per second from level 2 to all processors together."""
    return machine.cache_bandwidth(2)


def latency_seconds(machine: Machine) -> float:
    return machine.memory_latency_cycles / machine.clock_hz


def issue_seconds(machine: Machine, warp_instructions: np.ndarray) -> np.ndarray:
    """Seconds in which all schedulers together issue `warp_instructions`."""
    return warp_instructions / (machine.schedulers_per_processor * machine.processors * machine.clock_hz)


def start_seconds(machine: Machine, blocks: np.ndarray, cycles: float) -> np.ndarray:
    """Seconds in which a processor starts its share of the blocks, one after another, at `cycles` each."""
    seconds: np.ndarray = -(-blocks // machine.processors) * (cycles / machine.clock_hz)
    return seconds


def streaming_seconds(machine: Machine, bytes_moved: np.ndarray | float, threads_at_once: np.ndarray, bytes_each: np.ndarray) -> np.ndarray:
    """Seconds to move bytes when each of the threads has `bytes_each` in flight: Little's law, capped by the bandwidth."""
    reachable = threads_at_once * bytes_each / latency_seconds(machine)
    seconds: np.ndarray = bytes_moved / np.minimum(reachable, bandwidth(machine))
    return seconds
