"""Schedules of the `scan` schema on a GPU: rows per block, and threads that scan contiguous chunks of one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject


@dataclass(frozen=True)
class ScanFacts:
    """`rows` scans of `columns` elements each."""

    rows: int
    columns: int
    bytes_read: int
    bytes_written: int
    accumulator_bytes: int


@dataclass(frozen=True)
class ScanSchedule:
    """`threads_per_row` threads scan one row, each its own chunk, starting from the totals of the previous chunks. A block has `rows` rows."""

    rows: int
    threads_per_row: int

    @property
    def threads(self) -> int:
        return self.rows * self.threads_per_row

    def __str__(self) -> str:
        return f"scan rows={self.rows} threads_per_row={self.threads_per_row}"


def scan_space(facts: ScanFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns rows, threads_per_row; and the number rejected for each reason."""
    powers = [2**i for i in range(9)]
    candidates = product_of({"rows": powers, "threads_per_row": powers})
    threads = candidates["rows"] * candidates["threads_per_row"]
    return reject(
        candidates,
        [
            ("threads exceed a block", threads > min(256, machine.threads_per_block)),
            ("shared memory exceeds a block's", threads * facts.accumulator_bytes > machine.shared_bytes_per_block),
            ("more threads than elements of a row", (candidates["threads_per_row"] > 1) & (2 * candidates["threads_per_row"] > facts.columns)),
            ("more rows a block than there are", (candidates["rows"] > 1) & (candidates["rows"] >= 2 * facts.rows)),
        ],
    )
