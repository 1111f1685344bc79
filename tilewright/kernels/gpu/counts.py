"""Data movement and resources of GPU kernels, counted from tiles: one array entry per candidate.

Every schema provides `LaunchCounts`; schemas that learned models cover provide `TileCounts`, from which the features, the analytical model
(`counted`), and each schema's own estimate and bound are computed. Counts are exact where the kernel's code determines them, and expectations where
alignment does (noted in each formula); tests/test_gpu_counts.py enumerates small cases.

CNNOpt is "Effective Performance Modeling and Domain-Specific Compiler Optimization of CNNs for GPUs" (PACT 2022). Details of its kernels that the
text leaves open (which warps fill shared memory, how results are staged and stored, the compiler's register cap) are taken from the sources and
scripts of its artifact, github.com/HPCRL/AE-PACT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.counts import Counts
from tilewright.kernels.gpu.rates import SECTOR_BYTES

WORD = 4
"""Bytes of a shared-memory bank, of a register, and of an element in models that do not distinguish types."""
SECTOR_WORDS = SECTOR_BYTES // WORD


@dataclass(frozen=True)
class LaunchCounts(Counts):
    """The grid and the resources of the launch that does most of the work. A block is a thread block."""

    blocks: np.ndarray
    threads: np.ndarray
    """Threads per block."""
    registers: np.ndarray
    """Estimated registers per thread."""
    shared_bytes: np.ndarray
    """Bytes of shared memory per block."""
    resident: np.ndarray
    """Blocks resident on a processor at once."""


@dataclass(frozen=True)
class TileCounts(LaunchCounts):
    """Additional counts of blocks with tiles in shared memory. A step is the work of a block between two barriers of its reduction loop. Sectors are
    units of 32 bytes between level 2 and a processor; wavefronts are cycles of one processor's shared memory or L1.

    For `direct`, whose vectors depend on the schedule, transactions are those of CNNOpt's kernels: models were trained on these, and the schema's own
    estimate counts its vectors itself. `distinct_bytes` and `written_bytes` belong to the launch, `read_bytes` and `result_bytes` to the call; they
    differ if there are other launches or parts of a split."""

    padded_flops: np.ndarray
    """Operations of all threads, including those outside the result."""
    warps: np.ndarray
    """Warps per block; the last one may be partial."""
    steps: np.ndarray
    """Steps per block."""
    tile_steps: np.ndarray
    """Steps per tile, which its blocks share if the reduction is split."""
    accumulators: np.ndarray
    """Results that a thread keeps in registers."""
    step_multiply_adds: np.ndarray
    """Multiply-add instructions per warp (or thread) and step."""
    step_shared_loads: np.ndarray
    """Wavefronts of a warp's loads from shared memory per step."""
    step_cached_loads: np.ndarray
    """Wavefronts of a warp's loads through the read-only path per step."""
    step_fill: np.ndarray
    """Warp instructions with which a block fills shared memory per step (a load and a store count as one)."""
    step_sectors: np.ndarray
    """Sectors that a block reads per step."""
    drain_wavefronts: np.ndarray
    """Wavefronts of shared memory per block after its loop (staging of results)."""
    store_instructions: np.ndarray
    """Warp stores or atomic additions per block after its loop."""
    store_sectors: np.ndarray
    """Sectors that one block writes after its loop."""
    distinct_bytes: np.ndarray
    """Bytes read at least once."""
    written_bytes: np.ndarray
    """Bytes of the result, with every part of a split counted."""
    split: np.ndarray
    stages: np.ndarray
    """Buffers of shared memory through which the fills of successive steps rotate."""
    reuse_bytes: np.ndarray
    """Distinct bytes that one block reads in its whole loop: its working set in level 2."""

    @property
    def tiles(self) -> np.ndarray:
        """Tiles of the result; each has `split` blocks."""
        tiles: np.ndarray = self.blocks // self.split
        return tiles


@dataclass(frozen=True)
class TensorCounts(TileCounts):
    """Of tiles that tensor cores multiply: a warp's multiply-add instructions are those of matrices, and its loads from shared memory include the
    matrices that the instructions read there."""


class PairCounts(TensorCounts):
    """Of products of pairs of TF32 numbers, each of which is three."""


class HalfPairCounts(TensorCounts):
    """The same of pairs of float16 numbers."""


class AttentionCounts(TensorCounts):
    """Of attention on tensor cores: a step is a tile of keys, for both products and the softmax between them."""


def launch_counts(
    counts: Counts, blocks: np.ndarray, threads: np.ndarray, registers: np.ndarray | int, shared_bytes: np.ndarray | int, machine: Machine
) -> LaunchCounts:
    """The counts with the grid and the resources of the launch."""
    numbers = (counts.flops, counts.read_bytes, counts.result_bytes, counts.level2_bytes)
    registers, shared_bytes = np.broadcast_to(registers, len(blocks)), np.broadcast_to(shared_bytes, len(blocks))
    return LaunchCounts(*numbers, blocks, threads, registers, shared_bytes, resident_blocks(machine, threads, registers, shared_bytes))


def ceil_div(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """a / b, rounded up; exact for the sizes here (well below 2**53)."""
    parts: np.ndarray = -np.floor_divide(-a, b)
    return parts


def row_sectors(words: np.ndarray) -> np.ndarray:
    """Sectors that a run of words touches, averaged over its start: (words + 7) / 8."""
    return (words + SECTOR_WORDS - 1) / SECTOR_WORDS
