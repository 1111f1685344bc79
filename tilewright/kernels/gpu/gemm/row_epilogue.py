"""Epilogue of a block on whole rows of a product's result: softmax and normalisations over n in the contraction's kernel.

The accumulators are spilled to shared memory. Maps over the tile and reductions of its rows follow, with a barrier after each (several threads share
a row and combine their parts in a tree), and then the final map, whose stores run along n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.codegen.common import below, combine, decode, identity, named
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, Var, binary, compare, index_const, replace_loads, substitute, variables
from tilewright.ir.kernel import Allocate, Buffer, For, If, Let, Statement, Store

TILE = "row_tile"
FIRST = "row_first"
"""Name by which bodies load the first element of the row."""
UNROLLED_TURNS = 16


@dataclass(frozen=True)
class RowStage:
    """A reduction of each row (`step` has the combiner, `result` is its name), or a map that overwrites the tile. Bodies load the tile's element by
    the name of the sum, and earlier results by their names."""

    body: Expr
    step: Step
    result: str = ""

    @property
    def reduces(self) -> bool:
        return self.step.kind == "reduce"


@dataclass(frozen=True)
class RowBlock:
    """The block's tile of rows: `rows` x `columns` elements from row `start` of `m` on, over the axes `m_axes` and `n_axes`; sums and later results
    have type `dtype`."""

    sum_name: str
    dtype: str
    rows: int
    columns: int
    threads: int
    m: int
    start: Expr
    m_axes: tuple[Var, ...]
    n_axes: tuple[Var, ...]
    thread: Var

    @property
    def ld(self) -> int:
        """Leading dimension: one more than the columns, so that threads on neighbouring rows access different banks."""
        return self.columns + 1

    @property
    def threads_per_row(self) -> int:
        """Threads that share a row: a power of two."""
        return 1 << max(0, (self.threads // self.rows).bit_length() - 1)


def row_epilogue(
    at: RowBlock, stages: Sequence[RowStage], element: Expr, offset: Expr, output: str, spill: Callable[[Callable[[Expr, Expr], Expr]], Statement]
) -> list[Statement]:
    """Statements from the accumulators to the stored results. `spill` receives a function from (row, column) to the tile's offset, and returns the
    statement that stores the thread's accumulators there."""
    tile = Buffer(TILE, at.dtype, at.rows * at.ld, "shared")
    root: list[Statement] = [Allocate(tile), spill(lambda row, column: row * at.ld + column), block_barrier()]
    results: set[str] = set()
    for number, stage in enumerate(stages):
        if stage.reduces:
            root += _reduce(at, stage, number, results)
            results.add(stage.result)
        else:
            root += _everywhere(at, lambda row, where, mapping, stage=stage: _kept(at, stage, row, where, mapping, results))  # type: ignore[misc]
        root.append(block_barrier())
    per_row = not set(at.n_axes) & variables(offset)

    def store(row: Expr, where: Expr, mapping: Mapping[Var, Expr]) -> list[Statement]:
        value = _held(at, substitute(element, mapping), row, where, results)
        lets, (target, value) = bind_shared([substitute(offset, mapping), value])
        return [*lets, Store(output, target, value)]

    return [*root, *_everywhere(at, store, per_row)]


def _held(at: RowBlock, body: Expr, row: Expr, where: Expr, results: set[str]) -> Expr:
    """The body with the tile's element and the row's results loaded from shared memory."""
    held: dict[str, Expr] = {name: Load(name, (row,), at.dtype) for name in results}
    return replace_loads(body, {at.sum_name: Load(TILE, (where,), at.dtype), FIRST: Load(TILE, (row * at.ld,), at.dtype), **held})


def _kept(at: RowBlock, stage: RowStage, row: Expr, where: Expr, mapping: Mapping[Var, Expr], results: set[str]) -> list[Statement]:
    lets, (value,) = bind_shared([_held(at, substitute(stage.body, mapping), row, where, results)])
    return [*lets, Store(TILE, where, value)]


def _everywhere(at: RowBlock, body: Callable[[Expr, Expr, Mapping[Var, Expr]], list[Statement]], per_row: bool = False) -> list[Statement]:
    """The body for each existing element of the tile (or each row), with adjacent threads on adjacent columns."""
    width = 1 if per_row else at.columns
    points = at.rows * width
    turn = Var("turn", -(-points // at.threads))

    def element(position: Var) -> list[Statement]:
        row = Var("row", at.rows)
        column: Expr = position % width if width > 1 else index_const(0)

        def inside(m: Var) -> list[Statement]:
            lets, mapping = named({**decode(m, at.m_axes), **decode(column, at.n_axes)})
            return [*lets, *body(row, row * at.ld + column, mapping)]

        return [Let(row, position // width), *below(at.start + row, at.m, "m", inside)]

    return [_over(turn, below(turn * at.threads + at.thread, points, "position", element))]


def _over(turn: Var, body: Sequence[Statement]) -> Statement:
    """The loop, unrolled if it is short, so that the loads of several iterations are in flight together."""
    turns = turn.extent or 1
    return For(turn, index_const(turns), block(body), "unroll" if turns <= UNROLLED_TURNS else "serial")


def _reduce(at: RowBlock, stage: RowStage, number: int, results: set[str]) -> list[Statement]:
    """Reduces every row of the tile into the shared buffer `stage.result`. Rows past the end repeat the last one."""
    threads_per_row, combiner = at.threads_per_row, stage.step.combiner or ""
    together = at.threads // threads_per_row
    lane, group = Var("lane", threads_per_row), Var("group", together)
    part, row = Var("pass", -(-at.rows // together)), Var("row", at.rows)
    accumulator = f"row_sum{number}"
    held = Load(accumulator, (index_const(0),), at.dtype)
    (start,) = identity(stage.step)
    turn = Var("turn", -(-at.columns // threads_per_row))

    m = Var("m", at.m)
    m_lets, m_axes = named(decode(m, at.m_axes))

    def column(n: Var) -> list[Statement]:
        lets, mapping = named(decode(n, at.n_axes))
        body = _held(at, substitute(stage.body, {**m_axes, **mapping}), row, row * at.ld + n, results)
        (total,) = combine(combiner, (held,), (body,))
        shared, (total,) = bind_shared([total])
        return [*lets, *shared, Store(accumulator, index_const(0), total)]

    clamped = binary("min", at.start + row, index_const(at.m - 1))
    loop = _over(turn, below(turn * threads_per_row + lane, at.columns, "column", column))
    serial: list[Statement] = [
        Let(m, clamped), *m_lets,
        Allocate(Buffer(accumulator, at.dtype, 1, "register")),
        Store(accumulator, index_const(0), start),
        loop,
    ]  # fmt: skip
    root: list[Statement] = [Allocate(Buffer(stage.result, at.dtype, at.rows, "shared"))]
    root += [Let(lane, at.thread % threads_per_row), Let(group, at.thread // threads_per_row)]
    if threads_per_row == 1:
        one = block(below(part * together + group, at.rows, "row", lambda _: [*serial, Store(stage.result, row, held)]))
        return [block(root), For(part, index_const(part.extent or 1), one)]
    parts = f"row_part{number}"
    root += [Allocate(Buffer(parts, at.dtype, at.threads, "shared")), Let(row, binary("min", group, index_const(at.rows - 1))), *serial]
    root.append(Store(parts, at.thread, held))
    stride = threads_per_row // 2
    while stride:
        (total,) = combine(combiner, (Load(parts, (at.thread,), at.dtype),), (Load(parts, (at.thread + stride,), at.dtype),))
        fresh = Var("fresh", None, at.dtype)
        root += [block_barrier(), If(compare("lt", lane, index_const(stride)), block([Let(fresh, total), Store(parts, at.thread, fresh)]))]
        stride //= 2
    first = compare("eq", lane, index_const(0))
    keep = below(group, at.rows, "own_row", lambda own: [Store(stage.result, own, Load(parts, (at.thread,), at.dtype))])
    return [*root, If(first, block(keep))]
