"""Schedules of the `winograd` schema on a CPU: 3x3 convolutions with stride 1 by minimal filtering, F(2x2, 3x3) and F(4x4, 3x3), in one kernel.

A thread runs all three steps on a block of tiles while it is in the level-2 cache: the transform of the input tiles; then, for each panel of output
channels, the products of the points, and the transform of the sums with the epilogue. Accuracy is the same as on a GPU
(`kernels.gpu.winograd.space`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import Columns, product_of, reject
from tilewright.kernels.winograd_transform import FILTER, OUTPUT_TILES

VECTORS = (1, 2, 3, 4)
REGISTER_TILES = tuple(range(2, 15))
BLOCKS = (1, 2, 3, 4, 6, 8)
"""Register tiles in a block."""


@dataclass(frozen=True)
class CpuWinogradFacts:
    """Extents of the output (`outputs`: its channels), channels of the input, and distinct bytes that the epilogue reads besides the sums.
    `single_stores`: results are not contiguous along the output channels and are stored one by one. `element_bytes` is for transformed values,
    `input_bytes` and `result_bytes` for an element as it is stored."""

    images: int
    height: int
    width: int
    channels: int
    outputs: int
    epilogue_bytes: int = 0
    single_stores: bool = False
    element_bytes: int = size_of(DEFAULT_FLOAT)
    input_bytes: int = size_of(DEFAULT_FLOAT)
    result_bytes: int = size_of(DEFAULT_FLOAT)

    def tiles(self, output_tile: np.ndarray | int) -> np.ndarray:
        """Tiles of all images."""
        size = np.asarray(output_tile)
        count: np.ndarray = self.images * -(-self.height // size) * -(-self.width // size)
        return count


@dataclass(frozen=True)
class CpuWinogradSchedule:
    """F(m x m) with m = `output_tile`. `tile` tiles by `vectors` vectors of `lanes` output channels stay in registers over all input channels; a
    block is `blocks` * `tile` tiles. Tiles are divided into `tile_parts` for threads, and the panels of output channels into `panel_parts` (each of
    which transforms the input itself)."""

    output_tile: int
    tile: int
    blocks: int
    vectors: int
    tile_parts: int
    panel_parts: int
    lanes: int

    @property
    def panel(self) -> int:
        return self.vectors * self.lanes

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.tile * self.blocks

    @property
    def points(self) -> int:
        return (self.output_tile + FILTER - 1) ** 2

    def __str__(self) -> str:
        size, parts = self.output_tile, f"threads {self.tile_parts}x{self.panel_parts}"
        return f"winograd F({size}x{size},3x3) tile {self.tile} by {self.vectors}x{self.lanes} channels, {self.tiles} tiles a block, {parts}"


def working_bytes(facts: CpuWinogradFacts, candidates: Columns, lanes: int) -> np.ndarray:
    """Bytes that a block keeps in level 2: its points, the sums of a panel, and the filters of one point and panel."""
    points = (candidates["output_tile"] + FILTER - 1) ** 2
    tiles, panel = candidates["tile"] * candidates["blocks"], candidates["vectors"] * lanes
    needed: np.ndarray = facts.element_bytes * (points * tiles * (facts.channels + panel) + facts.channels * panel)
    return needed


def cpu_winograd_space(facts: CpuWinogradFacts, machine: Machine, threads: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with a column for each field of the schedule except `lanes`, and the number rejected for each reason."""
    lanes = machine.vector_lanes()
    candidates = product_of({"output_tile": OUTPUT_TILES, "tile": REGISTER_TILES, "blocks": BLOCKS, "vectors": VECTORS, "by_panel": (0, 1)})
    by_panel = candidates.pop("by_panel")
    candidates["tile_parts"], candidates["panel_parts"] = np.where(by_panel, 1, threads), np.where(by_panel, threads, 1)
    level_2 = machine.cache(2)
    capacity = level_2.bytes if level_2 is not None else 0
    tile, tiles = candidates["tile"], facts.tiles(candidates["output_tile"])
    block = tile * candidates["blocks"]
    panels = -(-facts.outputs // (candidates["vectors"] * lanes))
    return reject(
        candidates,
        [
            (f"more than {machine.vector_registers} vector registers", (tile + 1) * candidates["vectors"] + 1 > machine.vector_registers),
            ("more channels a panel than there are", (candidates["vectors"] > 1) & ((candidates["vectors"] - 1) * lanes >= facts.outputs)),
            ("a block larger than the tiles of a thread", (candidates["blocks"] > 1) & (block - tile >= -(-tiles // candidates["tile_parts"]))),
            ("a thread without work", (candidates["tile_parts"] > tiles) | (candidates["panel_parts"] > panels)),
            ("the same as sharing the tiles", (by_panel == 1) & (threads == 1)),
            ("a block does not stay in level 2", working_bytes(facts, candidates, lanes) > 0.75 * capacity),
        ],
    )


def schedule_of(lanes: int, **axes: int) -> CpuWinogradSchedule:
    """The schedule of one candidate on a machine with vectors of `lanes` elements."""
    return CpuWinogradSchedule(**axes, lanes=lanes)
