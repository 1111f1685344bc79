"""Schedules of the `map` schema on a GPU: threads a block, elements a thread, and the width of its loads and stores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject


@dataclass(frozen=True)
class PointProblem:
    """What the cost of one element a thread depends on; map and window have it in common.

    `points` counts scalar elements of the output; `lanes` is the widest vector that every access allows; `flops` is for one element.
    Bytes are those that move at least once; `requests` counts loads and stores that one thread makes for one element or vector."""

    points: int
    lanes: int
    bytes_read: int
    bytes_written: int
    flops: float
    requests: int
    reduced: int = 1


@dataclass(frozen=True)
class MapSchedule:
    """`items` elements or vectors a thread, neighbouring threads at neighbouring ones."""

    threads: int
    items: int
    lanes: int

    def __str__(self) -> str:
        return f"map threads={self.threads} items={self.items} lanes={self.lanes}"


def map_space(problem: PointProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns threads, items, lanes; and how many were rejected by reason."""
    rows = product_of({"threads": (64, 128, 256, 512), "items": (1, 2, 4, 8), "lanes": (1, 2, 4)})
    vectors = -(-problem.points // rows["lanes"])
    blocks = -(-vectors // (rows["threads"] * rows["items"]))
    return reject(
        rows,
        [
            ("threads exceed a block", rows["threads"] > machine.threads_per_block),
            ("accesses are not adjacent or aligned for vectors this wide", rows["lanes"] > problem.lanes),
            ("several items a thread leave processors idle", (rows["items"] > 1) & (blocks < 4 * machine.processors)),
        ],
    )
