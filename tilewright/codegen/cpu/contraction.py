"""CPU contractions: direct convolution and matrix product from one register-tiled loop nest.

    for each panel of output channels, tile of pixels:      (in parallel)
        acc[pixel][vector] = 0
        for r in reduction:                                  (filter rows, filter columns, input channels)
            acc[pixel][vector] += A[pixel, r] * B[r, vector] (A broadcast, B a vector from a packed panel)
        out = epilogue(acc)

Where reductions over all output channels follow (softmax, layer normalisation), a tile holds whole rows of channels, and reductions and epilogue
run on the tile before anything is stored. Where a sum over pixels follows (global average pooling), one thread computes all tiles of an image
for its panel, one after the other, and adds them to a total for each channel instead of storing them.

The tile spans two M axes (rows and columns of an image), so it fits small images too; partial tiles get code of their own, partial vectors
leave through a small buffer. Padding costs nothing where A has a zeroed halo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, storage_order
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.cpu.common import ACCUMULATOR, SERIAL_WORK, common_origin, reduction, wide_epilogue
from tilewright.codegen.cpu.second_factor import SecondFactor, depends_on, how_b_lies, second_factor
from tilewright.codegen.cpu.transposition import copied, transposed, vector_pieces
from tilewright.codegen.describe import problem
from tilewright.graph.contraction import Contraction, anchor, sums_pixels
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import (
    ZERO,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    binary,
    coefficient,
    index_const,
    loads,
    rewrite,
    substitute,
    variables,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Let, Prefetch, Statement, Store, substitute_in
from tilewright.ir.layout import Layout
from tilewright.ir.region import Call, Lowered, Region
from tilewright.schedule.cpu_contraction import CpuContractionProblem, CpuContractionSchedule


@dataclass(frozen=True)
class _Stage:
    """What happens to the tile's rows before the epilogue: a reduction over N, or (without one) a map that overwrites the tile."""

    body: Expr
    reduction: Step | None = None
    result: Var | None = None


@dataclass(frozen=True)
class _Nest:
    """The contraction in flat form: axes in loop order, A's element, the result's offset, and the epilogue (None: store the sum).

    With `final` the epilogue's values are summed over the pixels: `serial` axes (outside the tile's two), rows and columns. The result is `final`
    of a total for each channel, which it knows as the variable TOTAL."""

    found: Contraction
    outer: tuple[Var, ...]
    rows: Var | None
    columns: Var
    a: Expr
    offset: Expr
    epilogue: Expr | None
    n: Var
    stages: tuple[_Stage, ...] = ()
    serial: tuple[Var, ...] = ()
    final: Expr | None = None

    @property
    def n_outer(self) -> tuple[Var, ...]:
        return tuple(axis for axis in self.found.n if axis != self.n and axis.extent != 1)

    @property
    def batch(self) -> tuple[Var, ...]:
        return tuple(axis for axis in self.found.batch if axis.extent != 1)


def _prepare(region: Region, layouts: Mapping[str, Layout], constants: frozenset[str]) -> _Nest:
    found = anchor(region.steps, constants)
    assert found is not None
    last = region.steps[-1]
    offset = layouts[region.outputs[0]].offset(last.index)
    a = flatten(found.a, layouts)
    if sums_pixels(region.steps, found):
        return _prepare_pixel_sum(region, found, a, offset, layouts)
    # sums and totals are addressed by nothing while axes are merged: they are what the tile holds
    held: dict[str, Expr] = {found.step.name: Var(ACCUMULATOR, None, "f32")}
    stages: list[_Stage] = []
    for step in region.steps[1:]:
        body = rewrite(flatten(step.bodies[0], layouts), lambda x: held.get(x.buffer, x) if isinstance(x, Load) else x)
        result = Var(f"total{len(stages)}", None, body.dtype) if step.combiner else None
        stages.append(_Stage(body, step if step.combiner else None, result))
        held[step.name] = result if result is not None else Var(ACCUMULATOR, None, "f32")
    ordered = storage_order(found.m, offset)
    axes, merged = merge_axes(ordered, [a, offset, *(stage.body for stage in stages)])
    units: dict[Var, Expr] = {v: ZERO for v in (*found.batch, *found.n, *found.step.reduction) if v.extent == 1}
    merged = tuple(substitute(e, units) for e in merged)
    columns = axes[-1] if axes else Var("m", 1)
    rows = axes[-2] if len(axes) > 1 else None
    n = max(found.n, key=lambda axis: axis.extent or 0)
    stages = [replace(stage, body=body) for stage, body in zip(stages, merged[2:], strict=True)]
    epilogue: Expr | None = None
    if stages:
        epilogue = stages[-1].result or stages.pop().body
    kept, epilogue = _kept(stages, epilogue)
    return _Nest(found, axes[:-2], rows, columns, merged[0], merged[1], epilogue, n, kept)


def _prepare_pixel_sum(region: Region, found: Contraction, a: Expr, offset: Expr, layouts: Mapping[str, Layout]) -> _Nest:
    """The nest of [sum, sum over pixels, map?]."""
    product, total, *rest = region.steps

    def held(step: Step, name: str, body: Expr) -> Expr:
        flat = flatten(body, layouts)
        return rewrite(flat, lambda x: Var(name, None, "f32") if isinstance(x, Load) and x.buffer == step.name else x)

    element = held(product, ACCUMULATOR, total.bodies[0])
    final: Expr = held(total, TOTAL, rest[0].bodies[0]) if rest else Var(TOTAL, None, "f32")
    summed = tuple(axis for axis in found.m if axis in total.reduction)
    images = storage_order([axis for axis in found.m if axis not in summed], offset)
    # images and the pixels of one image run in different loops, so that they are not merged with each other
    outer, merged = merge_axes(images, [a, offset, element, final])
    pixels, merged = merge_axes(summed, merged)
    units: dict[Var, Expr] = {v: ZERO for v in (*found.batch, *found.n, *found.step.reduction) if v.extent == 1}
    a, offset, element, final = (substitute(e, units) for e in merged)
    columns = pixels[-1] if pixels else Var("m", 1)
    rows = pixels[-2] if len(pixels) > 1 else None
    n = max(found.n, key=lambda axis: axis.extent or 0)
    return _Nest(found, outer, rows, columns, a, offset, element, n, serial=pixels[:-2], final=final)


def _kept(stages: Sequence[_Stage], epilogue: Expr | None) -> tuple[tuple[_Stage, ...], Expr | None]:
    """Stages and epilogue with what a reduction computes of each element written over the tile, where everything later needs that and nothing
    else of the tile: a softmax then evaluates its exponential once."""
    tile = Var(ACCUMULATOR, None, "f32")
    result: list[_Stage] = []
    rest = list(stages)
    while rest:
        stage = rest.pop(0)
        body = stage.body
        if stage.reduction is not None and isinstance(body, Apply) and body.dtype == "f32" and epilogue is not None:
            later = [rewrite(e, lambda x: tile if x == body else x) for e in (*(s.body for s in rest), epilogue)]  # noqa: B023
            without = [rewrite(e, lambda x: ZERO if x == body else x) for e in (*(s.body for s in rest), epilogue)]  # noqa: B023
            if any(tile in variables(e) for e in later) and not any(tile in variables(e) for e in without):
                result.append(_Stage(body))
                stage = replace(stage, body=tile)
                rest = [replace(s, body=e) for s, e in zip(rest, later[:-1], strict=True)]
                epilogue = later[-1]
        result.append(stage)
    return tuple(result), epilogue


TOTAL = "total"
LINE = 16  # float32 in a cache line
SHORT = 8
"""Iterations of an innermost loop below which a longer one in its place was measured to be faster (gcc 12, 7 x 7 filters)."""


def contraction_problem(region: Region, layouts: Mapping[str, Layout], constants: frozenset[str]) -> CpuContractionProblem:
    """The extents that the schedule's choice depends on."""
    nest = _prepare(region, layouts, constants)
    images = prod(axis.extent or 0 for axis in (*nest.batch, *nest.n_outer, *nest.outer))
    outer = images * prod(axis.extent or 0 for axis in nest.serial)
    rows = nest.rows.extent or 0 if nest.rows is not None else 1
    a_values = {load.buffer for load in loads(nest.found.a)}
    a_bytes = sum(layouts[name].size for name in a_values if name in layouts) * 4
    b_size = prod(axis.extent or 0 for axis in (*nest.found.batch, *nest.found.n, *nest.found.r))
    operations = sum(step.flops() for step in region.steps[1:]) if nest.stages or nest.final is not None else 0
    return CpuContractionProblem(
        outer,
        rows,
        nest.columns.extent or 0,
        nest.n.extent or 0,
        nest.found.size_r,
        a_bytes,
        4 * b_size,
        bool(nest.stages),
        operations,
        images if nest.final is not None else 0,
        how_b_lies(nest.found, nest.n, layouts, constants),
    )


def lower_contraction(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    schedule: CpuContractionSchedule,
) -> Lowered:
    """Kernels of a contraction: (where B has to be copied) one that copies B into panels, and the tiled product."""
    nest = _prepare(region, layouts, constants)
    found = nest.found
    leading = depends_on(found, (*nest.batch, *nest.n_outer))
    b = second_factor(region, found, nest.n, leading, layouts, values, constants, machine, schedule)
    panel = Var("panel", -(-(nest.n.extent or 0) // schedule.panel))
    level_2 = machine.cache(2)
    emitter = _Tile(region, nest, schedule, panel, b, _tile_axis(nest, schedule), level_2.bytes // 2 if level_2 is not None else 0)
    body = _outer_loops(nest, schedule, panel, emitter)
    header = f"{problem(region, constants)}\n{schedule}"
    roles = {**{load.buffer: "A" for load in loads(found.a)}, b.buffer: f"B in panels of {schedule.panel}" if b.layout is not None else "B"}
    dtypes = {**{name: v.dtype for name, v in values.items()}, **({b.buffer: "f32"} if b.layout is not None else {})}
    placed = {**layouts, **({b.buffer: b.layout} if b.layout is not None else {})}
    kernel, arguments = assemble("contraction", body, placed, dtypes, region.outputs, header=header, roles=roles)
    return Lowered(region, str(schedule), (*b.kernels, kernel), (*b.calls, Call(kernel.name, arguments)), b.storage)


def _tile_axis(nest: _Nest, schedule: CpuContractionSchedule) -> Var:
    """The loop over tile rows, or over tile columns where there is one M axis."""
    if nest.rows is None:
        return Var("tile_column", -(-(nest.columns.extent or 0) // schedule.tile_columns))
    return Var("tile_row", -(-(nest.rows.extent or 0) // schedule.tile_rows))


def _outer_loops(nest: _Nest, schedule: CpuContractionSchedule, panel: Var, tile: _Tile) -> Statement:
    """Threads over batch, panels and tile rows (or tile columns where there is one M axis); columns of tiles inside. Where pixels are summed,
    threads over batch, images and panels, and all tiles of an image inside."""
    width = schedule.tile_columns
    columns = nest.columns.extent or 0
    height = schedule.tile_rows
    row_extent = nest.rows.extent or 0 if nest.rows is not None else 1
    row_tile = _tile_axis(nest, schedule)

    def column_tiles(row_start: Expr, rows: int) -> list[Statement]:
        parts: list[Statement] = []
        full = columns // width
        if full == 1:
            parts.append(tile.emit(row_start, rows, ZERO, width))
        elif full:
            at = Var("tile_column", full)
            parts.append(For(at, index_const(full), tile.emit(row_start, rows, at * width, width)))
        if columns % width:
            parts.append(tile.emit(row_start, rows, index_const(full * width), columns % width))
        return parts

    parallel: list[Var] = [*nest.batch, *nest.n_outer]
    if nest.rows is None and columns > width:
        at = row_tile
        inside: Statement
        whole = tile.emit(ZERO, 1, at * width, width)
        if columns % width:
            rest = tile.emit(ZERO, 1, index_const(columns // width * width), columns % width)
            inside = If(at < columns // width, whole, rest)
        else:
            inside = whole
        m_axes: list[Var] = [at]
    elif row_extent % height:
        full = row_extent // height
        last = block(column_tiles(index_const(full * height), row_extent % height))
        inside = If(row_tile < full, block(column_tiles(row_tile * height, height)), last) if full else last
        m_axes = [row_tile]
    else:
        inside = block(column_tiles(row_tile * height, height))
        m_axes = [row_tile]
    if nest.final is not None:
        inside = tile.summed([*nest.serial, *m_axes], inside)
        m_axes = []
    m_axes = [*nest.outer, *m_axes]
    order = [panel, *m_axes] if schedule.order == "n" else [*m_axes, panel]
    parallel += [axis for axis in order if axis.extent != 1]
    single: dict[Var, Expr] = {axis: ZERO for axis in order if axis.extent == 1}
    if single:
        inside = substitute_in(inside, single)
    work = nest.found.flops
    result = inside
    for axis in reversed(parallel):
        result = For(axis, index_const(axis.extent or 0), result, "parallel" if work > 8 * SERIAL_WORK else "serial")
    return result


@dataclass(frozen=True)
class _Tile:
    """Emits the code of one register tile."""

    region: Region
    nest: _Nest
    schedule: CpuContractionSchedule
    panel: Var
    b: SecondFactor
    tile: Var  # the parallel loop over tile rows (or columns) that runs inside the loop over panels
    prefetched_bytes: int

    def emit(self, row_start: Expr, rows: int, column_start: Expr, columns: int) -> Block:
        """The tile of `rows` x `columns` pixels that starts there, for the current panel."""
        lanes, vectors = self.schedule.lanes, self.schedule.vectors
        size = rows * columns * vectors
        zero = Apply("broadcast", (Const(0.0, "f32"),), "f32", lanes)
        k = Var("k", size)
        start: list[Statement] = [Allocate(Buffer("acc", "f32", size * lanes, "register", lanes))]
        start.append(For(k, index_const(size), Store("acc", k * lanes, zero), "unroll"))
        reduced, (element, base, step) = self._reduced()
        inner: Statement = block(self._accumulate(row_start, rows, column_start, columns, element, base, step))
        for axis in reversed(reduced):
            inner = For(axis, index_const(axis.extent or 0), inner)
        return block(start, inner, self._store(row_start, column_start, rows, columns))

    def summed(self, axes: Sequence[Var], tiles: Statement) -> Block:
        """The loops over all tiles of an image, which add to the totals of the panel's channels, and the store of what becomes of the totals."""
        assert self.nest.final is not None
        lanes, vectors, width = self.schedule.lanes, self.schedule.vectors, self.schedule.panel
        v, lane = Var("v", vectors), Var("lane", width)
        zero = Apply("broadcast", (Const(0.0, "f32"),), "f32", lanes)
        start: list[Statement] = [Allocate(Buffer("totals", "f32", width, "register"))]
        start.append(For(v, index_const(vectors), Store("totals", v * lanes, zero), "unroll"))
        for axis in reversed(axes):
            tiles = For(axis, index_const(axis.extent or 0), tiles) if axis.extent != 1 else substitute_in(tiles, {axis: ZERO})
        place: dict[Var, Expr] = {self.nest.n: self.panel * width + lane, Var(TOTAL, None, "f32"): Load("totals", (lane,), "f32")}
        lets, (value, where) = bind_shared([substitute(self.nest.final, place), substitute(self.nest.offset, place)])
        store = block(lets, Store(self.region.outputs[0], where, value))
        return block(start, tiles, For(lane, self._channels(), store))

    def _channels(self) -> Expr:
        """How many channels the present panel has."""
        extent, width = self.nest.n.extent or 0, self.schedule.panel
        if extent % width == 0:
            return index_const(width)
        return index_const(extent) if extent < width else binary("min", extent - self.panel * width, index_const(width))

    def _at(self, expr: Expr, row: Expr, column: Expr) -> Expr:
        mapping: dict[Var, Expr] = {self.nest.columns: column}
        if self.nest.rows is not None:
            mapping[self.nest.rows] = row
        return substitute(expr, mapping)

    def _reduced(self) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
        """The loops of the reduction, and over them A's element, the offset of B's vectors and the number of the step. Where the innermost loop is
        short, it is one with the next if both factors are walked contiguously: the columns of a large filter over an image of three channels."""
        start = substitute(self.b.offset, {self.nest.n: self.panel * self.schedule.panel})
        step: Expr = ZERO
        for axis in self.nest.found.r:
            step = step * (axis.extent or 1) + axis

        def short(outer: Var, inner: Var) -> bool:
            return (inner.extent or 0) < SHORT and (outer.extent or 0) * (inner.extent or 0) >= 2 * SHORT

        return merge_axes(self.nest.found.r, [self.nest.a, start, step], short)

    def _accumulate(
        self, row_start: Expr, rows: int, column_start: Expr, columns: int, element: Expr, base: Expr, step: Expr
    ) -> list[Statement]:
        """One step of the reduction: acc[row][column][v] += A[row, column] * B[v]. `element`, `base`, `step`: as of `_reduced`."""
        lanes, vectors = self.schedule.lanes, self.schedule.vectors
        i, j, v = Var("i", rows), Var("j", columns), Var("v", vectors)
        weight = Load("b", (v * lanes,), "f32", lanes)
        result: list[Statement] = [Allocate(Buffer("b", "f32", vectors * lanes, "register", lanes))]
        result.append(For(v, index_const(vectors), Store("b", v * lanes, Load(self.b.buffer, (base + v * lanes,), "f32", lanes)), "unroll"))
        pixel = Var("a", None, "f32")
        at = (i * columns + j) * (vectors * lanes) + v * lanes
        old = Load("acc", (at,), "f32", lanes)
        update = Store("acc", at, Apply("add", (old, Apply("mul", (pixel, weight), "f32", lanes)), "f32", lanes))
        start, value = common_origin(self._at(element, row_start + i, column_start + j), (i, j))
        body: Statement = block(Let(pixel, value), For(v, index_const(vectors), update, "unroll"))
        return [*result, *self._prefetch(step), *start, self._over_pixels(body, i, j)]

    def _prefetch(self, step: Expr) -> list[Statement]:
        """While the tiles of one panel are computed, the next panel comes from memory: every tile fetches its share of it, a line a step."""
        steps_of_tile = self.nest.found.size_r
        lines = self.schedule.panel * steps_of_tile // LINE
        tiles = self.tile.extent or 1
        large = self.b.layout is not None and self.b.layout.size * 4 > self.prefetched_bytes
        if self.schedule.order != "n" or not large or not 2 <= tiles <= 16 or self.schedule.panel % LINE:
            return []
        shares = min(tiles, self.schedule.panel // LINE)
        line = (self.panel + 1) * lines + self.tile % shares * steps_of_tile + step
        return [Prefetch(self.b.buffer, line * LINE)]

    @staticmethod
    def _over_pixels(body: Statement, i: Var, j: Var) -> Statement:
        for axis in (j, i):
            if axis.extent != 1:
                body = For(axis, index_const(axis.extent or 0), body, "unroll")
        return body

    def _store(self, row_start: Expr, column_start: Expr, rows: int, columns: int) -> Statement:
        extent = self.nest.n.extent or 0
        if self.nest.stages:
            return self._row_store(row_start, column_start, rows, columns)
        vectored = self._vector_store(row_start, column_start, rows, columns) or self._transposed_store(row_start, column_start, rows, columns)
        guarded = self._guarded_store(row_start, column_start, rows, columns)
        if vectored is None:
            return guarded
        if extent % self.schedule.panel == 0:
            return vectored
        full = extent // self.schedule.panel
        partial = self._partial_store(row_start, column_start, rows, columns) or guarded
        return If(self.panel < full, vectored, partial) if full else partial

    def _vector_store(self, row_start: Expr, column_start: Expr, rows: int, columns: int) -> Statement | None:
        lanes, vectors, n = self.schedule.lanes, self.schedule.vectors, self.nest.n
        if self.nest.final is None and coefficient(self.nest.offset, n) != 1:
            return None
        value = self._wide_value(lanes)
        if value is None:
            return None
        accumulated = Var(ACCUMULATOR, None, "f32", lanes)
        i, j, v = Var("i", rows), Var("j", columns), Var("v", vectors)
        place: dict[Var, Expr] = {n: self.panel * self.schedule.panel + v * lanes}
        held_at = Load("acc", ((i * columns + j) * (vectors * lanes) + v * lanes,), "f32", lanes)
        one = self._at(substitute(value, place), row_start + i, column_start + j)
        one = rewrite(one, lambda x: held_at if x == accumulated else x)
        target, where = self.region.outputs[0], self._at(substitute(self.nest.offset, place), row_start + i, column_start + j)
        if self.nest.final is not None:
            target, where = "totals", v * lanes
            one = Apply("add", (Load(target, (where,), "f32", lanes), one), "f32", lanes)
        lets, (one, where) = bind_shared([one, where])
        store = For(v, index_const(vectors), block(lets, Store(target, where, one)), "unroll")
        return self._over_pixels(store, i, j)

    def _wide_value(self, lanes: int) -> Expr | None:
        """What is stored of so many channels, over ACCUMULATOR as a vector; None where the epilogue has no vectors."""
        return Var(ACCUMULATOR, None, "f32", lanes) if self.nest.epilogue is None else wide_epilogue(self.nest.epilogue, self.nest.n, lanes)

    def _transposed_store(self, row_start: Expr, column_start: Expr, rows: int, columns: int) -> Statement | None:
        """Where neighbouring pixels, and not channels, lie side by side in the result: as many pixels as lanes at a time are transposed in registers,
        and leave as vectors of pixels, straight or (where no vector fits a row) through a buffer."""
        nest, lanes, vectors, width = self.nest, self.schedule.lanes, self.schedule.vectors, self.schedule.panel
        value = self._wide_value(lanes)
        power_of_two = lanes & (lanes - 1) == 0
        if value is None or nest.final is not None or columns == 1 or not power_of_two or coefficient(nest.offset, nest.columns) != 1:
            return None
        accumulated = Var(ACCUMULATOR, None, "f32", lanes)
        zero = Apply("broadcast", (Const(0.0, "f32"),), "f32", lanes)
        target, v, c, k = self.region.outputs[0], Var("v", vectors), Var("c", width), Var("k", lanes)
        channel = self.panel * width + v * lanes
        size = rows * columns
        groups = -(-size // lanes)
        straight = rows == 1 and columns == lanes
        body: list[Statement] = [Allocate(Buffer(name, "f32", lanes * lanes, "register", lanes)) for name in ("tile", "turned")]
        for group in range(groups):
            values: list[Expr] = []
            for pixel in range(group * lanes, min((group + 1) * lanes, size)):
                held = Load("acc", (index_const(pixel * width) + v * lanes,), "f32", lanes)
                row, column = row_start + pixel // columns, column_start + pixel % columns
                placed = self._at(substitute(value, {nest.n: channel}), row, column)
                values.append(substitute(placed, {accumulated: held}))
            lets, values = bind_shared(values)
            body += [*lets, *(Store("tile", index_const(at * lanes), one) for at, one in enumerate([*values, *[zero] * (lanes - len(values))]))]
            turns, result = transposed("tile", "turned", lanes)
            vector = Load(result, (k * lanes,), "f32", lanes)
            if straight:
                where = self._at(substitute(nest.offset, {nest.n: channel + k}), row_start, column_start)
                leave: Statement = Store(target, where, vector)
            else:
                leave = Store("spill", (v * lanes + k) * (groups * lanes) + group * lanes, vector)
            body += [*turns, For(k, index_const(lanes), leave, "unroll")]
        tile = For(v, index_const(vectors), block(body), "unroll")
        if straight:
            return tile
        copies: list[Statement] = []
        for at in range(rows):
            where = self._at(substitute(nest.offset, {nest.n: self.panel * width + c}), row_start + at, column_start)
            copies += copied(target, where, "spill", c * (groups * lanes) + at * columns, columns, lanes)
        spill = Allocate(Buffer("spill", "f32", width * groups * lanes, "register"))
        return block(spill, tile, For(c, index_const(width), block(copies)))

    def _spill(self, vectors: int) -> list[Statement]:
        """The accumulators as an array of elements."""
        lanes = self.schedule.lanes
        k = Var("k", vectors)
        copy = Store("spill", k * lanes, Load("acc", (k * lanes,), "f32", lanes))
        return [Allocate(Buffer("spill", "f32", vectors * lanes, "register")), For(k, index_const(vectors), copy, "unroll")]

    def _partial_store(self, row_start: Expr, column_start: Expr, rows: int, columns: int) -> Block | None:
        """The channels of the last panel, which is not filled, through a buffer: pixel by pixel in the fewest vectors that cover them exactly. None
        where results do not lie along N, or where the epilogue has no vectors."""
        nest, panel = self.nest, self.schedule.panel
        if nest.final is not None or coefficient(nest.offset, nest.n) != 1:
            return None
        row, column = Var("row", rows), Var("column", columns)
        pieces: list[Statement] = []
        for start, lanes in vector_pieces((nest.n.extent or 0) % panel, self.schedule.lanes):
            value = self._wide_value(lanes)
            if value is None:
                return None
            held = Load("spill", ((row * columns + column) * panel + start,), "f32", lanes)
            place: dict[Var, Expr] = {nest.n: self.panel * panel + start}
            one, where = (self._at(substitute(e, place), row_start + row, column_start + column) for e in (value, nest.offset))
            lets, (one, where) = bind_shared([substitute(one, {Var(ACCUMULATOR, None, "f32", lanes): held}), where])
            pieces.append(block(lets, Store(self.region.outputs[0], where, one)))
        store: Statement = block(pieces)
        for axis in (column, row):
            store = For(axis, index_const(axis.extent or 0), store)
        return block(self._spill(rows * columns * self.schedule.vectors), store)

    def _row_store(self, row_start: Expr, column_start: Expr, rows: int, columns: int) -> Block:
        """Pixel by pixel: maps and reductions over the row of channels that the tile holds, then the epilogue."""
        nest, extent = self.nest, self.nest.n.extent or 0
        assert self.schedule.panel >= extent, "a tile holds whole rows"
        row, column, lane = Var("row", rows), Var("column", columns), Var("lane", extent)
        held = Load("spill", ((row * columns + column) * self.schedule.panel + lane,), "f32")
        totals: dict[Var, Expr] = {}

        def here(expr: Expr) -> Expr:
            placed = self._at(substitute(expr, {nest.n: lane}), row_start + row, column_start + column)
            narrow = Var(ACCUMULATOR, None, "f32")
            return rewrite(placed, lambda x: held if x == narrow else totals.get(x, x) if isinstance(x, Var) else x)

        parts: list[Statement] = []
        for stage in nest.stages:
            if stage.reduction is None or stage.result is None:
                lets, (value,) = bind_shared([here(stage.body)])
                parts.append(For(lane, index_const(extent), block(lets, Store("spill", held.index[0], value)), "simd"))
                continue
            reduce = replace(stage.reduction, reduction=(lane,))
            accumulate, results = reduction(reduce, [here(stage.body)], "simd", f"{stage.result.name}_")
            parts += accumulate
            totals[stage.result] = results[0]
        assert nest.epilogue is not None
        lets, (value, where) = bind_shared([here(nest.epilogue), here(nest.offset)])
        store: Statement = block(lets, Store(self.region.outputs[0], where, value))
        if nest.n in variables(nest.offset):
            store = For(lane, index_const(extent), store, "simd")
        pixel: Statement = block(parts, store)
        for axis in (column, row):
            if axis.extent != 1:
                pixel = For(axis, index_const(axis.extent or 0), pixel)
            else:
                pixel = substitute_in(pixel, {axis: ZERO})
        return block(self._spill(rows * columns * self.schedule.vectors), pixel)

    def _guarded_store(self, row_start: Expr, column_start: Expr, rows: int, columns: int) -> Block:
        """Through a buffer, element by element: partial panels, results that do not lie along N, epilogues without vectors."""
        panel_width, n = self.schedule.panel, self.nest.n
        result = self._spill(rows * columns * self.schedule.vectors)
        row, column, lane = Var("row", rows), Var("column", columns), Var("lane", panel_width)
        held = Load("spill", ((row * columns + column) * panel_width + lane,), "f32")
        place: dict[Var, Expr] = {n: self.panel * panel_width + lane}
        value: Expr = held
        if self.nest.epilogue is not None:
            narrow = Var(ACCUMULATOR, None, "f32")
            value = self._at(substitute(self.nest.epilogue, place), row_start + row, column_start + column)
            value = rewrite(value, lambda x: held if x == narrow else x)
        target, where = self.region.outputs[0], self._at(substitute(self.nest.offset, place), row_start + row, column_start + column)
        if self.nest.final is not None:
            target, where = "totals", lane
            value = Apply("add", (Load(target, (where,), "f32"), value), "f32")
        lets, (value, where) = bind_shared([value, where])
        width = self._channels()
        store: Statement = block(lets, Store(target, where, value))
        # the axis along which the result is contiguous goes innermost
        if coefficient(self.nest.offset, n) == 1 or self.nest.columns.extent == 1:
            order: tuple[tuple[Var, Expr], ...] = ((lane, width), (column, index_const(columns)), (row, index_const(rows)))
        else:
            order = ((column, index_const(columns)), (lane, width), (row, index_const(rows)))
        for axis, bound in order:
            store = For(axis, bound, store)
        return block(result, store)
