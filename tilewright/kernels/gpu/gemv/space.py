"""Schedules of products of few rows: a thread a column or vector of columns, threads that divide the reduction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject
from tilewright.kernels.gpu.gemm.space import ContractionProblem


@dataclass(frozen=True)
class GemvSchedule:
    """For a few rows of m: `columns` threads along n (each with a vector), `sharers` threads that divide r, `split` blocks that do."""

    columns: int
    sharers: int
    split: int = 1

    @property
    def threads(self) -> int:
        return self.columns * self.sharers

    def __str__(self) -> str:
        return f"gemv columns={self.columns} sharers={self.sharers} split={self.split}"


GEMV_ROWS = 8
"""The most rows of m that one thread accumulates."""


def gemv_space(problem: ContractionProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns columns, sharers, split; and how many were rejected by reason. None for more rows than GEMV_ROWS."""
    powers = [2**i for i in range(11)]
    rows = product_of({"columns": powers, "sharers": powers, "split": (1, 2, 4, 8, 16)})
    threads = rows["columns"] * rows["sharers"]
    along_n = problem.b.along == "own"
    lanes = problem.b.lanes if along_n else 1
    r_lanes = 1 if along_n else problem.b.lanes
    shared = threads * lanes * problem.m * problem.element_bytes * (rows["sharers"] > 1)
    each = -(-problem.r // (r_lanes * rows["split"]))
    return reject(
        rows,
        [
            ("rows of n are reduced, which no block holds", np.full(len(threads), problem.row_stages > 0)),
            ("too many rows of m", np.full(len(threads), problem.m > GEMV_ROWS)),
            ("threads below a warp or above 512", (threads < 32) | (threads > min(512, machine.threads_per_block))),
            ("more columns than n", (rows["columns"] > 1) & (rows["columns"] * lanes >= 2 * problem.n)),
            ("fewer than four reduced elements a thread", (rows["sharers"] > 1) & (rows["sharers"] * 4 > each)),
            ("a split would have nothing to reduce", (rows["split"] - 1) * each * r_lanes >= problem.r),
            ("shared memory exceeds 48 KiB", shared > 48 * 1024),
        ],
    )
