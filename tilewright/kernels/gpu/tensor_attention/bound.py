"""Lower bounds on the time of attention on tensor cores."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import longest_of
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.tensor_attention.form import TensorAttentionFacts


def tensor_attention_bound(facts: TensorAttentionFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: both products of the queries and the keys that a causal mask leaves, spread evenly; masks that are data skip nothing.

    fma: at the machine's peak, which no product exceeds.  issue: products by `mma.sync`, and a power for each weight.  memory: the results, since
    loads of masks and biases may be guarded.

    Worked example, h200: 16 heads of 2048 queries and keys of 64 elements in float16: 17.2 Gflop at 989 Tflop/s: 17.4 us."""
    sizes = facts.attention
    one = np.ones(1, dtype=np.int64)
    scores = sizes.batch * sizes.m * float(sizes.passes(one, one)[0])
    schedulers = machine.processors * machine.schedulers_per_processor
    flops = 2 * scores * (sizes.r + sizes.d)
    instructions = np.where(candidates["wide"] > 0, 0, flops / (2 * M * N * facts.shape.depth)) + scores / machine.warp_size
    return longest_of(
        machine,
        fma=np.full(len(counts), flops / machine.peak_flops[PEAKS[facts.kind]] * machine.clock_hz),
        issue=instructions / schedulers,
        chain=0.0,
        shared=0.0,
        moved=share * counts.result_bytes,
        others=np.zeros(len(counts)),
    )
