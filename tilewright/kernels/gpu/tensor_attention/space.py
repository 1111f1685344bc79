"""Schedules of attention on tensor cores: a block computes a tile of queries for one head, and passes over its keys tile by tile.

Each of `warps` warps has block_m / warps queries, all block_n scores of each, and all d sums: rows are never divided among warps. Four warps may
multiply together, as a warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tilewright.codegen.intrinsics import wgmma
from tilewright.codegen.intrinsics.mma import REGISTER_BYTES, M, N
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns, product_of, reject
from tilewright.kernels.gpu.attention.space import SPLITS, splits_to_reject
from tilewright.kernels.gpu.tensor_attention.form import TensorAttentionFacts
from tilewright.kernels.gpu.warpgroup.space import BARRIER_BYTES

WARP = 32
WARPS_OF_GROUP = 4
MOST_GROUPS = 2
"""Warpgroups of a block."""
PANEL = 64
"""16-bit elements of a row of 128 bytes, of which factors of a warpgroup have whole ones."""


@dataclass(frozen=True)
class TensorAttentionSchedule:
    """One candidate. `stages`: buffers for keys and values, filled by asynchronous copies that run `stages` - 1 tiles ahead; 1: a buffer that is
    filled before it is read, through registers where there are no copies. `held` (0 or 1): queries stay in registers, instead of being loaded from
    shared memory for each tile of keys. `split`: parts of the keys, each with blocks of its own, which a second kernel puts together. `wide` (0 or
    1): warpgroups multiply (`wgmma`), and read queries, keys and values from shared memory. `turns` (0 or 1): the two of a block issue the products
    of their scores one after the other."""

    block_m: int
    block_n: int
    warps: int
    stages: int = 2
    held: int = 0
    split: int = 1
    wide: int = 0
    turns: int = 0

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def __str__(self) -> str:
        block = f"{self.block_m} queries x {self.block_n} keys"
        return (
            f"tensor attention block={block} warps={self.warps} stages={self.stages}"
            + " wgmma" * self.wide
            + " in turns" * self.turns
            + " held" * self.held
            + (f" split={self.split}" if self.split > 1 else "")
        )


AXES = {
    "block_m": (16, 32, 64, 128),
    "block_n": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3),
    "held": (0, 1),
    "split": SPLITS,
    "wide": (0, 1),
    "turns": (0, 1),
}
MOST_ROWS = 2
"""Matrices of 16 queries that a warp has at most: each has all scores and sums of its rows in registers."""


def tensor_attention_space(facts: TensorAttentionFacts, machine: Machine, tf32: bool) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The candidates, and the number rejected for each reason. `tf32`: whether float32 factors may be rounded to TF32."""
    if facts.kind == "tf32" and not tf32:
        return {entry.name: np.zeros(0, np.int64) for entry in fields(TensorAttentionSchedule)}, {"float32 may not be rounded to TF32": 1}
    candidates = product_of(AXES)
    bm, bn, warps, stages = (candidates[name] for name in ("block_m", "block_n", "warps", "stages"))
    registers, sizes = registers_of(facts, candidates), facts.attention
    rows, wide = bm // (M * warps), candidates["wide"] > 0
    return reject(
        candidates,
        [
            ("no warpgroups multiply such factors", wide & (not warpgroups_multiply(facts, machine))),
            ("a warpgroup has four warps of 16 queries", wide & ((warps % WARPS_OF_GROUP != 0) | (rows != 1))),
            # ptxas 13.0 gives registers of first factors that outlive a loop's iteration to the weights as well
            ("warpgroups read queries from shared memory", wide & (candidates["held"] > 0)),
            ("more warpgroups than a block has", wide & (warps > WARPS_OF_GROUP * MOST_GROUPS)),
            ("no two warpgroups take turns", (candidates["turns"] > 0) & (~wide | (warps != WARPS_OF_GROUP * MOST_GROUPS))),
            ("a warp has no whole matrices of queries", (bm % (M * warps) != 0) | (rows == 0)),
            ("a warp has too many queries", rows > MOST_ROWS),
            ("elements are too narrow to be copied asynchronously", (stages > 1) & (not facts.copies)),
            ("more than twice as many queries or keys as there are", ((bm >= 2 * sizes.m) & (bm > M)) | ((bn >= 2 * sizes.n) & (bn > 16))),
            ("more stages than tiles of keys", (stages > 2) & (stages > -(-sizes.n // (bn * candidates["split"])))),
            *splits_to_reject(sizes, candidates, machine),
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
            ("registers exceed a thread's", registers > machine.registers_per_thread_max),
            ("registers exceed a processor's", registers * threads_of(candidates) > machine.registers_per_processor),
        ],
    )


def warpgroups_multiply(facts: TensorAttentionFacts, machine: Machine) -> bool:
    """Whether `wgmma` can: values are no K-major factor, which 16-bit floats need not be, and rows of 128 bytes are swizzled as it reads them."""
    whole = facts.attention.r % PANEL == 0 and facts.attention.d % PANEL == 0 and facts.d <= wgmma.MOST_N
    return machine.has(wgmma.REQUIRES[0]) and facts.element_bytes == 2 and whole and facts.copies


def threads_of(candidates: Columns) -> np.ndarray:
    """Threads of a block."""
    threads: np.ndarray = WARP * candidates["warps"]
    return threads


def rows_of(candidates: Columns) -> np.ndarray:
    """Matrices of 16 queries of a warp."""
    rows: np.ndarray = candidates["block_m"] // (M * candidates["warps"])
    return rows


def shared_bytes_of(facts: TensorAttentionFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: the queries, and keys and values of each stage, but of no more tiles than a part has; and barriers by which
    warpgroups take turns.

    For 64 queries x 64 keys of 64 16-bit elements, two stages: 2 * (64 * 64 + 2 * 64 * (64 + 64)) = 40,960."""
    bm, bn = candidates["block_m"], candidates["block_n"]
    tiles = -(-facts.attention.n // bn)
    buffers = np.minimum(candidates["stages"], -(-tiles // candidates["split"]))
    turns = candidates["turns"] * MOST_GROUPS * BARRIER_BYTES
    needed: np.ndarray = facts.element_bytes * (bm * facts.r + buffers * bn * (facts.r + facts.d)) + turns
    return needed


def registers_of(facts: TensorAttentionFacts, candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: scores, sums, totals and greatest logits, queries that are held, fragments (two sets of those of keys or
    values), and addresses."""
    rows = rows_of(candidates)
    packed = REGISTER_BYTES // facts.element_bytes
    queries = facts.shape.a.size // packed * np.where(candidates["held"] > 0, facts.r // facts.shape.depth, 2)
    queries = np.where(candidates["wide"] > 0, 0, queries)
    sums = facts.shape.sums.size * (candidates["block_n"] // N + facts.d // N)
    fragments = 2 * 2 * facts.shape.b.size // packed + facts.shape.a.size // packed * rows
    # all weights of a tile are rounded before the first product of a warpgroup
    fragments = np.where(candidates["wide"] > 0, candidates["block_n"] // (2 * packed), fragments)
    registers: np.ndarray = 40 + rows * (sums + queries + 4) + fragments
    return registers


def blocks_to_ask_for(schedule: TensorAttentionSchedule, facts: TensorAttentionFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler: the blocks that are resident with the estimated registers, so that it uses what is left."""
    candidate = {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}
    return int(resident_blocks(machine, threads_of(candidate), registers_of(facts, candidate), shared_bytes_of(facts, candidate))[0])
