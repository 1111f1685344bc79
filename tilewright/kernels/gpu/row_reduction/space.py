"""Schedules of the row reduction schema on a GPU: how many rows a block owns and how many threads share one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject


@dataclass(frozen=True)
class RowsProblem:
    """`rows` of at most `columns` reduced elements. `row_contiguous`: neighbouring rows (not neighbouring columns) lie next to one another.

    `lanes`: the widest vector that all accesses along the columns allow. `stages` counts the reductions that follow one another."""

    rows: int
    columns: int
    row_contiguous: bool
    lanes: int
    stages: int
    bytes_read: int
    bytes_written: int
    flops: float
    accumulator_bytes: int


@dataclass(frozen=True)
class RowsSchedule:
    """A block of rows * sharers threads: `sharers` (a power of two) threads reduce one row together."""

    rows: int
    sharers: int
    lanes: int

    @property
    def threads(self) -> int:
        return self.rows * self.sharers

    def __str__(self) -> str:
        return f"rows rows={self.rows} sharers={self.sharers} lanes={self.lanes}"


def rows_space(problem: RowsProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns rows, sharers, lanes; and how many were rejected by reason."""
    powers = [2**i for i in range(11)]
    rows = product_of({"rows": powers, "sharers": powers, "lanes": (1, 2, 4)})
    threads = rows["rows"] * rows["sharers"]
    shared = threads * problem.accumulator_bytes * (rows["sharers"] > 1)
    smallest = min(32, problem.rows * problem.columns)
    return reject(
        rows,
        [
            ("threads exceed a block", threads > machine.threads_per_block),
            ("less than a warp", threads < smallest),
            ("accesses are not adjacent or aligned for vectors this wide", rows["lanes"] > problem.lanes),
            ("shared memory exceeds a block's", shared > machine.shared_bytes_per_block),
            (
                "more threads than columns",
                (rows["sharers"] > 1) & (rows["sharers"] * rows["lanes"] >= 2 * max(problem.columns, 1)),
            ),
            ("more rows a block than there are", (rows["rows"] > 1) & (rows["rows"] >= 2 * problem.rows)),
        ],
    )
