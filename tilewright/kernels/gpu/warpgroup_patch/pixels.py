"""Where the rows of a block's product are in the image: positions of the result that are inside of the tile and of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewright.codegen.common import Below, below, decode, named
from tilewright.ir.expr import Expr, index_const
from tilewright.ir.kernel import Statement
from tilewright.kernels.gpu.gemm.block_result import AtRow, RowBody
from tilewright.kernels.gpu.warpgroup_patch.form import EIGHT, PatchFacts, PatchForm
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule


@dataclass(frozen=True)
class Position:
    """An image, and a position of its result along each dimension."""

    image: Expr
    where: tuple[Expr, ...]


class Positions(Protocol):
    """Emits a body with the position of a row of the product, as `within` has it if the row may be outside the tile or the result."""

    def __call__(self, row: Expr, body: Callable[[Position], list[Statement]], within: Below = below) -> list[Statement]: ...


def row_of(facts: PatchFacts, image: Expr, where: Sequence[Expr]) -> Expr:
    """The number of a position among those of all images."""
    m = image
    for position, extent in zip(where, facts.outputs, strict=True):
        m = m * extent + position
    return m


def patch_of(facts: PatchFacts, schedule: PatchSchedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extents of the block's patch, and the distances of its neighbours along each dimension (`PatchFacts.patch`)."""
    extents, pitches = facts.patch(schedule.pixels, schedule.height, schedule.width, schedule.lines, facts.pools(schedule.split))
    return tuple(map(int, extents)), tuple(map(int, pitches))


def line_rows(facts: PatchFacts, schedule: PatchSchedule) -> int:
    """Rows of the product from one line to the next; 0 for images of one dimension."""
    if len(facts.outputs) == 1:
        return 0
    return EIGHT if schedule.lines else patch_of(facts, schedule)[1][-2]


def positions_of(facts: PatchFacts, schedule: PatchSchedule, image: Expr, first: Sequence[Expr]) -> Positions:
    """The positions of the rows of the block whose tile of an image begins at `first`."""
    tile = [int(extent) for extent in facts.tile(schedule.height, schedule.width)]
    pitch = line_rows(facts, schedule)

    def at_row(row: Expr, body: Callable[[Position], list[Statement]], within: Below = below) -> list[Statement]:
        inner = [row // pitch, row % pitch] if pitch else [row]

        def inside(positions: list[Expr]) -> list[Statement]:
            number = len(positions)
            if number == len(tile):
                return within(image, facts.images, "stored_image", lambda image: body(Position(image, tuple(positions))))
            dimension = len(tile) - 1 - number  # the last one first
            along = inner[dimension - len(tile)] if number < len(inner) else index_const(0)

            def placed(offset: Expr) -> list[Statement]:
                def at(position: Expr) -> list[Statement]:
                    return inside([position, *positions])

                return within(first[dimension] + offset, facts.outputs[dimension], f"position{dimension}", at)

            return within(along, tile[dimension], f"offset{dimension}", placed)

        return inside([])

    return at_row


def rows_at(form: PatchForm, positions: Positions) -> AtRow:
    """Emits a body with the values of the axes of m at a row of the product."""

    def at_row(row: Expr, body: RowBody, within: Below = below) -> list[Statement]:
        def at(position: Position) -> list[Statement]:
            lets, mapping = named(decode(row_of(form.facts, position.image, position.where), form.product.m))
            return [*lets, *body(mapping)]

        return positions(row, at, within)

    return at_row
