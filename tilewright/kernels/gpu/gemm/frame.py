"""What surrounds the products of a block of an implicit GEMM: its place in the grid, its share of the reduction, and where its results go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.assemble import block
from tilewright.codegen.common import Below, below, decode, named
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, binary, coefficient, index_const
from tilewright.ir.kernel import For, Launch, Let, Statement, block_variable, thread_variable
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.gemm.block_result import BlockResult, RowBody
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.rates import LINE_BYTES


@dataclass(frozen=True)
class Turns:
    """The tiles that the blocks of a grid compute: block b those with the numbers b, b + grid, b + 2 grid ... `turn` and `tile`: how many the block
    has computed before, and the tile's number."""

    tiles: int
    launch: Launch

    @property
    def most(self) -> int:
        """Tiles of a block."""
        return -(-self.tiles // self.launch.grid[0])

    @property
    def turn(self) -> Expr:
        return Var("turn", self.most) if self.most > 1 else index_const(0)

    @property
    def tile(self) -> Var:
        return Var("tile", self.tiles) if self.most > 1 else block_variable(self.launch)

    def each(self, *body: Statement | Sequence[Statement]) -> Statement:
        """The body for each tile of the block."""
        if self.most == 1:
            return block(*body)
        number, grid = block_variable(self.launch), self.launch.grid[0]
        count = (self.tiles - 1 - number) // grid + 1 if self.tiles % grid else index_const(self.most)
        assert isinstance(self.turn, Var)
        return For(self.turn, count, block(Let(self.tile, number + self.turn * grid), *body))


def turns_of(tiles: int, threads: int, most: int = 0, along: tuple[tuple[int, int], ...] = ()) -> Turns:
    """The turns of a grid of up to `most` blocks, or of a block for each tile if that is 0. `along`: the tiles along dimensions (`Launch.tiles`)."""
    return Turns(tiles, Launch((min(tiles, most or tiles), 1, 1), (threads, 1, 1), () if most else along))


@dataclass(frozen=True)
class BlockFrame:
    """A block that computes the tile of `rows` (of m) by `columns` (of n) elements from `first` on, in `steps` of `steps_each` at most.

    `statements` come first in the body for a tile. `bind`: the values of the batch's axes and, if a form stores parts, of `part`; `part`: the tile's
    number among those that share the reduction; `among`: its number among adjacent ones with the same columns; `first_r` and `first_step`: the
    element and the step at which its share begins."""

    form: ProductForm
    rows: int
    columns: int
    turns: Turns
    thread: Var
    statements: tuple[Statement, ...]
    bind: Mapping[Var, Expr]
    part: Expr
    among: Expr
    first: tuple[Expr, Expr]
    first_r: Expr
    first_step: Expr
    steps: Expr
    steps_each: int

    @property
    def launch(self) -> Launch:
        return self.turns.launch

    @property
    def threads(self) -> int:
        return self.launch.block[0]

    @property
    def result(self) -> BlockResult:
        """Where the block's sums go."""

        def at_row(row: Expr, body: RowBody, within: Below = below) -> list[Statement]:
            def inside(m: Var) -> list[Statement]:
                lets, mapping = named(decode(m, self.form.m))
                return [*lets, *body(mapping)]

            return within(self.first[0] + row, self.form.facts.m, "m", inside)

        return BlockResult(self.form, self.bind, self.rows, self.columns, self.first[1], at_row)


def block_frame(
    form: ProductForm,
    tile: tuple[int, int, int],
    threads: int,
    split: int,
    cluster: bool,
    steps_in_all: int | None = None,
    along_m: int = 1,
    most: int = 0,
    equal: bool = True,
) -> BlockFrame:
    """The frame for tiles of (m, n, r) elements, whose reduction `split` blocks share. `cluster`: these blocks are adjacent, and, if `equal`, have
    as many steps, as they have as many barriers. `steps_in_all`: of the reduction, if they are not runs of r elements. Groups of `along_m` adjacent
    blocks have the same columns; the last of them may be beyond the end of m. `most`: blocks of the grid, each of which then computes several tiles
    in turns; 0 for one block for each. Entries of the batch follow one another, unless they are adjacent in memory, as groups of channels are: then
    their blocks are adjacent too, so that the sectors that they share are read from memory once.

    Raises:
        Unsuitable: if a cluster does not divide steps evenly that have to be equal.
    """
    facts = form.facts
    bm, bn, bk = tile
    steps_in_all = steps_in_all or -(-facts.r // bk)
    steps_each = -(-steps_in_all // split)
    if cluster and equal and steps_in_all % split:
        raise Unsuitable(f"a cluster of {split} does not divide {steps_in_all} steps evenly")
    counts = (split, facts.batch, -(-facts.m // (bm * along_m)), -(-facts.n // bn), along_m)
    turns = turns_of(prod(counts), threads, most, ((facts.batch, 1), (facts.m, bm * along_m)))
    names = ("part", "batch", "tile_m", "tile_n", "among")
    part, batch, tile_m, tile_n, among = (Var(name, count) for name, count in zip(names, counts, strict=True))
    outer = (tile_m, batch) if _in_one_line(form) else (batch, tile_m)
    order = (*outer, tile_n, part) if cluster else (part, *outer, tile_n, among)
    lets, where = named(decode(turns.tile, order))
    part_, batch_, tile_m_, tile_n_, among_ = (where.get(v, v) for v in (part, batch, tile_m, tile_n, among))
    if along_m > 1:
        tile_m_ = tile_m_ * along_m + among_
    batch_lets, batch_values = named(decode(batch_, form.batch))
    bind = {**batch_values, **({part: part_} if part in where else {})}
    statements: list[Statement] = [*lets, *batch_lets]
    steps: Expr = index_const(steps_each)
    if split > 1 and steps_in_all % steps_each:
        steps = Var("steps", steps_each + 1)
        statements.append(Let(steps, binary("min", steps_in_all - part_ * steps_each, index_const(steps_each))))
    first, first_step = (tile_m_ * bm, tile_n_ * bn), part_ * steps_each
    return BlockFrame(
        form,
        bm,
        bn,
        turns,
        thread_variable(turns.launch),
        tuple(statements),
        bind,
        part_,
        among_,
        first,
        first_step * bk,
        first_step,
        steps,
        steps_each,
    )


def _in_one_line(form: ProductForm) -> bool:
    """Whether adjacent entries of the batch are less than a line of memory apart in the first factor, and less than adjacent rows."""
    if not form.batch or not form.m or not isinstance(form.a, Load) or len(form.a.index) != 1:
        return False
    entry, row = (coefficient(form.a.index[0], axes[-1]) for axes in (form.batch, form.m))
    return entry is not None and row is not None and 0 < entry < row and entry * size_of(form.stored(form.a)) < LINE_BYTES
