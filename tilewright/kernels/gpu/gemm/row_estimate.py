"""Cost of reducing whole rows in a contraction's block: the term that `kernels.gpu.gemm.row_epilogue` adds to the estimate of the product.

Every stage, the spill before and the store after make one pass over the block's BM x N elements in shared memory. A reduction also waits for the
chain of a thread's N / threads_per_row combinations and for the tree over these threads. Blocks of one processor share its issue slots but hide each
other's latencies.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts

ELEMENT_INSTRUCTIONS = 12.0
"""Instructions per element and pass, besides arithmetic: positions by division, the guard, load and store."""


def with_row_stages(estimate: Estimate, candidates: Columns, facts: ContractionFacts, counts: TileCounts, machine: Machine) -> Estimate:
    """The estimate of the product alone with the term "rows" (seconds) added."""
    bm, threads, blocks = candidates["block_m"], counts.threads, counts.blocks
    elements = bm * facts.n
    instructions = elements * ((facts.row_stages + 2) * ELEMENT_INSTRUCTIONS + facts.epilogue_flops) / machine.warp_size
    issue = instructions / machine.schedulers_per_processor * -(-blocks // machine.processors)
    cache = machine.cache(1)
    shared_latency = cache.latency_cycles if cache is not None else 30.0
    threads_per_row = np.maximum(1, threads // bm)
    chain = facts.n / threads_per_row * np.ceil(bm * threads_per_row / threads) * shared_latency
    tree = (np.log2(threads_per_row) + 2) * 2 * shared_latency
    waves = -(-blocks // (counts.resident * machine.processors))
    seconds = (issue + waves * facts.row_stages * (chain + tree)) / machine.clock_hz
    return replace(estimate, terms={**estimate.terms, "rows": seconds})
