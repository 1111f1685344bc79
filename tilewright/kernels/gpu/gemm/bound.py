"""Lower bounds on the time of the implicit GEMM."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import WIDEST, fma_cycles, live, longest_of, steps_of_busiest
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts, copied


def contraction_bound(facts: ContractionFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: tiles of block_m x block_n, with `split` blocks per tile that share the steps of block_k.

    Padding is computed too (rows past the end repeat the last, and the reduction is padded with zeros in shared memory), so every step of every block
    is whole, except for the elements of thread_m and thread_n that `live` omits. With the warp steps of the busiest scheduler:

    fma: BK TM TN per warp step, 32 lanes per scheduler.  issue: these, one load from shared memory for every four of a thread's BK (TM + TN)
    elements, and each warp's loads or copies of A and B; a scheduler issues one instruction per cycle. chain: an element's multiply-adds depend on
    each other: BK latencies for each step of a part.  shared: a processor serves one load per cycle (equal addresses merged), and stores into the
    tiles at full bandwidth.  memory: distinct bytes (all of a buffer, but at most one element per evaluation).  A split without a cluster needs a
    second kernel, and so one more launch.

    Worked example, h200: 64 x 64 x 16, thread 4 x 4, m = n = 1024, r = 1024: 256 blocks of 8 warps, two on some processor, 64 steps: ceil(2 * 8 / 4)
    * 64 * 16 * 16 = 65536 cycles, 33 us; spread evenly it would be 32."""
    bm, bn, bk, tm, tn, split = (candidates[k] for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    threads, warps = counts.threads, counts.warps
    steps, block_steps, warp_steps = steps_of_busiest(counts, machine)
    live_m, live_n = live(facts.m, bm, tm), live(facts.n, bn, tn)
    products = bk * live_m * live_n
    reads = -(-bk * (live_m + live_n) // WIDEST)
    fetches = bm * bk // (facts.a.vector_width * threads) + bn * bk // (facts.b.vector_width * threads)
    staged_a, staged_b = (facts.staged_bytes(operand, copied(candidates)) for operand in (facts.a, facts.b))
    written = (bm * staged_a + bn * staged_b) * bk / machine.shared_bytes_per_cycle
    return longest_of(
        machine,
        fma=warp_steps * products * fma_cycles(machine),
        issue=warp_steps * (products + reads + fetches),
        chain=steps * bk * machine.fma_latency_cycles,
        shared=block_steps * (warps * reads + written),
        moved=share * counts.memory_bytes,
        others=machine.launch_seconds * ((split > 1) & (candidates["cluster"] == 0)),
    )
