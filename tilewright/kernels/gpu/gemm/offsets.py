"""Offsets along the reduction of an implicit GEMM, in a table that each block computes once.

The address of A[m, r] is often a sum of a part that depends on m and one that depends on r alone, such as those of pixel and of (row of the filter,
column, channel). The second takes divisions of r at each load, or a look-up in this table (DeepCuts, section 6.2: "memory-based index function").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.assemble import block
from tilewright.codegen.common import decode
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.expr import (
    INDEX,
    Apply,
    Expr,
    Linear,
    Load,
    Var,
    cast,
    compare,
    from_linear,
    index_const,
    linear,
    range_of,
    substitute,
    variables,
    walk,
)
from tilewright.ir.kernel import Allocate, Buffer, For, If, Statement, Store

ENTRY = "i32"
"""Type of the entries."""


def offsets_along(expr: Expr, r: Sequence[Var]) -> Expr | None:
    """The part of a load's flat offset that depends on the axes r alone; None if there is no such part that takes divisions, or the offset is no sum
    of it and of a part without r."""
    if not isinstance(expr, Load) or len(expr.index) != 1:
        return None
    along, others = _parts(expr, frozenset(r))
    if variables(others) & set(r):
        return None
    entry = substitute(along, decode(Var("position", prod(axis.extent or 1 for axis in r)), r)) if r else along
    divided = any(isinstance(node, Apply) and node.operation in ("floordiv", "mod") for node in walk(entry))
    return along if divided and range_of(along)[1] < 2**31 else None


def _parts(load: Load, r: frozenset[Var]) -> tuple[Expr, Expr]:
    """The terms of a flat offset that depend on r alone, and the others."""
    form = linear(load.index[0])
    own = tuple(term for term in form.terms if variables(term[0]) and variables(term[0]) <= r)
    rest = tuple(term for term in form.terms if term not in own)
    return from_linear(Linear(own, 0)), from_linear(Linear(rest, form.constant))


@dataclass(frozen=True)
class OffsetTable:
    """`entries` offsets in shared memory: of positions `first`, `first` + `step`, ... of the reduction over `r`. `along`: its part of the address."""

    r: tuple[Var, ...]
    along: Expr
    first: Expr
    step: int
    entries: int
    name: str = "offsets"

    def filled(self, thread: Var, threads: int) -> list[Statement]:
        """The statements that compute the table, with all threads of the block, and a barrier."""
        turn = Var("turn", -(-self.entries // threads))
        number = turn * threads + thread
        offset = cast(substitute(self.along, decode(self.first + number * self.step, self.r)), ENTRY)
        store: Statement = Store(self.name, number, offset)
        if self.entries % threads:
            store = If(compare("lt", number, index_const(self.entries)), store)
        return [Allocate(Buffer(self.name, ENTRY, self.entries, "shared")), For(turn, index_const(turn.extent or 1), block([store])), block_barrier()]

    def applied(self, load: Expr, position: Expr) -> Expr:
        """The load with the offset of a position, counted from `first`, in place of the part along r."""
        assert isinstance(load, Load)
        _, others = _parts(load, frozenset(self.r))
        return replace(load, index=(others + cast(Load(self.name, (position // self.step,), ENTRY), INDEX),))
