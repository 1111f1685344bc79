"""Schedules of CPU kernels without tiles (map, window, row reduction, scan): one candidate, with the machine's vector width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject


@dataclass(frozen=True)
class LoopSchedule:
    """Threads over the outer axes, vectors of `lanes` float32 along the innermost."""

    lanes: int

    def __str__(self) -> str:
        return f"loops lanes={self.lanes}"


ACROSS = (0, 1, 2, 4, 8)
"""Vectors of neighbouring rows that are candidates: more of them use lines of memory better, and fewer leave registers and work for threads."""


@dataclass(frozen=True)
class RowSchedule:
    """Threads over rows. across: vectors of neighbouring rows that are reduced together, one row in each lane; 0: the lanes divide each row."""

    lanes: int
    across: int = 0

    def __str__(self) -> str:
        return f"loops lanes={self.lanes} {f'rows={self.across * self.lanes}' if self.across else 'along rows'}"


def row_space(lane_extent: int, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Rows along lanes or, if `lane_extent` (0: none) rows are adjacent, across."""
    every = product_of({"lanes": (machine.vector_lanes(),), "across": ACROSS})
    across, lanes = every["across"], every["lanes"]
    return reject(
        every,
        [
            ("neighbouring rows are not adjacent", (across > 0) & (lane_extent == 0)),
            ("more vectors than rows", (across > 1) & (across * lanes > lane_extent)),
        ],
    )


def loop_space(machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The only candidate, with column lanes; nothing is rejected."""
    return product_of({"lanes": (machine.vector_lanes(),)}), {}
