"""Data movement and resources of Winograd's algorithm in one kernel."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.block_transforms import elements_of, tile_of
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.rates import SECTOR_BYTES
from tilewright.kernels.gpu.winograd.space import WinogradFacts
from tilewright.kernels.gpu.winograd_fused.space import fused_registers_of, fused_shared_bytes_of, fused_threads_of, tiles_there


def fused_winograd_counts(facts: WinogradFacts, candidates: Columns, machine: Machine) -> TileCounts:
    """Counts of the single launch. Inputs and filters are read step by step."""
    r = {name: np.asarray(column, dtype=np.float64) for name, column in candidates.items()}
    points, threads = elements_of(candidates).astype(np.float64), fused_threads_of(candidates).astype(np.float64)
    registers, shared = fused_registers_of(candidates).astype(np.float64), fused_shared_bytes_of(facts, candidates).astype(np.float64)
    one = np.ones(length(candidates))
    blocks = -(-tiles_there(facts, candidates) // r["tiles"]) * -(-facts.outputs // r["outputs"]) * r["split"]
    steps = facts.channels / (r["channels"] * r["split"])
    sums = points * r["tiles"] * r["outputs"]
    items, filters = r["tiles"] * r["channels"], points * r["channels"] * r["outputs"]
    results = prod(tile_of(r))
    loaded = facts.stored_bytes * points * items + facts.element_bytes * filters
    stored = facts.bytes_written / (facts.images * facts.height * facts.width * facts.outputs)
    read = one * (facts.bytes_read + facts.epilogue_bytes) + facts.element_bytes * points * facts.channels * facts.outputs
    return TileCounts(
        flops=2 * points * tiles_there(facts, candidates) * facts.outputs * facts.channels,
        read_bytes=read,
        result_bytes=one * facts.bytes_written,
        level2_bytes=blocks * steps * loaded + facts.epilogue_bytes,
        padded_flops=2 * blocks * sums * steps * r["channels"],
        blocks=blocks,
        warps=threads / machine.warp_size,
        threads=threads,
        steps=steps,
        tile_steps=facts.channels / r["channels"],
        registers=registers,
        shared_bytes=shared,
        resident=resident_blocks(machine, threads, registers, shared) * one,
        accumulators=r["thread_m"] * r["thread_n"],
        step_multiply_adds=r["channels"] * r["thread_m"] * r["thread_n"],
        step_shared_loads=r["channels"] * gpu_calibration(machine).gemm.fragment_wavefronts * np.maximum(2, (r["thread_m"] + r["thread_n"]) / 4),
        step_cached_loads=0 * one,
        step_fill=(2 * items * points + filters / 4) / machine.warp_size,
        step_sectors=loaded / SECTOR_BYTES,
        drain_wavefronts=2 * sums / machine.warp_size,
        store_instructions=r["tiles"] * r["outputs"] * results / machine.warp_size,
        store_sectors=r["tiles"] * r["outputs"] * results * stored / SECTOR_BYTES,
        distinct_bytes=read,
        written_bytes=one * facts.bytes_written,
        split=r["split"],
        stages=2 * one,
        reuse_bytes=steps * loaded,
    )
