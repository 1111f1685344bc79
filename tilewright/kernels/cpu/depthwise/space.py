"""Schedules of depthwise convolutions on a CPU: a register tile of pixels of one vector of channels, vectors a block, which loop is outermost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import Columns, product_of, reject

TILE_ROWS = (1, 2, 3, 4)
TILE_COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 14)
VECTORS = (1, 2, 3, 4, 6, 8)  # and all there are
ORDERS = ("c", "y")
MOST_PRODUCTS = 1024
"""Multiply-adds of a tile, all unrolled: more code would not stay in the caches of instructions."""


@dataclass(frozen=True)
class CpuDepthwiseFacts:
    """`images` outside of the rows and columns of the result, whole vectors of channels, and taps: rows and columns of the filter.

    `input_rows` and `input_columns`: (step, reach) along the image, in units of what taps and pixels have in common: tiles of n pixels need
    (n - 1) * step + reach positions. Bytes are those that move at least once."""

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
    """`tile_rows` x `tile_columns` pixels of one vector of `lanes` channels stay in registers; `vectors` such tiles, of neighbouring channels, follow
    one another. order "c": each thread takes a range of channels; "y": a range of rows."""

    tile_rows: int
    tile_columns: int
    vectors: int
    lanes: int
    order: str

    def __str__(self) -> str:
        return f"depthwise tile {self.tile_rows}x{self.tile_columns} pixels, {self.vectors}x{self.lanes} channels, {self.order} outermost"


def reach(span: tuple[int, int], count: np.ndarray) -> np.ndarray:
    """Positions of the input that `count` neighbouring pixels need."""
    step, width = span
    return (count - 1) * step + width


def filters_held(facts: CpuDepthwiseFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Whether the filter stays in registers while a row of tiles is computed: one vector of channels, and room beside sums and a row of inputs."""
    tile_rows, tile_columns = candidates["tile_rows"], candidates["tile_columns"]
    needed = tile_rows * tile_columns + reach(facts.input_columns, tile_columns) + facts.taps[0] * facts.taps[1]
    held: np.ndarray = (candidates["vectors"] == 1) & (needed <= machine.vector_registers)
    return held


def cpu_depthwise_space(facts: CpuDepthwiseFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns tile_rows, tile_columns, vectors, order (index into ORDERS); and how many were rejected by reason."""
    vectors = sorted({*VECTORS, facts.vectors})
    candidates = product_of({"tile_rows": TILE_ROWS, "tile_columns": TILE_COLUMNS, "vectors": vectors, "order": range(len(ORDERS))})
    sums = candidates["tile_rows"] * candidates["tile_columns"]
    return reject(
        candidates,
        [
            ("a tile larger than the image", (candidates["tile_rows"] > facts.rows) | (candidates["tile_columns"] > facts.columns)),
            ("the same with all channels in one block", (candidates["order"] == ORDERS.index("c")) & (candidates["vectors"] == facts.vectors)),
            ("channels are no multiple of the block", facts.vectors % candidates["vectors"] != 0),
            # sums, one element of the filter and one of the input
            (f"more than {machine.vector_registers} vector registers", sums + 2 > machine.vector_registers),
            ("a tile with too many multiply-adds to unroll", sums * facts.taps[0] * facts.taps[1] > MOST_PRODUCTS),
        ],
    )


def schedule_of(lanes: int, *, tile_rows: int, tile_columns: int, vectors: int, order: int) -> CpuDepthwiseSchedule:
    """The schedule of one row of the space on a machine with vectors of so many lanes."""
    return CpuDepthwiseSchedule(tile_rows, tile_columns, vectors, lanes, ORDERS[order])
