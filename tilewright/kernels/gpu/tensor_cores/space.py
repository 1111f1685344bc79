"""Schedules of the implicit GEMM on tensor cores: block, warp and reduction tiles, stages, and split reduction.

C[batch, m, n] = sum over r of A[batch, m, r] * B[batch, n, r]. A block computes block_m x block_n elements, each of its warps_m x warps_n warps an
equal part of them in registers; block_k elements along r at a time are in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, product_of, reject, times
from tilewright.kernels.gpu.gemm.space import CLUSTERS, SPLITS, steps_of
from tilewright.kernels.gpu.tensor_cores.form import TensorCoreFacts
from tilewright.kernels.schema import Numerics

WARP = 32


@dataclass(frozen=True)
class TensorCoreSchedule:
    """One candidate. `stages` > 1: number of buffers, filled by asynchronous copies that run `stages` - 1 steps ahead; 1: two buffers, filled through
    registers. `split` blocks share the reduction of one output tile; as a `cluster` (0 or 1) they add their parts through shared memory, otherwise a
    second kernel adds them, both in order. `staged` (0 or 1): without a split, sums go through shared memory, so that adjacent threads store (and
    read, in the epilogue) adjacent vectors; otherwise each thread stores pairs of adjacent elements from its registers. `pairs` (0 or 1): float32
    factors are pairs of TF32 numbers, instead of rounded to one."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int = 1
    split: int = 1
    cluster: int = 0
    staged: int = 0
    pairs: int = 0

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    def __str__(self) -> str:
        return (
            f"tensor cores block={self.block_m}x{self.block_n}x{self.block_k} warps={self.warps_m}x{self.warps_n} "
            f"stages={self.stages} split={self.split}" + " cluster" * self.cluster + " staged" * self.staged + " pairs" * self.pairs
        )


TILE_AXES = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64),
    "warps_m": (1, 2, 4),
    "warps_n": (1, 2, 4),
}
STAGES = (2, 3, 4)
"""Stages with asynchronous copies; 1 if a factor's elements are too narrow for them."""
PARTS_PADDING = 8
"""Elements between the rows of sums in shared memory, so that the pairs of eight rows that a warp stores do not conflict."""
MOST_SUMS = 128
"""Sums that a thread holds at most: beside them there are two sets of fragments, and addresses."""

FEWEST_OF_PAIRS = 64
"""Products of a sum from which on pairs of TF32 are as accurate as a chain of float32 multiply-adds, or within 1 % (docs/usage.md, "Precision")."""


def tensor_core_space(facts: TensorCoreFacts, machine: Machine, numerics: Numerics) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The candidates, and the number rejected for each reason (a rejected tile counts once for each split and stage)."""
    pairs = [0] if facts.kind != "tf32" or numerics.tf32 else [1] if numerics.tf32_pairs else []
    if not pairs:
        return {entry.name: np.zeros(0, np.int64) for entry in fields(TensorCoreSchedule)}, {"float32 may not be rounded to TF32": 1}
    rest = product_of({"stages": STAGES if facts.copies else (1,), "split": SPLITS, "cluster": (0, 1), "staged": (0, 1), "pairs": pairs})
    possible = (rest["cluster"] == 0) | (np.isin(rest["split"], CLUSTERS) & (machine.compute_capability >= (9, 0)))
    possible &= (rest["staged"] == 0) | ((rest["split"] == 1) & (facts.product.store_vector > 1))
    rest = {name: column[possible] for name, column in rest.items()}
    each = len(rest["split"])
    tiles = product_of(TILE_AXES)
    tiles, rejected = reject(tiles, tile_rules(facts, tiles, machine))
    candidates = times(tiles, rest)
    candidates, more = reject(candidates, rules(facts, candidates, machine))
    return candidates, {**{reason: number * each for reason, number in rejected.items()}, **more}


def tile_rules(facts: TensorCoreFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Reasons for which tiles are infeasible or certainly wasteful with any split, and a mask of the rows that each rejects."""
    bm, bn, bk, warps_m, warps_n = (candidates[name] for name in TILE_AXES)
    threads = threads_of(candidates)
    product = facts.product
    undivided = np.zeros(len(bm), dtype=bool)
    for operand, extent in ((product.a, bm), (product.b, bn)):
        vectors = extent * bk // operand.vector_width
        run = np.where(operand.along == "r", bk, extent) // operand.vector_width
        undivided |= ((vectors % threads != 0) & (vectors > threads)) | (threads % np.maximum(run, 1) != 0) | (run == 0)
    return [
        ("threads below two warps or above eight", (threads < 2 * WARP) | (threads > 8 * WARP)),
        ("a warp has no whole matrices", (bm % (M * warps_m) != 0) | (bn % (N * warps_n) != 0)),
        ("a thread holds too many sums", sums_of(candidates) > MOST_SUMS),
        ("tile of m is more than twice the extent", (bm >= 2 * max(product.m, M)) & (bm > M)),
        ("tile of n is more than twice the extent", (bn >= 2 * max(product.n, M)) & (bn > M)),
        ("tile of r is more than twice the extent", (bk >= 2 * max(product.r, facts.shape.depth)) & (bk > 16)),
        ("loads of a tile do not divide among the threads", undivided),
    ]


def rules(facts: TensorCoreFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Reasons for which candidates with feasible tiles are infeasible or certainly wasteful, and a mask of the rows that each rejects."""
    split, stages = candidates["split"], candidates["stages"]
    steps, steps_each = steps_of(facts.product, candidates)
    registers = registers_of(facts, candidates)
    return [
        ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
        ("registers exceed a thread's", registers > machine.registers_per_thread_max),
        ("registers exceed a processor's", registers * threads_of(candidates) > machine.registers_per_processor),
        ("more stages than steps", (stages > 2) & (stages > steps_each)),
        ("a cluster does not divide the steps evenly", (candidates["cluster"] > 0) & (steps % split != 0)),
        ("a split would have nothing to reduce", (split > 1) & ((split - 1) * steps_each >= steps)),
        ("a split reduces fewer than two steps", (split > 1) & (steps_each < 2)),
        ("a thread holds too many sums beside pairs", (candidates["pairs"] > 0) & (sums_of(candidates) > MOST_SUMS // 2)),
        ("a sum of so few products is more accurate on CUDA cores", (candidates["pairs"] > 0) & (facts.product.r < FEWEST_OF_PAIRS)),
    ]


def columns_of(schedule: TensorCoreSchedule) -> dict[str, np.ndarray]:
    """One schedule as columns of a single row."""
    return {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}


def threads_of(candidates: Columns) -> np.ndarray:
    """Threads of a block."""
    threads: np.ndarray = WARP * candidates["warps_m"] * candidates["warps_n"]
    return threads


def sums_of(candidates: Columns) -> np.ndarray:
    """Sums that each thread holds."""
    sums: np.ndarray = candidates["block_m"] * candidates["block_n"] // threads_of(candidates)
    return sums


def matrices_of(candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of 16 rows and of 8 columns in a warp's part of the tile."""
    return candidates["block_m"] // (M * candidates["warps_m"]), candidates["block_n"] // (N * candidates["warps_n"])


def shared_bytes_of(facts: TensorCoreFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: for both tiles one buffer per stage (at least two), but no more than there are steps; afterwards sums that a
    cluster exchanges, or that are staged, are in their place."""
    bm, bn, bk = (candidates[name] for name in ("block_m", "block_n", "block_k"))
    buffers = np.minimum(np.maximum(candidates["stages"], 2), steps_of(facts.product, candidates)[1])
    sums = facts.product.element_bytes * bm * (bn + PARTS_PADDING) * (candidates["cluster"] | candidates["staged"])
    needed: np.ndarray = np.maximum(buffers * (bm + bn) * bk * facts.element_bytes, sums)
    return needed


def registers_of(facts: TensorCoreFacts, candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: sums, two sets of fragments (of pairs one, high and low, and eight sums that hide one another's
    latency), vectors on their way to shared memory, and addresses."""
    rows, columns = matrices_of(candidates)
    product, threads = facts.product, threads_of(candidates)
    addresses: np.ndarray = np.full(len(threads), 40)
    for operand, extent in ((product.a, candidates["block_m"]), (product.b, candidates["block_n"])):
        vectors = -(-extent * candidates["block_k"] // (threads * operand.vector_width))
        words = -(-operand.vector_width * facts.element_bytes // 4)
        held = np.where(candidates["stages"] > 1, 0, vectors * words)
        addresses = addresses + held + np.where(operand.along == "r", vectors * (3 if operand.guarded else 1), 2)
    registers: np.ndarray = sums_of(candidates) + 2 * (4 * rows + 2 * columns) + 8 * facts.shape.sums.size * candidates["pairs"] + addresses
    return registers


def blocks_to_ask_for(schedule: TensorCoreSchedule, facts: TensorCoreFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler, which caps a thread's registers at 1.5 times the estimate, as for CUDA cores."""
    registers = int(registers_of(facts, columns_of(schedule))[0])
    return max(1, machine.registers_per_processor // (schedule.threads * (registers * 3 // 2)))
