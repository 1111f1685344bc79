"""Schedules of attention on tile registers: a thread computes a tile of queries for one head, and passes over its keys block by block.

The tile has `vectors` vectors of queries, which are the columns of tile registers. The scores of `keys` keys at a time, and their weights in pairs,
are in level 1 or 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.codegen.intrinsics.amx import FACTOR, TILE_CHANNELS, TILE_PIXELS
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.kernels.columns import Columns, product_of, reject
from tilewright.kernels.cpu.amx.space import CHUNK
from tilewright.kernels.cpu.tile_attention.form import TileAttentionFacts

VECTORS = (1, 2, 3, 4, 6, 8)
KEYS = (64, 128, 256, 512)
"""Keys of a block, at most: blocks of one schedule are equal up to the remainder of the division."""


@dataclass(frozen=True)
class TileAttentionSchedule:
    """One candidate; see the module's docstring."""

    vectors: int
    keys: int

    @property
    def queries(self) -> int:
        return self.vectors * TILE_CHANNELS

    def __str__(self) -> str:
        return f"attention on tile registers, {self.queries} queries, {self.keys} keys at a time"


def working_bytes(facts: TileAttentionFacts, candidates: Columns) -> np.ndarray:
    """Bytes that a thread reads and writes again for each block of keys: scores, sums and weights, queries, keys and values."""
    queries, keys, sizes = candidates["vectors"] * TILE_CHANNELS, candidates["keys"], facts.attention
    needed: np.ndarray = size_of(FLOAT32) * queries * (keys + facts.columns) + size_of(FACTOR) * (
        queries * (keys + sizes.r) + keys * (sizes.r + facts.columns)
    )
    return needed


def tile_attention_space(facts: TileAttentionFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with a column for each field of the schedule, and the number rejected for each reason."""
    n = facts.attention.n
    # as many blocks as of the usual sizes, but all of about the same size
    keys = sorted({CHUNK * -(-n // (CHUNK * -(-n // most))) for most in KEYS})
    candidates = product_of({"vectors": VECTORS, "keys": keys})
    vectors, level2 = candidates["vectors"], machine.cache(2)
    assert level2 is not None, f"{machine.name} lacks the facts about its caches"
    rest = n % candidates["keys"]
    return reject(
        candidates,
        [
            ("a vector more than there are queries", (vectors > 1) & ((vectors - 1) * TILE_CHANNELS >= facts.attention.m)),
            ("the last block does not fill a tile", (rest > 0) & (rest < TILE_PIXELS)),
            ("a tile exceeds half of level 2", working_bytes(facts, candidates) > level2.bytes // 2),
        ],
    )
