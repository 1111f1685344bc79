"""Stores of pooled results from the sums in the registers of warpgroups, without an exchange between threads.

Pixels are on wgmma's columns: a thread has the sums of pairs of adjacent pixels, every eighth one, for two output channels. Lines have whole
multiples of eight columns (`PatchFacts.patch`), so that the pixels above each other are those of one thread as well. It computes what would be stored
of each pixel of a window (bias, activation, residual), combines these values, and stores one for all.
"""

from __future__ import annotations

from functools import reduce
from itertools import product as all_of

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.codegen.common import below, combine, decode
from tilewright.ir.expr import Expr, Var, index_const, replace_loads, substitute
from tilewright.ir.kernel import For, Let, Statement, Store
from tilewright.kernels.gpu.gemm.block_result import BlockResult
from tilewright.kernels.gpu.warpgroup.results import thread_sums
from tilewright.kernels.gpu.warpgroup_patch.form import EIGHT, PAIR, PatchForm
from tilewright.kernels.gpu.warpgroup_patch.pixels import Position, Positions, line_rows, row_of
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule


def store_pooled(form: PatchForm, schedule: PatchSchedule, result: BlockResult, positions: Positions, group: Expr, thread: Expr) -> list[Statement]:
    """Stores one value for each window of the block's tile that is inside of the result."""
    pooled, facts = form.pooled, form.facts
    assert pooled is not None and schedule.swapped
    sums = thread_sums(schedule.columns, schedule.swapped, group, thread)
    down, across = facts.window
    below_it = line_rows(facts, schedule) // EIGHT * PAIR  # registers from one line to the next
    line, pair = Var("line", schedule.height // down), Var("pair", -(-schedule.width // EIGHT))
    first, channel = Var("window", PAIR // across), Var("j", sums.columns)
    register = line * down * below_it + pair * PAIR + first * across
    dtype = form.product.dtype

    def value(at: Position, moved: tuple[int, int], channels: dict[Var, Expr]) -> Expr:
        """What would be stored of the pixel so far down and to the right of the window's first one."""
        y, x = moved
        steps = (*(0 for _ in at.where[2:]), y, x)[-len(at.where) :]
        row = row_of(facts, at.image, [position + step for position, step in zip(at.where, steps, strict=True)])
        element = substitute(form.product.element, {**result.bind, **decode(row, form.product.m), **channels})
        return replace_loads(element, {form.product.step.name: sums.held(register + y * below_it + x, channel, dtype, 1)})

    def stored(at: Position) -> list[Statement]:
        numbers = [position // size for position, size in zip(at.where, facts.windows, strict=True)]
        windows = {axis: number for axis, number in zip(pooled.axes, numbers, strict=True) if axis is not None}
        images = {pooled.images: at.image} if pooled.images is not None else {}

        def of_channel(n: Var) -> list[Statement]:
            channels = decode(n, form.product.n)
            values = [value(at, moved, channels) for moved in all_of(range(down), range(across))]
            total = reduce(lambda one, other: combine(pooled.combiner, (one,), (other,))[0], values)
            held = Var("pooled", None, dtype)
            axes: dict[Var, Expr] = {**images, **windows, pooled.channel: n}
            offset, element = (substitute(part, axes) for part in (pooled.offset, replace_loads(pooled.element, {pooled.name: held})))
            shared, (total, offset) = bind_shared([total, offset])
            more, (element,) = bind_shared([element], "w")
            return [*shared, Let(held, total), *more, Store(form.product.output, offset, element)]

        inside = below(result.first_n + sums.column(channel), form.product.facts.n, "n", of_channel)
        return [For(channel, index_const(sums.columns), block(inside), "unroll")]

    inner: Statement = For(first, index_const(first.extent or 1), block(positions(sums.row(register), stored)), "unroll")
    return [For(line, index_const(line.extent or 1), For(pair, index_const(pair.extent or 1), inner, "unroll"), "unroll")]
