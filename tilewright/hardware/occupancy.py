"""Occupancy: how many blocks of a kernel are resident on one GPU processor."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine


def resident_blocks(machine: Machine, threads: np.ndarray | int, registers: np.ndarray | int, shared: np.ndarray | int) -> np.ndarray:
    """Blocks resident on one processor: the minimum of what threads, registers, shared memory and block slots allow (occupancy rules of the CUDA
    programming guide). threads: per block; registers: per thread; shared: bytes per block."""
    warps = -(-np.asarray(threads) // machine.warp_size)
    unit = machine.register_allocation_unit
    per_warp = -(-np.asarray(registers) * machine.warp_size // unit) * unit
    by_registers = machine.registers_per_processor // np.maximum(per_warp * warps, 1)
    by_threads = machine.threads_per_processor // (warps * machine.warp_size)
    taken = np.asarray(shared) + machine.shared_reserved_bytes
    by_shared = machine.shared_bytes_per_processor // np.maximum(taken, 1)
    limit = np.minimum(np.minimum(by_registers, by_threads), np.minimum(by_shared, machine.blocks_per_processor))
    blocks: np.ndarray = np.maximum(limit, 1)
    return blocks
