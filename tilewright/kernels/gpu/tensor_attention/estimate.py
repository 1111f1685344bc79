"""Predicted times of attention on tensor cores."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS, TENSOR_CORES, mma_flops
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.attention.estimate import EXCHANGE, ROW_INSTRUCTIONS, parts_seconds
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.rates import SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import BlockStep, on_processors
from tilewright.kernels.gpu.tensor_attention.form import TensorAttentionFacts
from tilewright.kernels.gpu.tensor_attention.lower import DISTANCES
from tilewright.kernels.gpu.tensor_attention.space import rows_of
from tilewright.kernels.gpu.tensor_cores.estimate import FRAGMENT_ROWS, ROUNDING, TURNING

WEIGHT_INSTRUCTIONS = 4
"""Instructions for each score: the maximum, the exponent, its power, the total."""
POWERS_PER_CYCLE = 4
"""Results of a scheduler's special function unit (CUDA C++ Programming Guide, "Arithmetic Instructions": 16 per cycle and processor)."""
MATRICES = 4
"""Matrices of one `ldmatrix`."""


def tensor_attention_estimate(facts: TensorAttentionFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate. For one tile of keys of one block, in cycles of a processor:

    tensor = warps * products * cycles of one / schedulers;  special = scores / powers per cycle, of four schedulers, which overlaps with it;  issue =
    warps (products + matrix loads + scores (softmax + logit) + rounded fragments + sums + rows + copies) / schedulers;  shared = wavefronts of
    matrices and of copies;  level 2 = BN (R + D) bytes / (bytes per cycle);  alone = a warp's own chain of both products and of its softmax.  Waves,
    tail, occupancy and overlap are those of the implicit GEMM (`kernels.gpu.steps`). Products of warpgroups take their time at the machine's peak,
    are issued once for 64 queries and all keys or elements, and need no matrix loads. Turns cost a latency of shared memory each; what
    they gain is not modelled, so that only trials choose them.

    Worked example, float16 on an h200, 64 queries x 64 keys, r = d = 64, 4 warps: 64 products of 6.9 cycles a warp, on its own scheduler: 440 cycles;
    32 powers a thread take 32 * 32 / 4 = 256."""
    fitted = gpu_calibration(machine)
    instructions, latencies, sizes = fitted.instructions, fitted.steps, facts.attention
    bn, stages, rows = candidates["block_n"], candidates["stages"], rows_of(candidates)
    threads, warps, schedulers, depth = counts.threads, counts.warps, machine.schedulers_per_processor, facts.shape.depth
    wide = candidates["wide"] > 0
    reached = np.where(wide, machine.peak_flops[PEAKS[facts.kind]], mma_flops(machine, facts.kind))
    one = 2 * M * N * depth * machine.processors * schedulers * machine.clock_hz / reached
    scores, sums = M * rows * bn / machine.warp_size, M * rows * facts.d / machine.warp_size
    tensor = warps * counts.step_multiply_adds * one / schedulers
    powers = scores * machine.warp_size / POWERS_PER_CYCLE
    special = warps * powers / schedulers
    loads = np.where(wide, 0, counts.step_shared_loads / MATRICES * TURNING)
    products = np.where(wide, (facts.r + bn) / depth, counts.step_multiply_adds)
    rounded = scores / 2
    if facts.kind == "tf32":
        # all fragments are rounded, and those of values are loaded one element at a time
        values = bn * facts.d / machine.warp_size
        queries = M * rows * facts.r / machine.warp_size * (candidates["held"] == 0)
        rounded = ROUNDING * (scores + bn * facts.r / machine.warp_size + values + queries)
        loads = loads + values
    row = 2 * rows * (ROW_INSTRUCTIONS + EXCHANGE * len(DISTANCES))
    softmax = scores * (WEIGHT_INSTRUCTIONS + sizes.logit_flops) + sums + row + rounded
    fetched = counts.step_fill * machine.warp_size / threads
    fetch = fetched * (1 + instructions.address + (not facts.copies))
    issue = warps * (products + loads + softmax + fetch + instructions.step) / schedulers
    filled = bn * (sizes.r + sizes.d) * facts.element_bytes / machine.shared_bytes_per_cycle
    shared = warps * counts.step_shared_loads * 128 / machine.shared_bytes_per_cycle + filled
    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    level2 = counts.step_sectors * SECTOR_BYTES / cache2.bandwidth
    latency = latencies.loaded_latency * machine.memory_latency_cycles
    barrier = np.where(stages > 1, 1, 2) * (latencies.barrier_latencies * cache1.latency_cycles + 2 * warps)
    barrier = barrier + candidates["turns"] * cache1.latency_cycles
    product = TENSOR_CORES[machine.compute_capability].latency_cycles
    chain = 2 * cache1.latency_cycles + facts.r / depth * np.maximum(product, rows * bn / N * one)
    chain = chain + bn / depth * np.maximum(product, rows * facts.d / N * one) + np.maximum(softmax, powers) + len(DISTANCES) * cache1.latency_cycles
    least = np.where(stages > 1, np.maximum(chain, latency / np.maximum(stages - 1, 1)), chain + latency)
    step = BlockStep((tensor**latencies.overlap + special**latencies.overlap) ** (1 / latencies.overlap), issue, shared, level2, least, barrier,
                     latencies.overlap)  # fmt: skip
    vectors = candidates["block_m"] * sizes.r / sizes.q_vector / threads
    prologue = latency + warps * vectors * (instructions.address + sizes.q_flops * sizes.q_vector + sizes.q_vector) / schedulers
    # a warp stores pairs of eight rows at a time, each row another line
    stored = warps * sums / sizes.store_vector * FRAGMENT_ROWS
    ends = latencies.end_latencies * machine.memory_latency_cycles + prologue + stored
    work = on_processors(step, counts, ends, np.zeros(len(threads)), machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": work.drain_seconds,
        "parts": parts_seconds(sizes, candidates, counts, work, machine),
    }
    return Estimate(terms, overlapped=("compute", "memory"))
