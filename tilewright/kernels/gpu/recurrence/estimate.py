"""Counts and predicted times of recurrent layers in one kernel on a GPU.

    seconds = launches + weights + steps * (states + products + sums + gates + barrier)

Weights are read from memory once. In a step a block waits for the states in level 2 or, sent by the blocks of its cluster, in its shared memory. It
multiplies and adds at the rate of its processor (limited by shared memory if the weights are there), adds up the sums of its threads by exchanges and
shared memory, computes gates, and meets all others. Nothing of this overlaps, as each needs what is before it. The barriers of a grid and of a
cluster are the constants to be measured (`hardware.calibration.GpuRecurrence`); that of a block counts as the latency of level 1.

Worked example, an LSTM of 512 units and one sequence in blocks of 4 units and 256 threads on an H200: a thread holds 4 gates * 4 units * 2 elements =
32 weights. Level 2 answers in 263 cycles and passes the states to all blocks in 93; 8 warps multiply for 64 cycles on 4 schedulers; exchanges and the
meeting in shared memory take 543, the gates 497, and the barrier of 1.2 us 2376 at 1.98 GHz. A step takes 1.9 us, two thirds of it for the barrier.

An LSTM of 128 units in a cluster of 8 blocks of 4 warps with 4 units each: a lane holds 4 * 4 * 4 = 64 weights. States arrive 180 cycles after they
are sent, and the warps read them in 57; products take 64 cycles, exchanges and the meeting 403, the gates 497, and the barrier of 0.25 us 495. A step
takes 0.85 us.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import ASSUMED_RECURRENCE, gpu_recurrence
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.counts import counted
from tilewright.kernels.gpu.bounds import fma_cycles
from tilewright.kernels.gpu.counts import WORD, LaunchCounts, launch_counts
from tilewright.kernels.gpu.rates import bandwidth, l2_bandwidth, latency_seconds
from tilewright.kernels.gpu.recurrence.space import blocks_of, loops_apart, padded, registers_of, shared_bytes_of, slices, sums_of, thread_weights
from tilewright.kernels.recurrence_form import RecurrenceFacts

ADDING_INSTRUCTIONS = 3
"""Of one exchange, besides it: two selections and an addition."""
EXCHANGED_LANES = 32
"""Lanes of exchanges that a processor completes in a cycle (CUDA C++ Programming Guide, throughput of native arithmetic instructions: warp shuffles,
compute capability 7.0 to 9.0)."""
CLUSTER_LATENCY = 180
"""Cycles until a block sees what another of its cluster stored in its shared memory (Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU
Architecture via Microbenchmarking, 2024: the latency of the network between processors)."""


def recurrence_counts(facts: RecurrenceFacts, candidates: Columns, machine: Machine) -> LaunchCounts:
    """Each block reads its weights once; each group of a grid reads all states in every step."""
    blocks = blocks_of(facts, candidates)
    streams = float(facts.steps * facts.stream_bytes)
    states = np.where(candidates["cluster"] > 0, 0.0, facts.steps * blocks * candidates["groups"] * _state_bytes(facts, candidates))
    moved = counted(length(candidates), facts.total_flops, facts.weight_bytes + streams, 0.0, facts.weight_bytes + streams + states)
    shared = shared_bytes_of(facts, candidates, machine.warp_size)
    return launch_counts(moved, blocks, candidates["threads"], registers_of(facts, candidates), shared, machine)


def recurrence_estimate(facts: RecurrenceFacts, candidates: Columns, counts: LaunchCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate."""
    level1, level2 = machine.cache(1), machine.cache(2)
    assert level1 is not None and level2 is not None, f"{machine.name} lacks the facts about its caches"
    groups, cluster = candidates["groups"], candidates["cluster"]
    warps = candidates["threads"] / machine.warp_size
    scheduled = np.ceil(warps / machine.schedulers_per_processor)
    tiles = ceil_divided(facts.rows, candidates["rows"])
    clock = machine.clock_hz
    weights = thread_weights(facts, candidates)
    # a weight in shared memory is loaded once for the rows of a tile, by the scheduler that then issues its multiply-adds
    loaded = np.where(candidates["shared"] > 0, tiles * weights * scheduled, 0.0)
    multiplied = tiles * candidates["rows"] * weights * scheduled * fma_cycles(machine) + loaded
    fetched = np.where(candidates["shared"] > 0, tiles * weights * candidates["threads"] * WORD / machine.shared_bytes_per_cycle, 0.0)
    sums = padded(sums_of(facts, candidates))
    distances = np.log2(machine.warp_size)
    issued = np.maximum(sums, distances) * (ADDING_INSTRUCTIONS * scheduled + warps * machine.warp_size / EXCHANGED_LANES)
    exchanged = tiles * (issued + distances * level1.latency_cycles)
    turns = ceil_divided(facts.rows * candidates["units"] * groups, candidates["threads"])
    met = 2 * level1.latency_cycles + turns * (facts.gates // loops_apart(candidates)) * warps / groups
    gates = turns * (facts.dependent_flops * machine.fma_latency_cycles + level1.latency_cycles)
    through_level2 = tiles * level2.latency_cycles / clock + counts.blocks * groups * _state_bytes(facts, candidates) / l2_bandwidth(machine)
    read = facts.rows * WORD * sum(slices(facts, r, candidates) for _, r in facts.products) * candidates["threads"] / machine.shared_bytes_per_cycle
    through_shared = (np.where(cluster > 1, CLUSTER_LATENCY, 0.0) + tiles * level1.latency_cycles + read) / clock
    constants = gpu_recurrence(machine) or ASSUMED_RECURRENCE
    meeting = np.where(cluster > 1, constants.cluster_barrier_seconds, level1.latency_cycles / clock)
    terms = {
        "launch": np.where(cluster > 0, 1.0, 2.0) * machine.launch_seconds,
        "weights": np.full(len(weights), latency_seconds(machine) + facts.weight_bytes / bandwidth(machine)),
        "states": facts.steps * np.where(cluster > 0, through_shared, through_level2),
        "products": facts.steps * np.maximum(multiplied, fetched) / clock,
        "sums": facts.steps * (exchanged + met) / clock,
        "gates": facts.steps * gates / clock,
        "barriers": facts.steps * np.where(cluster > 0, meeting, constants.barrier_seconds),
    }
    return Estimate(terms)


def _state_bytes(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Bytes of the states that the sums of one unit read."""
    size: np.ndarray = facts.rows * WORD * sum(r for _, r in facts.products) / loops_apart(candidates)
    return size
