"""Schedules of depthwise convolutions on a CPU: a register tile of pixels by one vector of channels, vectors per block, and the outermost loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import Columns, product_of, reject

TILE_ROWS = (1, 2, 3, 4)
TILE_COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 14)
VECTORS = (1, 2, 3, 4, 6, 8)  # and the number of all vectors
ORDERS = ("c", "y")
MOST_PRODUCTS = 1024
"""Maximum multiply-adds that are unrolled: more code would not fit into the instruction caches. A tile of one row of pixels may have a loop over the
rows of the filter instead."""


@dataclass(frozen=True)
class CpuDepthwiseFacts:
    """Sizes of the convolution: `images` is the extent of all axes outside rows and columns, `vectors` the number of whole vectors of channels,
    `taps` the rows and columns of the filter.

    `input_rows` and `input_columns`: (step, reach) along the image, in units of the greatest common divisor of the steps of taps and pixels: n pixels
    need (n - 1) * step + reach positions. Bytes are distinct bytes."""

    images: int
    rows: int
    columns: int
    vectors: int
    taps: tuple[int, int]
    input_rows: tuple[int, int]
    input_columns: tuple[int, int]
    bytes_read: int
    bytes_written: int
    element_bytes: int = size_of(DEFAULT_FLOAT)


@dataclass(frozen=True)
class CpuDepthwiseSchedule:
    """`tile_rows` x `tile_columns` pixels of one vector of `lanes` channels stay in registers. A block is `vectors` such tiles of adjacent channels,
    one after another. order "c": each thread has a range of channels; "y": a range of rows."""

    tile_rows: int
    tile_columns: int
    vectors: int
    lanes: int
    order: str

    def __str__(self) -> str:
        return f"depthwise tile {self.tile_rows}x{self.tile_columns} pixels, {self.vectors}x{self.lanes} channels, {self.order} outermost"


def reach(span: tuple[int, int], count: np.ndarray) -> np.ndarray:
    """Positions of the input that `count` adjacent pixels need."""
    step, width = span
    return (count - 1) * step + width


def filters_held(facts: CpuDepthwiseFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Whether the filter stays in registers for a row of tiles: a block has one vector of channels, and sums, a row of inputs and the filter fit."""
    tile_rows, tile_columns = candidates["tile_rows"], candidates["tile_columns"]
    needed = tile_rows * tile_columns + reach(facts.input_columns, tile_columns) + facts.taps[0] * facts.taps[1]
    held: np.ndarray = (candidates["vectors"] == 1) & (needed <= machine.vector_registers)
    return held


def cpu_depthwise_space(facts: CpuDepthwiseFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns tile_rows, tile_columns, vectors, order (index into ORDERS); and the number rejected for each reason."""
    vectors = sorted({*VECTORS, facts.vectors})
    candidates = product_of({"tile_rows": TILE_ROWS, "tile_columns": TILE_COLUMNS, "vectors": vectors, "order": range(len(ORDERS))})
    sums = candidates["tile_rows"] * candidates["tile_columns"]
    unrolled = sums * facts.taps[1] * np.where(candidates["tile_rows"] == 1, 1, facts.taps[0])
    return reject(
        candidates,
        [
            ("a tile larger than the image", (candidates["tile_rows"] > facts.rows) | (candidates["tile_columns"] > facts.columns)),
            ("the same with all channels in one block", (candidates["order"] == ORDERS.index("c")) & (candidates["vectors"] == facts.vectors)),
            ("channels are no multiple of the block", facts.vectors % candidates["vectors"] != 0),
            # sums, one element of the filter and one of the input
            (f"more than {machine.vector_registers} vector registers", sums + 2 > machine.vector_registers),
            ("a tile with too many multiply-adds to unroll", unrolled > MOST_PRODUCTS),
        ],
    )


def schedule_of(lanes: int, *, tile_rows: int, tile_columns: int, vectors: int, order: int) -> CpuDepthwiseSchedule:
    """The schedule of one row of the space on a machine with vectors of `lanes` elements."""
    return CpuDepthwiseSchedule(tile_rows, tile_columns, vectors, lanes, ORDERS[order])
