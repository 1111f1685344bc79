"""Schedules of contractions on a CPU: a register tile of pixels by vectors of output channels, and which loop is outermost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import product_of, reject

CONSTANT, ALONG_N, ACROSS_N = "constant", "along n", "across n"


@dataclass(frozen=True)
class CpuContractionFacts:
    """Facts that the choice depends on: the two innermost M extents (rows may be 1), the product of all others, N and the reduction's size.

    `a_bytes`, `b_bytes`: bytes of each factor, read once. `element_bytes`, `result_bytes`: bytes of one packed element of B and of one result.
    Vectors hold float32. `whole_rows`: reductions over N follow in the same kernel, so a tile must hold all of N; `row_operations` counts their
    arithmetic and that of the maps between them. `images`: number of images if a sum over the pixels of each image follows (a thread then owns one
    panel of one image), otherwise 0. `b`: how the second factor is stored; CONSTANT is packed at compile time, ALONG_N is read in place if panels
    divide N and copied otherwise, ACROSS_N is copied. `epilogue_bytes`: everything else that is read; `single_stores`: results are not contiguous
    along N. `a_instructions`: those that compute an element of the first factor, besides the load that broadcasts one; 0 if it is stored."""

    outer: int
    rows: int
    columns: int
    n: int
    r: int
    a_bytes: int
    b_bytes: int
    whole_rows: bool = False
    row_operations: int = 0
    images: int = 0
    b: str = CONSTANT
    epilogue_bytes: int = 0
    single_stores: bool = False
    element_bytes: int = size_of(DEFAULT_FLOAT)
    result_bytes: int = size_of(DEFAULT_FLOAT)
    a_instructions: float = 0.0


@dataclass(frozen=True)
class CpuContractionSchedule:
    """`tile_rows` x `tile_columns` pixels by `vectors` vectors of `lanes` output channels stay in registers over the whole reduction.
    order "n": each thread takes a range of channel panels; "m": a range of pixels."""

    tile_rows: int
    tile_columns: int
    vectors: int
    lanes: int
    order: str

    @property
    def panel(self) -> int:
        return self.vectors * self.lanes

    def __str__(self) -> str:
        return f"tile {self.tile_rows}x{self.tile_columns} pixels by {self.vectors}x{self.lanes} channels, {self.order} outermost"


@dataclass(frozen=True)
class CpuNarrowSchedule(CpuContractionSchedule):
    """The same tiles, with B packed in its 16-bit type; its vectors are widened when they are loaded."""

    def __str__(self) -> str:
        return f"{super().__str__()}, weights of 16 bits"


@dataclass(frozen=True)
class CpuPairsSchedule(CpuContractionSchedule):
    """The same tiles of products of pairs of bfloat16."""

    def __str__(self) -> str:
        return f"{super().__str__()}, pairs of bfloat16"


ORDERS = ("n", "m")
VECTORS = (1, 2, 3, 4, 6, 8, 12, 16)


def cpu_contraction_space(facts: CpuContractionFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns tile_rows, tile_columns, vectors, order (index into ORDERS); and the number rejected for each reason."""
    registers = machine.vector_registers
    lanes = machine.vector_lanes()
    vectors = {*VECTORS, -(-facts.n // lanes)} if facts.whole_rows else VECTORS
    candidates = product_of(
        {
            "tile_rows": range(1, min(facts.rows, 8) + 1),
            "tile_columns": range(1, min(facts.columns, registers) + 1),
            "vectors": sorted(vectors),
            "order": range(len(ORDERS)),
        }
    )
    accumulators = candidates["tile_rows"] * candidates["tile_columns"] * candidates["vectors"]
    # the accumulators, `vectors` vectors of B, and the broadcast element of A
    needed = accumulators + candidates["vectors"] + 1
    part_of_a_row = (candidates["vectors"] * lanes < facts.n) & facts.whole_rows
    return reject(
        candidates,
        [
            (f"more than {registers} vector registers", needed > registers),
            ("more channels a tile than there are", (candidates["vectors"] > 1) & ((candidates["vectors"] - 1) * lanes >= facts.n)),
            ("a tile would hold a part of a row that is reduced", part_of_a_row),
            ("pixels that are summed stay with one thread", (candidates["order"] == ORDERS.index("m")) & (facts.images > 0)),
            ("two rows a tile while one is not filled", (candidates["tile_rows"] > 1) & (candidates["tile_columns"] < facts.columns)),
        ],
    )


def longest_row(machine: Machine) -> int:
    """The maximum number of channels in a tile of one pixel: the accumulators, as many vectors of B, and the element of A are in registers."""
    return machine.vector_lanes() * ((machine.vector_registers - 1) // 2)


def schedule_of(lanes: int, *, tile_rows: int, tile_columns: int, vectors: int, order: int) -> CpuContractionSchedule:
    """The schedule of one row of the space on a machine with vectors of `lanes` elements."""
    return CpuContractionSchedule(tile_rows, tile_columns, vectors, lanes, ORDERS[order])
