"""Schedules of the `scan` schema on a GPU: rows per block, threads that share a row, and elements of each in a turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject


@dataclass(frozen=True)
class ScanFacts:
    """`rows` scans of `columns` elements each. `row_contiguous`: rows are adjacent in the output, not the elements of a row."""

    rows: int
    columns: int
    bytes_read: int
    bytes_written: int
    accumulator_bytes: int
    row_contiguous: bool


@dataclass(frozen=True)
class ScanSchedule:
    """A block has `rows` rows. `threads_per_row` threads scan one row in turns of `items` successive elements each; one thread alone has one item."""

    rows: int
    threads_per_row: int
    items: int = 1

    @property
    def threads(self) -> int:
        return self.rows * self.threads_per_row

    def __str__(self) -> str:
        return f"scan rows={self.rows} threads_per_row={self.threads_per_row} items={self.items}"


MOST_THREADS = 1024
"""Maximum threads of a block: few long rows have no other threads to hide their latencies."""
ITEMS = (1, 2, 4, 8)


def scan_space(facts: ScanFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns rows, threads_per_row, items; and the number rejected for each reason."""
    most = MOST_THREADS.bit_length()
    candidates = product_of({"rows": [2**i for i in range(9)], "threads_per_row": [2**i for i in range(most)], "items": list(ITEMS)})
    threads, shared = candidates["rows"] * candidates["threads_per_row"], candidates["threads_per_row"] > 1
    return reject(
        candidates,
        [
            ("threads exceed a block", threads > min(MOST_THREADS, machine.threads_per_block)),
            ("shared memory exceeds a block's", 2 * threads * shared * facts.accumulator_bytes > machine.shared_bytes_per_block),
            ("one thread keeps no elements", ~shared & (candidates["items"] > 1)),
            ("more elements a turn than a row has", shared & (candidates["threads_per_row"] * candidates["items"] >= 2 * facts.columns)),
            ("more rows a block than there are", (candidates["rows"] > 1) & (candidates["rows"] >= 2 * facts.rows)),
        ],
    )
