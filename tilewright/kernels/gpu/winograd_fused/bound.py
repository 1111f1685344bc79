"""Lower bounds on the time of Winograd's algorithm in one kernel."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.block_transforms import elements_of
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.bounds import WIDEST, fma_cycles, longest_of, steps_of_busiest
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.winograd.space import WinogradFacts


def fused_winograd_bound(facts: WinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds, like `contraction_bound`, for the points of `tiles` x `outputs` sums and `channels` per step.

    Sums go through shared memory, so all of them are computed. issue: besides products and their loads, every thread's instructions to load a step:
    copies of four filter elements, and for each tile that it transforms an addition per point, and vector loads and stores of four elements."""
    threads, warps, points = counts.threads, counts.warps, elements_of(candidates)
    tiles, outputs, channels = candidates["tiles"], candidates["outputs"], candidates["channels"]
    steps, block_steps, warp_steps = steps_of_busiest(counts, machine)
    products = counts.step_multiply_adds
    reads = -(-channels * (candidates["thread_m"] + candidates["thread_n"]) // WIDEST)
    transforms = tiles * channels // threads * points * (1 + 2 / WIDEST)
    copies = points * channels * outputs // (WIDEST * threads)
    written = points * channels * (tiles + outputs) * facts.element_bytes / machine.shared_bytes_per_cycle
    return longest_of(
        machine,
        fma=warp_steps * products * fma_cycles(machine),
        issue=warp_steps * (products + reads + transforms + copies),
        chain=steps * channels * machine.fma_latency_cycles,
        shared=block_steps * (warps * reads + written),
        moved=share * counts.memory_bytes,
        others=np.zeros(length(candidates)),
    )
