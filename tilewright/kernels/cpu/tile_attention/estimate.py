"""Counts and predicted times of attention on tile registers."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import FACTOR, TILE_CHANNELS, TILE_PIXELS
from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.cpu.amx.estimate import LOAD_CYCLES, STORE_CYCLES
from tilewright.kernels.cpu.amx.space import CHUNK
from tilewright.kernels.cpu.tile_attention.form import TileAttentionFacts

WEIGHT_INSTRUCTIONS = 14
"""Vector instructions per vector of scores besides the products: 1 for the maximum, 2 for the difference and its scale, 7 for the power of two, 2 for
the total and 2 for the pair of bfloat16 (counted in the code that gcc 12 makes, in operations of the ports of multiply-adds)."""
RESCALE_CYCLES = 1.0
"""To multiply a vector of sums: a load, a product and a store."""
TURNED_CYCLES = 6.0
"""To transpose a vector of 16 elements: the load, four interleavings and the store (of values also the rounding of pairs)."""


def tile_attention_counts(facts: TileAttentionFacts, candidates: Columns, machine: Machine) -> Counts:
    """Level 2 supplies keys and copied values once for each tile of queries."""
    sizes = facts.attention
    tiles = sizes.batch * ceil_divided(sizes.m, candidates["vectors"] * TILE_CHANNELS)
    each = size_of(FACTOR) * sizes.n * (sizes.r + facts.columns)
    return counted(len(tiles), sizes.flops, sizes.read_bytes, sizes.bytes_written, tiles * each + sizes.q_bytes + sizes.other_bytes)


def tile_attention_estimate(facts: TileAttentionFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate. A block of 2 x 2 tiles of scores has 5 tile loads for 4 products, and ends with 4 stores; one of sums begins with 4
    loads as well. Blocks begin and end as those of the schema `amx`. The softmax follows the products of a block of keys, and does not overlap them.

    Worked example, 32 queries, 128 keys of 64 elements at a time: 32 products of scores and 32 of sums (1,088 cycles), 16 + 8 stores (384), 8 loads
    of sums (64), 6 blocks (480); 256 vectors of scores take 7 cycles each, with two ports for vectors."""
    fitted, sizes = cpu_calibration(machine).amx, facts.attention
    vectors, keys = (np.asarray(candidates[name], dtype=np.float64) for name in ("vectors", "keys"))
    lines, chunks = facts.columns / TILE_PIXELS, sizes.r // facts.chunk
    across = ceil_divided(vectors, 2)
    loads = np.where(vectors == 1, 1.5, 1.25) * LOAD_CYCLES
    product = np.maximum(fitted.product_cycles, loads)
    key_tiles = keys / TILE_PIXELS
    scores = key_tiles * vectors * (chunks * product + STORE_CYCLES) + key_tiles / 2 * across * fitted.block_cycles
    sums = lines * vectors * (keys / CHUNK * product + LOAD_CYCLES + STORE_CYCLES) + np.ceil(lines / 2) * across * fitted.block_cycles
    softmax = vectors * (keys * (WEIGHT_INSTRUCTIONS + sizes.logit_flops) / machine.fma_ports + facts.columns * RESCALE_CYCLES)
    turned = vectors * (sizes.r * (1 + sizes.q_flops) + facts.columns * (2 + sizes.epilogue_flops)) * TURNED_CYCLES
    copied = facts.copied * (TURNED_CYCLES / TILE_CHANNELS if facts.adjacent else 2.0)

    tiles = sizes.batch * ceil_divided(sizes.m, vectors * TILE_CHANNELS)
    passes = np.minimum(sizes.passes(candidates["vectors"] * TILE_CHANNELS, candidates["keys"]), sizes.n / keys)
    used = tiles * ceil_divided(tiles, threads) * threads / tiles / threads / machine.clock_hz
    supply = fitted.level_2_share * machine.cache_bandwidth(2) / machine.processors * min(threads, machine.processors)
    return Estimate(
        {
            "products": passes * (scores + sums) * used,
            "softmax": passes * softmax * used,
            "L2 to registers": counts.level2_bytes / supply,
            "transposition": turned * used,
            "copy of V": np.full(len(tiles), copied / threads / machine.clock_hz),
            "memory": (counts.memory_bytes + 2 * size_of(FACTOR) * facts.copied) / machine.memory_bandwidth,
            "dispatch": np.full(len(tiles), 2 * machine.dispatch_seconds),
        },
        overlapped=("products", "L2 to registers", "memory"),
        exponent=cpu_calibration(machine).contraction.transfers,
    )
