"""Lowering of the `contraction` schema: implicit GEMM with tiles of both factors in shared memory and of the result in registers.

Each block computes one tile of C. With one stage, threads prefetch the next tiles of A and B from global memory to registers, multiply the current
tiles from shared memory, and then store the prefetched tiles to the other of two buffers. With more, asynchronous copies run `stages` - 1 steps
ahead, without registers. Either way there is one barrier per step; a plain loop has one buffer and two barriers. Rows past the end repeat the last
one and are never stored; elements past the end of the reduction are zero.

With `split` > 1 the blocks of a tile divide the reduction. As a cluster, they store their sums in their shared memory, and each adds up its share of
the tile in the order of the parts. Otherwise they store parts, which a second kernel adds in order, or, with `atomics`, add them to the result
atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.codegen.assemble import block
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import (
    Const,
    Expr,
    Load,
    Var,
    compare,
    index_const,
    substitute,
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
)
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.gemm.block_result import ThreadSums, meeting, store_shares, store_sums
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.frame import block_frame
from tilewright.kernels.gpu.gemm.offsets import OffsetTable, offsets_along
from tilewright.kernels.gpu.gemm.row_epilogue import TILE, RowBlock, row_epilogue
from tilewright.kernels.gpu.gemm.space import (
    PLAIN,
    TRANSPOSED,
    ContractionFacts,
    ContractionSchedule,
    Operand,
    blocks_to_ask_for,
    columns_of,
    table_entries,
)
from tilewright.kernels.gpu.gemm.staging import buffers_of, staged_steps, staged_tile
from tilewright.kernels.gpu.gemm.tile import Tile
from tilewright.kernels.gpu.split import in_one_or_two

UNROLLED_PRODUCTS = 1024
"""Maximum multiply-adds in one unrolled run of the inner loop."""
WARP = 32
DEEP = 4
"""Elements along k that a thread reads at once from a tile stored along k."""


def lower_contraction(problem: Problem, form: ProductForm, schedule: ContractionSchedule, machine: Machine) -> Lowered:
    """One kernel, or several with a workspace if the reduction is split; packed weights are in the storage."""
    return in_one_or_two(
        problem,
        form,
        schedule,
        machine,
        lambda form: tiles(form, schedule),
        occupancy=lambda form: blocks_to_ask_for(schedule, form.facts, machine),
        split=schedule.split,
        cluster=bool(schedule.cluster),
        atomics=bool(schedule.atomics),
    )


def tiles(form: ProductForm, schedule: ContractionSchedule) -> tuple[Block, Launch]:
    """The body of the tiled kernel. A form whose offset depends on a variable `part` stores the parts of a split reduction."""
    bm, bn, bk = schedule.block_m, schedule.block_n, schedule.block_k
    tm, tn = schedule.thread_m, schedule.thread_n
    frame = block_frame(form, (bm, bn, bk), schedule.threads, schedule.split, bool(schedule.cluster))
    thread, bind, first, first_r, steps_each = frame.thread, frame.bind, frame.first, frame.first_r, frame.steps_each
    root: list[Statement] = list(frame.statements)
    _require(schedule, form.facts)
    layout, copies, plain = schedule.layout, schedule.copies, schedule.loop == PLAIN
    fetched_a, fetched_b = (fetched(operand, schedule) for operand in (form.facts.a, form.facts.b))
    a = Tile("a", substitute(form.a, bind), form.m, fetched_a, bm, bk, schedule.threads, copies, form.stored(form.a), layout)
    b = Tile("b", substitute(form.b, bind), form.b_n, fetched_b, bn, bk, schedule.threads, copies, form.stored(form.b), layout)
    stages = schedule.stages if copies else 1
    table = _table(form, schedule, a, first_r)
    root += table.filled(thread, schedule.threads) if table is not None else []
    staged = []
    for tile, start, its in zip((a, b), first, (table, None), strict=True):
        statements, ready = staged_tile(tile, start, form, thread, first_r, buffers_of(stages, steps_each, plain), its)
        root += statements
        staged.append(ready)
    root.append(Allocate(Buffer("acc", form.dtype, tm * tn, "register")))
    at = Var("at", tm * tn)
    root.append(For(at, index_const(tm * tn), Store("acc", at, Const(0.0, form.dtype)), "unroll"))
    thread_m, thread_n, ids = thread_grid(thread, bm // tm, bn // tn)
    root += ids
    # a single step is straight-line code, and the assembler would hoist all its fragment loads
    limit = UNROLLED_PRODUCTS // 8 if steps_each == 1 else UNROLLED_PRODUCTS
    inner = lambda buffers, step: _inner_product(a, b, form.dtype, schedule, thread_m, thread_n, buffers, limit)  # noqa: E731
    root += staged_steps(staged, stages, frame.steps, steps_each, inner, plain)
    width = 1 if b.deep else min(4, tn)
    sums = ThreadSums(tm, tn, lambda i: a.spread(i, thread_m, tm), lambda j: b.spread(j, thread_n, tn), width)
    if form.row_stages:
        root += _whole_rows(form, schedule, bind, first, (a, b), thread, thread_m, thread_n)
    elif schedule.cluster:
        root += meeting(frame.result, sums, frame.part, schedule.split)
        root += store_shares(frame.result, frame.part, schedule.split, thread, schedule.threads)
    else:
        root += store_sums(frame.result, sums, bool(schedule.atomics and schedule.split > 1))
    return block(root), frame.launch


def _require(schedule: ContractionSchedule, facts: ContractionFacts) -> None:
    """Raises Unsuitable for a variant that the factors do not allow."""
    if schedule.copies and not (facts.a.plain and facts.b.plain):
        raise Unsuitable("a factor is computed while it is read: it cannot be copied asynchronously")
    if schedule.layout == TRANSPOSED and not schedule.copies:
        raise Unsuitable("tiles are transposed by copies of single elements, and this schedule has no copies")
    if schedule.table and not facts.a.tabled:
        raise Unsuitable("the offsets along the reduction take no divisions, or depend on other axes: they are in no table")


def fetched(operand: Operand, schedule: ContractionSchedule) -> Operand:
    """The operand as the schedule reads it: TRANSPOSED copies single elements of those along r."""
    return replace(operand, vector_width=1) if schedule.layout == TRANSPOSED and operand.along == "r" else operand


def _table(form: ProductForm, schedule: ContractionSchedule, a: Tile, first: Expr) -> OffsetTable | None:
    """The table of the first factor's offsets in the part of the reduction that begins at `first`; None without one."""
    if not schedule.table:
        return None
    along = offsets_along(a.expr, form.r)
    assert along is not None
    entries = int(table_entries(form.facts, columns_of(schedule))[0])
    return OffsetTable(form.r, along, first, a.vector_width if a.along_r else 1, entries)


def thread_grid(thread: Var, count_m: int, count_n: int) -> tuple[Var, Var, list[Statement]]:
    """Position of the thread in the block's grid of thread tiles. A warp covers a patch as square as possible, so that its threads share reads;
    adjacent threads alternate along m, which lets the hardware merge equal addresses of vector loads."""
    warp_n = next((w for w in (8, 4, 16, 2, 32, 1) if count_n % w == 0 and count_m % (WARP // w) == 0), None)
    m, n = Var("thread_m", count_m), Var("thread_n", count_n)
    if warp_n is None:
        return m, n, [Let(m, thread // count_n), Let(n, thread % count_n)]
    warp_m = WARP // warp_n
    warps_n = count_n // warp_n
    lane, warp = thread % WARP, thread // WARP
    if warp_m % 2 == 0:
        lane_m = lane // (2 * warp_n) * 2 + lane % 2
        lane_n = lane % (2 * warp_n) // 2
    else:
        lane_m, lane_n = lane // warp_n, lane % warp_n
    return m, n, [Let(m, warp // warps_n * warp_m + lane_m), Let(n, warp % warps_n * warp_n + lane_n)]


def _inner_product(
    a: Tile, b: Tile, dtype: str, schedule: ContractionSchedule, thread_m: Var, thread_n: Var, buffers: Sequence[Expr], limit: int
) -> list[Statement]:
    """acc[i, j] += a[k, i] * b[k, j] over the tiles that start at the offsets `buffers`; `dtype` is the type of the sums, `limit` the most
    products in one unrolled run. From a deep tile a thread reads four k at once."""
    tm, tn, bk = schedule.thread_m, schedule.thread_n, schedule.block_k
    group = DEEP if a.deep or b.deep else 1
    stretch = bk
    while stretch * tm * tn > limit and stretch > 4:
        stretch //= 2
    outer, inner, within = Var("k_outer", bk // stretch), Var("k", stretch // group), Var("k_inner", group)
    first = inner * group
    k = outer * stretch + first if stretch < bk else first
    i, j = Var("i", tm), Var("j", tn)
    body: list[Statement] = []
    single: list[Statement] = []
    factors = []
    for tile, count, thread, part, at, start in (
        (a, tm, thread_m, "a_part", i, buffers[0]),
        (b, tn, thread_n, "b_part", j, buffers[1]),
    ):
        if tile.deep:
            body.append(Allocate(Buffer(part, tile.dtype, count * group, "register")))
            for number in range(count):
                offset = start + tile.at(tile.spread(number, thread, count), k)
                body.append(Store(part, index_const(number * group), Load(tile.tile, (offset,), tile.dtype, group)))
            factors.append(Load(part, (at * group + within,), tile.dtype))
            continue
        width = min(4, count)
        single.append(Allocate(Buffer(part, tile.dtype, count, "register")))
        for number in range(0, count, width):
            offset = start + tile.at(tile.spread(number, thread, count), k + within)
            single.append(Store(part, index_const(number), Load(tile.tile, (offset,), tile.dtype, width)))
        factors.append(Load(part, (at,), tile.dtype))
    place = i * tn + j
    update = Store("acc", place, Load("acc", (place,), dtype) + factors[0] * factors[1])
    single.append(For(i, index_const(tm), For(j, index_const(tn), update, "unroll"), "unroll"))
    body.append(For(within, index_const(group), block(single), "unroll"))
    loop: Statement = For(inner, index_const(stretch // group), block(body), "unroll")
    return [For(outer, index_const(bk // stretch), loop) if stretch < bk else loop]


def _whole_rows(
    form: ProductForm,
    schedule: ContractionSchedule,
    bind: Mapping[Var, Expr],
    first: Sequence[Expr],
    pair: tuple[Tile, Tile],
    thread: Var,
    thread_m: Var,
    thread_n: Var,
) -> list[Statement]:
    """Reductions over n in a block that holds whole rows, and then the store."""
    tm, tn = schedule.thread_m, schedule.thread_n
    if schedule.block_n < form.facts.n or schedule.split > 1:
        raise Unsuitable("a block does not hold whole rows")
    i, j = Var("i", tm), Var("j", tn)

    def spill(place: Callable[[Expr, Expr], Expr]) -> Statement:
        column = pair[1].spread(j, thread_n, tn)
        store = Store(TILE, place(pair[0].spread(i, thread_m, tm), column), Load("acc", (i * tn + j,), form.dtype))
        held: Statement = store if schedule.block_n == form.facts.n else If(compare("lt", column, index_const(form.facts.n)), store)
        return For(i, index_const(tm), For(j, index_const(tn), held, "unroll"), "unroll")

    at = RowBlock(form.step.name, form.dtype, schedule.block_m, form.facts.n, schedule.threads, form.facts.m, first[0], form.m, form.n, thread)
    stages = [replace(stage, body=substitute(stage.body, bind)) for stage in form.row_stages]
    return row_epilogue(at, stages, substitute(form.element, bind), substitute(form.offset, bind), form.output, spill)
