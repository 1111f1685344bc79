"""Data movement and resources of GPU kernels, counted from tiles: one entry a candidate, whole columns at once.

`Counts` is what every schema fills in and what the features and the analytical model of learned ranking are computed from. Counts are exact
where the kernel's text fixes them and expectations where alignment decides (said in each formula); tests/test_models.py enumerates small cases.

CNNOpt is "Effective Performance Modeling and Domain-Specific Compiler Optimization of CNNs for GPUs" (PACT 2022). What its text leaves open of its
kernels (which warps fill shared memory, how results are staged and stored, the compiler's register cap) is read from the sources and scripts of its
artifact, github.com/HPCRL/AE-PACT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.kernels.gpu.rates import SECTOR_BYTES

WORD = 4
"""Bytes of a bank of shared memory, of a register, and of an element where models tell no types apart."""
SECTOR_WORDS = SECTOR_BYTES // WORD


@dataclass(frozen=True)
class Counts:
    """Counts of one kernel launch, an array entry a candidate. "A block" is a thread block, "a step" what a block does between two barriers of its
    reduction loop. Sectors are 32 bytes between level 2 and a processor; wavefronts are cycles of one processor's shared memory or L1."""

    flops: np.ndarray
    """Of the problem."""
    padded_flops: np.ndarray
    """Of all threads, with those outside the result."""
    blocks: np.ndarray
    warps: np.ndarray
    """Of a block; the last one may be partly empty."""
    threads: np.ndarray
    """Of a block."""
    steps: np.ndarray
    """Of a block."""
    registers: np.ndarray
    """Of a thread, an estimate."""
    shared_bytes: np.ndarray
    """Of a block."""
    resident: np.ndarray
    """Blocks that a processor holds at once."""
    accumulators: np.ndarray
    """Results that a thread keeps in registers."""
    step_multiply_adds: np.ndarray
    """Of a warp (or thread), in one step: instructions."""
    step_shared_loads: np.ndarray
    """Wavefronts of a warp's loads from shared memory, in one step."""
    step_cached_loads: np.ndarray
    """Wavefronts of a warp's loads by the read-only path, in one step."""
    step_fill: np.ndarray
    """Warp instructions with which a block fills shared memory, in one step (a load and a store count as one)."""
    step_sectors: np.ndarray
    """Sectors that a block reads in one step."""
    drain_wavefronts: np.ndarray
    """Of shared memory in one block after its loop (staging of results)."""
    store_instructions: np.ndarray
    """Warp stores or atomic additions of one block after its loop."""
    store_sectors: np.ndarray
    """Sectors that one block writes after its loop."""
    distinct_bytes: np.ndarray
    """Bytes read at least once."""
    written_bytes: np.ndarray
    """Bytes of the result, every part of a split counted."""
    split: np.ndarray
    stages: np.ndarray
    """Buffers of shared memory that a step's fill alternates between."""
    reuse_bytes: np.ndarray
    """What one block reads in its whole loop, distinct: its working set in level 2."""

    def __len__(self) -> int:
        return len(self.blocks)


def ceil_div(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """Whole parts of size b that hold a; exact for the sizes here (well below 2**53)."""
    parts: np.ndarray = -np.floor_divide(-a, b)
    return parts


def row_sectors(words: np.ndarray) -> np.ndarray:
    """Sectors that a run of words touches, on average over where it starts: (words + 7) / 8."""
    return (words + SECTOR_WORDS - 1) / SECTOR_WORDS
