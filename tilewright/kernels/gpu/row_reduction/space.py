"""Schedules of the `row reduction` schema on a GPU: the rows per block and the threads that share one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject, vector_widths
from tilewright.kernels.gpu.counts import WORD


@dataclass(frozen=True)
class RowReductionFacts:
    """`rows` of at most `columns` reduced elements. `row_contiguous`: elements of neighbouring rows (not columns) are adjacent in memory.

    `vector_width`: the widest vector that all accesses along the columns allow. `stages`: number of successive reductions.
    `element_bytes`: of the narrowest floats in memory."""

    rows: int
    columns: int
    row_contiguous: bool
    vector_width: int
    stages: int
    bytes_read: int
    bytes_written: int
    flops: float
    accumulator_bytes: int
    element_bytes: int = WORD


@dataclass(frozen=True)
class RowReductionSchedule:
    """A block of rows * threads_per_row threads: `threads_per_row` (a power of two) threads reduce one row together."""

    rows: int
    threads_per_row: int
    vector_width: int

    @property
    def threads(self) -> int:
        return self.rows * self.threads_per_row

    def __str__(self) -> str:
        return f"row reduction rows={self.rows} threads_per_row={self.threads_per_row} vector_width={self.vector_width}"


def row_reduction_space(facts: RowReductionFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns rows, threads_per_row, vector_width; and the number rejected for each reason."""
    powers = [2**i for i in range(11)]
    candidates = product_of({"rows": powers, "threads_per_row": powers, "vector_width": vector_widths(facts.vector_width)})
    threads = candidates["rows"] * candidates["threads_per_row"]
    shared = threads * facts.accumulator_bytes * (candidates["threads_per_row"] > 1)
    smallest = min(32, facts.rows * facts.columns)
    return reject(
        candidates,
        [
            ("threads exceed a block", threads > machine.threads_per_block),
            ("less than a warp", threads < smallest),
            ("accesses are not adjacent or aligned for vectors this wide", candidates["vector_width"] > facts.vector_width),
            ("shared memory exceeds a block's", shared > machine.shared_bytes_per_block),
            (
                "more threads than columns",
                (candidates["threads_per_row"] > 1) & (candidates["threads_per_row"] * candidates["vector_width"] >= 2 * max(facts.columns, 1)),
            ),
            ("more rows a block than there are", (candidates["rows"] > 1) & (candidates["rows"] >= 2 * facts.rows)),
        ],
    )
