"""Lowering of the `tensor cores` schema: implicit GEMM with tiles of both factors in shared memory, multiplied by warps on tensor cores.

Tiles are filled as those of the CUDA cores' implicit GEMM are (`gemm/staging.py`), and so are parts added and results stored
(`gemm/block_result.py`). Tiles keep the direction in which memory is read: of [m][k] and [n][k] plain `ldmatrix` loads fragments, of [k][m] and
[k][n] its transposed form, or of float32 loads of single elements. A warp loads the fragments of the next 16 (of TF32 8) elements along k while it
multiplies those of the current ones. float32 is rounded to the nearest TF32 in the fragments, or split into a pair of TF32, `high + low`:

    part = 0;  part += low_a high_b;  part += high_a low_b;  part += high_a high_b;  sums += part

for every 8 elements along k. The small products come first, and `part` is added in float32: tensor cores truncate their sums instead of rounding
them, by which long sums would lose more bits than the pairs have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.mma import REGISTER_BYTES, ROW_BYTES, Fragment, M, N, Shape, ldmatrix, mma, pair_of_tf32, round_to_tf32
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Const, Expr, Load, Var, index_const, substitute
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Launch, Let, Place, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.gemm.block_result import ThreadSums, meeting, store_shares, store_sums
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.frame import block_frame
from tilewright.kernels.gpu.gemm.space import MATRICES
from tilewright.kernels.gpu.gemm.staging import buffers_of, staged_steps, staged_tile
from tilewright.kernels.gpu.gemm.tile import Tile
from tilewright.kernels.gpu.split import in_one_or_two
from tilewright.kernels.gpu.tensor_cores.form import TensorCoreFacts, TensorCoreForm
from tilewright.kernels.gpu.tensor_cores.space import PARTS_PADDING, WARP, TensorCoreSchedule, blocks_to_ask_for


def lower_tensor_cores(problem: Problem, form: TensorCoreForm, schedule: TensorCoreSchedule, machine: Machine) -> Lowered:
    """One kernel, or two with a workspace if the reduction is split; packed weights are in the storage."""
    return in_one_or_two(
        problem,
        form.product,
        schedule,
        machine,
        lambda product: tiles(product, form.facts, schedule),
        occupancy=lambda product: blocks_to_ask_for(schedule, form.facts, machine),
        split=schedule.split,
        cluster=bool(schedule.cluster),
    )


class Matrix(Protocol):
    """A factor in shared memory, in the buffer `tile`: the offset of the element at `own` and `k`. `deep`: rows hold what a product sums over."""

    @property
    def tile(self) -> str: ...
    @property
    def deep(self) -> bool: ...
    def at(self, own: Expr, k: Expr) -> Expr: ...


@dataclass(frozen=True)
class WarpTile:
    """A warp's part of the block's tile: `rows` matrices of 16 rows from row `first_row` on, `columns` matrices of 8 columns from `first_column` on.
    `lane`: the thread's place in the warp. `pairs`: float32 factors are pairs of TF32, whose low parts are in registers of their own."""

    shape: Shape
    rows: int
    columns: int
    first_row: Expr
    first_column: Expr
    lane: Expr
    pairs: bool = False

    def register(self, row: Expr, column: Expr) -> Expr:
        """The register of the thread's sum in its row and column of sums: fragments one after another, each [half][column]."""
        return ((row // 2 * self.columns + column // 2) * 2 + row % 2) * 2 + column % 2

    @property
    def sums(self) -> ThreadSums:
        """A thread has the rows lane / 4 and 8 + lane / 4 of each fragment, and two adjacent columns."""
        return ThreadSums(
            2 * self.rows,
            2 * self.columns,
            lambda i: self.first_row + i // 2 * M + i % 2 * (M // 2) + self.lane // 4,
            lambda j: self.first_column + j // 2 * N + self.lane % 4 * 2 + j % 2,
            2,
            self.register,
        )

    def load(self, tile: Matrix, name: str, own: Expr, first: Expr, k: Expr, buffer: Expr, fragment: Fragment, count: int) -> list[Statement]:
        """Loads `count` fragments, one after another along m or n from `own` on, of the elements from `k` on to the registers `name` from `first`
        on. The second factor's have 8 columns each, the first one's (a single one) 16 rows."""
        stored, size = self.shape.stored, count * fragment.size
        is_a = fragment is self.shape.a
        if size_of(stored) == 2 or tile.deep:
            vector = ROW_BYTES // size_of(stored)
            # lane 8 i + j gives the address of row j of matrix i; the order of the matrices is that of the fragment's registers
            matrices = size * size_of(stored) // REGISTER_BYTES
            lane = self.lane % (8 * matrices)  # the other lanes' addresses are valid too
            matrix, row = lane // 8, self.lane % 8
            along_own, along_k = (matrix % 2 * 8, matrix // 2 * vector) if is_a else (matrix // 2 * 8, matrix % 2 * vector)
            own, k = (own + along_own + row, k + along_k) if tile.deep else (own + along_own, k + along_k + row)
            loads: list[Statement] = [ldmatrix(stored, matrices, Place(name, first), Place(tile.tile, buffer + tile.at(own, k)), not tile.deep)]
            values = [Load(name, (first + number,), stored) for number in range(size)]
        else:
            loads = []
            rows, columns = self.lane // 4, self.lane % 4
            places = [(number % 2 * 8, number // 2 * 4) if is_a else (number // 2 * 8, number % 2 * 4) for number in range(size)]
            values = [Load(tile.tile, (buffer + tile.at(own + rows + along_own, k + columns + along_k),), stored) for along_own, along_k in places]
        if size_of(stored) == 4:
            for number, value in enumerate(values):
                place = Place(name, first + number)
                loads += pair_of_tf32(place, replace(place, buffer=low_part(name)), value) if self.pairs else [round_to_tf32(place, value)]
        return loads

    def fragments(self, a: Tile, b: Tile, turn: int, k: Expr, buffers: Sequence[Expr]) -> list[Statement]:
        """Loads all fragments of the elements from `k` on to one of the two sets of registers."""
        of_a, of_b = self.shape.a, self.shape.b
        i, j = Var("i", self.rows), Var("j", self.columns // 2)
        first = self.load(a, f"a{turn}", self.first_row + i * M, i * of_a.size, k, buffers[0], of_a, 1)
        loads: list[Statement] = [For(i, index_const(self.rows), block(first), "unroll")]
        if self.columns > 1:
            second = self.load(b, f"b{turn}", self.first_column + j * (2 * N), j * (2 * of_b.size), k, buffers[1], of_b, 2)
            loads.append(For(j, index_const(self.columns // 2), block(second), "unroll"))
        if self.columns % 2:
            last = self.columns - 1
            loads += self.load(b, f"b{turn}", self.first_column + last * N, index_const(last * of_b.size), k, buffers[1], of_b, 1)
        return loads

    def products(self, kind: str, turn: int) -> Statement:
        """sums += a b for every pair of fragments."""
        i, j, size = Var("i", self.rows), Var("j", self.columns), self.shape.sums.size
        first = (i * self.columns + j) * size
        a, b = Place(f"a{turn}", i * self.shape.a.size), Place(f"b{turn}", j * self.shape.b.size)
        product: Statement = mma(kind, Place("acc", first), a, b)
        if self.pairs:
            part, at = Place("part", index_const(0)), Var("at", size)
            held, total = Load("part", (at,), FLOAT32), Load("acc", (first + at,), FLOAT32)
            product = block(
                Allocate(Buffer("part", FLOAT32, size, "register")),
                For(at, index_const(size), Store("part", at, Const(0.0, FLOAT32)), "unroll"),
                mma(kind, part, replace(a, buffer=low_part(a.buffer)), b),
                mma(kind, part, a, replace(b, buffer=low_part(b.buffer))),
                mma(kind, part, a, b),
                For(at, index_const(size), Store("acc", first + at, total + held), "unroll"),
            )
        return For(i, index_const(self.rows), For(j, index_const(self.columns), product, "unroll"), "unroll")


def low_part(name: str) -> str:
    """The registers of the low parts of pairs whose high parts are in these."""
    return f"{name}_low"


def tiles(form: ProductForm, facts: TensorCoreFacts, schedule: TensorCoreSchedule) -> tuple[Block, Launch]:
    """The body of the kernel. A form whose offset depends on a variable `part` stores the parts of a split reduction."""
    if schedule.stages > 1 and not facts.copies:
        raise Unsuitable("elements of a factor are too narrow to be copied asynchronously, or computed while they are read")
    if schedule.pairs and facts.kind != "tf32":
        raise Unsuitable("only float32 factors are pairs of TF32")
    size = schedule.block_m, schedule.block_n, schedule.block_k
    if schedule.staged and schedule.split > 1:
        raise Unsuitable("parts of a split are stored as they are, or meet in shared memory anyway")
    if schedule.block_m % (M * schedule.warps_m) or schedule.block_n % (N * schedule.warps_n) or schedule.block_k % facts.shape.depth:
        raise Unsuitable(f"the tile of a warp of {schedule} has no whole matrices")
    frame = block_frame(form, size, schedule.threads, schedule.split, bool(schedule.cluster))
    root: list[Statement] = list(frame.statements)
    product, copies = facts.product, schedule.stages > 1
    pair = [
        Tile(name, substitute(factor, frame.bind), own, operand, extent, schedule.block_k, schedule.threads, copies, facts.shape.stored, MATRICES)
        for name, factor, own, operand, extent in (
            ("a", form.a, form.m, product.a, schedule.block_m),
            ("b", form.b, form.b_n, product.b, schedule.block_n),
        )
    ]
    buffers = buffers_of(schedule.stages, frame.steps_each)
    loop: list[Statement] = []
    staged = []
    for tile, start in zip(pair, frame.first, strict=True):
        statements, ready = staged_tile(tile, start, form, frame.thread, frame.first_r, buffers)
        loop += statements
        staged.append(ready)
    rows, columns = schedule.block_m // schedule.warps_m, schedule.block_n // schedule.warps_n
    lane, warp = Var("lane", WARP), Var("warp", schedule.threads // WARP)
    warp_m, warp_n = warp // schedule.warps_n, warp % schedule.warps_n
    mine = WarpTile(facts.shape, rows // M, columns // N, warp_m * rows, warp_n * columns, lane, bool(schedule.pairs))
    count = mine.rows * mine.columns * facts.shape.sums.size
    at = Var("at", count)
    root += [
        Let(lane, frame.thread % WARP),
        Let(warp, frame.thread // WARP),
        Allocate(Buffer("acc", form.dtype, count, "register")),
        For(at, index_const(count), Store("acc", at, Const(0.0, form.dtype)), "unroll"),
    ]
    inner = lambda where, step: _step(mine, pair, facts, schedule.block_k, where)  # noqa: E731
    loop += staged_steps(staged, schedule.stages, frame.steps, frame.steps_each, inner)
    if not (schedule.cluster or schedule.staged):
        return block(root, loop, store_sums(frame.result, mine.sums)), frame.launch
    # the loop is a scope of its own, so that the sums have the places of the tiles, which other warps may still read
    result, split = replace(frame.result, padding=PARTS_PADDING), schedule.split if schedule.cluster else 1
    after = block(
        block_barrier(), meeting(result, mine.sums, frame.part, split), store_shares(result, frame.part, split, frame.thread, schedule.threads)
    )
    return Block((*block(root).statements, block(loop), *after.statements)), frame.launch


def _step(mine: WarpTile, pair: Sequence[Tile], facts: TensorCoreFacts, block_k: int, buffers: Sequence[Expr]) -> list[Statement]:
    """The warp's products of the tiles that start at the offsets `buffers`."""
    shape = facts.shape
    packed = REGISTER_BYTES // size_of(shape.stored)
    statements: list[Statement] = []
    turns = block_k // shape.depth
    for number in range(1 if mine.pairs else min(turns, 2)):
        for name, size in ((f"a{number}", mine.rows * shape.a.size), (f"b{number}", mine.columns * shape.b.size)):
            parts = (name, low_part(name)) if mine.pairs else (name,)
            statements += [Allocate(Buffer(part, shape.stored, size, "register", packed)) for part in parts]
    a, b = pair
    if mine.pairs:  # a loop, as the assembler would load fragments of all turns ahead, and spill
        turn = Var("turn", turns)
        body = block(mine.fragments(a, b, 0, turn * shape.depth, buffers), mine.products(facts.kind, 0))
        return [*statements, For(turn, index_const(turns), body)]
    statements += mine.fragments(a, b, 0, index_const(0), buffers)
    for number in range(turns):
        if number + 1 < turns:
            statements += mine.fragments(a, b, (number + 1) % 2, index_const((number + 1) * shape.depth), buffers)
        statements.append(mine.products(facts.kind, number % 2))
    return statements
