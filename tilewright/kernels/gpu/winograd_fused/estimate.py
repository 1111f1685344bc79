"""Predicted times of the `winograd fused` schema, in the form of `kernels.gpu.gemm.estimate` and mostly with its constants."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.block_transforms import elements_of, tile_of, works
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.rates import bandwidth, l2_bandwidth
from tilewright.kernels.gpu.steps import BlockStep, on_processors
from tilewright.kernels.gpu.winograd.estimate import sectors_stored
from tilewright.kernels.gpu.winograd.space import WinogradFacts
from tilewright.kernels.winograd_transform import Winograd, output_tiles

COPY_INSTRUCTIONS = 4
"""Instructions of one copy to shared memory, with its addresses, which mostly add constants."""


def fused_winograd_estimate(facts: WinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """seconds = launch + max(compute, memory) + drain + split.

    For one step of one block, in cycles of a processor: fma = points BT BK BC / lanes; issue = warps (products and their fragments, copies of
    filters, and loads, transform and stores for each tile and channel) / schedulers; shared = wavefronts of all of these; l2 = bytes of inputs and
    filters. A step takes at least the latency of its loads plus that of the transform that depends on them. The blocks of a processor, waves and the
    tail are as in `contraction_estimate`; drain is the path of the sums through shared memory and the transform of the outputs, and what their stores
    take longer if output channels are apart in memory; split is the exchange of a cluster's partial outputs.

    Worked example: F(2x2), 16 x 32 x 8: 16 * 16 * 32 * 8 / 128 = 512 cycles of fma per step at peak on an h200."""
    fitted = gpu_calibration(machine)
    own, latencies = fitted.winograd_fused, fitted.steps
    size, bt, bk, bc = (candidates[name] for name in ("output_tile", "tiles", "outputs", "channels"))
    tm, tn, split = (candidates[name] for name in ("thread_m", "thread_n", "split"))
    points, results, sizes = elements_of(candidates), prod(tile_of(candidates)), output_tiles(facts.filter_shape)
    fused = np.array([[work.fused for work in works(Winograd(m, facts.filter_shape))] for m in sizes])
    of_input, of_outputs = fused[np.searchsorted(sizes, size)].T
    threads, warps, blocks = counts.threads, counts.warps, counts.blocks
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    fma = counts.step_multiply_adds * threads / machine.fp32_lanes_per_processor / efficiency
    fragments = -(-tm // 4) + tn // 4
    items = bt * bc / machine.warp_size
    copies = points * bc * bk / 4 / machine.warp_size
    of_tile = 2 * points + own.transform_instructions * of_input
    issue = warps * (counts.step_multiply_adds + bc * fragments + fitted.instructions.step) + items * of_tile + copies * COPY_INSTRUCTIONS
    issue = issue / machine.schedulers_per_processor
    wavefronts = warps * bc * own.fragment_wavefronts * np.maximum(fragments, 2) + items * points * own.store_wavefronts + copies * 4
    shared = wavefronts * 128 / machine.shared_bytes_per_cycle
    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    level2 = points * (bk * facts.element_bytes + bt * facts.stored_bytes) * bc / cache2.bandwidth
    wait = latencies.loaded_latency * machine.memory_latency_cycles
    passes = np.ceil(bt * bc / threads)
    # a warp waits for its loads, then transforms the tiles
    chain = wait + passes * of_tile * own.transform_cycles
    inner = bc * np.maximum(tm * tn * latencies.multiply_add_cycles, latencies.fragment_latencies * cache1.latency_cycles) + cache1.latency_cycles
    least = np.maximum(chain, inner + passes * of_tile)
    barrier = own.barrier_latencies * cache1.latency_cycles + 2 * warps
    of_sums = points + of_outputs + results * (2 + facts.epilogue_flops)
    epilogue = own.sum_wavefronts * points * bt * bk / machine.warp_size + bt * bk / machine.warp_size * of_sums / machine.schedulers_per_processor
    together = np.minimum(-(-blocks // machine.processors), counts.resident)
    ends = machine.memory_latency_cycles + chain + together * epilogue
    step = BlockStep(fma, issue, shared, level2, least, barrier, latencies.overlap)
    work = on_processors(step, counts, ends, split > 1, machine)
    meeting = 2 * cache2.latency_cycles + 2 * facts.element_bytes * results * bt * bk / cache2.bandwidth * together
    apart = (sectors_stored(facts.store_stride) - 1) * facts.bytes_written / l2_bandwidth(machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": work.drain_seconds + apart,
        "split": np.where(split > 1, work.rounds * meeting / machine.clock_hz, 0.0),
    }
    return Estimate(terms, overlapped=("compute", "memory"))
