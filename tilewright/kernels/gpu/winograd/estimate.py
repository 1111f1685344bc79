"""Predicted times of the `winograd` schema: transforms from data movement, latency and issue slots, the product as a contraction.

The transforms follow the form of `kernels.gpu.map.estimate`. The product is `contraction_estimate` of the batched product, with its operands in level
2 as far as they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np

from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.estimate import Estimate
from tilewright.kernels.block_transforms import Transform, of_each, works
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.counts import taken
from tilewright.kernels.gpu.counts import SECTOR_WORDS, TileCounts
from tilewright.kernels.gpu.gemm.estimate import contraction_estimate
from tilewright.kernels.gpu.rates import bandwidth, l2_bandwidth
from tilewright.kernels.gpu.winograd.space import CHANNELS_OF_BLOCK, OTHER_REGISTERS, WinogradFacts, held_registers, scratch_bytes

BYTES_AHEAD = 256
"""Bytes of a thread's loads in flight: the loads of a tile are independent, but their registers are limited."""


def winograd_estimate(facts: WinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate (`estimate_with_transforms`)."""

    def multiplied(number: int, part: Columns, lying: TileCounts) -> Estimate:
        return contraction_estimate(facts.products[number], {**part, "atomics": np.zeros_like(part["split"])}, lying, machine)

    return estimate_with_transforms(facts, candidates, counts, machine, multiplied)


def estimate_with_transforms(
    facts: WinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine, multiplied: Callable[[int, Columns, TileCounts], Estimate]
) -> Estimate:
    """Seconds of each candidate. `multiplied`: those of the product of candidates with the transform of a number, given counts whose distinct bytes
    are those that are not in level 2.

    seconds = launches (1 + 2 later_launch) + input transform + max(compute, memory) + drain + split + output transform.

    A transform takes max(bytes through level 2, bytes from memory, issue) + waves * latency. The workspaces V and M are (m + 2)^2 / m^2 times as
    large as input and output; the fraction min(1, level 2 / (V + M + filters)) of them stays in level 2, and the rest goes to memory and back.
    Adjacent threads have adjacent channels: where these are apart in memory, each element of the result is a sector of its own, of which level 2
    takes half as many in a second as it delivers.

    Worked example: 64 channels in and out, 56 x 56, m = 4: 196 tiles, V and M 36 * 196 * 64 * 4 = 1.8 MB each, 6.2 MB through level 2 in
    both transforms together: 1.1 us on an h200, under the launches' 1.1 * 1.82 = 2.0 us."""
    terms = {"launch": np.zeros(length(candidates))}
    overlapped: tuple[str, ...] = ()
    for which, transform in of_each(candidates):
        number, part = facts.number(transform), take(candidates, which)
        product = facts.products[number]
        elements, results, points = prod(transform.span), prod(transform.tile), transform.points
        of_input, of_sums = works(transform)
        cache = machine.cache(2)
        assert cache is not None
        inputs, sums = product.a.bytes, product.bytes_written
        missing = 1.0 - min(1.0, cache.bytes / (inputs + sums + product.b.bytes))
        # the product's own distinct bytes, except those already in level 2
        one = np.ones(length(part))
        read, written = int(missing * inputs) + product.b.bytes + product.epilogue_bytes, int(missing * sums)
        lying = replace(taken(counts, which), read_bytes=one * read, result_bytes=one * written)
        estimate = multiplied(number, part, lying)
        overlapped = estimate.overlapped
        found = dict(estimate.terms)
        found["launch"] = found["launch"] + 2 * gpu_calibration(machine).winograd.later_launch * machine.launch_seconds
        found["input transform"] = _transform(
            part,
            machine,
            transform,
            tiles=product.m,
            channels=facts.channels,
            lanes=facts.input_vector,
            held=held_registers(transform),
            accesses=elements + points + of_input.scratch,
            arithmetic=of_input.fused,
            through=facts.bytes_read * elements / results + inputs,
            memory=facts.bytes_read + missing * inputs,
            element_bytes=facts.element_bytes,
        )
        found["output transform"] = _transform(
            part,
            machine,
            transform,
            tiles=product.m,
            channels=facts.outputs,
            lanes=facts.store_vector,
            held=min(held_registers(transform), transform.span[1] * transform.tile[0]),
            accesses=points + results + of_sums.scratch,
            arithmetic=of_sums.fused + results * facts.epilogue_flops,
            through=sums + facts.epilogue_bytes + facts.bytes_written * sectors_stored(facts.store_stride),
            memory=facts.bytes_written + facts.epilogue_bytes + missing * sums,
            element_bytes=facts.element_bytes,
        )
        for name, seconds in found.items():
            terms.setdefault(name, np.zeros(length(candidates)))[which] = seconds
    return Estimate(terms, overlapped)


def sectors_stored(stride: int) -> int:
    """Bytes that level 2 could deliver in the time of storing one, by threads whose elements are `stride` apart."""
    return 1 if stride <= 1 else 2 * min(stride, SECTOR_WORDS)


def _transform(
    candidates: Columns,
    machine: Machine,
    transform: Transform,
    *,
    tiles: int,
    channels: int,
    lanes: int,
    held: int,
    accesses: int,
    arithmetic: float,
    through: float,
    memory: float,
    element_bytes: int,
) -> np.ndarray:
    """Seconds of one transform of the tiles of all channels, without its launch. A thread holds `held` vectors in registers; `accesses` and
    `arithmetic` (per lane) are the instructions for a tile; `through` and `memory` are the bytes through level 2 and from or to memory."""
    threads, wide = candidates["transform_threads"], np.minimum(candidates["transform_vector"], lanes)
    # the threads of a block share its tiles where these pass between passes, otherwise each has one of its own
    chunk = CHANNELS_OF_BLOCK if transform.scratch else 1
    own = chunk / threads if transform.scratch else np.ones(length(candidates))
    elements = tiles * -(-channels // chunk) * chunk
    blocks = np.ceil(elements / (wide * threads * own))
    registers = np.minimum(OTHER_REGISTERS + held * wide, machine.registers_per_thread_max)
    resident = resident_blocks(machine, threads, registers, scratch_bytes(transform, element_bytes))
    waves = -(-blocks // (resident * machine.processors))
    at_once = np.minimum(elements / (wide * own), resident * machine.processors * threads)
    latency = machine.memory_latency_cycles / machine.clock_hz
    reachable = at_once * np.minimum(own * accesses * wide * element_bytes, BYTES_AHEAD) / latency
    # each processor has its share of the level-2 bandwidth, even if others are idle
    level2 = l2_bandwidth(machine) * np.minimum(1.0, blocks / machine.processors)
    moving = np.maximum(through / np.minimum(level2, reachable), memory / np.minimum(bandwidth(machine), reachable))
    instructions = own * (accesses + arithmetic * wide) + 3 * gpu_calibration(machine).instructions.division
    warps = blocks * threads / machine.warp_size
    # blocks are whole, so the busiest processor counts
    uneven = np.ceil(blocks / machine.processors) * machine.processors / blocks
    issue = uneven * warps * instructions / (machine.schedulers_per_processor * machine.processors * machine.clock_hz)
    cache = machine.cache(2)
    assert cache is not None
    # the loads, the dependent instructions of one warp, and the stores that the next kernel waits for
    alone = latency + (instructions * machine.fma_latency_cycles / 2 + cache.latency_cycles) / machine.clock_hz
    seconds: np.ndarray = np.maximum(moving, issue) + waves * alone
    return seconds
