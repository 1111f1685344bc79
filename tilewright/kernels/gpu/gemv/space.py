"""Schedules of products of few rows: one column or vector of columns per thread, and threads that divide the reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, product_of, reject
from tilewright.kernels.gpu.gemm.space import ContractionFacts


@dataclass(frozen=True)
class GemvSchedule:
    """For a few rows of m: `columns` threads along n (each with a vector); `threads_along_r` threads and `split` blocks divide r."""

    columns: int
    threads_along_r: int
    split: int = 1

    @property
    def threads(self) -> int:
        return self.columns * self.threads_along_r

    def __str__(self) -> str:
        return f"gemv columns={self.columns} threads_along_r={self.threads_along_r} split={self.split}"


GEMV_ROWS = 8
"""Maximum rows of m that one thread accumulates."""
GATHERED = 16
"""Sums that one thread adds before a barrier, if more threads than these have a part of a result."""
MOST_TURNS, MOST_LOADS = 8, 36
"""Maximum unrolled iterations of the reduction, and maximum vector loads of theirs in flight in a thread."""


def lanes_of(facts: ContractionFacts) -> tuple[int, int]:
    """Lanes along n and along r of a load of B: one of them is 1."""
    return (facts.b.stream_width, 1) if facts.b.along == "own" else (1, facts.b.stream_width)


def steps_of(facts: ContractionFacts, split: Any) -> Any:
    """Loads of B along r by which a part of a split reduces a column, for a number or a column of parts; those of the last part may be fewer."""
    return -(-facts.r // (lanes_of(facts)[1] * split))


def turns_at_once(rows: int) -> int:
    """Iterations of the reduction whose loads a thread has in flight: in each, one of B and one for every row of A."""
    return min(MOST_TURNS, MOST_LOADS // (1 + rows))


def meeting_size(results: Any, threads_along_r: Any) -> Any:
    """Elements of shared memory in which the sums of a block's threads meet, for numbers or columns; 0 for one thread along r."""
    return results * (threads_along_r + 1) * (threads_along_r > 1)


def factor_loads(facts: ContractionFacts) -> int:
    """Loads of A in a turn of a thread: for each row a vector if A is adjacent along r as well, otherwise single elements."""
    _, lanes = lanes_of(facts)
    wide = facts.a.along == "r" and facts.a.stream_width >= lanes
    return facts.m * (1 if wide else lanes)


def meeting_sums(facts: ContractionFacts, candidates: Columns) -> np.ndarray:
    """Sums in shared memory that a thread adds after all have met there; 0 for one thread along r."""
    along, threads = candidates["threads_along_r"], candidates["columns"] * candidates["threads_along_r"]
    results = facts.m * lanes_of(facts)[0] * candidates["columns"]
    gathered = GATHERED * -(-results * (along // GATHERED) // threads)
    last = np.where(along > GATHERED, along // GATHERED, along) * -(-results // threads)
    return np.where(along > 1, last + (along > GATHERED) * gathered, 0)


def gemv_space(facts: ContractionFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns columns, threads_along_r, split; and the number rejected for each reason. There are no candidates for more rows than
    GEMV_ROWS."""
    powers = [2**i for i in range(11)]
    candidates = product_of({"columns": powers, "threads_along_r": powers, "split": (1, 2, 4, 8, 16)})
    threads = candidates["columns"] * candidates["threads_along_r"]
    lanes, r_lanes = lanes_of(facts)
    shared = meeting_size(candidates["columns"] * lanes * facts.m, candidates["threads_along_r"]) * facts.element_bytes
    each = steps_of(facts, candidates["split"])
    return reject(
        candidates,
        [
            ("rows of n are reduced, which no block holds", np.full(len(threads), facts.row_stages > 0)),
            ("too many rows of m", np.full(len(threads), facts.m > GEMV_ROWS)),
            ("threads below a warp or above 512", (threads < 32) | (threads > min(512, machine.threads_per_block))),
            ("more columns than n", (candidates["columns"] > 1) & (candidates["columns"] * lanes >= 2 * facts.n)),
            ("fewer than four reduced elements a thread", (candidates["threads_along_r"] > 1) & (candidates["threads_along_r"] * 4 > each)),
            ("a split would have nothing to reduce", (candidates["split"] - 1) * each * r_lanes >= facts.r),
            ("shared memory exceeds 48 KiB", shared > 48 * 1024),
        ],
    )
