"""Stores of the sums in a CPU contraction's register tile: as vectors of channels or of pixels, row by row, or one by one.

The accumulators `acc` hold [row][column][vector of channels]. Scalar epilogues, partial panels and results that are not contiguous along the channels
go through a small array, `spill`. If pixels are summed, tiles add to `totals`, one for each channel of the panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.ir.expr import ZERO, Apply, Const, Expr, Load, Var, binary, coefficient, index_const, rewrite, substitute, variables
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Let, Statement, Store, substitute_in
from tilewright.kernels.cpu.common import accumulated, reduction, wide_epilogue
from tilewright.kernels.cpu.contraction.nest import Nest, summed_up
from tilewright.kernels.cpu.contraction.space import CpuContractionSchedule
from tilewright.kernels.cpu.transposition import copied, transposed, vector_pieces


@dataclass(frozen=True)
class Pixels:
    """The pixels of a register tile: `rows` x `columns` pixels starting at (row, column)."""

    row: Expr
    rows: int
    column: Expr
    columns: int


def over_pixels(body: Statement, i: Var, j: Var) -> Statement:
    """The body in unrolled loops over rows i and columns j of a tile."""
    for axis in (j, i):
        if axis.extent != 1:
            body = For(axis, index_const(axis.extent or 0), body, "unroll")
    return body


@dataclass(frozen=True)
class TileStores:
    """Emits the stores of the tiles of one contraction, for the panel of channels given by the variable `panel`."""

    target: str
    nest: Nest
    schedule: CpuContractionSchedule
    panel: Var

    def store(self, pixels: Pixels) -> Statement:
        """The epilogue and store of a tile."""
        extent = self.nest.n.extent or 0
        if self.nest.stages:
            return self._row_store(pixels)
        vectored = self._vector_store(pixels) or self._transposed_store(pixels)
        guarded = self._guarded_store(pixels)
        if vectored is None:
            return guarded
        if extent % self.schedule.panel == 0:
            return vectored
        full = extent // self.schedule.panel
        partial = self._partial_store(pixels) or guarded
        return If(self.panel < full, vectored, partial) if full else partial

    def _vector_store(self, pixels: Pixels) -> Statement | None:
        lanes, vectors, n = self.schedule.lanes, self.schedule.vectors, self.nest.n
        if self.nest.final is None and coefficient(self.nest.offset, n) != 1:
            return None
        value = self._wide_value(lanes)
        if value is None:
            return None
        sums = accumulated(self.nest.dtype, lanes)
        i, j, v = Var("i", pixels.rows), Var("j", pixels.columns), Var("v", vectors)
        place: dict[Var, Expr] = {n: self.panel * self.schedule.panel + v * lanes}
        held_at = Load("acc", ((i * pixels.columns + j) * (vectors * lanes) + v * lanes,), self.nest.dtype, lanes)
        one = self.nest.at(substitute(value, place), pixels.row + i, pixels.column + j)
        one = rewrite(one, lambda x: held_at if x == sums else x)
        target, where = self.target, self.nest.at(substitute(self.nest.offset, place), pixels.row + i, pixels.column + j)
        if self.nest.final is not None:
            target, where = "totals", v * lanes
            one = Apply("add", (Load(target, (where,), self.nest.dtype, lanes), one), self.nest.dtype, lanes)
        lets, (one, where) = bind_shared([one, where])
        store = For(v, index_const(vectors), block(lets, Store(target, where, one)), "unroll")
        return over_pixels(store, i, j)

    def _wide_value(self, lanes: int) -> Expr | None:
        """The stored value of `lanes` channels, over ACCUMULATOR as a vector; None if the epilogue cannot be vectorised."""
        nest = self.nest
        return accumulated(nest.dtype, lanes) if nest.epilogue is None else wide_epilogue(nest.epilogue, nest.n, lanes, nest.dtype)

    def _transposed_store(self, pixels: Pixels) -> Statement | None:
        """The store if pixels, not channels, are adjacent in the result: `lanes` pixels at a time are transposed in registers and stored as vectors
        of pixels, directly or (if no vector fits a row) through a buffer."""
        nest, lanes, vectors, width = self.nest, self.schedule.lanes, self.schedule.vectors, self.schedule.panel
        value = self._wide_value(lanes)
        power_of_two = lanes & (lanes - 1) == 0
        suits = value is not None and value.dtype == self.nest.dtype and nest.final is None and pixels.columns != 1 and power_of_two
        if value is None or not suits or coefficient(nest.offset, nest.columns) != 1:
            return None
        sums = accumulated(self.nest.dtype, lanes)
        zero = Apply("broadcast", (Const(0.0, self.nest.dtype),), self.nest.dtype, lanes)
        target, v, c, k = self.target, Var("v", vectors), Var("c", width), Var("k", lanes)
        channel = self.panel * width + v * lanes
        size = pixels.rows * pixels.columns
        groups = -(-size // lanes)
        straight = pixels.rows == 1 and pixels.columns == lanes
        body: list[Statement] = [Allocate(Buffer(name, self.nest.dtype, lanes * lanes, "register", lanes)) for name in ("tile", "turned")]
        for group in range(groups):
            values: list[Expr] = []
            for pixel in range(group * lanes, min((group + 1) * lanes, size)):
                held = Load("acc", (index_const(pixel * width) + v * lanes,), self.nest.dtype, lanes)
                row, column = pixels.row + pixel // pixels.columns, pixels.column + pixel % pixels.columns
                placed = self.nest.at(substitute(value, {nest.n: channel}), row, column)
                values.append(substitute(placed, {sums: held}))
            lets, values = bind_shared(values)
            body += [*lets, *(Store("tile", index_const(at * lanes), one) for at, one in enumerate([*values, *[zero] * (lanes - len(values))]))]
            turns, result = transposed("tile", "turned", lanes, self.nest.dtype)
            vector = Load(result, (k * lanes,), self.nest.dtype, lanes)
            if straight:
                where = self.nest.at(substitute(nest.offset, {nest.n: channel + k}), pixels.row, pixels.column)
                leave: Statement = Store(target, where, vector)
            else:
                leave = Store("spill", (v * lanes + k) * (groups * lanes) + group * lanes, vector)
            body += [*turns, For(k, index_const(lanes), leave, "unroll")]
        tile = For(v, index_const(vectors), block(body), "unroll")
        if straight:
            return tile
        copies: list[Statement] = []
        for at in range(pixels.rows):
            where = self.nest.at(substitute(nest.offset, {nest.n: self.panel * width + c}), pixels.row + at, pixels.column)
            copies += copied(target, where, "spill", c * (groups * lanes) + at * pixels.columns, pixels.columns, lanes, self.nest.dtype)
        spill = Allocate(Buffer("spill", self.nest.dtype, width * groups * lanes, "register"))
        return block(spill, tile, For(c, index_const(width), block(copies)))

    def _spill(self, vectors: int) -> list[Statement]:
        """The accumulators as an array of elements."""
        lanes = self.schedule.lanes
        k = Var("k", vectors)
        copy = Store("spill", k * lanes, Load("acc", (k * lanes,), self.nest.dtype, lanes))
        return [Allocate(Buffer("spill", self.nest.dtype, vectors * lanes, "register")), For(k, index_const(vectors), copy, "unroll")]

    def _partial_store(self, pixels: Pixels) -> Block | None:
        """Stores the channels of a partial last panel through a buffer, pixel by pixel in the fewest vectors that cover them exactly. None if results
        are not contiguous along N or the epilogue cannot be vectorised."""
        nest, panel = self.nest, self.schedule.panel
        if nest.final is not None or coefficient(nest.offset, nest.n) != 1:
            return None
        row, column = Var("row", pixels.rows), Var("column", pixels.columns)
        pieces: list[Statement] = []
        for start, lanes in vector_pieces((nest.n.extent or 0) % panel, self.schedule.lanes):
            value = self._wide_value(lanes)
            if value is None:
                return None
            held = Load("spill", ((row * pixels.columns + column) * panel + start,), self.nest.dtype, lanes)
            place: dict[Var, Expr] = {nest.n: self.panel * panel + start}
            one, where = (self.nest.at(substitute(e, place), pixels.row + row, pixels.column + column) for e in (value, nest.offset))
            lets, (one, where) = bind_shared([substitute(one, {accumulated(self.nest.dtype, lanes): held}), where])
            pieces.append(block(lets, Store(self.target, where, one)))
        store: Statement = block(pieces)
        for axis in (column, row):
            store = For(axis, index_const(axis.extent or 0), store)
        return block(self._spill(pixels.rows * pixels.columns * self.schedule.vectors), store)

    def _row_store(self, pixels: Pixels) -> Block:
        """For each pixel: maps and reductions over the row of channels in the tile, then the epilogue."""
        nest, extent = self.nest, self.nest.n.extent or 0
        row, column, lane = Var("row", pixels.rows), Var("column", pixels.columns), Var("lane", extent)
        held = Load("spill", ((row * pixels.columns + column) * self.schedule.panel + lane,), self.nest.dtype)
        totals: dict[Var, Expr] = {}

        def here(expr: Expr) -> Expr:
            placed = self.nest.at(substitute(expr, {nest.n: lane}), pixels.row + row, pixels.column + column)
            narrow = accumulated(self.nest.dtype)
            return rewrite(placed, lambda x: held if x == narrow else totals.get(x, x) if isinstance(x, Var) else x)

        parts: list[Statement] = []
        for stage in nest.stages:
            if stage.reduction is None or stage.result is None:
                lets, (value,) = bind_shared([here(stage.body)])
                parts.append(For(lane, index_const(extent), block(lets, Store("spill", held.index[0], value)), "simd"))
                continue
            if not stage.reduction.reduction:  # reads the row's first element
                total = Var(f"{stage.result.name}_first", None, stage.result.dtype)
                parts.append(Let(total, substitute(here(stage.body), {lane: ZERO})))
                totals[stage.result] = total
                continue
            reduce = replace(stage.reduction, reduction=(lane,))
            accumulate, results = reduction(reduce, [here(stage.body)], "simd", f"{stage.result.name}_")
            parts += accumulate
            totals[stage.result] = results[0]
        assert nest.epilogue is not None
        lets, (value, where) = bind_shared([here(nest.epilogue), here(nest.offset)])
        store: Statement = block(lets, Store(self.target, where, value))
        if nest.n in variables(nest.offset):
            store = For(lane, index_const(extent), store, "simd")
        pixel: Statement = block(parts, store)
        for axis in (column, row):
            if axis.extent != 1:
                pixel = For(axis, index_const(axis.extent or 0), pixel)
            else:
                pixel = substitute_in(pixel, {axis: ZERO})
        return block(self._spill(pixels.rows * pixels.columns * self.schedule.vectors), pixel)

    def _guarded_store(self, pixels: Pixels) -> Block:
        """Stores through a buffer, element by element: partial panels, results that are not contiguous along N, scalar epilogues."""
        panel_width, n = self.schedule.panel, self.nest.n
        result = self._spill(pixels.rows * pixels.columns * self.schedule.vectors)
        row, column, lane = Var("row", pixels.rows), Var("column", pixels.columns), Var("lane", panel_width)
        held = Load("spill", ((row * pixels.columns + column) * panel_width + lane,), self.nest.dtype)
        place: dict[Var, Expr] = {n: self.panel * panel_width + lane}
        value: Expr = held
        if self.nest.epilogue is not None:
            narrow = accumulated(self.nest.dtype)
            value = self.nest.at(substitute(self.nest.epilogue, place), pixels.row + row, pixels.column + column)
            value = rewrite(value, lambda x: held if x == narrow else x)
        target, where = self.target, self.nest.at(substitute(self.nest.offset, place), pixels.row + row, pixels.column + column)
        if self.nest.final is not None:
            target, where = "totals", lane
            value = Apply("add", (Load(target, (where,), self.nest.dtype), value), self.nest.dtype)
        lets, (value, where) = bind_shared([value, where])
        width = self._channels()
        store: Statement = block(lets, Store(target, where, value))
        # the axis along which the result is contiguous goes innermost
        if coefficient(self.nest.offset, n) == 1 or self.nest.columns.extent == 1:
            order: tuple[tuple[Var, Expr], ...] = ((lane, width), (column, index_const(pixels.columns)), (row, index_const(pixels.rows)))
        else:
            order = ((column, index_const(pixels.columns)), (lane, width), (row, index_const(pixels.rows)))
        for axis, bound in order:
            store = For(axis, bound, store)
        return block(result, store)

    def sums(self, axes: Sequence[Var], tiles: Statement) -> Block:
        """The loops over all tiles of an image, which add to the totals of the panel's channels, and the epilogue and store of the totals."""
        assert self.nest.final is not None
        lanes, vectors, width = self.schedule.lanes, self.schedule.vectors, self.schedule.panel
        v, lane = Var("v", vectors), Var("lane", width)
        zero = Apply("broadcast", (Const(0.0, self.nest.dtype),), self.nest.dtype, lanes)
        start: list[Statement] = [Allocate(Buffer("totals", self.nest.dtype, width, "register"))]
        start.append(For(v, index_const(vectors), Store("totals", v * lanes, zero), "unroll"))
        for axis in reversed(axes):
            tiles = For(axis, index_const(axis.extent or 0), tiles) if axis.extent != 1 else substitute_in(tiles, {axis: ZERO})
        place: dict[Var, Expr] = {self.nest.n: self.panel * width + lane, summed_up(self.nest.dtype): Load("totals", (lane,), self.nest.dtype)}
        lets, (value, where) = bind_shared([substitute(self.nest.final, place), substitute(self.nest.offset, place)])
        store = block(lets, Store(self.target, where, value))
        return block(start, tiles, For(lane, self._channels(), store))

    def _channels(self) -> Expr:
        """The number of channels in the current panel."""
        extent, width = self.nest.n.extent or 0, self.schedule.panel
        if extent % width == 0:
            return index_const(width)
        return index_const(extent) if extent < width else binary("min", extent - self.panel * width, index_const(width))
