"""Occupancy: how many blocks of a kernel one processor of a GPU holds at once."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine


def resident_blocks(machine: Machine, threads: np.ndarray | int, registers: np.ndarray | int, shared: np.ndarray | int) -> np.ndarray:
    """Blocks that one processor holds at once: the least of what threads, registers, shared memory and block slots allow (occupancy rules
    of the CUDA programming guide). threads: of a block; registers: of a thread; shared: bytes of a block."""
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
