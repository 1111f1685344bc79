"""Times that no kernel of the implicit GEMM can beat."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import WIDEST, fma_cycles, live, longest_of, steps_of_busiest
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts


def contraction_bound(facts: ContractionFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Implicit GEMM: tiles of block_m x block_n, of which `split` blocks each reduce some of the steps of block_k.

    Padding is computed like the rest (rows past the end repeat the last, and the reduction is padded with zeros in shared memory), so that every step
    of every block is whole, but for what `live` leaves out of thread_m and thread_n. With the warp steps of the busiest scheduler:

    fma: BK TM TN a warp step, 32 lanes a scheduler.  issue: those, one load of at most four elements of shared memory for each four
    of a thread's BK (TM + TN), and the loads or copies of A and B that fall to every warp; a scheduler issues one instruction a cycle.
    chain: an element's multiply-adds depend on each other: BK for each step of a part, with the latency of one.  shared: a processor serves one load
    a cycle (all equal addresses merged), and what is written into the tiles at its bandwidth.  memory: distinct bytes (a stored value counts
    whole, at most its evaluations).  A split without a cluster needs a second kernel, and so a launch more.

    Worked example, h200: 64 x 64 x 16, thread 4 x 4, m = n = 1024, r = 1024: 256 blocks of 8 warps, two for some processor, 64 steps:
    ceil(2 * 8 / 4) * 64 * 16 * 16 = 65536 cycles, 33 us; spread evenly it would be 32."""
    bm, bn, bk, tm, tn, split = (candidates[k] for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    threads, warps = counts.threads, counts.warps
    steps, block_steps, warp_steps = steps_of_busiest(counts, machine)
    live_m, live_n = live(facts.m, bm, tm), live(facts.n, bn, tn)
    products = bk * live_m * live_n
    reads = -(-bk * (live_m + live_n) // WIDEST)
    fetches = bm * bk // (facts.a.vector_width * threads) + bn * bk // (facts.b.vector_width * threads)
    written = (bm * facts.a.element_bytes + bn * facts.b.element_bytes) * bk / machine.shared_bytes_per_cycle
    return longest_of(
        machine,
        fma=warp_steps * products * fma_cycles(machine),
        issue=warp_steps * (products + reads + fetches),
        chain=steps * bk * machine.fma_latency_cycles,
        shared=block_steps * (warps * reads + written),
        moved=share * counts.memory_bytes,
        others=machine.launch_seconds * ((split > 1) & (candidates["cluster"] == 0)),
    )
