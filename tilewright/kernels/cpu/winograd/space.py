"""Schedules of the `winograd` schema on a CPU: convolutions with stride 1 by transforms of blocks (`kernels.block_transforms`) in one kernel.

A thread runs all three steps on a block of tiles while it is in the level-2 cache: the transform of the input tiles; then, for each panel of output
channels, the products of the points, and the transform of the sums with the epilogue. Accuracy is the same as on a GPU
(`kernels.gpu.winograd.space`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.block_transforms import Transform, points_of, tiles_of, transform_axes, transform_of
from tilewright.kernels.columns import Columns, product_of, reject, times
from tilewright.kernels.winograd_transform import Shape

VECTORS = (1, 2, 3, 4)
REGISTER_TILES = tuple(range(2, 15))
BLOCKS = (1, 2, 3, 4, 6, 8)
"""Register tiles in a block."""


@dataclass(frozen=True)
class CpuWinogradFacts:
    """Extents of the output (`outputs`: its channels), channels of the input, and distinct bytes that the epilogue reads besides the sums.
    `single_stores`: results are not contiguous along the output channels and are stored one by one. `element_bytes` is for transformed values,
    `input_bytes` and `result_bytes` for an element as it is stored. Filters of one row may slide along either dimension (`WinogradForm`)."""

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
    filter_shape: Shape = (3, 3)

    def tiles(self, candidates: Columns) -> np.ndarray:
        """Tiles of all images."""
        return tiles_of(self.images, self.height, self.width, candidates)


@dataclass(frozen=True)
class CpuWinogradSchedule:
    """The transform of `output_tile`, `filter_y`, `filter_x` and `fourier`. `tile` tiles by `vectors` vectors of `lanes` output channels stay in
    registers over all input channels; a block is `blocks` * `tile` tiles. Tiles are divided into `tile_parts` for threads, and the panels of output
    channels into `panel_parts` (each of which transforms the input itself)."""

    output_tile: int
    tile: int
    blocks: int
    vectors: int
    tile_parts: int
    panel_parts: int
    lanes: int
    filter_y: int = field(default=3, metadata={"omitted": 3})
    filter_x: int = field(default=3, metadata={"omitted": 3})
    fourier: int = field(default=0, metadata={"omitted": 0})

    @property
    def transform(self) -> Transform:
        return transform_of(self.output_tile, self.filter_y, self.filter_x, self.fourier)

    @property
    def panel(self) -> int:
        return self.vectors * self.lanes

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.tile * self.blocks

    @property
    def points(self) -> int:
        return self.transform.points

    def __str__(self) -> str:
        parts = f"threads {self.tile_parts}x{self.panel_parts}"
        return f"{self.transform} tile {self.tile} by {self.vectors}x{self.lanes} channels, {self.tiles} tiles a block, {parts}"


def working_bytes(facts: CpuWinogradFacts, candidates: Columns, lanes: int) -> np.ndarray:
    """Bytes that a block keeps in level 2: its points, the sums of a panel, and the filters of one point and panel."""
    points = points_of(candidates)
    tiles, panel = candidates["tile"] * candidates["blocks"], candidates["vectors"] * lanes
    needed: np.ndarray = facts.element_bytes * (points * tiles * (facts.channels + panel) + facts.channels * panel)
    return needed


def cpu_winograd_space(facts: CpuWinogradFacts, machine: Machine, threads: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with a column for each field of the schedule except `lanes`, and the number rejected for each reason."""
    lanes = machine.vector_lanes()
    of_tiles = product_of({"tile": REGISTER_TILES, "blocks": BLOCKS, "vectors": VECTORS, "by_panel": (0, 1)})
    candidates = times(transform_axes(facts.filter_shape), of_tiles)
    by_panel = candidates.pop("by_panel")
    candidates["tile_parts"], candidates["panel_parts"] = np.where(by_panel, 1, threads), np.where(by_panel, threads, 1)
    level_2, level_3 = (cache.bytes if cache is not None else 0 for cache in map(machine.cache, (2, 3)))
    working = working_bytes(facts, candidates, lanes)
    # of so many points few tiles stay in level 2, and their products are so few that level 3 can supply them
    fourier = candidates["fourier"] == 1
    tile, tiles = candidates["tile"], facts.tiles(candidates)
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
            ("a block does not stay in level 2", ~fourier & (working > 0.75 * level_2)),
            ("a block does not stay in a thread's share of level 3", fourier & (working > 0.75 * max(level_3 / threads, level_2))),
        ],
    )


def schedule_of(lanes: int, **axes: int) -> CpuWinogradSchedule:
    """The schedule of one candidate on a machine with vectors of `lanes` elements."""
    return CpuWinogradSchedule(**axes, lanes=lanes)
