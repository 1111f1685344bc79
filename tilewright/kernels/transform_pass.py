"""What the transforms of convolutions by blocks have in common (`winograd_transform`, `fourier_transform`): passes that load, compute and store.

A transform of one tile is one or more passes, each of independent pieces. The pieces of a pass may be iterations of a loop or threads; a pass reads
what all pieces of the one before it have put into a scratch array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tilewright.ir.expr import Apply, Expr, Load, Var, index_const, walk
from tilewright.ir.kernel import Let, Statement, Store

Matrix: TypeAlias = tuple[tuple[float, ...], ...]
LoadElement: TypeAlias = Callable[[Expr, Expr], Expr]
"""Element (row, column) of a tile of the input."""
LoadPoint: TypeAlias = Callable[[Expr], Expr]
"""The sum of a point."""
StorePoint: TypeAlias = Callable[[Expr, Expr], Statement]
"""Stores (point, value)."""
StoreRows: TypeAlias = Callable[[Expr, Sequence[Sequence[Expr]]], Sequence[Statement]]
"""Stores adjacent rows of a tile of the output: (the first one, values by row and column)."""


@dataclass(frozen=True)
class Values:
    """The type of what a transform computes, and access to its scratch array: `get` and `put` take the number of a value."""

    dtype: str
    lanes: int
    get: Callable[[Expr], Expr]
    put: Callable[[Expr, Expr], Statement]

    def variable(self, name: str) -> Var:
        return Var(name, None, self.dtype, self.lanes)


@dataclass(frozen=True)
class Pass:
    """`pieces` independent pieces; `body` makes the statements of one of them."""

    pieces: int
    body: Callable[[Expr], Sequence[Statement]]


@dataclass(frozen=True)
class Work:
    """What the passes of a transform do for one tile: arithmetic operations, the instructions for these where a product and the sum that it is added
    to are one, and accesses to the scratch array."""

    arithmetic: int
    fused: int
    scratch: int


def work_of(make: Callable[[Values], Sequence[Pass]], dtype: str) -> Work:
    """Counts the passes that `make` makes; loads of a tile's elements or points and stores of results do not count."""
    arithmetic = fused = scratch = 0
    values = Values(dtype, 1, lambda place: Load(SCRATCH, (place,), dtype), lambda place, value: Store(SCRATCH, place, value))
    for each in make(values):
        for statement in each.body(index_const(0)):
            assert isinstance(statement, (Let, Store)), statement
            operations = [node for node in walk(statement.value) if isinstance(node, Apply)]
            arithmetic += each.pieces * len(operations)
            fused += each.pieces * (len(operations) - sum(map(_adds_a_product, operations)))
            put = isinstance(statement, Store) and statement.buffer == SCRATCH
            got = isinstance(statement.value, Load) and statement.value.buffer == SCRATCH
            scratch += each.pieces * (put + got)
    return Work(arithmetic, fused, scratch)


def _adds_a_product(node: Apply) -> bool:
    return node.operation in ("add", "sub") and any(isinstance(term, Apply) and term.operation == "mul" for term in node.args)


SCRATCH = "scratch"
"""Name of the scratch array."""
