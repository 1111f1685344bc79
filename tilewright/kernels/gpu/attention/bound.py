"""Lower bounds on the time of attention."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import busiest, fma_cycles, longest_of
from tilewright.kernels.gpu.counts import TileCounts


def attention_bound(facts: AttentionFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: both products of the queries and the keys that a causal mask leaves; masks that are data skip nothing.

    fma: spread evenly over all schedulers; without a causal mask also those of whole tiles of queries, which stay on their processor.  issue: these,
    and an exponential for each weight.  chain: the multiply-adds of an element of the result depend on each other, one for each key that the last
    query of a part of the keys sees.  memory: the results, since loads of masks and biases may be guarded, and what an epilogue reads may be as well.

    Worked example, h200: 16 heads of 2048 queries and keys of 64 elements: 16 * 2048 * 2048 * 128 multiply-adds, 32 lanes on each of 528 schedulers:
    508,400 cycles, 257 us."""
    schedulers = machine.schedulers_per_processor
    one = np.ones(1, dtype=np.int64)
    weights = facts.batch * facts.m * float(facts.passes(one, one)[0]) / machine.warp_size
    each = facts.n * (facts.r + facts.d) / machine.warp_size
    products = np.full(len(counts), weights * (facts.r + facts.d) / (machine.processors * schedulers))
    split = candidates["split"]
    if facts.shift is None:
        whole = busiest(facts.batch * (facts.m // candidates["block_m"]), machine.processors) * candidates["block_m"]
        products = np.maximum(products, np.where(split > 1, 0, whole * each / schedulers))
    return longest_of(
        machine,
        fma=products * fma_cycles(machine),
        issue=products * (1 + 1 / (facts.r + facts.d)),
        chain=facts.n / split * machine.fma_latency_cycles if facts.shift is None else 0.0,
        shared=0.0,
        moved=share * counts.result_bytes,
        others=np.zeros(len(counts)),
    )
