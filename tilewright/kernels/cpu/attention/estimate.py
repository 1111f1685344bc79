"""Counts and predicted times of attention on a CPU."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.rates import overlapping

SOFTMAX_INSTRUCTIONS = 30
"""Vector instructions per vector of scores besides the products: 3 for the maximum, which propagates NaN, 24 for the exponential, the difference, the
sum and the store (counted in the code that gcc 12 makes for AVX-512)."""

WIDENED_INSTRUCTIONS = 4
"""To load a 16-bit element of a key or a value, widen and broadcast it: a load, a shift, a move to a vector and a broadcast, of which the last two
have one port. A float32 element is broadcast by its load."""


def attention_counts(facts: AttentionFacts, candidates: Columns, machine: Machine) -> Counts:
    """Level 2 supplies keys and values once for each tile of queries."""
    tiles = facts.batch * ceil_divided(facts.m, candidates["vectors"] * machine.vector_lanes())
    each = facts.element_bytes * facts.n * (facts.r + facts.d)
    return counted(len(tiles), facts.flops, facts.read_bytes, facts.bytes_written, tiles * each + facts.q_bytes + facts.other_bytes)


def attention_estimate(facts: AttentionFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate. Per step of a product (an element of a key, or a key) a strip of t rows by v vectors issues t v multiply-adds, v
    loads and t broadcasts, as in the contraction's estimate; lanes past the last query are computed too. A strip adds its `tile_overhead_cycles`, and
    loads and stores of its accumulators. The softmax takes SOFTMAX_INSTRUCTIONS per vector.

    Worked example, AVX-512, 128 queries and keys of 64 elements, 4 vectors by 6 rows: per head 2 tiles of queries, each 128 / 6 + 64 / 6 strips."""
    lanes = machine.vector_lanes()
    vectors, rows, keys = (np.asarray(candidates[name], dtype=np.float64) for name in ("vectors", "rows", "keys"))
    once = cpu_calibration(machine).contraction.tile_overhead_cycles
    widened = WIDENED_INSTRUCTIONS if facts.stored_bytes < facts.element_bytes else 0

    def product(lines: np.ndarray | float, steps: np.ndarray | float) -> np.ndarray:
        """Cycles for `lines` rows of a product with `steps` reduced elements."""
        total = np.zeros(len(vectors))
        for strips, height in ((np.floor_divide(lines, rows), rows), (np.minimum(np.mod(lines, rows), 1.0), np.mod(lines, rows))):
            tall = np.maximum(height, 1.0)
            arithmetic, loads = tall * (vectors + widened) / machine.fma_ports, (tall + vectors) / machine.load_ports
            cycles = overlapping(machine, arithmetic, loads, np.full_like(tall, machine.fma_latency_cycles))
            total += strips * (cycles * steps + once + 2 * tall * vectors)
        return total

    tiles = facts.batch * ceil_divided(facts.m, vectors * lanes)
    # tiles of keys are equal but for the last, which is charged as the others
    passes = np.minimum(facts.passes(candidates["vectors"] * lanes, candidates["keys"]), facts.n / keys)
    products = passes * (product(keys, facts.r) + product(facts.d, keys))
    softmax = vectors * passes * keys * (SOFTMAX_INSTRUCTIONS + facts.logit_flops) / machine.fma_ports
    turned = vectors * (facts.r * (1 + facts.q_flops) + facts.d * (1 + facts.epilogue_flops)) * np.log2(lanes)
    balance = ceil_divided(tiles, threads) * threads / tiles
    used = tiles * balance / threads / machine.clock_hz
    level1, level2 = machine.cache(1), machine.cache(2)
    assert level1 is not None and level2 is not None, f"{machine.name} lacks the facts about its caches"
    # every strip of the first product reads all queries again, every strip of the second all weights and its columns of the values: from level 2 if
    # they leave level 1, where the values of a tile of keys are too
    element, queries = float(facts.element_bytes), vectors * lanes
    first = np.where(element * facts.r * (queries + rows) > level1.bytes, keys / rows * queries * facts.r, 0.0)
    second = np.where(element * keys * (queries + facts.d) > level1.bytes, facts.d / rows * keys * (queries + rows), 0.0)
    spilled = element * tiles * passes * (first + second)
    supply = machine.cache_bandwidth(2) / machine.processors * min(threads, machine.processors)
    return Estimate(
        {
            "products": products * used,
            "L2 to registers": (counts.level2_bytes + spilled) / supply,
            "softmax": softmax * used,
            "transposition": turned * used,
            "memory": counts.memory_bytes / machine.memory_bandwidth,
            "dispatch": np.full(len(vectors), machine.dispatch_seconds),
        },
        overlapped=("products", "L2 to registers", "memory"),
        exponent=cpu_calibration(machine).contraction.transfers,
    )
