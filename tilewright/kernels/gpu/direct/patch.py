"""How a block of a direct convolution stages its patch of the input in shared memory, in any order of its dimensions for any input layout.

Adjacent threads fetch adjacent elements: channels of a pixel of a channels-last input, otherwise columns of a row. A thread's further elements are at
constant distances, so they cost no address arithmetic. Elements beyond the input's edge, or beyond its last channel, are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics.async_copy import copy
from tilewright.ir.expr import TRUE, Const, Expr, Load, Var, as_lanes, compare, index_const, loads, logical_and, select, substitute
from tilewright.ir.kernel import Allocate, Buffer, If, Let, Statement, Store
from tilewright.kernels.gpu.direct.form import DirectForm
from tilewright.kernels.gpu.direct.patch_layout import Pitches, fetch_vector_of
from tilewright.kernels.gpu.direct.schedule import DirectSchedule, columns_of, patch_of
from tilewright.kernels.gpu.gemm.staging import Staged

PATCH = "patch"
FETCHED = "patch_next"


@dataclass(frozen=True)
class _Passes:
    """Distribution of the fetches among threads. In each pass a thread fetches `lanes` channels at (channel, line, column) plus the pass's distance
    (lines, columns). A line is a row, or, if columns are adjacent, a row of a channel. `active`: whether a thread fetches at all."""

    lanes: int
    channel: Expr
    line: Expr
    column: Expr
    active: Expr
    distances: tuple[tuple[int, int], ...]


def _passes(thread: Var, schedule: DirectSchedule, rows: int, columns: int, lanes: int, channels_adjacent: bool) -> tuple[_Passes, list[Statement]]:
    threads, groups = schedule.threads, schedule.channels // lanes if channels_adjacent else 1
    lines = rows if channels_adjacent else rows * schedule.channels
    pixels = threads // groups
    at_once = min(columns, pixels)
    lines_at_once = min(lines, pixels // at_once)
    usable = lines_at_once * at_once
    pixel: Expr = thread // groups
    column, line, group = Var("patch_column", at_once), Var("patch_line", -(-threads // groups) // at_once + 1), Var("patch_group", groups)
    lets: list[Statement] = [Let(group, thread % groups), Let(column, pixel % at_once), Let(line, pixel // at_once)]
    active = compare("lt", pixel, index_const(usable))
    if active == TRUE:
        line = Var("patch_line", lines_at_once)
        lets[2] = Let(line, pixel // at_once)
    down, across = range(0, lines, lines_at_once), range(0, columns, at_once)
    return _Passes(lanes, group * lanes, line, column, active, tuple((y, x) for y in down for x in across)), lets


def _where(condition: Expr, statements: list[Statement]) -> list[Statement]:
    return statements if condition == TRUE else [If(condition, block(statements))]


def patch(
    form: DirectForm,
    schedule: DirectSchedule,
    bind: Mapping[Var, Expr],
    thread: Var,
    origin: tuple[Expr, Expr],
    first_channel: Expr,
    pitches: Pitches,
    buffers: int,
) -> tuple[list[Statement], Staged]:
    """Statements before the loop over chunks of channels, and the fetch of a chunk's patch. `origin`: row and column in the input of the patch's
    first element. `pitches`: the layout in shared memory."""
    facts, dtype = form.facts, form.product.dtype
    stored = form.product.stored(form.product.a)  # converted when it leaves the registers
    shape = columns_of(schedule)
    rows, columns = (int(extent[0]) for extent in patch_of(facts, shape))
    adjacent = form.channel_pitch == 1 or form.column_pitch != 1
    lanes = int(fetch_vector_of(facts, shape)[0]) if adjacent else 1
    passes, setup = _passes(thread, schedule, rows, columns, lanes, adjacent)
    elements = pitches.elements
    many = len(passes.distances)
    if schedule.stages == 1:
        setup.append(Allocate(Buffer(FETCHED, stored, many * lanes, "register", lanes)))
    setup.append(Allocate(Buffer(PATCH, dtype, buffers * elements, "shared")))

    def place(down: int) -> tuple[Expr, Expr]:
        """The channel within the chunk, and the row within the patch."""
        line = passes.line + down
        return (passes.channel, line) if adjacent else (line // rows, line % rows)

    def offset(channel: Expr, row: Expr, column: Expr) -> Expr:
        return channel * form.channel_pitch + (origin[0] + row) * form.row_pitch + (origin[1] + column) * form.column_pitch

    # with adjacent channels the passes differ only by constant distances
    base = Var("patch_from", form.product.layouts[form.source].size)
    known = substitute(form.base, bind) + first_channel * form.channel_pitch
    setup.append(Let(base, known + offset(passes.channel, passes.line, passes.column) if adjacent else known))
    target = Var("patch_to", elements)
    across_at = passes.column * pitches.column
    setup.append(Let(target, passes.channel * pitches.channel + passes.line * pitches.row + across_at if adjacent else across_at))

    def each(down: int, across: int, statements: list[Statement]) -> list[Statement]:
        """The statements, guarded for threads that have an element in this pass."""
        row, column = passes.line + down, passes.column + across
        lines = rows if adjacent else rows * schedule.channels
        return _where(logical_and(compare("lt", row, index_const(lines)), compare("lt", column, index_const(columns))), statements)

    def shared(down: int, across: int) -> Expr:
        if adjacent:
            return target + (down * pitches.row + across * pitches.column)
        channel, row = place(down)
        return channel * pitches.channel + row * pitches.row + target + across * pitches.column

    def load(step: Expr, buffer: Expr) -> list[Statement]:
        result: list[Statement] = []
        for number, (down, across) in enumerate(passes.distances):
            channel, row = place(down)
            if adjacent:
                where = base + (step * (schedule.channels * form.channel_pitch) + (down * form.row_pitch + across * form.column_pitch))
            else:
                where = base + (step * (schedule.channels * form.channel_pitch) + offset(channel, row, passes.column + across))
            conditions = [
                compare("lt", origin[0] + row, index_const(form.rows)),
                compare("lt", origin[1] + passes.column + across, index_const(form.columns)),
            ]
            if facts.channels % schedule.channels:
                conditions.append(compare("lt", first_channel + step * schedule.channels + channel, index_const(facts.channels)))
            value = select(logical_and(*conditions), Load(form.source, (where,), stored, lanes), as_lanes(Const(0.0, stored), lanes))
            one: Statement = Store(FETCHED, index_const(number * lanes), value)
            if schedule.stages > 1:
                # beyond the last channel the value is a constant, and there is nothing to copy
                to = buffer + shared(down, across)
                one = copy(PATCH, to, value, dtype) if loads(value) else Store(PATCH, to, value)
            result += each(down, across, [one])
        return _where(passes.active, result)

    def put(buffer: Expr) -> list[Statement]:
        result: list[Statement] = []
        width = lanes if pitches.innermost == "c" else 1
        for number, (down, across) in enumerate(passes.distances):
            stores: list[Statement] = [
                Store(
                    PATCH,
                    buffer * elements + shared(down, across) + lane * pitches.channel,
                    Load(FETCHED, (index_const(number * lanes + lane),), dtype, width),
                )
                for lane in range(0, lanes, width)
            ]
            result += each(down, across, stores)
        return _where(passes.active, result)

    return setup, Staged(elements, load, put)
