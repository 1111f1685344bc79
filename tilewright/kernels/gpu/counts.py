"""Data movement and resources of GPU kernels, counted from tiles: one entry a candidate, whole columns at once.

`LaunchCounts` is what every schema fills in, `TileCounts` what those do that the learned models know: features and the analytical model from counts
alone (`counted`) are computed from it, as each schema's own estimate and bound. Counts are exact where the kernel's text fixes them and expectations
where alignment decides (said in each formula); tests/test_models.py enumerates small cases.

CNNOpt is "Effective Performance Modeling and Domain-Specific Compiler Optimization of CNNs for GPUs" (PACT 2022). What its text leaves open of its
kernels (which warps fill shared memory, how results are staged and stored, the compiler's register cap) is read from the sources and scripts of its
artifact, github.com/HPCRL/AE-PACT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.counts import Counts
from tilewright.kernels.gpu.rates import SECTOR_BYTES

WORD = 4
"""Bytes of a bank of shared memory, of a register, and of an element where models tell no types apart."""
SECTOR_WORDS = SECTOR_BYTES // WORD


@dataclass(frozen=True)
class LaunchCounts(Counts):
    """The grid and the resources of the launch that does most of the work. "A block" is a thread block."""

    blocks: np.ndarray
    threads: np.ndarray
    """Of a block."""
    registers: np.ndarray
    """Of a thread, an estimate."""
    shared_bytes: np.ndarray
    """Of a block."""
    resident: np.ndarray
    """Blocks that a processor holds at once."""


@dataclass(frozen=True)
class TileCounts(LaunchCounts):
    """What blocks with tiles in shared memory do besides: "a step" is what a block does between two barriers of its reduction loop. Sectors are 32
    bytes between level 2 and a processor; wavefronts are cycles of one processor's shared memory or L1.

    Transactions are those of CNNOpt's kernels where ours differ by schedule-dependent vectors (`direct`): models were trained with these, and the
    schema's own estimate counts its vectors itself. `distinct_bytes` and `written_bytes` are the launch's, `read_bytes` and `result_bytes` the
    call's: they differ where there are other launches, or parts of a split."""

    padded_flops: np.ndarray
    """Of all threads, with those outside the result."""
    warps: np.ndarray
    """Of a block; the last one may be partly empty."""
    steps: np.ndarray
    """Of a block."""
    tile_steps: np.ndarray
    """Of a tile, whose blocks divide them where a sum is split."""
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

    @property
    def tiles(self) -> np.ndarray:
        """Tiles of the result: a split gives each so many blocks."""
        tiles: np.ndarray = self.blocks // self.split
        return tiles


def launch_counts(
    counts: Counts, blocks: np.ndarray, threads: np.ndarray, registers: np.ndarray | int, shared_bytes: np.ndarray | int, machine: Machine
) -> LaunchCounts:
    """With the grid and the resources of the launch."""
    numbers = (counts.flops, counts.read_bytes, counts.result_bytes, counts.level2_bytes)
    registers, shared_bytes = np.broadcast_to(registers, len(blocks)), np.broadcast_to(shared_bytes, len(blocks))
    return LaunchCounts(*numbers, blocks, threads, registers, shared_bytes, resident_blocks(machine, threads, registers, shared_bytes))


def ceil_div(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """Whole parts of size b that hold a; exact for the sizes here (well below 2**53)."""
    parts: np.ndarray = -np.floor_divide(-a, b)
    return parts


def row_sectors(words: np.ndarray) -> np.ndarray:
    """Sectors that a run of words touches, on average over where it starts: (words + 7) / 8."""
    return (words + SECTOR_WORDS - 1) / SECTOR_WORDS
