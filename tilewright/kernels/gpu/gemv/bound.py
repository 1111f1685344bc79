"""Times that no product of few rows can beat."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.bounds import fma_cycles, longest_of
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.gemm.space import ContractionProblem


def gemv_bound(rows: Columns, problem: ContractionProblem, counts: LaunchCounts, machine: Machine, share: float) -> Estimate:
    """Few rows of m: the products, and one load of at most `lanes` elements of B, spread evenly; no shared memory is certain."""
    count, split = length(rows), rows["split"]
    schedulers = machine.processors * machine.schedulers_per_processor
    products = problem.batch * problem.m * problem.n * problem.r / machine.warp_size / schedulers
    loads = problem.batch * problem.n * problem.r / (problem.b.lanes * machine.warp_size) / schedulers
    return longest_of(
        machine,
        fma=np.full(count, products * fma_cycles(machine)),
        issue=np.full(count, products + loads),
        chain=0.0,
        shared=0.0,
        moved=share * counts.memory_bytes,
        others=machine.launch_seconds * (split > 1),
    )
