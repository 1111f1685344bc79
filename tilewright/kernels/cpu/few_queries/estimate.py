"""Counts and predicted times of attention of few queries on a CPU."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.attention.estimate import SOFTMAX_INSTRUCTIONS
from tilewright.kernels.cpu.few_queries.space import ACCUMULATORS, part_tiles
from tilewright.kernels.cpu.rates import overlapping


def few_queries_counts(facts: AttentionFacts, candidates: Columns, machine: Machine) -> Counts:
    """Keys and values are read once for each head."""
    read = facts.batch * facts.stored_bytes * facts.n * (facts.r + facts.d) + facts.q_bytes + facts.other_bytes
    return counted(length(candidates), facts.flops, facts.read_bytes, facts.bytes_written, read)


def few_queries_estimate(facts: AttentionFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate. Each query reads every key and value again, from level 1: the products of a key with a load of the query for each
    multiply-add, and log2(lanes) shuffles, an addition and a store to add up its lanes; the multiply-adds of a value, which depend on those of the
    value before; the softmax. A thread computes whole parts, and gets its share of the outermost cache's bandwidth.

    Worked example, AVX-512, one query, 4096 keys of 64 elements: for a key 4 multiply-adds and 8 loads, 4 shuffles and 2 others; for a value the
    latency of a multiply-add; 30 / 16 vector instructions."""
    lanes = machine.vector_lanes()
    keys = part_tiles(facts, candidates) * candidates["keys"]
    parts, ones = candidates["parts"], np.ones(length(candidates))
    elements, columns = facts.r // lanes, facts.d // lanes
    products = overlapping(machine, ones * elements / machine.fma_ports, ones * 2 * elements / machine.load_ports)
    held = ceil_divided(columns, ACCUMULATORS)
    sums = overlapping(
        machine, ones * columns / machine.fma_ports, ones * (columns + held) / machine.load_ports, ones * held * machine.fma_latency_cycles
    )
    softmax = (SOFTMAX_INSTRUCTIONS + facts.logit_flops) / lanes / machine.fma_ports
    each = facts.m * (products + np.log2(lanes) + 2 + sums + softmax)
    rounds, used = ceil_divided(facts.batch * parts, threads), np.minimum(facts.batch * parts, threads)
    combined = (parts > 1) * ceil_divided(facts.batch * facts.m, threads) * parts * columns * 2
    outermost = 3 if machine.cache(3) is not None else 2
    supply = machine.cache_bandwidth(outermost) / machine.processors * np.minimum(used, machine.processors)
    return Estimate(
        {
            "instructions": rounds * keys * each / machine.clock_hz,
            "memory": counts.memory_bytes / machine.memory_bandwidth,
            "caches": counts.level2_bytes / supply,
            "combination": combined / machine.clock_hz,
            "dispatch": machine.dispatch_seconds * (1 + (parts > 1)),
        },
        overlapped=("instructions", "memory", "caches"),
        exponent=cpu_calibration(machine).contraction.transfers,
    )
