"""Results that the copy engine stores: a warpgroup puts them in shared memory as they are to be stored, and goes on with the next tile meanwhile.

In shared memory the results of a warpgroup are boxes of a matrix with dense columns of n. A row of a box has 32, 64 or 128 bytes, whose pieces of 16
are swizzled, so that the stores of a warp are in different banks. Pairs of 16-bit results are a fragment, which `stmatrix` stores, transposed if the
factors are swapped; float32 results are stored as pairs, which meet in two wavefronts instead of one, or singly if swapped. The engine leaves out
what is outside of the matrix, for which operands of the last column are read.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tilewright.codegen.assemble import block
from tilewright.codegen.common import vectors_fit
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.mma import stmatrix
from tilewright.codegen.intrinsics.tensor_copy import await_stores, commit_stores, store_box
from tilewright.codegen.intrinsics.wgmma import M
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, binary, compare, index_const, replace_loads, substitute, variables
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Buffer, For, If, Let, Place, Statement, Store
from tilewright.ir.region import Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.block_result import BlockResult
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.tile import swizzled
from tilewright.kernels.gpu.warpgroup.result_matrix import result_matrix
from tilewright.kernels.gpu.warpgroup.results import Ending, thread_sums
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
SENT, PAIRS = "sent", "pairs"
ALIGNMENT = 1024
"""Of swizzled boxes in shared memory, in bytes."""
ROW_BYTES = (128, 64, 32)
"""Of a box, the first that divides the columns of a warpgroup."""
SIDE, MATRICES = 8, 4
"""Rows and columns of a matrix of `stmatrix`, and matrices at once: 16 rows and 16 columns of sums."""


def sent_map(product: ProductForm, schedule: WarpgroupSchedule) -> TensorMap:
    """The map of the result, with the boxes of a warpgroup, of which it has several along n.

    Raises:
        Unsuitable: if the copy engine cannot store it.
    """
    matrix = result_matrix(product)
    if matrix is None:
        raise Unsuitable(f"the copy engine cannot store {product.output}")
    rows, columns = (schedule.columns, M) if schedule.swapped else (M, schedule.columns)
    return matrix.map(rows, next(width for width in ROW_BYTES if columns * size_of(matrix.dtype) % width == 0))


def sending(result: BlockResult, schedule: WarpgroupSchedule, first_m: Expr, batch: Expr, group: Expr, thread: Expr) -> Ending:
    """The stores of a block's sums by the copy engine. It has read the boxes of the tile before when a warpgroup fills them again, and all before the
    block ends."""
    described = sent_map(result.form, schedule)
    columns, size = described.box[0], prod(described.box)
    count = (M if schedule.swapped else schedule.columns) // columns
    own = group * (count * size)
    own_m, own_n = (index_const(0), group * M) if schedule.swapped else (group * M, index_const(0))
    put = put_pairs if size_of(described.dtype) == 2 else put_singles
    number, one = Var("box", count), compare("eq", thread % GROUP, 0)
    at = (result.first_n + own_n + number * columns, first_m + own_m, batch)
    start = store_box(Place(SENT, own + number * size), described, at)
    return Ending(
        beginning=(Allocate(Buffer(SENT, described.dtype, schedule.consumers * count * size, "shared", alignment=ALIGNMENT)),),
        products=(
            If(one, await_stores(0)),
            mbarrier.group_barrier(group + 1),
            *put(result, schedule, described, own, own_n, thread),
            mbarrier.publish(),
            mbarrier.group_barrier(group + 1),
            If(one, block(For(number, index_const(count), start, "unroll"), commit_stores())),
        ),
        after=(If(one, await_stores(0)),),
    )


def put_pairs(result: BlockResult, schedule: WarpgroupSchedule, described: TensorMap, own: Expr, own_n: Expr, thread: Expr) -> list[Statement]:
    """A warpgroup's results of 16 bits in shared memory, from `own` on. `own_n`: its first column in the block's tile."""
    lane, warp = thread % WARP, thread % GROUP // WARP
    part, number, second = Var("columns", schedule.columns // (2 * SIDE)), lane // SIDE, Var("second", MATRICES)
    # registers of sums are [columns in eights][rows in eights][2]
    sums = Load("acc", (part * (2 * MATRICES) + second * 2,), result.form.dtype, 2)
    n = warp * (2 * SIDE) + lane // 4 + second % 2 * SIDE if schedule.swapped else (part * 2 + second // 2) * SIDE + lane % 4 * 2
    fill = [*_value(result, schedule, own_n + n, sums, lambda value: Store(PAIRS, second * 2, value))]
    along, across = warp * (2 * SIDE) + number % 2 * SIDE, (part * 2 + number // 2) * SIDE
    row, column = (across + lane % SIDE, along) if schedule.swapped else (along + lane % SIDE, across)
    put = stmatrix(described.dtype, MATRICES, _place(described, own, row, column), Place(PAIRS, index_const(0)), bool(schedule.swapped))
    body = block(
        Allocate(Buffer(PAIRS, described.dtype, 2 * MATRICES, "register", 2)),
        For(second, index_const(MATRICES), block(fill), "unroll"),
        put,
    )
    return [For(part, index_const(part.extent or 1), body, "unroll")]


def put_singles(result: BlockResult, schedule: WarpgroupSchedule, described: TensorMap, own: Expr, own_n: Expr, thread: Expr) -> list[Statement]:
    """The same of results of float32."""
    sums = thread_sums(schedule.columns, schedule.swapped, index_const(0), thread % GROUP)
    lanes = sums.lanes(2)
    i, j = Var("i", sums.rows), Var("j", sums.columns // lanes)
    place = _place(described, own, sums.row(i), sums.column(j * lanes))
    held = sums.held(i, j * lanes, result.form.dtype, lanes)
    store = _value(result, schedule, own_n + sums.column(j * lanes), held, lambda value: Store(place.buffer, place.offset, value))
    return [For(i, index_const(sums.rows), For(j, index_const(j.extent or 1), block(store), "unroll"), "unroll")]


def _place(described: TensorMap, own: Expr, row: Expr, column: Expr) -> Place:
    """Where an element of a warpgroup's results is in shared memory."""
    columns, size = described.box[0], prod(described.box)
    within = swizzled(row, column % columns, columns, described.dtype, True)
    return Place(SENT, own + column // columns * size + row * columns + within)


def _value(result: BlockResult, schedule: WarpgroupSchedule, column: Expr, sums: Load, stored: Callable[[Expr], Statement]) -> list[Statement]:
    """Stores what follows from one or two sums at a column of the block's tile: of it and the next one, or of it alone if factors are swapped."""
    form = result.form
    (n,), lanes = form.n, sums.lanes
    along = Var("pair", lanes) if schedule.swapped else n
    element = vectors_fit(substitute(form.element, result.bind), along, lanes, form.layouts)
    assert element is not None
    names: list[Statement] = []
    if n in variables(element):
        where = result.first_n + column
        if form.facts.n % result.columns:
            where = binary("min", where, index_const(form.facts.n - (1 if schedule.swapped else lanes)))
        names = [Let(n, where)]
    return [*names, stored(replace_loads(element, {form.step.name: sums}))]
