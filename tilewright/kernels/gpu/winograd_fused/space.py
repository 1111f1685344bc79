"""Schedules of the `winograd fused` schema on a GPU: Winograd's algorithm in one kernel, for layers too small for three.

A block computes `tiles` tiles of the output for `outputs` output channels. For `channels` input channels at a time, its threads transform the input
tiles into shared memory, and asynchronous copies bring the transformed filters there. Every point of the tiles has its own threads, which accumulate
thread_m x thread_n sums each. The sums go through shared memory to the transform of the outputs. `split` > 1: a cluster of `split` blocks divides the
input channels; the transform is linear, so they exchange partial outputs, a quarter of the sums (4 / 9 for m = 4), through each other's shared
memory. Accuracy is that of `kernels.gpu.winograd.space`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.block_transforms import elements_of, tile_of, tiles_of
from tilewright.kernels.columns import Columns, product_of, reject
from tilewright.kernels.gpu.winograd.space import WinogradFacts
from tilewright.kernels.winograd_transform import Winograd, output_tiles

PADDING = 4
"""Padding in elements between rows of the transformed input in shared memory: vectors stay aligned, and stores of adjacent channels hit different
banks."""
FUSED_AXES = {
    "tiles": (8, 16, 32),
    "outputs": (16, 32, 64),
    "channels": (4, 8, 16),
    "thread_m": (2, 4, 8),
    "thread_n": (4, 8),
    "split": (1, 2, 4, 8),
}


FUSED_COLUMNS = ("output_tile", "filter_y", "filter_x", *FUSED_AXES)


@dataclass(frozen=True)
class FusedWinogradSchedule:
    """One candidate; see the module's docstring."""

    output_tile: int
    tiles: int
    outputs: int
    channels: int
    thread_m: int
    thread_n: int
    split: int = 1
    filter_y: int = field(default=3, metadata={"omitted": 3})
    filter_x: int = field(default=3, metadata={"omitted": 3})

    @property
    def transform(self) -> Winograd:
        return Winograd(self.output_tile, (self.filter_y, self.filter_x))

    @property
    def points(self) -> int:
        """Points of a tile."""
        return self.transform.points

    @property
    def threads(self) -> int:
        return self.points * (self.tiles // self.thread_m) * (self.outputs // self.thread_n)

    def __str__(self) -> str:
        return (
            f"winograd fused {self.transform.name} block={self.tiles}x{self.outputs}x{self.channels} "
            f"thread={self.thread_m}x{self.thread_n} split={self.split}" + " cluster" * (self.split > 1)
        )


def fused_winograd_space(facts: WinogradFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns FUSED_COLUMNS, and the number rejected for each reason."""
    rows, columns = facts.filter_shape
    candidates = product_of({"output_tile": output_tiles(facts.filter_shape), "filter_y": (rows,), "filter_x": (columns,), **FUSED_AXES})
    threads = fused_threads_of(candidates)
    points = elements_of(candidates)
    tiles, outputs, channels, split = (candidates[name] for name in ("tiles", "outputs", "channels", "split"))
    there = tiles_there(facts, candidates)
    registers = fused_registers_of(candidates)
    vectors, items = points * channels * outputs // 4, tiles * channels
    capability = machine.compute_capability
    quad = machine.warp_size * machine.schedulers_per_processor
    return reject(
        candidates,
        [
            ("no asynchronous copies", np.full(len(threads), capability < (8, 0))),
            ("no clusters", (split > 1) & (capability < (9, 0))),
            ("a thread's tile exceeds the block's", (candidates["thread_m"] > tiles) | (candidates["thread_n"] > outputs)),
            ("threads below two warps, above 640, or not whole warps", (threads < 64) | (threads > 640) | (threads % machine.warp_size != 0)),
            ("input channels do not divide among steps and parts", facts.channels % (channels * split) != 0),
            ("loads of a step do not divide among the threads", (vectors % threads != 0) | ((items % threads != 0) & (items > threads))),
            ("more than twice as many tiles or output channels as there are", (tiles >= 2 * there) | (outputs >= 2 * facts.outputs)),
            ("shared memory exceeds a block's", fused_shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
            ("registers exceed a thread's", registers > machine.registers_per_thread_max),
            # each scheduler has an equal share of the registers, and whole warps
            ("registers exceed a processor's", registers * (-(-threads // quad) * quad) > machine.registers_per_processor),
        ],
    )


def tiles_there(facts: WinogradFacts, candidates: Columns) -> np.ndarray:
    """Tiles of the whole output."""
    return tiles_of(facts.images, facts.height, facts.width, candidates)


def fused_threads_of(candidates: Columns) -> np.ndarray:
    threads: np.ndarray = (
        elements_of(candidates) * (candidates["tiles"] // candidates["thread_m"]) * (candidates["outputs"] // candidates["thread_n"])
    )
    return threads


def fused_shared_bytes_of(facts: WinogradFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: two buffers each of the transformed input and the filters, the sums, and partial outputs of a cluster.

    F(2x2) with 16 tiles, 32 outputs and 8 channels: 4 * 16 * (2 * 8 * (16 + 4) + 2 * 8 * 32 + 16 * 32) = 86016."""
    inputs = 2 * candidates["channels"] * (candidates["tiles"] + PADDING)
    filters = 2 * candidates["channels"] * candidates["outputs"]
    block = candidates["tiles"] * candidates["outputs"]
    parts = np.where(candidates["split"] > 1, prod(tile_of(candidates)) * block, 0)
    needed: np.ndarray = facts.element_bytes * (elements_of(candidates) * (inputs + filters + block) + parts)
    return needed


def fused_registers_of(candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: accumulators, prefetched fragments, tiles loaded one step ahead, and addresses. For the candidates
    predicted best for the layers of bench/layers.py on sm_90a, ptxas 13.0 allocates at most an eighth more, and mostly fewer."""
    passes = -(-candidates["tiles"] * candidates["channels"] // np.maximum(fused_threads_of(candidates), 1))
    size = candidates["thread_m"] * candidates["thread_n"]
    registers: np.ndarray = 28 + size + 2 * (candidates["thread_m"] + candidates["thread_n"]) + passes * elements_of(candidates)
    return registers
