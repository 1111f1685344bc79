"""CPU depthwise convolutions: each channel has its own filter; channels are in vector lanes.

    for each block of channels, row of tiles:                (in parallel, in either order)
        for each tile of pixels, vector of channels:
            acc[pixel] = 0
            for each row of the input under the tile:        (unrolled; of large filters a loop, and tiles have one row)
                x[position] = the row's vectors              (each loaded once for all taps and pixels)
                for taps in this row: acc[pixel] += x[pixel * stride + tap * dilation] * filter[tap]
            out = epilogue(acc)

The input is stored with its halo, so no tap is guarded. A filter that stays in registers is loaded before the tiles of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from types import MappingProxyType

from tilewright.codegen.access import bind_shared, flatten, merge_axes, storage_order, vectorise
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import bytes_touched
from tilewright.graph.contraction import MULTIPLIED
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import computed_in, size_of
from tilewright.ir.expr import ZERO, Apply, Const, Expr, Load, Var, as_lanes, coefficient, index_const, rewrite, substitute, variables
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Let, Statement, Store, substitute_in
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Storage, Unsuitable
from tilewright.kernels.cpu.common import loops
from tilewright.kernels.cpu.depthwise.space import MOST_PRODUCTS, CpuDepthwiseFacts, CpuDepthwiseSchedule, filters_held
from tilewright.kernels.cpu.loops.window import packed_along


@dataclass(frozen=True)
class DepthwiseForm:
    """The convolution in flat form: `source` and `filters` are vectors along `lane`; `element` (over loads of the sum's name) is stored at `offset`.
    `packed` is the problem with packed filters.

    `rows` and `columns` are the axes of a tile (`rows` is None if there is one row), `row_tap` and `column_tap` those of the filter, `outer` all
    others."""

    packed: Problem
    step: Step
    source: Load
    filters: Load
    element: Expr
    offset: Expr
    outer: tuple[Var, ...]
    rows: Var | None
    columns: Var
    lane: Var
    row_tap: Var | None
    column_tap: Var | None
    storage: Mapping[str, Storage]

    @property
    def dtype(self) -> str:
        """The type of the sums and of their terms."""
        return self.step.dtypes[0]

    def step_of(self, axis: Var | None) -> int:
        """The stride of the axis in elements of the input."""
        return (coefficient(self.source.index[0], axis) or 0) if axis is not None else 0


def depthwise_form(problem: Problem, machine: Machine) -> tuple[DepthwiseForm, CpuDepthwiseFacts]:
    """The form, and the facts that the choice of a schedule depends on.

    Raises:
        Unsuitable: if the region is not a sum, over at most two axes, of an input times a constant, both with adjacent channels (so no channel
        multipliers); if channels are not whole vectors; or if the input is guarded.
    """
    region, values = problem.region, problem.values
    lanes = machine.vector_lanes()
    step, final = region.steps[0], region.steps[-1]
    if region.kind != "window" or step.combiner != "sum" or len(step.bodies) != 1 or len(region.steps) > 2:
        raise Unsuitable(f"region {region.name} is not one sum with at most one map behind it")
    types = {computed_in(values[name].dtype) for name in (*region.inputs, *region.outputs) if name in values}
    if len(types) != 1 or not types <= MULTIPLIED:
        raise Unsuitable(f"region {region.name} computes with other types than {', '.join(sorted(MULTIPLIED))}: {', '.join(sorted(types))}")
    offset = problem.layouts[region.outputs[0]].offset(final.index)
    lane = storage_order(step.axes, offset)[-1:]
    packed, storage = packed_along(problem, lane)
    layouts = packed.layouts
    step, final = packed.region.steps[0], packed.region.steps[-1]
    body = flatten(step.bodies[0], layouts)
    own = Load(step.name, tuple(step.axes), body.dtype)
    element = flatten(final.bodies[0], layouts) if final is not step else own
    axes, (body, offset, element) = merge_axes(storage_order(step.axes, offset), [body, offset, element])
    unit_axes: dict[Var, Expr] = {axis: ZERO for axis in (*axes, *step.reduction) if axis.extent == 1}
    axes = tuple(axis for axis in axes if axis not in unit_axes)
    body, offset, element = (substitute(e, unit_axes) for e in (body, offset, element))
    taps = [axis for axis in step.reduction if axis not in unit_axes]
    if not (isinstance(body, Apply) and body.operation == "mul" and all(isinstance(arg, Load) for arg in body.args)) or len(axes) < 2 or not taps:
        raise Unsuitable(f"region {region.name} is not a sum of an unguarded input times a filter")
    wide = vectorise(body, axes[-1], lanes)
    wide_element = vectorise(element, axes[-1], lanes, resident=lambda load: load.buffer == step.name)
    if wide is None or wide_element is None or (axes[-1].extent or 0) % lanes or coefficient(offset, axes[-1]) != 1:
        raise Unsuitable(f"channels of region {region.name} do not lie side by side in whole vectors")
    first, second = (arg for arg in wide.args)  # type: ignore[union-attr]
    source, filters = (second, first) if isinstance(first, Load) and first.buffer in storage | dict.fromkeys(problem.constants) else (first, second)
    if not all(isinstance(x, Load) and x.lanes == lanes for x in (source, filters)) or set(axes[:-1]) & variables(filters):
        raise Unsuitable(f"region {region.name} has not one filter for each channel")
    assert isinstance(source, Load) and isinstance(filters, Load)
    steps = {axis: coefficient(source.index[0], axis) for axis in (*axes, *taps)}
    if len(taps) > 2 or any(not steps[axis] for axis in taps) or not steps[axes[-2]]:
        raise Unsuitable(f"the input of region {region.name} is not walked in steps of one size")
    columns, column_tap = axes[-2], min(taps, key=lambda axis: abs(steps[axis] or 0))
    row_tap = next((axis for axis in taps if axis != column_tap), None)
    rows = axes[-3] if len(axes) > 2 else None
    form = DepthwiseForm(
        packed, step, source, filters, wide_element, offset, axes[:-3], rows, columns, axes[-1], row_tap, column_tap,
        MappingProxyType(storage),
    )  # fmt: skip
    extents = [axis.extent or 1 if axis is not None else 1 for axis in (rows, columns, row_tap, column_tap)]
    facts = CpuDepthwiseFacts(
        prod(axis.extent or 1 for axis in axes[:-3]),
        extents[0],
        extents[1],
        (axes[-1].extent or 0) // lanes,
        (extents[2], extents[3]),
        _span(form, rows, row_tap),
        _span(form, columns, column_tap),
        bytes_touched([body, element], (*axes, *taps), packed.values),
        values[region.outputs[0]].bytes,
        size_of(form.dtype),
    )
    return form, facts


def _span(form: DepthwiseForm, pixels: Var | None, taps: Var | None) -> tuple[int, int]:
    """(step, reach) in units of the greatest common divisor of the steps of pixels and taps."""
    unit = gcd(form.step_of(pixels), form.step_of(taps)) or 1
    width = ((taps.extent or 1) - 1) * form.step_of(taps) // unit + 1 if taps is not None else 1
    return form.step_of(pixels) // unit, width


def lower_depthwise(form: DepthwiseForm, facts: CpuDepthwiseFacts, schedule: CpuDepthwiseSchedule, machine: Machine) -> Lowered:
    """One kernel, and the filter packed with channels innermost."""
    axes = {"tile_rows": schedule.tile_rows, "tile_columns": schedule.tile_columns, "vectors": schedule.vectors}
    held = bool(filters_held(facts, axes, machine))  # type: ignore[arg-type]
    body = _Tiles(form, facts, schedule, held).loops()
    lowered = single(form.packed, schedule, body)
    return replace(lowered, storage=form.storage)


@dataclass(frozen=True)
class _Tiles:
    """Emits the loops over blocks and rows of tiles, and the tiles."""

    form: DepthwiseForm
    facts: CpuDepthwiseFacts
    schedule: CpuDepthwiseSchedule
    held: bool

    def loops(self) -> Statement:
        """The whole loop nest."""
        s, form, facts = self.schedule, self.form, self.facts
        blocks = Var("channel_block", facts.vectors // s.vectors)
        tile_row = Var("tile_row", -(-facts.rows // s.tile_rows))
        full, rest = divmod(facts.rows, s.tile_rows)
        inside: Statement = self._row_of_tiles(blocks, tile_row * s.tile_rows, s.tile_rows)
        if rest:
            last = self._row_of_tiles(blocks, index_const(full * s.tile_rows), rest)
            inside = If(tile_row < full, inside, last) if full else last
        order = [blocks, tile_row] if s.order == "c" else [tile_row, blocks]
        kept = [axis for axis in order if axis.extent != 1]
        inside = substitute_in(inside, {axis: ZERO for axis in order if axis.extent == 1})
        return loops([*form.outer, *kept], inside, True, work=form.step.flops())

    def _row_of_tiles(self, blocks: Var, row: Expr, rows: int) -> Block:
        s = self.schedule
        full, rest = divmod(self.facts.columns, s.tile_columns)
        start = self._filters(blocks) if self.held else []
        parts: list[Statement] = []
        if full:
            at = Var("tile_column", full)
            tile = self._vectors(blocks, row, rows, at * s.tile_columns, s.tile_columns)
            parts.append(For(at, index_const(full), tile) if full > 1 else substitute_in(tile, {at: ZERO}))
        if rest:
            parts.append(self._vectors(blocks, row, rows, index_const(full * s.tile_columns), rest))
        return block(start, parts)

    def _vectors(self, blocks: Var, row: Expr, rows: int, column: Expr, columns: int) -> Statement:
        """The tile, for each vector of channels of the block in turn."""
        s, v = self.schedule, Var("v", self.schedule.vectors)
        if s.vectors == 1:
            return self._tile(blocks * s.lanes, row, rows, column, columns)
        return For(v, index_const(s.vectors), self._tile(blocks * (s.vectors * s.lanes) + v * s.lanes, row, rows, column, columns))

    def _filter(self, channel: Expr, row_tap: Expr, column_tap: Expr) -> Expr:
        places: dict[Var, Expr] = {self.form.lane: channel}
        for axis, tap in ((self.form.row_tap, row_tap), (self.form.column_tap, column_tap)):
            if axis is not None:
                places[axis] = tap
        return substitute(self.form.filters, places)

    def _filters(self, blocks: Var) -> list[Statement]:
        """Loads the whole filter of one vector of channels into registers."""
        lanes, (height, width) = self.schedule.lanes, self.facts.taps
        y, x = Var("fy", height), Var("fx", width)
        load = Store("w", (y * width + x) * lanes, self._filter(blocks * lanes, y, x))
        return [Allocate(Buffer("w", self.form.dtype, height * width * lanes, "register", lanes)), _unrolled(load, y, x)]

    def _tile(self, channel: Expr, row: Expr, rows: int, column: Expr, columns: int) -> Block:
        form, lanes, dtype = self.form, self.schedule.lanes, self.form.dtype
        (height, width), (row_step, _), (column_step, _) = self.facts.taps, self.facts.input_rows, self.facts.input_columns
        row_unit = gcd(form.step_of(form.rows), form.step_of(form.row_tap)) or 1
        column_unit = gcd(form.step_of(form.columns), form.step_of(form.column_tap)) or 1
        row_jump, column_jump = form.step_of(form.row_tap) // row_unit, form.step_of(form.column_tap) // column_unit
        span = (columns - 1) * column_step + (width - 1) * column_jump + 1
        places: dict[Var, Expr] = {form.lane: channel, form.columns: column}
        places |= {axis: row for axis in (form.rows,) if axis is not None}
        taps: dict[Var, Expr] = {axis: ZERO for axis in (form.row_tap, form.column_tap) if axis is not None}
        origin, k, j, x = Var("origin", None), Var("k", span), Var("j", columns), Var("fx", width)
        zero, size = Apply("broadcast", (Const(0.0, dtype),), dtype, lanes), rows * columns
        p = Var("p", size)
        body: list[Statement] = [
            Allocate(Buffer("acc", dtype, size * lanes, "register", lanes)),
            For(p, index_const(size), Store("acc", p * lanes, zero), "unroll"),
            Allocate(Buffer("x", dtype, span * lanes, "register", lanes)),
            Let(origin, substitute(form.source.index[0], {**places, **taps})),
        ]

        def loaded(position: Expr) -> Statement:
            """The row of the input at this position."""
            return _unrolled(Store("x", k * lanes, Load(form.source.buffer, (origin + k * column_unit + position * row_unit,), dtype, lanes)), k)

        def added(y: Expr, i: int, name: str) -> Statement:
            """Row y of the filter times the row of the input, added to row i of the tile."""
            weight = Load("w", ((x + y * width) * lanes,), dtype, lanes) if self.held else self._filter(channel, y, x)
            at, factor = (j + i * columns) * lanes, Var(name, None, dtype, lanes)
            pixel = Load("x", ((j * column_step + x * column_jump) * lanes,), dtype, lanes)
            update = Store("acc", at, Apply("add", (Load("acc", (at,), dtype, lanes), Apply("mul", (pixel, factor), dtype, lanes)), dtype, lanes))
            return _unrolled(block(Let(factor, weight), _unrolled(update, j)), x)

        if self.schedule.tile_columns * height * width > MOST_PRODUCTS:
            y = Var("fy", height)
            body.append(For(y, index_const(height), block(loaded(y * row_jump), added(y, 0, "f"))))
            return block(body, self._store(channel, row, rows, column, columns))
        for position in sorted({i * row_step + y * row_jump for i in range(rows) for y in range(height)}):
            body.append(loaded(index_const(position)))
            for i in range(rows):
                row_of_filter, between = divmod(position - i * row_step, max(row_jump, 1))
                if not between and 0 <= row_of_filter < height:
                    body.append(added(index_const(row_of_filter), i, f"f{position}_{i}"))
        return block(body, self._store(channel, row, rows, column, columns))

    def _store(self, channel: Expr, row: Expr, rows: int, column: Expr, columns: int) -> Statement:
        form, lanes, dtype = self.form, self.schedule.lanes, self.form.dtype
        i, j = Var("i", rows), Var("j", columns)
        places: dict[Var, Expr] = {form.lane: channel, form.columns: column + j}
        places |= {axis: row + i for axis in (form.rows,) if axis is not None}
        held = Load("acc", ((i * columns + j) * lanes,), dtype, lanes)
        value = rewrite(form.element, lambda x: held if isinstance(x, Load) and x.buffer == form.step.name else x)
        value = as_lanes(substitute(value, places), lanes)
        lets, (value, where) = bind_shared([value, substitute(form.offset, places)])
        return _unrolled(block(lets, Store(form.packed.region.outputs[0], where, value)), i, j)


def _unrolled(body: Statement, *axes: Var) -> Statement:
    for axis in reversed(axes):
        body = For(axis, index_const(axis.extent or 0), body, "unroll") if axis.extent != 1 else substitute_in(body, {axis: ZERO})
    return body
