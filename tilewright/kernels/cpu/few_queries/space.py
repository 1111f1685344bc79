"""Schedules of attention of few queries on a CPU (decoding): a thread computes all queries of a head for a part of its keys.

Vectors hold elements of keys and of values, which are read once, as they are stored. `parts` threads share the keys of a head, and a second kernel
combines what each has found. The weights of `keys` keys at a time are in level 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns, ceil_divided, product_of, reject

MOST_QUERIES = 8
"""Maximum queries of a head: with more, vectors of queries (the schema `attention`) leave fewer lanes idle than this schema has shuffles."""
ACCUMULATORS = 8
"""Maximum vectors of sums in registers."""
KEYS = (64, 128, 256)
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class FewQueriesSchedule:
    """One candidate; see the module's docstring. Vectors have `lanes` elements."""

    keys: int
    parts: int
    lanes: int

    def __str__(self) -> str:
        return f"few queries by vectors of {self.lanes}, {self.keys} keys at a time, keys in {self.parts} part{'s' * (self.parts > 1)}"


def part_tiles(facts: AttentionFacts, candidates: Columns) -> np.ndarray:
    """Tiles of keys of each part but the last, which may have fewer."""
    return ceil_divided(ceil_divided(facts.n, candidates["keys"]), candidates["parts"])


def few_queries_space(facts: AttentionFacts, machine: Machine, threads: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns keys and parts, and the number rejected for each reason."""
    candidates = product_of({"keys": KEYS, "parts": PARTS})
    keys, parts = candidates["keys"], candidates["parts"]
    return reject(
        candidates,
        [
            ("a tile has more than twice as many keys as there are", (keys >= 2 * facts.n) & (keys > KEYS[0])),
            ("a part has no keys", ceil_divided(facts.n, keys * part_tiles(facts, candidates)) != parts),
            ("more parts than threads could use", (parts > 1) & (parts * facts.batch >= 8 * threads)),
        ],
    )
