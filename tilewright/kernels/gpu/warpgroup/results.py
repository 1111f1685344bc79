"""Stores of the sums in the registers of warpgroups: each thread stores its own, or they go through shared memory to adjacent stores, where the
blocks of a split that are a cluster add theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.barriers import cluster_barrier
from tilewright.codegen.intrinsics.wgmma import M
from tilewright.ir.expr import Expr, Load, Var, index_const, replace_loads
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Buffer, For, Let, Statement, Store
from tilewright.kernels.gpu.gemm.block_result import BlockResult, ThreadSums, parts_of, put_sums, store_shares, store_sums
from tilewright.kernels.gpu.warpgroup.space import STAGED_PADDING, Consuming, staged_columns

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
STAGED = "staged"


@dataclass(frozen=True)
class Ending:
    """What becomes of the sums `acc` of warpgroups: statements at the beginning of the kernel, those of the warpgroups behind the products of each
    tile and behind all tiles, and those of all threads at the end."""

    beginning: tuple[Statement, ...] = ()
    products: tuple[Statement, ...] = ()
    after: tuple[Statement, ...] = ()
    end: tuple[Statement, ...] = ()


def ending(result: BlockResult, schedule: Consuming, part: Expr, group: Expr, thread: Var) -> Ending:
    """The stores of a block's sums. `part`: its number among those that share the reduction. If these meet, each has its sums in shared memory, and
    adds up and stores a share of the tile; all threads have to know where that is."""
    if schedule.meeting:
        padded = replace(result, padding=STAGED_PADDING[schedule.swapped])
        put = put_sums(padded, thread_sums(schedule.columns, schedule.swapped, group, thread), part)
        shares = store_shares(padded, part, schedule.split, thread, schedule.threads)
        return Ending((parts_of(padded, schedule.split),), (put,), end=(cluster_barrier(), *shares))
    if schedule.staged:
        return Ending(products=tuple(store_staged_sums(result, schedule, group, thread)))
    # of swapped factors a thread has sums of many rows, and behind their guards would read what it adds to them one row after the other
    adds_a_tensor = result.form.facts.epilogue_bytes > result.form.facts.bytes_written / 2  # as large as the result, or nearly
    sums = thread_sums(schedule.columns, schedule.swapped, group, thread)
    return Ending(products=tuple(store_sums(result, sums, nearest=bool(schedule.swapped) and adds_a_tensor)))


def thread_sums(columns: int, swapped: int, group: Expr, thread: Expr) -> ThreadSums:
    """The thread's sums (`wgmma.sums_fragment`): two rows, and pairs of adjacent columns, in registers [column / 2][row][column % 2]. Rows are of m,
    or of n if `swapped`."""
    lane, warp, count = thread % WARP, thread % GROUP // WARP, columns // 4

    def row(i: Expr) -> Expr:
        return group * M + warp * 16 + lane // 4 + i * 8

    def column(j: Expr) -> Expr:
        return j // 2 * 8 + lane % 4 * 2 + j % 2

    def register(i: Expr, j: Expr) -> Expr:
        return j // 2 * 4 + i * 2 + j % 2

    if swapped:
        return ThreadSums(count, 2, column, row, 1, lambda m, n: register(n, m))
    return ThreadSums(2, count, row, column, 2, register)


def store_staged_sums(result: BlockResult, schedule: Consuming, group: Expr, thread: Expr) -> list[Statement]:
    """Stores the sums of a warpgroup, a part of its columns after the other: they go to its own share of shared memory as [m][n], from which adjacent
    threads store adjacent vectors along n."""
    columns, swapped, form = schedule.columns, schedule.swapped, result.form
    width = staged_columns(columns)
    rows, across = (width, M) if swapped else (M, width)
    pitch = across + STAGED_PADDING[swapped]
    lanes = next(lanes for lanes in (4, 2, 1) if lanes <= form.facts.store_vector)
    sums, own = thread_sums(width, swapped, index_const(0), thread), group * (rows * pitch)
    pair = sums.lanes(2)
    part, vector = Var("run", columns // width), Var("vector", rows * across // (GROUP * lanes))
    i, j = Var("i", sums.rows), Var("j", sums.columns // pair)
    put = Store(STAGED, own + sums.row(i) * pitch + sums.column(j * pair), sums.held(i, j * pair, form.dtype, pair, part * (width // 2)))

    element, offset = result.parts(lanes)
    held = Var("sum", None, form.dtype, lanes)
    value = replace_loads(element, {form.step.name: held})
    number = (vector * GROUP + thread % GROUP) * lanes
    row, column = number // across, number % across
    first_m, first_n = (part * width, group * M) if swapped else (group * M, part * width)
    store = result.store_vector(value, offset, first_m + row, first_n + column)
    take = Let(held, Load(STAGED, (own + row * pitch + column,), form.dtype, lanes))
    body = block(
        mbarrier.group_barrier(group + 1),
        For(i, index_const(sums.rows), For(j, index_const(sums.columns // pair), put, "unroll"), "unroll"),
        mbarrier.group_barrier(group + 1),
        For(vector, index_const(vector.extent or 1), block(take, store), "unroll"),
    )
    return [
        Allocate(Buffer(STAGED, form.dtype, schedule.consumers * rows * pitch, "shared")),
        For(part, index_const(columns // width), body, "unroll"),
    ]
