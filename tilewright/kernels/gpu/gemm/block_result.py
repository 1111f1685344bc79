"""Stores of the sums in a block's registers: each thread stores its own; or they go through shared memory, where the blocks of a cluster combine
theirs, and from which adjacent threads store adjacent vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.codegen.common import Below, Nearest, below, decode, named, vectors_fit
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.ir.expr import TRUE, Expr, Load, Var, as_lanes, index_const, logical_and, replace_loads, substitute
from tilewright.ir.kernel import Allocate, AtomicAdd, Buffer, For, If, Let, Statement, Store
from tilewright.kernels.gpu.gemm.form import ProductForm

PARTS = "parts"

RowBody: TypeAlias = Callable[[Mapping[Var, Expr]], list[Statement]]


class AtRow(Protocol):
    """Emits a body with the values of the axes of m at a row of the tile, as `within` has it if the row may be outside the result."""

    def __call__(self, row: Expr, body: RowBody, within: Below = below) -> list[Statement]: ...


@dataclass(frozen=True)
class BlockResult:
    """The tile of `rows` (of m) by `columns` (of n, from `first_n` on) that a block computes. `bind` holds the values of all axes but those of m and
    n. `padding`: elements between the rows of the tile in shared memory."""

    form: ProductForm
    bind: Mapping[Var, Expr]
    rows: int
    columns: int
    first_n: Expr
    at_row: AtRow
    padding: int = 0

    @property
    def pitch(self) -> int:
        """Elements from one row to the next in shared memory."""
        return self.columns + self.padding

    def parts(self, lanes: int) -> tuple[Expr, Expr]:
        """The stored element, `lanes` wide, and its offset, over the axes of m and n."""
        form = self.form
        element, offset = substitute(form.element, self.bind), substitute(form.offset, self.bind)
        if lanes > 1:
            wide = vectors_fit(element, form.n[-1], lanes, form.layouts)
            assert wide is not None
            element = as_lanes(wide, lanes)
        return element, offset

    def store(self, element: Expr, offset: Expr, column: Expr, mapping: Mapping[Var, Expr], atomic: bool = False) -> list[Statement]:
        """Stores (or atomically adds) an element at a column of the tile, if it is inside the result."""

        def at(n: Var) -> list[Statement]:
            lets, (where, what) = self._at_column(element, offset, n, mapping)
            return [*lets, (AtomicAdd if atomic else Store)(self.form.output, where, what)]

        return below(self.first_n + column, self.form.facts.n, "n", at)

    def store_vector(self, element: Expr, offset: Expr, row: Expr, column: Expr) -> list[Statement]:
        """Stores an element at a row and a column of the tile, if these are inside the result. It is computed in any case, of the nearest ones that
        are: behind a branch the compiler would read operands of one element only after the store of the one before."""
        rows, columns = Nearest(), Nearest(element.lanes)

        def in_row(mapping: Mapping[Var, Expr]) -> list[Statement]:
            def at(n: Var) -> list[Statement]:
                lets, (where, what) = self._at_column(element, offset, n, mapping)
                stored = Var("stored", None, what.dtype, what.lanes)
                inside, store = logical_and(rows.inside, columns.inside), Store(self.form.output, where, stored)
                return [*lets, Let(stored, what), store if inside == TRUE else If(inside, store)]

            return columns.below(self.first_n + column, self.form.facts.n, "n", at)

        return self.at_row(row, in_row, rows.below)

    def _at_column(self, element: Expr, offset: Expr, n: Var, mapping: Mapping[Var, Expr]) -> tuple[list[Statement], list[Expr]]:
        """The offset and the element at a row, whose axes have the values of `mapping`, and a column of the result."""
        lets, more = named(decode(n, self.form.n))
        everything = {**mapping, **more}
        shared, both = bind_shared([substitute(offset, everything), substitute(element, everything)])
        return [*lets, *shared], both


@dataclass(frozen=True)
class ThreadSums:
    """A thread's rows x columns sums and their places in the tile. Runs of `width` columns of a thread are adjacent in the tile and in the registers
    `acc`, whose order is [row][column], or the one that `register` gives."""

    rows: int
    columns: int
    row: Callable[[Expr], Expr]
    column: Callable[[Expr], Expr]
    width: int = 4
    register: Callable[[Expr, Expr], Expr] | None = None

    def held(self, row: Expr, column: Expr, dtype: str, lanes: int, first: Expr | int = 0) -> Load:
        """`lanes` adjacent sums. `first`: the register of the first one of all."""
        place = row * self.columns + column if self.register is None else self.register(row, column)
        return Load("acc", (place + first,), dtype, lanes)

    def lanes(self, most: int) -> int:
        """The widest vector of columns, up to `most`."""
        return next(lanes for lanes in (4, 2, 1) if lanes <= min(most, self.width) and self.columns % lanes == 0)


def store_sums(result: BlockResult, sums: ThreadSums, atomic: bool = False, nearest: bool = False) -> list[Statement]:
    """Stores the thread's elements, in vectors along n if the output allows it; `atomic`: adds them atomically instead; `nearest`: none is
    computed behind a branch (`BlockResult.store_vector`)."""
    if atomic and nearest:
        raise ValueError("what is added atomically is not computed of the nearest row")
    lanes = sums.lanes(result.form.facts.store_vector)
    i, j = Var("i", sums.rows), Var("j", sums.columns // lanes)
    element, offset = result.parts(lanes)
    element = replace_loads(element, {result.form.step.name: sums.held(i, j * lanes, result.form.dtype, lanes)})

    if nearest:
        inside = block(result.store_vector(element, offset, sums.row(i), sums.column(j * lanes)))
        return [For(i, index_const(sums.rows), For(j, index_const(sums.columns // lanes), inside, "unroll"), "unroll")]

    def row(mapping: Mapping[Var, Expr]) -> list[Statement]:
        inner = block(result.store(element, offset, sums.column(j * lanes), mapping, atomic))
        return [For(j, index_const(sums.columns // lanes), inner, "unroll")]

    return [For(i, index_const(sums.rows), block(result.at_row(sums.row(i), row)), "unroll")]


def meeting(result: BlockResult, sums: ThreadSums, part: Expr, split: int) -> list[Statement]:
    """Stores the thread's sums in the block's part of `parts`, and synchronises the cluster, or without a split the block."""
    return [parts_of(result, split), put_sums(result, sums, part), cluster_barrier() if split > 1 else block_barrier()]


def parts_of(result: BlockResult, split: int) -> Allocate:
    """`parts` [part, m, n], of which each block of a cluster has one in its shared memory."""
    return Allocate(Buffer(PARTS, result.form.dtype, split * result.rows * result.pitch, "cluster" if split > 1 else "shared"))


def put_sums(result: BlockResult, sums: ThreadSums, part: Expr) -> Statement:
    """Stores the thread's sums in the block's part of `parts`."""
    lanes = sums.lanes(4)
    i, j = Var("i", sums.rows), Var("j", sums.columns // lanes)
    place = part * (result.rows * result.pitch) + sums.row(i) * result.pitch + sums.column(j * lanes)
    put = Store(PARTS, place, sums.held(i, j * lanes, result.form.dtype, lanes))
    return For(i, index_const(sums.rows), For(j, index_const(sums.columns // lanes), put, "unroll"), "unroll")


def store_shares(result: BlockResult, part: Expr, split: int, thread: Var, threads: int) -> list[Statement]:
    """Each block of the cluster (without a split the block) adds up and stores its share of the tile, in vectors along n if the output allows it."""
    size = result.rows * result.pitch
    lanes = next(lanes for lanes in (4, 2, 1) if lanes <= result.form.facts.store_vector and result.columns % lanes == 0)
    share = result.rows * result.columns // (split * lanes)
    element, offset = result.parts(lanes)
    turn = Var("turn", -(-share // threads))

    def vector(at: Var) -> list[Statement]:
        number = Var("number", result.rows * result.columns)
        row, column = number // result.columns, number % result.columns
        place = row * result.pitch + column
        total: Expr = Load(PARTS, (place,), result.form.dtype, lanes)
        for other in range(1, split):
            total = total + Load(PARTS, (place + other * size,), result.form.dtype, lanes)
        held = Var("sum", None, result.form.dtype, lanes)
        value = replace_loads(element, {result.form.step.name: held})

        def in_row(mapping: Mapping[Var, Expr]) -> list[Statement]:
            return result.store(value, offset, column, mapping)

        return [Let(number, (part * share + at) * lanes), Let(held, total), *result.at_row(row, in_row)]

    body = block(below(turn * threads + thread, share, "at", vector))
    # no block may exit while others read its sums
    return [For(turn, index_const(turn.extent or 1), body, "unroll"), *([cluster_barrier()] if split > 1 else [])]
