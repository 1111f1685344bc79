"""Lowering of the `winograd fused` schema: transform of the input, product, and transform of the sums in one kernel.

One barrier per step: while the products of a step read one buffer, the filters of the next step are copied to the other buffer, and its input tiles
are loaded into registers, to be transformed and stored after the products. Tiles past the last one repeat it, and output channels past the last one
repeat the last four; neither are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import below, decode, extent_of, named
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.async_copy import await_groups, commit, copy
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.ir.expr import (
    TRUE,
    ZERO,
    Const,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    compare,
    index_const,
    range_of,
    select,
)
from tilewright.ir.kernel import (
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    thread_variable,
)
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.kernels.gpu.winograd.lower import filters_storage, store_tile, store_vector
from tilewright.kernels.gpu.winograd_fused.places import place_of, spread
from tilewright.kernels.gpu.winograd_fused.space import PADDING, FusedWinogradSchedule
from tilewright.kernels.winograd_form import WinogradForm, input_index

INPUTS, FILTERS, SUMS, PARTIAL, NEXT = "v_tile", "u_tile", "sums", "partial", "d_next"


def lower_fused_winograd(problem: Problem, form: WinogradForm, schedule: FusedWinogradSchedule) -> Lowered:
    """One kernel, and the filters transformed and packed.

    Raises:
        Unsuitable: if the input channels do not divide into steps.
    """
    if form.channels % (schedule.channels * schedule.split):
        raise Unsuitable(f"{form.channels} input channels do not divide into steps of {schedule.channels} in {schedule.split} parts")
    name = f"{problem.region.name}#filters"
    filters = filters_storage(name, form, schedule.transform)
    stored = problem.with_storage({name: filters})
    body, launch = _Fused(form, schedule, stored, filters).kernel()
    kernel, arguments = assemble(
        "winograd_fused",
        body,
        stored,
        (form.output,),
        header=f"{described(problem)}\n{schedule}",
        launch=launch,
        cluster=schedule.split,
    )
    return Lowered(problem.region, str(schedule), (kernel,), (Call(kernel.name, arguments),), {name: filters})


@dataclass(frozen=True)
class _Place:
    """Offsets in the input: of the first element of a tile, and from there to its rows and columns."""

    corner: Expr
    rows: tuple[Expr, ...]
    columns: tuple[Expr, ...]


class _Fused:
    """Emits the parts of the kernel's body, with their common form, schedule, and positions of block and thread."""

    def __init__(self, form: WinogradForm, schedule: FusedWinogradSchedule, stored: Problem, filters: Storage) -> None:
        self.form, self.schedule, self.layouts, self.filters = form, schedule, stored.layouts, filters
        self.stored = stored.values[form.source.buffer].dtype
        self.tile_axes = form.tiles(schedule.transform.tile)
        self.total = extent_of(self.tile_axes)
        self.tile, self.span = schedule.transform.tile, schedule.transform.span
        self.steps = form.channels // (schedule.channels * schedule.split)
        counts = (-(-self.total // schedule.tiles), -(-form.outputs // schedule.outputs), schedule.split)
        self.launch = Launch((counts[0] * counts[1] * counts[2], 1, 1), (schedule.threads, 1, 1), ((self.total, schedule.tiles),))
        self.thread = thread_variable(self.launch)
        axes = Var("block_tile", counts[0]), Var("block_k", counts[1]), Var("part", counts[2])
        self.lets, where = named(decode(block_variable(self.launch), axes))
        tile, k, self.part = (where.get(axis, axis) for axis in axes)
        self.first_tile, self.first_k = tile * schedule.tiles, k * schedule.outputs
        self.first_channel = self.part * (self.steps * schedule.channels)
        self.ld = schedule.tiles + PADDING
        self.input_elements = schedule.points * schedule.channels * self.ld
        self.filter_elements = schedule.points * schedule.channels * schedule.outputs
        self.elements = schedule.tiles * schedule.outputs

    def kernel(self) -> tuple[Block, Launch]:
        schedule = self.schedule
        across = self.passes * schedule.points
        root: list[Statement] = [
            *self.lets,
            Allocate(Buffer(INPUTS, self.form.dtype, 2 * self.input_elements, "shared")),
            Allocate(Buffer(FILTERS, self.form.dtype, 2 * self.filter_elements, "shared")),
            Allocate(Buffer(SUMS, self.form.dtype, schedule.points * self.elements, "shared")),
            Allocate(Buffer(NEXT, self.stored, across, "register")),
            Allocate(Buffer("acc", self.form.dtype, schedule.thread_m * schedule.thread_n, "register")),
        ]
        at = Var("at", schedule.thread_m * schedule.thread_n)
        root.append(For(at, index_const(at.extent or 0), Store("acc", at, Const(0.0, self.form.dtype)), "unroll"))
        lets, places = self.input_places()
        root += lets
        zero = index_const(0)
        root += [*self.copy_filters(zero, zero), commit(), *self.load_inputs(places, zero), *self.store_inputs(zero)]
        step = Var("step", self.steps)
        more = compare("lt", step + 1, index_const(self.steps))
        other = (step + 1) % 2
        body: list[Statement] = [await_groups(0), block_barrier()]
        if self.steps > 1:
            body.append(If(more, block(self.copy_filters(step + 1, other), self.load_inputs(places, step + 1))))
        body += [commit(), *self.products(step % 2)]
        if self.steps > 1:
            body.append(If(more, block(self.store_inputs(other))))
        root.append(For(step, index_const(self.steps), block(body)))
        root += [*self.spill(), block_barrier(), *(self.outputs() if schedule.split == 1 else self.outputs_of_cluster())]
        return block(root), self.launch

    @property
    def passes(self) -> int:
        """Single-channel tiles that a thread transforms per step."""
        return -(-self.schedule.tiles * self.schedule.channels // self.schedule.threads)

    def item(self, number: int) -> tuple[Expr, Expr, Expr]:
        """Tile and channel, within those of the block, of a thread's pass, and whether they exist. Adjacent threads have adjacent channels."""
        position = self.thread + number * self.schedule.threads
        return position // self.schedule.channels, position % self.schedule.channels, position < self.schedule.tiles * self.schedule.channels

    def input_places(self) -> tuple[list[Statement], list[_Place]]:
        """The place of each pass's tile in the input, and the statements before the loop that compute it."""
        statements: list[Statement] = []
        places: list[_Place] = []
        layout = self.layouts[self.form.source.buffer]
        for number in range(self.passes):
            tile, channel, _ = self.item(number)
            position = self.first_tile + tile
            if range_of(position)[1] > self.total - 1:
                position = binary("min", position, index_const(self.total - 1))
            flat_tile = Var(f"tile{number}", self.total)
            statements.append(Let(flat_tile, position))
            axes = decode(flat_tile, self.tile_axes)
            fresh = {axis: Var(f"{axis.name}_{number}", axis.extent) for axis in axes}
            statements += [Let(fresh[axis], value) for axis, value in axes.items()]
            where: dict[Var, Expr] = {**fresh, self.form.c: channel}

            def offset(i: int, j: int, where: Mapping[Var, Expr] = where) -> Expr:
                return layout.offset(input_index(self.form, self.tile_axes, layout, where, self.tile, index_const(i), index_const(j)))

            corner = offset(0, 0)
            base = Var(f"tile_base{number}", layout.size)
            statements.append(Let(base, corner))
            rows, columns = [offset(i, 0) - corner for i in range(self.span[0])], [offset(0, j) - corner for j in range(self.span[1])]
            for name, distances in (("row", rows), ("column", columns)):
                for i, distance in enumerate(distances):
                    if not isinstance(distance, Const):
                        variable = Var(f"{name}{number}_{i}", layout.size)
                        statements.append(Let(variable, distance))
                        distances[i] = variable
            places.append(_Place(base, tuple(rows), tuple(columns)))
        return statements, places

    def load_inputs(self, places: Sequence[_Place], step: Expr) -> list[Statement]:
        """Loads the tiles of a step into registers."""
        source = self.form.source.buffer
        statements: list[Statement] = []
        for number, place in enumerate(places):
            start = place.corner + self.first_channel + step * self.schedule.channels
            first = number * self.schedule.points
            loads = [
                Store(NEXT, index_const(first + i * self.span[1] + j), Load(source, (start + row + column,), self.stored))
                for i, row in enumerate(place.rows)
                for j, column in enumerate(place.columns)
            ]
            statements.append(self.guarded(number, loads))
        return statements

    def store_inputs(self, buffer: Expr) -> list[Statement]:
        """Stores B^T d C of the loaded tiles in one of the buffers, [point][channel][tile]."""
        statements: list[Statement] = []
        for number in range(self.passes):
            tile, channel, _ = self.item(number)
            first = number * self.schedule.points
            held = [
                [Load(NEXT, (index_const(first + i * self.span[1] + j),), self.form.dtype) for j in range(self.span[1])] for i in range(self.span[0])
            ]
            lets, rows = self.schedule.transform.of_inputs(held, f"{number}_")
            inner: list[Statement] = [*lets]
            for t, value in enumerate(value for row in rows for value in row):
                place = buffer * self.input_elements + (t * self.schedule.channels + channel) * self.ld + tile
                inner.append(Store(INPUTS, place, value))
            statements.append(self.guarded(number, inner))
        return statements

    def guarded(self, number: int, statements: Sequence[Statement]) -> Statement:
        condition = self.item(number)[2]
        return block(statements) if condition == TRUE else If(condition, block(statements))

    def copy_filters(self, step: Expr, buffer: Expr) -> list[Statement]:
        """Starts to copy the filters of a step to one of the buffers, [point][channel][output]."""
        schedule = self.schedule
        vectors = schedule.outputs // 4
        axes = Var("t", schedule.points), Var("c", schedule.channels), Var("v", vectors)
        point_stride, channel_stride, _ = self.filters.layout.strides[:3]
        stored = self.filters.layout.extents[2] * (4 if len(self.filters.layout.order) > 3 else 1)
        statements: list[Statement] = []
        for number in range(schedule.points * schedule.channels * vectors // schedule.threads):
            position = self.thread + number * schedule.threads
            t, c, v = decode(position, axes).values()
            k = self.first_k + v * 4
            inside = compare("le", k, index_const(stored - 4))
            if range_of(k)[1] > stored - 4:
                k = binary("min", k, index_const(stored - 4))
            channel = self.first_channel + step * schedule.channels + c
            source = Load(self.filters.value.name, (t * point_stride + channel * channel_stride + k,), self.filters.value.dtype, 4)
            value = select(inside, source, as_lanes(Const(0.0, source.dtype), 4))
            statements.append(copy(FILTERS, buffer * self.filter_elements + position * 4, value, source.dtype))
        return statements

    @property
    def place(self) -> tuple[Expr, Expr, Expr]:
        return place_of(self.thread, self.schedule)

    def products(self, buffer: Expr) -> list[Statement]:
        """acc += v * u over the channels of a step, at the thread's point."""
        schedule = self.schedule
        tm, tn = schedule.thread_m, schedule.thread_n
        point, thread_m, thread_n = self.place
        k = Var("k", schedule.channels)
        line = point * schedule.channels + k
        body: list[Statement] = []
        for part, count, start, thread, size in (
            ("v_part", tm, buffer * self.input_elements + line * self.ld, thread_m, schedule.tiles),
            ("u_part", tn, buffer * self.filter_elements + line * schedule.outputs, thread_n, schedule.outputs),
        ):
            width = min(4, count)
            body.append(Allocate(Buffer(part, self.form.dtype, count, "register")))
            name = INPUTS if part == "v_part" else FILTERS
            for number in range(0, count, width):
                body.append(Store(part, index_const(number), Load(name, (start + spread(number, thread, count, size),), self.form.dtype, width)))
        i, j = Var("i", tm), Var("j", tn)
        at = i * tn + j
        update = Store("acc", at, Load("acc", (at,), self.form.dtype) + Load("v_part", (i,), self.form.dtype) * Load("u_part", (j,), self.form.dtype))
        body.append(For(i, index_const(tm), For(j, index_const(tn), update, "unroll"), "unroll"))
        return [For(k, index_const(schedule.channels), block(body), "unroll")]

    def spill(self) -> list[Statement]:
        """Stores the thread's sums in `sums` [point][tile][output]."""
        schedule = self.schedule
        tm, tn = schedule.thread_m, schedule.thread_n
        point, thread_m, thread_n = self.place
        i, j = Var("i", tm), Var("j", tn // 4)
        tile, output = spread(i, thread_m, tm, schedule.tiles), spread(j * 4, thread_n, tn, schedule.outputs)
        place = (point * schedule.tiles + tile) * schedule.outputs + output
        put = Store(SUMS, place, Load("acc", (i * tn + j * 4,), self.form.dtype, 4))
        return [For(i, index_const(tm), For(j, index_const(tn // 4), put, "unroll"), "unroll")]

    def outputs(self) -> list[Statement]:
        """A^T M D of every tile and output channel, then the epilogue and store."""
        lanes = self.lanes(self.elements)

        def element(at: Var, axes: Mapping[Var, Expr]) -> list[Statement]:
            statements, rows = self.transformed(at, lanes)
            return [*statements, *store_tile(self.form, self.tile_axes, self.layouts, axes, self.tile, ZERO, rows, lanes)]

        return self.vectors(self.elements, lanes, index_const(0), lambda at: self.within_output(at, element))

    def outputs_of_cluster(self) -> list[Statement]:
        """Stores A^T M D of every tile and output channel in the block's part of `partial` [part][element of the tile][tile][output]. Each block then
        adds up the parts of its share, with epilogue and store."""
        schedule = self.schedule
        (height, width), pixels = self.tile, prod(self.tile)
        share = self.elements // schedule.split
        first, last = self.lanes(self.elements, 4), self.lanes(share)

        def partial(at: Var) -> list[Statement]:
            statements, rows = self.transformed(at, first)
            start = self.part * (pixels * self.elements) + at
            return [*statements, *(Store(PARTIAL, start + t * self.elements, v) for t, v in enumerate(value for row in rows for value in row))]

        def element(at: Var, axes: Mapping[Var, Expr]) -> list[Statement]:
            statements: list[Statement] = []
            rows: list[list[Expr]] = []
            for i in range(height):
                rows.append([])
                for j in range(width):
                    offsets = [at + (part * pixels + i * width + j) * self.elements for part in range(schedule.split)]
                    parts: list[Expr] = [Load(PARTIAL, (offset,), self.form.dtype, last) for offset in offsets]
                    total = Var(f"y{i}_{j}", None, self.form.dtype, last)
                    statements.append(Let(total, reduce(lambda a, b: a + b, parts)))
                    rows[i].append(total)
            return [*statements, *store_tile(self.form, self.tile_axes, self.layouts, axes, self.tile, ZERO, rows, last)]

        return [
            Allocate(Buffer(PARTIAL, self.form.dtype, schedule.split * pixels * self.elements, "cluster")),
            *self.vectors(self.elements, first, index_const(0), partial),
            cluster_barrier(),
            *self.vectors(share, last, self.part * share, lambda at: self.within_output(at, element)),
            cluster_barrier(),  # no block may exit while others read its parts
        ]

    def lanes(self, elements: int, widest: int = 0) -> int:
        """The widest vectors along the output channels that leave no thread idle, up to `widest` (default: the region's store width)."""
        most = widest or store_vector(self.form, self.layouts)
        return next(width for width in (4, 2, 1) if width <= most and (elements // width >= self.schedule.threads or width == 1))

    def vectors(self, elements: int, lanes: int, first: Expr, body: Callable[[Var], list[Statement]]) -> list[Statement]:
        """Divides `elements` elements of the block's tile, from `first` on, among the threads. The body receives the flat position (tile, output) of
        a vector."""
        count = elements // lanes
        turn, at = Var("turn", -(-count // self.schedule.threads)), Var("at", self.elements)
        position = turn * self.schedule.threads + self.thread
        inner = block(below(position, count, "position", lambda p: [Let(at, first + p * lanes), *body(at)]))
        return [For(turn, index_const(turn.extent or 1), inner)]

    def within_output(self, at: Var, body: Callable[[Var, Mapping[Var, Expr]], list[Statement]]) -> list[Statement]:
        """The body, guarded by whether the tile and the output channel of a position exist; it receives their axes."""
        outputs = self.schedule.outputs

        def tile(which: Var) -> list[Statement]:
            lets, where = named(decode(which, self.tile_axes))
            axes = {axis: where.get(axis, axis) for axis in self.tile_axes}
            channel = self.first_k + at % outputs
            return [*lets, *below(channel, self.form.outputs, self.form.k.name, lambda k: body(at, {**axes, self.form.k: k}))]

        return below(self.first_tile + at // outputs, self.total, "tile", tile)

    def transformed(self, at: Var, lanes: int) -> tuple[list[Statement], list[list[Expr]]]:
        """A^T M D at a position (tile, output) of `sums`."""
        held = [[Var(name, None, self.form.dtype, lanes) for name in row] for row in self.schedule.transform.names("m")]
        points = [variable for row in held for variable in row]
        reads = [Let(variable, Load(SUMS, (at + t * self.elements,), self.form.dtype, lanes)) for t, variable in enumerate(points)]
        lets, rows = self.schedule.transform.of_sums(held)
        return [*reads, *lets], rows
