"""Occupancy: how many blocks of a kernel are resident on one GPU processor."""

from __future__ import annotations

from functools import reduce

import numpy as np

from tilewright.hardware.machine import Machine


def block_limits(machine: Machine, threads: np.ndarray | int, registers: np.ndarray | int, shared: np.ndarray | int) -> dict[str, np.ndarray]:
    """Blocks that each resource of one processor admits (occupancy rules of the CUDA programming guide). threads: per block; registers: per thread;
    shared: bytes per block."""
    warps = -(-np.asarray(threads) // machine.warp_size)
    unit = machine.register_allocation_unit
    per_warp = -(-np.asarray(registers) * machine.warp_size // unit) * unit
    return {
        "registers": machine.registers_per_processor // np.maximum(per_warp * warps, 1),
        "threads": machine.threads_per_processor // (warps * machine.warp_size),
        "shared memory": machine.shared_bytes_per_processor // np.maximum(np.asarray(shared) + machine.shared_reserved_bytes, 1),
        "block slots": np.asarray(machine.blocks_per_processor),
    }


def resident_blocks(machine: Machine, threads: np.ndarray | int, registers: np.ndarray | int, shared: np.ndarray | int) -> np.ndarray:
    """Blocks resident on one processor: as many as all of `block_limits` admit, at least one."""
    limits = block_limits(machine, threads, registers, shared)
    blocks: np.ndarray = np.maximum(reduce(np.minimum, limits.values()), 1)
    return blocks
