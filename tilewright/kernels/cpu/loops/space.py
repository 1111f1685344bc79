"""Schedules of CPU kernels without tiles (map, window, row reduction, scan): one candidate, with the machine's vector width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of


@dataclass(frozen=True)
class LoopSchedule:
    """Threads over the outer axes, vectors of `lanes` float32 along the innermost."""

    lanes: int

    def __str__(self) -> str:
        return f"loops lanes={self.lanes}"


def loop_space(machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The only candidate, with column lanes; nothing is rejected."""
    return product_of({"lanes": (machine.vector_lanes(),)}), {}
