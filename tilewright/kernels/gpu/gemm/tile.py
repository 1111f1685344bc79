"""One factor's tile of a tiled contraction: how threads share its loads, and its layout in shared memory.

Through registers a tile is stored as [k][m] (or [k][n]). Asynchronous copies bring it directly to shared memory, so it keeps the direction of vectors
in global memory: [m][k] if they are along r. The rows of adjacent threads are then adjacent, and reading four k at a time from eight rows accesses
every bank once. TRANSPOSED copies single elements instead, to [k][m].

Rows of factors along r are padded by four elements, or SWIZZLED: group g of four elements is at g XOR a number that depends on the row, so that the
same eight rows, or the stores of a warp that transposes, access every bank once without the padding.

Tiles of tensor cores are MATRICES: always in the direction of memory and in its type, in rows without padding whose groups of 16 bytes are swizzled,
so that eight adjacent rows of one group, which `ldmatrix` reads at once, access every bank once; of float32 in rows along m or n, which it cannot
transpose, four adjacent rows of two groups do so, which the lanes of a warp read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TypeAlias

from tilewright.codegen.assemble import block
from tilewright.codegen.common import decode, guarded_load, named, vectors_fit
from tilewright.codegen.intrinsics.async_copy import copy
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    TRUE,
    Const,
    Expr,
    Linear,
    Load,
    Var,
    as_lanes,
    binary,
    compare,
    from_linear,
    index_const,
    linear,
    loads,
    range_of,
    rewrite,
    select,
    substitute,
    variables,
)
from tilewright.ir.kernel import If, Let, Statement, Store
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.offsets import OffsetTable
from tilewright.kernels.gpu.gemm.space import MATRICES, PADDED, PADDING, SWIZZLED, TRANSPOSED, Operand

GROUP = 4
"""Elements that stay adjacent in a swizzled row: those of the widest vector."""
BANKS = 32
GROUPS = 8
"""Groups of 16 bytes that the banks hold at once."""


@dataclass(frozen=True)
class Tile:
    """A tile with `size` elements along its `own` axes (those other than r) and `depth` along r; `ld` is the row pitch in elements. `stored`: the
    type of the elements in memory."""

    name: str
    expr: Expr
    own: tuple[Var, ...]
    operand: Operand
    size: int
    depth: int
    threads: int
    copies: bool
    stored: str
    layout: int = PADDED

    @property
    def dtype(self) -> str:
        """The type of the elements, as multiplied."""
        return self.expr.dtype

    @property
    def held(self) -> str:
        """The type of the elements in shared memory: as multiplied, or as they are in memory if they are copied or read as matrices."""
        return self.stored if self.copies or self.layout == MATRICES else self.dtype

    @property
    def fetched(self) -> str:
        """The type of the elements in registers on their way to shared memory: as they are in memory, so that nothing waits for a load to convert it
        before it is stored, unless the factor is computed."""
        return self.stored if guarded_load(self.expr) is not None else self.dtype

    @property
    def along_r(self) -> bool:
        return self.operand.along == "r"

    @property
    def deep(self) -> bool:
        """Whether the tile is [m][k]: a row holds all of k."""
        return self.along_r and (self.copies and self.layout != TRANSPOSED or self.layout == MATRICES)

    @property
    def ld(self) -> int:
        return (self.depth if self.deep else self.size) + (PADDING if self.along_r and self.layout in (PADDED, TRANSPOSED) else 0)

    @property
    def elements(self) -> int:
        """Elements of one buffer."""
        return (self.size if self.deep else self.depth) * self.ld

    def at(self, own: Expr, k: Expr) -> Expr:
        """The offset within a buffer of the element at `own` (along m or n) and `k`, or of the vector that begins there."""
        row, column = (own, k) if self.deep else (k, own)
        if self.layout == MATRICES:
            column = swizzled(row, column, self.ld, self.stored, self.deep)
        elif self.along_r and self.layout == SWIZZLED:
            # rows that the banks hold at once keep their places; a warp's stores of a transposed tile are already in that many different groups
            apart = max(1, BANKS // self.depth)
            turned = row // apart if self.deep else row // GROUP * apart
            column = _exclusive_or(column // GROUP, turned % (self.ld // GROUP)) * GROUP + column % GROUP
        return row * self.ld + column

    def spread(self, index: Expr | int, thread: Expr, per_thread: int) -> Expr:
        """The position along m (or n) of a thread's element `index`. Vectors of up to four elements (single elements in a deep tile) of adjacent
        threads are adjacent; a thread's next vector follows after those of all threads."""
        width = 1 if self.deep else min(4, per_thread)
        groups = per_thread // width
        index = index_const(index) if isinstance(index, int) else index
        return index // width * (self.size // groups) + thread * width + index % width

    @property
    def vector_width(self) -> int:
        return self.operand.vector_width

    @property
    def run(self) -> int:
        """Threads that load the vectors of one line."""
        return (self.depth if self.along_r else self.size) // self.vector_width

    @property
    def reach(self) -> int:
        """Lines (along the other direction) that all threads load in one pass."""
        return self.threads // self.run

    @property
    def passes(self) -> int:
        return -(-(self.size if self.along_r else self.depth) // self.reach)

    @property
    def lines(self) -> int:
        return self.size if self.along_r else self.depth

    def own_and_k(self, run: Expr, line: Expr, number: int, lane: int = 0) -> tuple[Expr, Expr]:
        """The place in the tile of an element of the vector that a thread loads in pass `number`."""
        across, along = line + number * self.reach, run * self.vector_width + lane
        return (across, along) if self.along_r else (along, across)

    @property
    def stage(self) -> str:
        return f"{self.name}_next"

    @property
    def tile(self) -> str:
        return f"{self.name}_tile"


def swizzled(row: Expr, column: Expr, pitch: int, dtype: str, deep: bool) -> Expr:
    """The column of a matrix in shared memory at which its element of this row and column is: groups of 16 bytes change places. `deep`: rows are of
    the factor's own axis, and hold what a product sums over."""
    group = WIDEST_BYTES // size_of(dtype)
    together = gcd(pitch // group, GROUPS)  # as rows are `together` groups apart, so many groups of a row can change places
    read = 1 if deep or size_of(dtype) == 2 else 2
    turned = row // (GROUPS // together) % (together // read) * read
    return _exclusive_or(column // group, turned) * group + column % group


def _exclusive_or(a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const) and isinstance(b, Const):
        return index_const(int(a.value) ^ int(b.value))
    return a if b == index_const(0) else b if a == index_const(0) else binary("bitwise_xor", a, b)


Loader: TypeAlias = Callable[[Expr, Expr], list[Statement]]
"""Maps a step and the offset of a buffer to the statements that fetch the elements to registers, or start to copy them to that buffer."""


def loader(
    tile: Tile, start: Expr, form: ProductForm, thread: Var, first_r: Expr, bk: int, table: OffsetTable | None = None
) -> tuple[list[Statement], Loader]:
    """Statements before the loop, and the loads of each step; with a table, offsets along r come from it."""
    fastest = form.r[-1] if tile.along_r else tile.own[-1] if tile.own else None
    expr = vectors_fit(tile.expr, fastest, tile.vector_width, form.layouts) if tile.vector_width > 1 and fastest else tile.expr
    assert expr is not None
    if not tile.copies and tile.fetched != tile.dtype:
        expr = _one_guard(expr, tile.vector_width, tile.fetched)
    run, line = Var(f"{tile.name}_run", tile.run), Var(f"{tile.name}_line", tile.reach)
    setup: list[Statement] = [Let(run, thread % tile.run), Let(line, thread // tile.run)]
    extent = prod(axis.extent or 1 for axis in tile.own)
    own_lanes = 1 if tile.along_r else tile.vector_width
    total_r = prod(axis.extent or 1 for axis in form.r)
    # this thread's positions along m (or n), and whether they are inside: one per pass if vectors are along r, otherwise a single one
    rows: list[Expr] = []
    insides: list[Expr] = []
    for number in range(tile.passes if tile.along_r else 1):
        position = start + (line + number * tile.reach if tile.along_r else run * tile.vector_width)
        last = extent - own_lanes
        insides.append(compare("le", position, index_const(last)))
        if range_of(position)[1] > last:
            position = binary("min", position, index_const(last))
        row = Var(f"{tile.name}_row{number}", extent)
        setup.append(Let(row, position))
        row_lets, mapping = named(_suffixed(decode(row, tile.own), f"_{tile.name}{number}", setup))
        setup += row_lets
        hoisted, based = _hoist(substitute(expr, mapping), set(form.r), f"{tile.name}{number}")
        setup += hoisted
        rows.append(based)

    def load(step: Expr, buffer: Expr) -> list[Statement]:
        statements: list[Statement] = []
        for number in range(tile.passes):
            along = run * tile.vector_width if tile.along_r else line + number * tile.reach
            position = first_r + step * bk + along
            row = rows[number if tile.along_r else 0]
            value = table.applied(row, step * bk + along) if table is not None else substitute(row, decode(position, form.r))
            value = as_lanes(value, tile.vector_width)
            zeros = as_lanes(Const(0.0, value.dtype), tile.vector_width)
            if total_r % bk:
                value = select(compare("lt", position, index_const(total_r)), value, zeros)
            one: Statement = Store(tile.stage, index_const(number * tile.vector_width), value)
            if tile.copies:
                place = buffer + tile.at(*tile.own_and_k(run, line, number))
                # copies of equal addresses by several threads are not merged, unlike loads: zeros are written instead, without a read
                value = select(insides[number if tile.along_r else 0], value, zeros)
                # past the end of the reduction the value is a constant, and there is nothing to copy
                one = copy(tile.tile, place, _one_guard(value, tile.vector_width), tile.stored) if loads(value) else Store(tile.tile, place, value)
            statements += in_tile(tile, line, number, one)
        return statements

    return setup, load


def _one_guard(value: Expr, lanes: int, dtype: str = "") -> Expr:
    """Merges the guards of a load into a single one. `dtype`: the type of the result, if it is to be that in memory."""
    found = guarded_load(value)
    assert found is not None, f"the schedule asks for copies of what is not loaded alone: {value}"
    condition, load = found
    load = replace(load, dtype=dtype or load.dtype)
    return load if condition == TRUE else select(condition, load, as_lanes(Const(0.0, load.dtype), lanes))


def _suffixed(axes: Mapping[Var, Expr], suffix: str, setup: list[Statement]) -> dict[Var, Expr]:
    """Positions of axes, with a variable for each that is neither a variable nor a constant."""
    result: dict[Var, Expr] = {}
    for axis, expr in axes.items():
        if isinstance(expr, (Var, Const)):
            result[axis] = expr
        else:
            variable = Var(axis.name + suffix, axis.extent)
            setup.append(Let(variable, expr))
            result[axis] = variable
    return result


def in_tile(tile: Tile, line: Var, number: int, statement: Statement) -> list[Statement]:
    """The statement, guarded for threads whose line is inside the tile."""
    condition = compare("lt", line + number * tile.reach, index_const(tile.lines))
    return [statement] if condition == TRUE else [If(condition, block([statement]))]


def _hoist(expr: Expr, varying: set[Var], name: str) -> tuple[list[Statement], Expr]:
    """Hoists the part of every offset that depends on no varying variable: it becomes a variable computed before the loop."""
    lets: list[Statement] = []
    known: dict[Expr, Var] = {}

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or len(node.index) != 1:
            return node
        form = linear(node.index[0])
        fixed = tuple(term for term in form.terms if not variables(term[0]) & varying)
        if len(fixed) + (1 if form.constant else 0) < 2 and not (fixed and fixed[0][1] != 1):
            return node
        base = from_linear(Linear(fixed, form.constant))
        if base not in known:
            low, high = range_of(base)
            bounded = low >= 0 and high != float("inf")
            known[base] = Var(f"{name}_base{len(known)}", int(high) + 1 if bounded else None)
            lets.append(Let(known[base], base))
        rest = from_linear(Linear(tuple(term for term in form.terms if term not in fixed), 0))
        return replace(node, index=(rest + known[base],))

    return lets, rewrite(expr, visit)
