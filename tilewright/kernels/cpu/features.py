"""Features that several schemas share. All are relative to the machine, so that one model serves all of them."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import ceil_divided


def balance(tasks: np.ndarray, threads: int) -> np.ndarray:
    """Mean divided by maximum number of tasks per thread, with `tasks` equal tasks."""
    share: np.ndarray = tasks / (ceil_divided(tasks, threads) * threads)
    return share


def read_by_thread(a_bytes: float, b_bytes: float, share_pixels: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of both factors that each thread reads; threads share the pixels or else the channels."""
    return np.where(share_pixels, a_bytes / threads, a_bytes), np.where(share_pixels, b_bytes, b_bytes / threads)


def of_level(machine: Machine, level: int, threads: int, size: np.ndarray | float) -> np.ndarray:
    """Binary logarithm of a size in bytes over the share that one of `threads` threads has of the cache of that level; without such a cache, of the
    last one."""
    cache = machine.cache(level) or machine.caches[-1]
    return np.asarray(np.log2(np.maximum(size, 1.0) * min(cache.shared_by, threads) / cache.bytes))


def of_factors(machine: Machine, threads: int, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """What a thread reads of both factors of a product, in bytes, alone and together, over its share of level 2."""
    return {
        "first factor, level 2": of_level(machine, 2, threads, a),
        "second factor, level 2": of_level(machine, 2, threads, b),
        "factors, level 2": of_level(machine, 2, threads, a + b),
    }


def of_registers(machine: Machine, count: np.ndarray) -> np.ndarray:
    """Vector registers over those that the machine has."""
    return np.asarray(count / machine.vector_registers)


def machine_features(machine: Machine, threads: int) -> dict[str, float]:
    """What a cycle of multiply-adds on all ports is worth in loads, latency, and bytes of each level, per thread, as binary logarithms."""
    cycle = 4.0 * machine.vector_lanes() * machine.fma_ports
    beyond = machine.cache(3) or machine.caches[-1]
    share = machine.memory_bandwidth / machine.clock_hz / threads
    amounts = {
        "loads": machine.load_ports / machine.fma_ports,
        "chain": machine.fma_latency_cycles * machine.fma_ports,
        "registers": machine.vector_registers,
        "lanes": machine.vector_lanes(),
        "level 2": machine.cache_bandwidth(2) / machine.processors / machine.clock_hz / cycle,
        "level 3": beyond.bandwidth / cycle,
        "memory": share / cycle,
        "dispatch": machine.dispatch_seconds * machine.clock_hz,
        "threads": threads,
    }
    return {f"machine {name}": float(np.log2(amount)) for name, amount in amounts.items()}
