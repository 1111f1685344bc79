"""Lower bounds on the time of the implicit GEMM on tensor cores."""

from __future__ import annotations

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import longest_of, steps_of_busiest
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.tensor_cores.form import TensorCoreFacts


def tensor_core_bound(facts: TensorCoreFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds. With the warp steps of the busiest scheduler:

    fma: products of a warp's step, at the machine's peak, which no `mma.sync` exceeds.  issue: these; a scheduler issues one instruction per cycle.
    chain: additions to a sum depend on each other; a product takes at least as long as it occupies the tensor core.  shared: a processor loads
    matrices at the full bandwidth of shared memory, and fills tiles at the same.  memory: distinct bytes.  A split without a cluster needs a second
    kernel, and so one more launch."""
    bm, bn, bk, split = (candidates[name] for name in ("block_m", "block_n", "block_k", "split"))
    steps, block_steps, warp_steps = steps_of_busiest(counts, machine)
    each = machine.peak_flops[PEAKS[facts.kind]] / (machine.processors * machine.schedulers_per_processor * machine.clock_hz)
    one = 2 * M * N * facts.shape.depth / each
    products = counts.step_multiply_adds
    filled = (bm + bn) * bk * facts.element_bytes / machine.shared_bytes_per_cycle
    return longest_of(
        machine,
        fma=warp_steps * products * one,
        issue=warp_steps * products,
        chain=steps * bk / facts.shape.depth * one,
        shared=block_steps * (counts.warps * counts.step_shared_loads * 128 / machine.shared_bytes_per_cycle + filled),
        moved=share * counts.memory_bytes,
        others=machine.launch_seconds * ((split > 1) & (candidates["cluster"] == 0)),
    )
