"""Predicted times of GPU schedules from data movement, issue slots, latency and occupancy, for whole columns of candidates at once.

Facts of a machine come from `Machine`, what was fitted from `hardware.calibration`. Sources of the form of the model: the bound by global memory,
shared memory, balance and resources multiplies as in DeepCuts (PLDI 2021); waves and the tail as in CNNOpt (PACT 2022); bytes in flight by Little's
law (Volkov, Better Performance at Lower Occupancy, 2010).
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine

LOADS_IN_FLIGHT = 4
"""Independent loads of a thread that the compiler issues ahead in a serial loop."""
SIMPLE_REGISTERS = 40
"""Registers of a thread of the map, window, rows and prefix schemas."""
SECTOR_BYTES = 32
"""Least that a memory transaction moves."""


def bandwidth(machine: Machine) -> float:
    """Bytes a second from memory that copies reach: measured where known, else 85 % of nominal."""
    return machine.sustained_memory_bandwidth or 0.85 * machine.memory_bandwidth


def l2_bandwidth(machine: Machine) -> float:
    """Bytes a second of all processors together."""
    return machine.cache_bandwidth(2)


def latency_seconds(machine: Machine) -> float:
    return machine.memory_latency_cycles / machine.clock_hz


def issue_seconds(machine: Machine, warp_instructions: np.ndarray) -> np.ndarray:
    """Seconds in which all schedulers issue so many warp instructions."""
    return warp_instructions / (machine.schedulers_per_processor * machine.processors * machine.clock_hz)


def streaming_seconds(
    machine: Machine, bytes_moved: np.ndarray | float, threads_at_once: np.ndarray, bytes_each: np.ndarray
) -> np.ndarray:
    """Seconds to move bytes when each of the threads has `bytes_each` under way: Little's law, capped by the bandwidth."""
    reachable = threads_at_once * bytes_each / latency_seconds(machine)
    seconds: np.ndarray = bytes_moved / np.minimum(reachable, bandwidth(machine))
    return seconds
