"""Counts and predicted times of recurrent layers on tensor cores.

    seconds = launches + weights + steps * (states + products + sums + gates + barrier)

as on CUDA cores (`recurrence.estimate`), with other terms for what tensor cores do: the warps of all blocks load the states of their sequences from
level 2; each warp multiplies its part, in cycles of a scheduler's tensor core, of which products of one sum wait for one another; and the parts of
all warps pass through shared memory.

Worked example, an LSTM of 512 units and 64 sequences in float16, in blocks of 16 units and 16 sequences and 8 warps on an H200: 128 blocks load
16 KiB each, in 263 + 742 cycles. Each warp multiplies 2 pairs of fragments of states with 8 of weights: 32 products, which occupy the tensor core of
its scheduler, as do those of another warp, for 6.9 cycles each, 440 in all. 8 parts of 16 x 64 sums take 256 cycles on their way to shared memory and
256 back, and two latencies of it 82. A step takes 2.2 us, of which the barrier 0.9, and the states 0.5.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import ASSUMED_RECURRENCE, gpu_recurrence
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import TENSOR_CORES
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.counts import WORD, LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import bandwidth, l2_bandwidth, latency_seconds
from tilewright.kernels.gpu.tensor_cores.estimate import ROUNDING, mma_cycles
from tilewright.kernels.gpu.tensor_recurrence.form import TensorRecurrenceFacts
from tilewright.kernels.gpu.tensor_recurrence.lower import FRAGMENTS
from tilewright.kernels.gpu.tensor_recurrence.space import WARP, blocks_of, matrices_of, products_of, registers_of, rounds_of, shared_bytes_of


def tensor_recurrence_counts(facts: TensorRecurrenceFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Each group of blocks with the same sequences reads all weights once; each block reads all states of its sequences in every step."""
    sizes = facts.sizes
    blocks = blocks_of(facts, candidates)
    streams = float(sizes.steps * sizes.stream_bytes)
    groups = ceil_divided(sizes.rows, candidates["rows"])
    states = sizes.steps * blocks * _state_bytes(facts, candidates)
    read = facts.weight_bytes + streams
    moved = counted(length(candidates), sizes.total_flops, read, 0.0, groups * facts.weight_bytes + streams + states)
    return launch_counts(moved, blocks, WARP * candidates["warps"], registers_of(facts, candidates), shared_bytes_of(facts, candidates), machine)


def tensor_recurrence_estimate(facts: TensorRecurrenceFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate."""
    level1, level2 = machine.cache(1), machine.cache(2)
    assert level1 is not None and level2 is not None, f"{machine.name} lacks the facts about its caches"
    sizes, clock = facts.sizes, machine.clock_hz
    warps, rounds = candidates["warps"], rounds_of(facts, candidates)
    rows, columns = matrices_of(facts, candidates)
    scheduled = np.ceil(warps / machine.schedulers_per_processor)
    one = mma_cycles(facts, machine)
    latency = TENSOR_CORES[machine.compute_capability].latency_cycles
    rounded = rounds * rows * FRAGMENTS * facts.shape.a.size * ROUNDING * scheduled if facts.kind == "tf32" else 0
    tiles = products_of(facts, candidates) * (candidates["rows"] // candidates["together"])
    multiplied = tiles * (FRAGMENTS * rounds * np.maximum(rows * columns * scheduled * one, latency) + rounded)
    stored = tiles * warps * rows * columns * facts.shape.sums.size * machine.warp_size * WORD / machine.shared_bytes_per_cycle
    met = 2 * level1.latency_cycles + 2 * stored
    turns = ceil_divided(candidates["rows"] * candidates["units"], WARP * warps)
    gates = turns * (sizes.dependent_flops * machine.fma_latency_cycles + level1.latency_cycles)
    constants = gpu_recurrence(machine) or ASSUMED_RECURRENCE
    waits = candidates["rows"] // candidates["together"]
    states = waits * level2.latency_cycles / clock + counts.blocks * _state_bytes(facts, candidates) / l2_bandwidth(machine)
    terms = {
        "launch": np.full(len(warps), 2.0 * machine.launch_seconds),
        "weights": np.full(len(warps), latency_seconds(machine) + facts.weight_bytes / bandwidth(machine)),
        "states": sizes.steps * states,
        "products": sizes.steps * multiplied / clock,
        "sums": sizes.steps * met / clock,
        "gates": sizes.steps * gates / clock,
        "barriers": np.full(len(warps), sizes.steps * constants.barrier_seconds),
    }
    return Estimate(terms)


def _state_bytes(facts: TensorRecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Bytes of the states that a block reads in a step."""
    size: np.ndarray = candidates["rows"] * float(facts.reduced * facts.element_bytes) * products_of(facts, candidates)
    return size
