"""Schedules of the `attention` schema on a CPU: a thread computes a tile of queries for one head, and passes over its keys tile by tile.

Vectors hold queries: the tile has `vectors` vectors of them. `rows` keys (or columns of the values) by these vectors are the accumulators of both
products, in registers. The weights of `keys` keys at a time are in level 1 or 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns, product_of, reject

VECTORS = (1, 2, 3, 4)
ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)
KEYS = (32, 64, 128, 256, 512)
"""Keys of a tile, at most: tiles of one schedule are equal up to the remainder of the division."""


@dataclass(frozen=True)
class CpuAttentionSchedule:
    """One candidate; see the module's docstring. Vectors have `lanes` elements."""

    vectors: int
    rows: int
    keys: int
    lanes: int

    @property
    def queries(self) -> int:
        return self.vectors * self.lanes

    def __str__(self) -> str:
        return f"attention {self.vectors}x{self.lanes} queries by {self.rows} keys or columns in registers, {self.keys} keys at a time"


def working_bytes(facts: AttentionFacts, candidates: Columns, lanes: int) -> np.ndarray:
    """Bytes that a thread reads and writes again for each tile of keys: queries, weights, sums, keys and values."""
    queries = candidates["vectors"] * lanes
    needed: np.ndarray = facts.element_bytes * (queries * (facts.r + candidates["keys"] + facts.d) + candidates["keys"] * (facts.r + facts.d))
    return needed


def attention_space(facts: AttentionFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns vectors, rows and keys; and the number rejected for each reason."""
    # as many tiles as of the usual sizes, but all of about the same size
    keys = sorted({-(-facts.n // -(-facts.n // most)) for most in KEYS})
    candidates = product_of({"vectors": VECTORS, "rows": ROWS, "keys": keys})
    vectors, rows = candidates["vectors"], candidates["rows"]
    lanes, registers, level2 = machine.vector_lanes(), machine.vector_registers, machine.cache(2)
    assert level2 is not None, f"{machine.name} lacks the facts about its caches"
    return reject(
        candidates,
        [
            # the accumulators, `vectors` vectors of queries or weights, and the broadcast element
            (f"more than {registers} vector registers", (rows + 1) * vectors + 1 > registers),
            ("a vector more than there are queries", (vectors > 1) & ((vectors - 1) * lanes >= facts.m)),
            ("more rows than keys and columns", (rows > 1) & (rows > max(facts.n, facts.d))),
            ("a tile exceeds half of level 2", working_bytes(facts, candidates, lanes) > level2.bytes // 2),
        ],
    )
