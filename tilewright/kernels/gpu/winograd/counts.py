"""Data movement and resources of the product of Winograd's algorithm in three kernels."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.gpu.counts import Counts
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.winograd.space import WinogradProblem
from tilewright.kernels.winograd_transform import OUTPUT_TILES


def winograd_counts(rows: Columns, problem: WinogradProblem, machine: Machine) -> Counts:
    """Those of the batched product, which takes most of the time."""
    found: dict[str, np.ndarray] = {}
    for size, product in zip(OUTPUT_TILES, problem.products, strict=True):
        which = rows["output_tile"] == size
        counts = contraction_counts(take(rows, which), product, machine)
        for entry in fields(Counts):
            found.setdefault(entry.name, np.zeros(length(rows)))[which] = getattr(counts, entry.name)
    return Counts(**found)
