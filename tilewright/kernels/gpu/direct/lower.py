"""Lowering of the `direct` schema: the RS and S kernels of CNNOpt (PACT 2022, section 3), a patch of the input in shared memory.

A block computes a tile of output channels, rows and columns of one image and group. For each chunk of input channels it stages the patch that its
pixels need, halo included, in shared memory, as [channel][row][column] or in another order (`patch_layout.py`), and the filters as
[channel][tap][output channel]. For each channel a thread then reads its slice of the patch into registers and multiplies it with its filters for each
tap. In the RS kernel the slice is two-dimensional; in the S kernel it is one row, and the thread also holds one row of taps of its filters (the
paper's kernel holds one filter element). A channels-last input is transposed on the way, by four-byte copies or through registers, unless its
channels stay innermost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from tilewright.codegen.assemble import block
from tilewright.codegen.common import Below, below, decode, named, vectors_fit
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Const, Expr, Load, Var, binary, index_const, range_of, substitute
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.direct.form import DirectForm, form_of
from tilewright.kernels.gpu.direct.patch import PATCH, patch
from tilewright.kernels.gpu.direct.patch_layout import Pitches, lane_positions, pitches_of
from tilewright.kernels.gpu.direct.resources import blocks_to_ask_for
from tilewright.kernels.gpu.direct.schedule import (
    REGISTERS,
    RS,
    SHARED,
    DirectSchedule,
    columns_of,
    slice_of,
    stretch_of,
    taps_are_unrolled,
)
from tilewright.kernels.gpu.gemm.block_result import BlockResult, RowBody, ThreadSums, meeting, store_shares, store_sums
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.space import PLAIN
from tilewright.kernels.gpu.gemm.staging import Staged, buffers_of, staged_steps, staged_tile
from tilewright.kernels.gpu.gemm.tile import Tile
from tilewright.kernels.gpu.split import in_one_or_two

WARP = 32


def lower_direct(problem: Problem, form: DirectForm, schedule: DirectSchedule, machine: Machine) -> Lowered:
    """One kernel, or several with a workspace if the reduction is split; packed filters are in the storage.

    Raises:
        Unsuitable: if the schedule does not fit the convolution.
    """
    axes = form.axes
    return in_one_or_two(
        problem,
        form.product,
        schedule,
        machine,
        lambda product: convolution(form_of(product, axes), schedule),
        lambda part: product_form(part, axes.order, axes.apart),
        lambda product: blocks_to_ask_for(schedule, form_of(product, axes).facts, machine),
        split=schedule.split,
        cluster=bool(schedule.cluster),
        atomics=bool(schedule.atomics),
    )


@dataclass(frozen=True)
class Threads:
    """Position of a thread among those of its block along each dimension."""

    k: Var
    y: Var
    x: Var


def convolution(form: DirectForm, schedule: DirectSchedule) -> tuple[Block, Launch]:
    """The body of the kernel. A form whose offset depends on a variable `part` stores the parts of a split reduction."""
    facts, product = form.facts, form.product
    size_k, size_y, size_x = _extents(schedule)
    taps = facts.filter_y * facts.filter_x
    steps_in_all = -(-facts.channels // schedule.channels)
    steps_each = -(-steps_in_all // schedule.split)
    if (schedule.split - 1) * steps_each >= steps_in_all:
        raise Unsuitable(f"a split by {schedule.split} would leave a block nothing of {steps_in_all} steps")
    if schedule.stages > 1 and facts.stored_bytes < facts.element_bytes:
        raise Unsuitable("no copy is as narrow as an element of the input")
    if schedule.cluster and steps_in_all % schedule.split:
        raise Unsuitable(f"a cluster of {schedule.split} does not divide {steps_in_all} steps evenly")
    if schedule.cluster and size_k * size_y * size_x % (schedule.split * min(facts.store_vector, size_k)):
        raise Unsuitable(f"a cluster of {schedule.split} does not divide its tile evenly")
    counts = (
        schedule.split, facts.images, -(-facts.height // size_y), -(-facts.width // size_x),
        facts.groups, -(-facts.outputs // size_k),
    )  # fmt: skip
    launch = Launch((prod(counts), 1, 1), (schedule.threads, 1, 1), ((facts.images, 1), (facts.height, size_y)))
    thread = thread_variable(launch)
    names = ("part", "image", "tile_y", "tile_x", "group", "tile_k")  # groups of a pixel share sectors of memory, while these are in level 2
    grid = tuple(Var(name, count) for name, count in zip(names, counts, strict=True))
    # the blocks of a cluster are adjacent
    lets, where = named(decode(block_variable(launch), (*grid[1:], grid[0]) if schedule.cluster else grid))
    root: list[Statement] = list(lets)
    part, image, tile_y, tile_x, group, tile_k = (where.get(axis, axis) for axis in grid)
    bind: dict[Var, Expr] = {grid[0]: part} if grid[0] in where else {}
    for position, axes in ((group, product.batch), (image, form.images)):
        axis_lets, axis_values = named(decode(position, axes))
        root += axis_lets
        bind |= axis_values
    threads, ids = _positions(thread, schedule)
    first_channel = part * (steps_each * schedule.channels)
    plain = schedule.loop == PLAIN
    buffers = buffers_of(schedule.stages, steps_each, plain)
    pitches = pitches_of(facts, schedule)
    origin = (tile_y * size_y * facts.stride_y, tile_x * size_x * facts.stride_x)
    setup, staged_patch = patch(form, schedule, bind, thread, origin, first_channel, pitches, buffers)
    root += [*setup, *ids]
    tile = _filter_tile(form, schedule, bind, size_k)
    staged: list[Staged] = [staged_patch]
    if schedule.filters == SHARED:
        setup, filters = staged_tile(tile, tile_k * size_k, product, thread, part * (steps_each * schedule.channels * taps), buffers)
        root += setup
        staged.append(filters)
    sums = schedule.register_k * schedule.register_y * schedule.register_x
    root.append(Allocate(Buffer("acc", product.dtype, sums, "register")))
    at = Var("at", sums)
    root.append(For(at, index_const(sums), Store("acc", at, Const(0.0, product.dtype)), "unroll"))
    if schedule.split > 1 and steps_in_all % steps_each:
        steps: Expr = Var("steps", steps_each + 1)
        left = steps_in_all - part * steps_each
        root.append(Let(steps, binary("min", left, index_const(steps_each))))  # type: ignore[arg-type]
    else:
        steps = index_const(steps_each)
    inner = _Inner(form, schedule, threads, tile, bind, tile_k * size_k, pitches, steps_each)
    root += inner.before(first_channel)
    root += staged_steps(
        staged, schedule.stages, steps, steps_each, lambda at, step: inner.channels(at, first_channel + step * schedule.channels), plain
    )

    def at_row(row: Expr, body: RowBody, within: Below = below) -> list[Statement]:
        def columns(y: Var) -> list[Statement]:
            return within(tile_x * size_x + row % size_x, facts.width, "x", lambda x: body({form.y: y, form.x: x}))

        return within(tile_y * size_y + row // size_x, facts.height, "y", columns)

    result = BlockResult(product, bind, size_y * size_x, size_k, tile_k * size_k, at_row)
    width = schedule.register_x

    def row(i: Expr) -> Expr:
        return (threads.y * schedule.register_y + i // width) * size_x + threads.x * width + i % width

    mine = ThreadSums(
        schedule.register_y * width, schedule.register_k, row, lambda j: tile.spread(j, threads.k, schedule.register_k), min(4, schedule.register_k)
    )
    if schedule.cluster:
        root += meeting(result, mine, part, schedule.split)
        root += store_shares(result, part, schedule.split, thread, schedule.threads)
    else:
        root += store_sums(result, mine, bool(schedule.atomics and schedule.split > 1))
    return block(root), launch


def _extents(schedule: DirectSchedule) -> tuple[int, int, int]:
    return (
        schedule.register_k * schedule.warp_k * schedule.block_k,
        schedule.register_y * schedule.warp_y * schedule.block_y,
        schedule.register_x * schedule.warp_x * schedule.block_x,
    )


def _positions(thread: Var, schedule: DirectSchedule) -> tuple[Threads, list[Statement]]:
    """Warps run along x fastest, then y, then k; lanes as `lane_positions`."""
    warps = {axis: getattr(schedule, f"warp_{axis}") for axis in "kyx"}
    blocks = {axis: getattr(schedule, f"block_{axis}") for axis in "kyx"}
    within = lane_positions(thread % WARP, warps)
    others = decode(thread // WARP, [Var(f"warp_{axis}", blocks[axis]) for axis in "kyx"])
    place = {axis: Var(f"position_{axis}", warps[axis] * blocks[axis]) for axis in "kyx"}
    lets: list[Statement] = [Let(place[axis], many * warps[axis] + within[axis]) for axis, many in zip("kyx", others.values(), strict=True)]
    return Threads(place["k"], place["y"], place["x"]), lets


def _filter_tile(form: DirectForm, schedule: DirectSchedule, bind: Mapping[Var, Expr], size_k: int) -> Tile:
    """The filters of a chunk of channels, [channel, tap][output channel]."""
    lanes = min(form.facts.filter_vector, size_k)
    depth = schedule.channels * form.facts.filter_y * form.facts.filter_x
    operand = replace(form.product.facts.b, vector_width=lanes)
    b, stored = form.product.b, form.product.stored(form.product.b)
    tile = Tile("filter", substitute(b, bind), form.product.b_n, operand, size_k, depth, schedule.threads, schedule.stages > 1, stored)
    if schedule.filters == SHARED and (tile.run > schedule.threads or schedule.threads % tile.run):
        raise Unsuitable(f"{schedule.threads} threads do not share the load of {size_k} output channels evenly")
    return tile


@dataclass(frozen=True)
class _Inner:
    """The multiply-adds of a chunk of channels."""

    form: DirectForm
    schedule: DirectSchedule
    threads: Threads
    tile: Tile
    bind: Mapping[Var, Expr]
    first_k: Expr
    pitches: Pitches
    steps_each: int

    def before(self, first_channel: Expr) -> list[Statement]:
        """Variables that all channels share, and the filters of the first channel if they are fetched one channel ahead."""
        s, p = self.schedule, self.form.facts
        start = (self.threads.y * (s.register_y * p.stride_y)) * self.pitches.row + self.threads.x * (s.register_x * p.stride_x * self.pitches.column)
        statements: list[Statement] = [Let(self._slice_at, start)]
        if s.filters != SHARED:
            last = (self.form.product.b_n[-1].extent or 1) - self._width
            for number in range(0, s.register_k, self._width):
                position = self.first_k + self.tile.spread(number, self.threads.k, s.register_k)
                if range_of(position)[1] > last:
                    position = binary("min", position, index_const(last))
                statements.append(Let(self._k(number), position))
        if s.filters == REGISTERS:
            statements.append(Allocate(Buffer("filters_now", self._dtype, self._taps * s.register_k, "register")))
            statements += self._fetch_all("filters_now", first_channel)
        return statements

    def channels(self, buffers: Sequence[Expr], first_channel: Expr) -> list[Statement]:
        """acc[y, x, k] += patch[c, y, x] * filters[c, k] over the taps and the channels of the chunk whose buffers are at these offsets."""
        s = self.schedule
        stretch = int(stretch_of(self.form.facts, columns_of(s))[0])
        together = self.pitches.channels_read
        outer, inner, lane = Var("channels", s.channels // stretch), Var("channel", stretch // together), Var("channel_lane", together)
        c = outer * stretch + inner * together if stretch < s.channels else inner * together
        body = self._whole_slice(buffers[0], c) if together > 1 else []
        one = block(self._channel(buffers, c + lane if together > 1 else c, first_channel, lane if together > 1 else None))
        body.append(For(lane, index_const(together), one, "unroll") if together > 1 else one)
        loop: Statement = For(inner, index_const(stretch // together), block(body), "unroll")
        return [For(outer, index_const(s.channels // stretch), loop) if stretch < s.channels else loop]

    def _channel(self, buffers: Sequence[Expr], c: Expr, first_channel: Expr, lane: Expr | None) -> list[Statement]:
        """The multiply-adds of channel c, whose slice is `lane` of those in registers, or, with None, not read yet."""
        s = self.schedule
        body: list[Statement] = []
        source = "filters_now"
        if s.filters == REGISTERS:
            body.append(Allocate(Buffer("filters_next", self._dtype, self._taps * s.register_k, "register")))
            body += self._fetch_all("filters_next", first_channel + c + 1)
        body += self._rs(buffers, c, first_channel, source, lane) if s.slice == RS else self._s(buffers, c, first_channel, source)
        if s.filters == REGISTERS:
            i = Var("i", self._taps * s.register_k)
            body.append(For(i, index_const(i.extent or 1), Store("filters_now", i, Load("filters_next", (i,), self._dtype)), "unroll"))
        return body

    def _rs(self, buffers: Sequence[Expr], c: Expr, first_channel: Expr, source: str, lane: Expr | None) -> list[Statement]:
        """Reads the two-dimensional slice unless it is in registers, then multiplies for each tap."""
        s, p = self.schedule, self.form.facts
        fy, fx = Var("tap_y", p.filter_y), Var("tap_x", p.filter_x)
        tap, y, x = self._tap_and_place(fy, fx)
        body: list[Statement] = []
        if s.filters != REGISTERS:
            body.append(Allocate(Buffer("filters", self._dtype, s.register_k, "register")))
            body += self._fetch("filters", 0, buffers, c, first_channel, fy, fx)
            source, tap = "filters", index_const(0)
        place = self._held(y * p.stride_y + fy * p.dilation_y, x * p.stride_x + fx * p.dilation_x, index_const(0) if lane is None else lane)
        body.append(self._multiply(Load("slice", (place,), self._dtype), source, tap, (y, x)))
        loops = For(fy, index_const(p.filter_y), For(fx, index_const(p.filter_x), block(body), "unroll"), "unroll")
        return [*(self._whole_slice(buffers[0], c) if lane is None else ()), loops]

    def _whole_slice(self, buffer: Expr, c: Expr) -> list[Statement]:
        """Reads the two-dimensional slices of the channels from c that are read together."""
        return self._slice(buffer, c, index_const(0), self._slice_extents[0])

    def _s(self, buffers: Sequence[Expr], c: Expr, first_channel: Expr, source: str) -> list[Statement]:
        """For each row of taps, reads their filters, and then one row of the input for each row of outputs."""
        s, p = self.schedule, self.form.facts
        fy, fx = Var("tap_y", p.filter_y), Var("tap_x", p.filter_x)
        tap, y, x = self._tap_and_place(fy, fx)
        body: list[Statement] = []
        if s.filters != REGISTERS:
            body.append(Allocate(Buffer("filters", self._dtype, p.filter_x * s.register_k, "register")))
            body.append(For(fx, index_const(p.filter_x), block(self._fetch("filters", fx, buffers, c, first_channel, fy, fx)), "unroll"))
            source, tap = "filters", fx * 1
        place = x * p.stride_x + fx * p.dilation_x
        products = For(fx, index_const(p.filter_x), self._multiply(Load("slice", (place,), self._dtype), source, tap, (None, x), y), "unroll")
        row = [*self._slice(buffers[0], c, y * p.stride_y + fy * p.dilation_y, 1), products]
        body.append(For(y, index_const(s.register_y), block(row), "unroll"))
        unrolled = bool(taps_are_unrolled(p, columns_of(s))[0])
        return [For(fy, index_const(p.filter_y), block(body), "unroll" if unrolled else "serial")]

    def _tap_and_place(self, fy: Var, fx: Var) -> tuple[Expr, Var, Var]:
        return fy * self.form.facts.filter_x + fx, Var("y", self.schedule.register_y), Var("x", self.schedule.register_x)

    def _multiply(self, value: Load, source: str, tap: Expr, loops: tuple[Var | None, Var], y: Var | None = None) -> Statement:
        """acc[y, x, k] += value * filter[tap, k], in loops over y (unless it is given), x and k."""
        k = Var("k", self.schedule.register_k)
        outer, x = loops
        row = outer if outer is not None else y
        assert row is not None
        place = (row * self.schedule.register_x + x) * self.schedule.register_k + k
        factor = Load(source, (tap * self.schedule.register_k + k,), self._dtype)
        update: Statement = Store("acc", place, Load("acc", (place,), self._dtype) + value * factor)
        update = For(x, index_const(x.extent or 1), For(k, index_const(k.extent or 1), update, "unroll"), "unroll")
        return For(outer, index_const(outer.extent or 1), update, "unroll") if outer is not None else update

    def _slice(self, buffer: Expr, c: Expr, first_row: Expr, rows: int) -> list[Statement]:
        """Reads rows of the patch into the registers `slice`: lines along the innermost dimension in vectors, remainders in narrower ones."""
        pitches, columns = self.pitches, self._slice_extents[1]
        together = pitches.channels_read
        statements: list[Statement] = [Allocate(Buffer("slice", self._dtype, rows * columns * together, "register"))]
        run, down, across = {"c": (together, rows, columns), "y": (rows, 1, columns), "x": (columns, rows, 1)}[pitches.innermost]
        for row, column in product(range(down), range(across)):
            at, width = 0, pitches.width
            while at < run:
                while at + width > run:
                    width //= 2
                place = buffer + c * pitches.channel + (first_row + row) * pitches.row + self._slice_at + (column * pitches.column + at)
                held = self._held(index_const(row), index_const(column), index_const(0)) + at
                statements.append(Store("slice", held, Load(PATCH, (place,), self._dtype, width)))
                at += width
        return statements

    def _held(self, row: Expr, column: Expr, channel: Expr) -> Expr:
        """The place in the registers `slice`, which have the patch's innermost dimension innermost."""
        rows, columns = self._slice_extents
        if self.pitches.innermost == "y":
            return column * rows + row
        return (row * columns + column) * self.pitches.channels_read + channel

    @property
    def _slice_extents(self) -> tuple[int, int]:
        rows, columns = slice_of(self.form.facts, columns_of(self.schedule))
        return int(rows[0]) if self.schedule.slice == RS else 1, int(columns[0])

    @property
    def _slice_at(self) -> Var:
        return Var("slice_at", self.pitches.elements)

    def _fetch(self, target: str, at: Expr | int, buffers: Sequence[Expr], c: Expr, first_channel: Expr, fy: Expr, fx: Expr) -> list[Statement]:
        """Reads the thread's filters for one tap into the registers `target`, at tap number `at`."""
        s, p = self.schedule, self.form.facts
        statements: list[Statement] = []
        for number in range(0, s.register_k, self._width):
            if s.filters == SHARED:
                line = (c * p.filter_y + fy) * p.filter_x + fx
                where = buffers[1] + line * self.tile.ld + self.tile.spread(number, self.threads.k, s.register_k)
                value: Expr = Load(self.tile.tile, (where,), self.tile.dtype, self._width)
            else:
                value = self._stored(first_channel + c, fy, fx, number)
            statements.append(Store(target, at * s.register_k + index_const(number), value))
        return statements

    def _fetch_all(self, target: str, channel: Expr) -> list[Statement]:
        """Reads the thread's filters of a channel for every tap."""
        p, s = self.form.facts, self.schedule
        fy, fx = Var("tap_y", p.filter_y), Var("tap_x", p.filter_x)
        body = [
            Store(target, (fy * p.filter_x + fx) * s.register_k + number, self._stored(channel, fy, fx, number))
            for number in range(0, s.register_k, self._width)
        ]
        return [For(fy, index_const(p.filter_y), For(fx, index_const(p.filter_x), block(body), "unroll"), "unroll")]

    def _stored(self, channel: Expr, fy: Expr, fx: Expr, number: int) -> Expr:
        """The stored filters, with the channel clamped to the last one (beyond it the input is zero)."""
        product, last = self.form.product, self.form.facts.channels - 1
        axis = product.b_n[-1]
        wide = vectors_fit(self.tile.expr, axis, self._width, product.layouts)
        assert wide is not None
        if range_of(channel)[1] > last:
            channel = binary("min", channel, index_const(last))
        return substitute(wide, {self.form.channel: channel, self.form.filter_y: fy, self.form.filter_x: fx, axis: self._k(number)})

    def _k(self, number: int) -> Var:
        return Var(f"k_at{number}", self.form.product.b_n[-1].extent)

    @property
    def _width(self) -> int:
        """Output channels in a vector of filters."""
        return min(4, self.schedule.register_k)

    @property
    def _dtype(self) -> str:
        return self.form.product.dtype

    @property
    def _taps(self) -> int:
        return self.form.facts.filter_y * self.form.facts.filter_x
