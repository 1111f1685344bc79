"""Results that the copy engine stores: a warpgroup puts them in shared memory as they are to be stored, and goes on with the next tile meanwhile.

In shared memory the results of a warpgroup are boxes with dense columns of n. A row of a box has 32, 64 or 128 bytes, whose pieces of 16
are swizzled, so that the stores of a warp are in different banks. Pairs of 16-bit results are a fragment, which `stmatrix` stores, transposed if the
factors are swapped. The engine leaves out what is outside of the tensor, for which operands of the last column are read. float32 results fill shared
memory twice as fast, and leave it to fewer stages: most were slower on an H200. In parts, two of which are in shared memory, results leave it to more
stages; a warpgroup waits for the engine to read the first before it fills the third.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.codegen.assemble import block
from tilewright.codegen.common import vectors_fit
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.mma import stmatrix
from tilewright.codegen.intrinsics.tensor_copy import await_stores, commit_stores, store_box
from tilewright.codegen.intrinsics.wgmma import M
from tilewright.ir.expr import Expr, Load, Var, binary, compare, index_const, replace_loads, substitute, variables
from tilewright.ir.intrinsic import LANES, SWIZZLES
from tilewright.ir.kernel import Allocate, Buffer, For, If, Let, Place, Statement, Store
from tilewright.ir.region import Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.block_result import BlockResult
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.tile import swizzled
from tilewright.kernels.gpu.warpgroup.result_matrix import ELEMENT_BYTES, ResultMatrix, result_matrix
from tilewright.kernels.gpu.warpgroup.results import Ending
from tilewright.kernels.gpu.warpgroup.space import ALIGNMENT, IN_PARTS, PARTS_HELD, Consuming, WarpgroupSchedule, part_columns

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
SENT, PAIRS = "sent", "pairs"
SIDE, MATRICES = 8, 4
"""Rows and columns of a matrix of `stmatrix`, and matrices at once: 16 rows and 16 columns of sums."""


@dataclass(frozen=True)
class Boxes:
    """What a warpgroup sends: `count` boxes of a map, so many elements apart in shared memory, the `number`-th of them `at`
    these coordinates, given the first column of sums of the part."""

    map: TensorMap
    count: int
    distance: int
    at: Callable[[Expr, Expr], Sequence[Expr]]


def required_matrix(product: ProductForm) -> ResultMatrix:
    """`result_matrix`. Raises Unsuitable if the copy engine cannot store the result."""
    matrix = result_matrix(product)
    if matrix is None:
        raise Unsuitable(f"the copy engine cannot store {product.output}")
    return matrix


def columns_at_once(schedule: Consuming) -> int:
    """Columns of a warpgroup's sums whose results are sent at once. Raises Unsuitable if its columns are not several such parts."""
    if schedule.sent != IN_PARTS:
        return schedule.columns
    width = part_columns(schedule.columns)
    if schedule.columns % width or schedule.columns <= PARTS_HELD * width:
        raise Unsuitable(f"{schedule.columns} columns are not more than {PARTS_HELD} parts of {width}")
    return width


def sent_map(product: ProductForm, schedule: WarpgroupSchedule) -> TensorMap:
    """The map of the result as a matrix, with the boxes of a warpgroup, of which it has several along n. Raises Unsuitable as `required_matrix` and
    `columns_at_once`."""
    rows, columns = own_extents(schedule)
    return required_matrix(product).map(rows, max(width for width in SWIZZLES[1:] if columns * ELEMENT_BYTES % width == 0))


def own_extents(schedule: Consuming) -> tuple[int, int]:
    """Rows (of m) and columns (of n) of a warpgroup's results that are sent at once."""
    columns = columns_at_once(schedule)
    return (columns, M) if schedule.swapped else (M, columns)


def matrix_boxes(result: BlockResult, schedule: WarpgroupSchedule, first_m: Expr, batch: Expr, group: Expr) -> Boxes:
    """Of a matrix: all rows of a warpgroup by as many of its columns as a box has."""
    described, (rows, columns) = sent_map(result.form, schedule), own_extents(schedule)
    width, own = described.box[0], group * M

    def at(number: Expr, begin: Expr) -> Sequence[Expr]:
        own_m, own_n = (begin, own) if schedule.swapped else (own, begin)
        return result.first_n + own_n + number * width, first_m + own_m, batch

    return Boxes(described, columns // width, rows * width, at)


def sending(result: BlockResult, schedule: Consuming, boxes: Boxes, group: Expr, thread: Expr) -> Ending:
    """The stores of a block's sums by the copy engine, part by part. It has read the boxes of the tile before when a warpgroup fills them again,
    those of a part before another is put in their place, and all before the block ends."""
    at_once = columns_at_once(schedule)
    parts = schedule.columns // at_once
    several, held = parts > 1, min(parts, PARTS_HELD)
    run = Var("run", parts)
    part: Expr = run if several else index_const(0)
    own, begin = group * (M * at_once * held), part * at_once
    place, own_n = own + part % held * (M * at_once), group * M if schedule.swapped else begin
    number, one = Var("box", boxes.count), compare("eq", thread % GROUP, 0)
    start = store_box(Place(SENT, place + number * boxes.distance), boxes.map, boxes.at(number, begin))
    body = block(
        If(one, await_stores(held - 1)) if several else [],
        mbarrier.group_barrier(group + 1),
        *put_pairs(result, schedule, boxes.map, place, own_n, begin, thread),
        mbarrier.publish(),
        mbarrier.group_barrier(group + 1),
        If(one, block(For(number, index_const(boxes.count), start, "unroll"), commit_stores())),
    )
    return Ending(
        beginning=(Allocate(Buffer(SENT, boxes.map.dtype, schedule.consumers * M * at_once * held, "shared", alignment=ALIGNMENT)),),
        products=(If(one, await_stores(0)), For(run, index_const(parts), body, "unroll") if several else body),
        after=(If(one, await_stores(0)),),
    )


def put_pairs(result: BlockResult, schedule: Consuming, described: TensorMap, own: Expr, own_n: Expr, begin: Expr, thread: Expr) -> list[Statement]:
    """The results of a part of a warpgroup's sums, those of its columns from `begin` on, in shared memory, from `own` on. `own_n`: its first column
    in the block's tile."""
    form, columns, (rows, _) = result.form, described.box[0], own_extents(schedule)
    lane, warp = thread % WARP, thread % GROUP // WARP
    part, number, second = Var("columns", columns_at_once(schedule) // (2 * SIDE)), lane // SIDE, Var("second", MATRICES)
    # registers of sums are [columns in eights][rows in eights][2]
    sums = Load("acc", (begin // 2 + part * (2 * MATRICES) + second * 2,), form.dtype, 2)
    n = warp * (2 * SIDE) + lane // 4 + second % 2 * SIDE if schedule.swapped else (part * 2 + second // 2) * SIDE + lane % 4 * 2
    along, across = warp * (2 * SIDE) + number % 2 * SIDE, (part * 2 + number // 2) * SIDE
    row, column = (across + lane % SIDE, along) if schedule.swapped else (along + lane % SIDE, across)
    within = swizzled(row, column % columns, columns, described.dtype, True)
    place = Place(SENT, own + column // columns * (rows * columns) + row * columns + within)
    body = block(
        Allocate(Buffer(PAIRS, described.dtype, 2 * MATRICES, "register", 2)),
        For(second, index_const(MATRICES), block(_pair(result, schedule, own_n + n, sums, second)), "unroll"),
        stmatrix(described.dtype, MATRICES, place, Place(PAIRS, index_const(0)), bool(schedule.swapped)),
    )
    return [For(part, index_const(part.extent or 1), body, "unroll")]


def _pair(result: BlockResult, schedule: Consuming, column: Expr, sums: Load, number: Var) -> list[Statement]:
    """Stores what follows from two sums in a register: at a column of the block's tile and the next one, or both at this column if factors are
    swapped."""
    form = result.form
    (n,), lanes = form.n, sums.lanes
    element = vectors_fit(substitute(form.element, result.bind), Var("pair", lanes) if schedule.swapped else n, lanes, form.layouts)
    assert element is not None
    names: list[Statement] = []
    if n in variables(element):
        where = result.first_n + column
        if form.facts.n % result.columns:
            where = binary("min", where, index_const(form.facts.n - (1 if schedule.swapped else lanes)))
        names = [Let(n, where)]
    return [*names, Store(PAIRS, number * lanes, replace_loads(element, {form.step.name: sums}))]
