"""Schedules of the `window` schema on a GPU: each thread reduces small windows serially for its output elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.schedule.columns import product_of, reject
from tilewright.schedule.gpu_map import PointProblem

UNROLLED_WINDOW = 64
"""Windows of at most this many elements are unrolled fully: their loads are then independent of one another."""


@dataclass(frozen=True)
class WindowSchedule:
    """`items` neighbouring positions a thread along the axis just outside the fastest one: their windows overlap in the cache."""

    threads: int
    items: int
    lanes: int

    def __str__(self) -> str:
        return f"window threads={self.threads} items={self.items} lanes={self.lanes}"


def window_space(problem: PointProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns threads, items, lanes; and how many were rejected by reason."""
    rows = product_of({"threads": (32, 64, 128, 256), "items": (1, 2, 4), "lanes": (1, 2, 4)})
    blocks = -(-problem.points // (rows["lanes"] * rows["items"] * rows["threads"]))
    return reject(
        rows,
        [
            ("threads exceed a block", rows["threads"] > machine.threads_per_block),
            ("accesses are not adjacent or aligned for vectors this wide", rows["lanes"] > problem.lanes),
            (
                "unrolled windows exceed the instruction cache",
                (rows["items"] > 1) & (rows["items"] * problem.reduced > 128),
            ),
            ("several items a thread leave processors idle", (rows["items"] > 1) & (blocks < 4 * machine.processors)),
        ],
    )
