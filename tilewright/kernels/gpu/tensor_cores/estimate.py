"""Predicted times of the implicit GEMM on tensor cores."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import TENSOR_CORES, mma_flops
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.rates import LINE_BYTES, SECTOR_BYTES, bandwidth
from tilewright.kernels.gpu.steps import BlockStep, on_processors, split_seconds
from tilewright.kernels.gpu.tensor_cores.counts import fill_wavefronts, product_flops
from tilewright.kernels.gpu.tensor_cores.factors import Factors
from tilewright.kernels.gpu.tensor_cores.form import TensorCoreFacts
from tilewright.kernels.gpu.tensor_cores.space import matrices_of

FRAGMENT_ROWS = 8
"""Rows of the result of which a warp holds elements in one of its registers."""
STORE_INSTRUCTIONS = 4
"""Instructions for the addresses and the conversion of a vector of results."""
ROUNDING = 2
"""Issue slots of a rounding to TF32: assumed, those of 64 conversions per cycle and processor."""
TURNING = 2
"""Instructions for the place of a swizzled row: an exclusive or and an addition."""


def mma_cycles(facts: Factors, machine: Machine) -> float:
    """Cycles for which one `mma.sync` occupies the tensor core of its scheduler."""
    each = mma_flops(machine, facts.kind) / (machine.processors * machine.schedulers_per_processor * machine.clock_hz)
    return product_flops(facts) / each


def tensor_core_estimate(facts: TensorCoreFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate, by the model of `kernels.gpu.steps`. For one step of one block, in cycles of a processor:

    tensor = warps * products * cycles of one / schedulers;  issue = warps (products + matrix loads + copies and their addresses) / schedulers;
    shared = wavefronts of matrix loads and of copies;  level 2 = bytes of (BM + BN) BK / (bytes per cycle).  A block alone takes at least the latency
    of a matrix load and, for each BK / k, that of one product or the time of all products of a warp; and it waits for copies that were not issued
    early enough.

    Worked example, tensor alone: 128 x 128 x 32 in float16 on an h200 is 8 warps of 32 products each; one takes 4096 flop / 596 flop per cycle and
    scheduler = 6.9 cycles, so that a step takes 440 cycles."""
    fitted = gpu_calibration(machine)
    instructions, latencies = fitted.instructions, fitted.steps
    product = facts.product
    bm, bn, bk, split = (candidates[name] for name in ("block_m", "block_n", "block_k", "split"))
    warps, threads = counts.warps, counts.threads
    rows, columns = matrices_of(candidates)
    turns = bk / facts.shape.depth
    one = mma_cycles(facts, machine)
    tensor = warps * counts.step_multiply_adds * one / machine.schedulers_per_processor
    matrices = turns * (rows + np.ceil(columns / 2)) * TURNING
    if facts.kind == "tf32":
        # what is not along r is loaded one element at a time, and all are rounded
        single = sum(registers for operand, registers in ((product.a, 4 * rows), (product.b, 2 * columns)) if operand.along != "r")
        # the parts of pairs are two roundings and a difference; their sums start at zero and are added
        pairs = candidates["pairs"]
        matrices = matrices + turns * (single + (ROUNDING + (ROUNDING + 1) * pairs) * (4 * rows + 2 * columns))
        matrices = matrices + turns * rows * columns * 2 * facts.shape.sums.size * pairs
    fetch: np.ndarray = np.zeros(len(threads))
    for operand, extent in ((product.a, bm), (product.b, bn)):
        vectors = extent * bk / (threads * operand.vector_width)
        # the passes of a thread along r are at one position, whose divisions they share
        positions = np.where(operand.along == "r", 1, vectors)
        address = instructions.address + (8 if operand.guarded else 0)
        fetch = fetch + vectors * (1 + address) + positions * operand.taps * instructions.division / 2
        fetch = fetch + np.where(candidates["stages"] > 1, 0, vectors)
        fetch = fetch + vectors * operand.computing(operand.vector_width, instructions.address)
    issue = warps * (counts.step_multiply_adds + matrices + fetch + instructions.step) / machine.schedulers_per_processor
    shared = warps * counts.step_shared_loads * 128 / machine.shared_bytes_per_cycle + fill_wavefronts(facts, candidates, machine)
    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    level2 = counts.step_sectors * SECTOR_BYTES / cache2.bandwidth
    latency = latencies.loaded_latency * machine.memory_latency_cycles
    barrier = latencies.barrier_latencies * cache1.latency_cycles + 2 * warps
    each = 1 + 2 * candidates["pairs"]
    chain = cache1.latency_cycles + turns * each * np.maximum(TENSOR_CORES[machine.compute_capability].latency_cycles, rows * columns * one)
    least = np.maximum(chain, latency / np.maximum(candidates["stages"] - 1, 1))
    step = BlockStep(tensor, issue, shared, level2, least, barrier, latencies.overlap)
    storing, barriers = storing_cycles(facts, candidates, counts, machine)
    together = np.minimum(counts.resident, -(-counts.blocks // machine.processors))
    ends = latencies.end_latencies * machine.memory_latency_cycles + barriers * barrier + together * storing
    work = on_processors(step, counts, ends, candidates["cluster"], machine)
    none = np.zeros(len(threads))
    results = product.batch * product.m * product.n
    combine = split_seconds(split, candidates["cluster"], none, results, product.element_bytes, bm * bn, work, counts.resident, machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": counts.memory_bytes / bandwidth(machine),
        "drain": work.drain_seconds,
        "split": combine,
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def storing_cycles(facts: TensorCoreFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """Cycles of a processor in which a block stores its results, and barriers that it waits for before.

    An access of a warp takes a cycle of level 1 for each line of 128 bytes that it touches. From registers it has pairs of elements of eight rows;
    staged it has vectors of up to four adjacent elements in as few rows as possible, after a store of pairs to shared memory and a load. Operands of
    the epilogue that are as large as the result are read in the same way."""
    staged = (candidates["staged"] | candidates["cluster"]) > 0
    width = np.where(staged, facts.product.store_vector, min(facts.product.store_vector, 2))
    cycles = store_cycles(facts.product, counts.warps * counts.accumulators, width, FRAGMENT_ROWS, candidates["block_n"], staged, machine)
    return cycles, staged * 2


def store_cycles(
    product: ContractionFacts,
    elements: np.ndarray,
    width: np.ndarray,
    lines: np.ndarray | int,
    adjacent: np.ndarray,
    staged: np.ndarray,
    machine: Machine,
) -> np.ndarray:
    """Cycles of a processor in which so many elements of each lane of a warp are stored as vectors of `width`, of which a warp's access touches
    `lines` lines, or, `staged`, rows of `adjacent` elements. Operands of the epilogue that are as large as the result are read in the same way."""
    element_bytes = product.bytes_written / (product.batch * product.m * product.n)
    touched = machine.warp_size * width * element_bytes / LINE_BYTES
    lines = np.where(staged, np.maximum(np.maximum(touched, machine.warp_size * width / adjacent), 1), lines)
    accesses = 1 + product.epilogue_bytes / product.bytes_written
    issue = elements / width * (accesses + STORE_INSTRUCTIONS) + elements * product.epilogue_flops
    through = np.where(staged, elements * (product.element_bytes * machine.warp_size / machine.shared_bytes_per_cycle) * 2, 0)
    cycles: np.ndarray = np.maximum(issue / machine.schedulers_per_processor, elements / width * accesses * lines + through)
    return cycles
