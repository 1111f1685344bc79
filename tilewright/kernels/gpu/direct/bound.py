"""Lower bounds on the time of a direct convolution."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import WIDEST, fma_cycles, live, longest_of, steps_of_busiest
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.direct.schedule import SHARED, DirectFacts, extents_of, patch_of


def direct_bound(facts: DirectFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds: a thread computes register_k x register_y x register_x outputs, from `channels` input channels per step.

    Tiles and chunks of channels that extend past the end are computed whole. The terms are those of `contraction_bound`, with F filter elements and c
    channels per step. fma: c F outputs per warp step.  issue: these, one load for every four inputs of a channel that a thread's outputs need, and
    one for every four of its c F register_k weights.  chain: c F per step.  shared: loads of inputs, and of weights if these are staged; stores of
    the block's patch with its halo, and of the staged weights."""
    k, y, x = extents_of(candidates)
    split, channels = candidates["split"], candidates["channels"]
    warps = counts.warps
    steps, block_steps, warp_steps = steps_of_busiest(counts, machine)
    area = facts.filter_y * facts.filter_x
    live_k = live(facts.outputs, k, candidates["register_k"])
    live_y, live_x = live(facts.height, y, candidates["register_y"]), live(facts.width, x, candidates["register_x"])
    products = channels * area * live_k * live_y * live_x
    needed_y = _inputs_needed(live_y, facts.filter_y, facts.stride_y, facts.dilation_y)
    needed_x = _inputs_needed(live_x, facts.filter_x, facts.stride_x, facts.dilation_x)
    inputs, weights = -(-channels * needed_y * needed_x // WIDEST), -(-channels * area * live_k // WIDEST)
    staged = candidates["filters"] == SHARED
    patch_y, patch_x = patch_of(facts, candidates)
    written = channels * (patch_y * patch_x + np.where(staged, area * k, 0)) * facts.element_bytes / machine.shared_bytes_per_cycle
    return longest_of(
        machine,
        fma=warp_steps * products * fma_cycles(machine),
        issue=warp_steps * (products + inputs + weights),
        chain=steps * channels * area * machine.fma_latency_cycles,
        shared=block_steps * (warps * (inputs + np.where(staged, weights, 0)) + written),
        moved=share * counts.memory_bytes,
        others=machine.launch_seconds * ((split > 1) & (candidates["cluster"] == 0) & (candidates["atomics"] == 0)),
    )


def _inputs_needed(outputs: np.ndarray, filter_size: int, stride: int, dilation: int) -> np.ndarray:
    """Minimum distinct inputs that adjacent outputs read along one dimension; with a dilation, the larger of `outputs` and `filter_size`."""
    needed: np.ndarray
    if dilation > 1:
        needed = np.maximum(outputs, filter_size)
    else:
        needed = np.minimum(outputs * filter_size, (outputs - 1) * stride + filter_size)
    return needed
