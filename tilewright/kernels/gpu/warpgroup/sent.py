"""Results that the copy engine stores: a warpgroup puts them in shared memory as they are to be stored, and goes on with the next tile meanwhile.

In shared memory the results of a warpgroup are boxes of a matrix, or of images, with dense columns of n. A row of a box has 32, 64 or 128 bytes,
whose pieces of 16 are swizzled, so that the stores of a warp are in different banks: those of pairs of columns, of 16 bits, or of single ones if the
factors are swapped (pairs of float32 meet in two wavefronts instead of one). What is outside of the matrix the engine leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from tilewright.codegen.assemble import block, without_unread
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.tensor_copy import await_stores, commit_stores, store_box
from tilewright.codegen.intrinsics.wgmma import M
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Var, compare, index_const, replace_loads
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Buffer, For, If, Place, Statement
from tilewright.ir.region import Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.block_result import BlockResult
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.tile import swizzled
from tilewright.kernels.gpu.warpgroup.result_matrix import ResultMatrix, result_matrix
from tilewright.kernels.gpu.warpgroup.results import Ending, thread_sums
from tilewright.kernels.gpu.warpgroup.space import Consuming, sent_row_bytes

GROUP = LANES["warpgroup"]
SENT = "sent"
ALIGNMENT = 1024
"""Of swizzled boxes in shared memory, in bytes."""
REPEATED = 8
"""Rows after which a swizzle repeats."""

PlacedRow: TypeAlias = Callable[[Mapping[Var, Expr], Expr], list[Statement]]


@dataclass(frozen=True)
class Boxes:
    """The boxes that a warpgroup's results fill. `columns`: of one; a warpgroup has as many along n as its results have. `at`: coordinates of the box
    that begins at a column of the block's tile. `at_row` emits a body with the values of the axes of m, and the row of the box, at a row of the
    product in the block, if that is inside of tile and result."""

    map: TensorMap
    at: Callable[[Expr], Sequence[Expr]]
    at_row: Callable[[Expr, PlacedRow], list[Statement]]

    @property
    def columns(self) -> int:
        return self.map.box[0]

    @property
    def elements(self) -> int:
        """From one box to the next in shared memory: rows after which the swizzle repeats."""
        return -(-prod(self.map.box[1:]) // REPEATED) * REPEATED * self.columns


def matrix_boxes(result: BlockResult, schedule: Consuming, first_m: Expr, batch: Expr, group: Expr) -> Boxes:
    """Boxes of a matrix, of the rows of each warpgroup. `first_m`: the first row of the block's tile."""
    own = index_const(0) if schedule.swapped else group * M

    def at_row(row: Expr, body: PlacedRow) -> list[Statement]:
        return result.at_row(own + row, lambda mapping: body(mapping, row))

    return Boxes(matrix_map(result.form, schedule), lambda column: (result.first_n + column, first_m + own, batch), at_row)


def matrix_map(product: ProductForm, schedule: Consuming) -> TensorMap:
    """The map of the result, with the boxes of a warpgroup.

    Raises:
        Unsuitable: if it has none.
    """
    matrix = required_matrix(product)
    return matrix.map(schedule.columns if schedule.swapped else M, columns_of(matrix, schedule))


def required_matrix(product: ProductForm) -> ResultMatrix:
    """The result as a matrix. Raises Unsuitable if it is none."""
    matrix = result_matrix(product)
    if matrix is None:
        raise Unsuitable(f"the copy engine cannot store {product.output}")
    return matrix


def columns_of(matrix: ResultMatrix, schedule: Consuming) -> int:
    """Columns of a box."""
    size = size_of(matrix.dtype)
    return int(sent_row_bytes(schedule.columns, schedule.swapped, size)) // size


def sending(result: BlockResult, schedule: Consuming, boxes: Boxes, group: Expr, thread: Expr) -> Ending:
    """The stores of a block's sums by the copy engine. It has read the boxes of the tile before when a warpgroup fills them again, and all before the
    block ends."""
    form, dtype = result.form, boxes.map.dtype
    across = M if schedule.swapped else schedule.columns
    first_n = group * M if schedule.swapped else index_const(0)
    count, size = across // boxes.columns, boxes.elements
    sums = thread_sums(schedule.columns, schedule.swapped, index_const(0), thread % GROUP)
    lanes = sums.lanes(min(2, form.facts.store_vector))
    i, j, number = Var("i", sums.rows), Var("j", sums.columns // lanes), Var("box", count)
    element, offset = result.parts(lanes)
    element = replace_loads(element, {form.step.name: sums.held(i, j * lanes, form.dtype, lanes)})
    own = group * (count * size)

    def placed(mapping: Mapping[Var, Expr], row: Expr) -> list[Statement]:
        column = sums.column(j * lanes)
        within = swizzled(row, column % boxes.columns, boxes.columns, dtype, True)
        place = Place(SENT, own + column // boxes.columns * size + row * boxes.columns + within)
        return [For(j, index_const(j.extent or 1), block(result.store(element, offset, first_n + column, mapping, place=place)), "unroll")]

    one = compare("eq", thread % GROUP, 0)
    start = [store_box(Place(SENT, own + number * size), boxes.map, boxes.at(first_n + number * boxes.columns))]
    return Ending(
        beginning=(Allocate(Buffer(SENT, dtype, schedule.consumers * count * size, "shared", alignment=ALIGNMENT)),),
        products=(
            If(one, await_stores(0)),
            mbarrier.group_barrier(group + 1),
            For(i, index_const(i.extent or 1), without_unread(block(boxes.at_row(sums.row(i), placed))), "unroll"),
            mbarrier.publish(),
            mbarrier.group_barrier(group + 1),
            If(one, block(For(number, index_const(count), block(*start), "unroll"), commit_stores())),
        ),
        after=(If(one, await_stores(0)),),
    )
