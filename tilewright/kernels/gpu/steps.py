"""Time of concurrent blocks that repeat one step on a processor: the model shared by the schemas with tiles in shared memory.

A step's pipelines (multiply-adds, issue slots, shared memory, level 2) overlap; n concurrent blocks take n times as long as one, unless latencies
dominate. Waves of blocks and the tail are as in CNNOpt (PACT 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counts import TileCounts


@dataclass(frozen=True)
class BlockStep:
    """Cycles of one step of one block on each pipeline. `least`: minimum cycles of a block running alone, due to latencies; `barrier`: cycles lost
    between steps; `overlap`: p-norm exponent that combines the pipelines (1 is the sum, infinity the maximum)."""

    fma: np.ndarray
    issue: np.ndarray
    shared: np.ndarray
    level2: np.ndarray
    least: np.ndarray
    barrier: np.ndarray
    overlap: float


@dataclass(frozen=True)
class Work:
    """Seconds of all steps, seconds of the blocks' prologues and epilogues, blocks of the busiest processor, and its rounds of resident blocks."""

    compute_seconds: np.ndarray
    drain_seconds: np.ndarray
    blocks_each: np.ndarray
    rounds: np.ndarray


def on_processors(step: BlockStep, counts: TileCounts, ends: np.ndarray, cluster: np.ndarray, machine: Machine) -> Work:
    """The time of blocks with `ends` cycles before and after their steps. `cluster`: whether the blocks of a split form a cluster.

    With b = ceil(blocks / processors): floor(b / resident) rounds of resident blocks, and a last one with the rest."""
    blocks, warps, resident = counts.blocks, counts.warps, counts.resident
    fitted = gpu_calibration(machine).steps
    # pipelines overlap: (sum of t ** overlap) ** (1 / overlap); the powers are taken once
    overlap = step.overlap
    arithmetic, traffic = step.fma**overlap + step.issue**overlap, step.shared**overlap + step.level2**overlap

    def cycles_of(count: np.ndarray) -> np.ndarray:
        """Cycles of one step of `count` concurrent blocks."""
        a_scheduler = count * warps / machine.schedulers_per_processor
        uneven = 1 + fitted.scheduler_imbalance * (np.ceil(a_scheduler) / a_scheduler - 1)
        slower = uneven * (1 + fitted.unhidden / np.maximum(a_scheduler, 0.25))
        through = (arithmetic * slower**overlap + traffic) ** (1 / overlap)
        cycles: np.ndarray = np.maximum(count * through, np.maximum(through, step.least) + step.barrier)
        return cycles

    each = blocks_each(blocks, counts.split, cluster, machine)
    full, rest = each // resident, each % resident
    cycles = counts.steps * (full * cycles_of(resident) + np.where(rest > 0, cycles_of(np.where(rest > 0, rest, 1.0)), 0.0))
    rounds = full + (rest > 0)
    return Work(cycles / machine.clock_hz, rounds * ends / machine.clock_hz, each, rounds)


def blocks_each(blocks: np.ndarray, split: np.ndarray, cluster: np.ndarray, machine: Machine) -> np.ndarray:
    """Blocks of the busiest processor; a fraction if clusters, of the blocks of a split, reach only a share of the processors (fitted), and at least
    two if they cannot all be resident at once."""
    fitted = gpu_calibration(machine).steps
    share = np.ones(len(blocks))
    for size, reached in ((2, fitted.clustered_share_2), (4, fitted.clustered_share_4), (8, fitted.clustered_share_8)):
        share = np.where((cluster > 0) & (split == size), reached, share)
    reached_each = blocks / (machine.processors * share)
    each: np.ndarray = np.maximum(np.maximum(-(-blocks // machine.processors), reached_each), np.where(reached_each > 1, 2, 1))
    return each


def split_seconds(
    split: np.ndarray,
    cluster: np.ndarray,
    atomics: np.ndarray,
    results: int,
    element_bytes: int,
    tile: np.ndarray,
    work: Work,
    resident: np.ndarray,
    machine: Machine,
) -> np.ndarray:
    """Seconds that a split costs besides its blocks, for `results` elements of `element_bytes` in tiles of `tile` elements per block.

    These are a kernel that adds the parts, and their traffic through level 2; or, as a cluster, two barriers and a whole tile of sums that every
    block reads from the others; or, with atomics, a kernel that stores zeros, one for the map after the sum, and additions in level 2 at half its
    bandwidth."""
    cache2 = machine.cache(2)
    assert cache2 is not None
    level2 = machine.cache_bandwidth(2)
    parts = float(element_bytes) * results * split
    latency = cache2.latency_cycles / machine.clock_hz
    adding = machine.launch_seconds + gpu_calibration(machine).steps.split_traffic * parts / level2 + (1 + split / 8) * latency
    atomic = 2 * machine.launch_seconds + (2 * parts + 3.0 * element_bytes * results) / level2 + 3 * latency
    meeting = latency + 2 * tile * element_bytes / cache2.bandwidth * np.minimum(work.blocks_each, resident) / machine.clock_hz
    combine = np.where(split > 1, np.where(atomics > 0, atomic, adding), 0.0)
    return np.where(cluster > 0, meeting * work.rounds, combine)
