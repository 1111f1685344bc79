"""Schedules of the scan schema on a GPU: rows a block, and threads that scan contiguous chunks of one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject


@dataclass(frozen=True)
class PrefixProblem:
    """`rows` scans of `columns` elements each."""

    rows: int
    columns: int
    bytes_read: int
    bytes_written: int
    accumulator_bytes: int


@dataclass(frozen=True)
class PrefixSchedule:
    """`sharers` threads scan one row: each its own chunk, after the totals of the chunks before it."""

    rows: int
    sharers: int

    @property
    def threads(self) -> int:
        return self.rows * self.sharers

    def __str__(self) -> str:
        return f"prefix rows={self.rows} sharers={self.sharers}"


def prefix_space(problem: PrefixProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns rows, sharers; and how many were rejected by reason."""
    powers = [2**i for i in range(9)]
    rows = product_of({"rows": powers, "sharers": powers})
    threads = rows["rows"] * rows["sharers"]
    return reject(
        rows,
        [
            ("threads exceed a block", threads > min(256, machine.threads_per_block)),
            ("shared memory exceeds a block's", threads * problem.accumulator_bytes > machine.shared_bytes_per_block),
            ("more threads than elements of a row", (rows["sharers"] > 1) & (2 * rows["sharers"] > problem.columns)),
            ("more rows a block than there are", (rows["rows"] > 1) & (rows["rows"] >= 2 * problem.rows)),
        ],
    )
