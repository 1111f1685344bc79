"""Lower bounds on the time of products of few rows."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.bounds import fma_cycles, longest_of
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts


def gemv_bound(facts: ContractionFacts, candidates: Columns, counts: LaunchCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: the multiply-adds and the vector loads of B, spread evenly; no use of shared memory is certain."""
    count, split = length(candidates), candidates["split"]
    schedulers = machine.processors * machine.schedulers_per_processor
    products = facts.batch * facts.m * facts.n * facts.r / machine.warp_size / schedulers
    loads = facts.batch * facts.n * facts.r / (facts.b.stream_width * machine.warp_size) / schedulers
    return longest_of(
        machine,
        fma=np.full(count, products * fma_cycles(machine)),
        issue=np.full(count, products + loads),
        chain=0.0,
        shared=0.0,
        moved=share * counts.memory_bytes,
        others=machine.launch_seconds * (split > 1),
    )
