"""Operations, data movement and resources of attention in one kernel. A step is a tile of keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.attention_form import SOFTMAX_FLOPS, AttentionFacts
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.attention.space import columns_of, key_vector, registers_of, shared_bytes_of, sharing_of, threads_of
from tilewright.kernels.gpu.counts import TileCounts, ceil_div
from tilewright.kernels.gpu.rates import SECTOR_BYTES

WAVEFRONT_BYTES = 128


def _wide(count: np.ndarray) -> np.ndarray:
    """Elements of a thread's `count` that are adjacent in shared memory."""
    return np.where(count % 4 == 0, 4, np.where(count % 2 == 0, 2, 1))


@dataclass(frozen=True)
class Reads:
    """Loads of one thread from shared memory per tile of keys, and the wavefronts of a warp's."""

    loads: np.ndarray
    wavefronts: np.ndarray


def reads_of(facts: AttentionFacts, candidates: Columns, machine: Machine) -> Reads:
    """Both products: vectors of keys along r, of queries and weights along m, of values along d. Threads of a warp that share a row read the same
    vectors of queries and weights, the others the same keys and values; a vector load takes as many wavefronts as its distinct bytes fill, and for
    vectors of four at least `fragment_wavefronts`."""
    tm, tn, bn = candidates["thread_m"], candidates["thread_n"], candidates["block_n"]
    sharing, columns = sharing_of(candidates), columns_of(facts, candidates)
    together = machine.warp_size // sharing
    least = gpu_calibration(machine).gemm.fragment_wavefronts
    loads, wavefronts = np.zeros(len(tm)), np.zeros(len(tm))
    rows, across = _wide(tm), _wide(columns)
    group = np.full(len(tm), key_vector(facts))
    copied = np.where(candidates["stages"] > 0, facts.stored_bytes, facts.element_bytes)
    for count, vector, distinct, size in (
        (facts.r * tn / group, group, sharing, copied),
        ((facts.r + bn) * tm / rows, rows, together, facts.element_bytes),
        (bn * columns / across, across, sharing, copied),
    ):
        filled = distinct * vector * size / WAVEFRONT_BYTES
        loads = loads + count
        wavefronts = wavefronts + count * np.maximum(filled, np.where(vector * size == 16, least, 1.0))
    return Reads(loads, wavefronts)


def steps_of_part(facts: AttentionFacts, candidates: Columns) -> np.ndarray:
    """Tiles of keys that a block passes over: the mean with a causal mask, the most if the keys are divided."""
    steps = facts.passes(candidates["block_m"], candidates["block_n"])
    return np.where(candidates["split"] > 1, ceil_div(steps, candidates["split"]), steps)


def parts_bytes(facts: AttentionFacts, candidates: Columns) -> np.ndarray:
    """Bytes of the sums, greatest logits and totals of all parts."""
    stored: np.ndarray = facts.batch * facts.m * (facts.d + 2.0) * facts.element_bytes * candidates["split"]
    return stored


def attention_counts(facts: AttentionFacts, candidates: Columns, machine: Machine) -> TileCounts:
    """Counts of `AttentionSchedule` candidates."""
    bm, bn, tm, tn = (np.asarray(candidates[axis], dtype=np.float64) for axis in ("block_m", "block_n", "thread_m", "thread_n"))
    one = np.ones(len(bm))
    threads, columns = threads_of(candidates) * one, columns_of(facts, candidates)
    warps = threads / machine.warp_size
    split = candidates["split"] * one
    blocks = ceil_div(facts.m * one, bm) * facts.batch * split
    steps = steps_of_part(facts, candidates)
    registers, shared_bytes = registers_of(facts, candidates), shared_bytes_of(facts, candidates)
    pair = facts.r / facts.k_vector + facts.d / facts.v_vector
    sectors = bn * (np.maximum(facts.r * facts.stored_bytes / SECTOR_BYTES, 1) + np.maximum(facts.d * facts.stored_bytes / SECTOR_BYTES, 1))
    multiply_adds = tm * (tn * facts.r + bn * columns)
    queries = bm * facts.r * facts.stored_bytes
    stored = np.minimum(facts.store_vector, _wide(columns))
    return TileCounts(
        flops=facts.flops * one,
        read_bytes=facts.read_bytes * one,
        result_bytes=facts.bytes_written * one,
        level2_bytes=np.maximum(blocks * (steps * sectors * SECTOR_BYTES + queries) + facts.other_bytes, facts.read_bytes),
        padded_flops=blocks * threads * steps * (2 * multiply_adds + tm * tn * (facts.logit_flops + SOFTMAX_FLOPS)),
        blocks=blocks,
        warps=warps,
        threads=threads,
        steps=steps,
        tile_steps=steps,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads_of(candidates), registers, shared_bytes) * one,
        accumulators=tm * (tn + columns),
        step_multiply_adds=multiply_adds,
        step_shared_loads=reads_of(facts, candidates, machine).wavefronts,
        step_cached_loads=0 * one,
        step_fill=bn * pair / machine.warp_size,
        step_sectors=sectors,
        drain_wavefronts=0 * one,
        store_instructions=warps * tm * columns / stored,
        store_sectors=bm * np.maximum(facts.bytes_written / (facts.batch * facts.m) / SECTOR_BYTES, 1),
        distinct_bytes=facts.read_bytes * one,
        written_bytes=np.where(split > 1, parts_bytes(facts, candidates), facts.bytes_written * one),
        split=split,
        stages=np.maximum(candidates["stages"], 1) * one,
        reuse_bytes=queries + steps * sectors * SECTOR_BYTES,
    )
