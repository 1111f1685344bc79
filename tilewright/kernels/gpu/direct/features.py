"""What learned models read of candidates of direct convolution besides counts."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import Counts
from tilewright.kernels.gpu.direct.counts import direct_counts
from tilewright.kernels.gpu.direct.schedule import DirectProblem, registers_of, shared_bytes_of, threads_of
from tilewright.kernels.gpu.features import described

NUMBER = 1


def direct_features(problem: DirectProblem, rows: Columns) -> dict[str, np.ndarray]:
    sizes = {entry.name: getattr(problem, entry.name) for entry in fields(problem)}
    sizes["height"] = problem.height * problem.images * problem.groups
    return described(NUMBER, rows, sizes)


def own_counts(rows: Columns, problem: DirectProblem, machine: Machine) -> Counts:
    """`direct_counts` with our kernels' own resources, which it only estimates."""
    counts = direct_counts(rows, problem, machine)
    registers = registers_of(rows, problem).astype(np.float64)
    shared = shared_bytes_of(rows, problem).astype(np.float64)
    resident = resident_blocks(machine, threads_of(rows), registers, shared).astype(np.float64)
    return replace(counts, registers=registers, shared_bytes=shared, resident=resident)
