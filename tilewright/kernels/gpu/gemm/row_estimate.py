"""Cost of reducing whole rows in a contraction's block: the term that `kernels.gpu.gemm.row_epilogue` adds to the estimate of the product.

Every stage, the spill before and the store after pass over the block's BM x N elements in shared memory; a reduction also waits for the chain of a
thread's N / sharers combinations and for the tree over the sharers. Blocks of one processor share its issue slots but hide each other's waits.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.space import ContractionProblem

ELEMENT_INSTRUCTIONS = 12.0
"""Of one element in one pass, besides arithmetic: positions by division, the guard, load and store."""


def with_row_stages(estimate: Estimate, rows: Columns, problem: ContractionProblem, counts: TileCounts, machine: Machine) -> Estimate:
    """The estimate of the product alone with the term "rows" (seconds) added."""
    bm, threads, blocks = rows["block_m"], counts.threads, counts.blocks
    elements = bm * problem.n
    instructions = elements * ((problem.row_stages + 2) * ELEMENT_INSTRUCTIONS + problem.epilogue_flops) / machine.warp_size
    issue = instructions / machine.schedulers_per_processor * -(-blocks // machine.processors)
    cache = machine.cache(1)
    shared_latency = cache.latency_cycles if cache is not None else 30.0
    sharers = np.maximum(1, threads // bm)
    chain = problem.n / sharers * np.ceil(bm * sharers / threads) * shared_latency
    tree = (np.log2(sharers) + 2) * 2 * shared_latency
    waves = -(-blocks // (counts.resident * machine.processors))
    seconds = (issue + waves * problem.row_stages * (chain + tree)) / machine.clock_hz
    return Estimate({**estimate.terms, "rows": seconds}, estimate.overlapped)
