"""Adjacent rows in the lanes of vectors: what row reductions and scans share where corresponding elements of such rows are adjacent in memory.

    for blocks of adjacent rows:                             (in parallel; the last may overlap the one before)
        for the elements of the rows:
            for vectors of the block:                        (unrolled)
                acc[vector] = combine(acc[vector], body)

Accumulators stay in registers, and every line of memory that the block touches is used whole if the block is as long as a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.access import VECTOR_TYPES, bind_shared, vectorise
from tilewright.codegen.assemble import block
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.expr import (
    ZERO,
    Expr,
    Load,
    Var,
    as_lanes,
    coefficient,
    compare,
    index_const,
    loads,
    replace_loads,
    select,
    substitute,
)
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Let, Statement, Store, substitute_in
from tilewright.kernels.cpu.common import SHORTEST, combined, loops, swept, vector_width

ELEMENTS = 64
"""Neighbouring rows in a block whose values have no vectors here; the compiler makes vectors of the loop over them."""


def held(name: str, dtype: str) -> Load:
    """What stands in bodies for the result of a reduction over the row that is computed."""
    return Load(name, (), dtype)


def adjacent_axis(bodies: Sequence[Expr], axes: Sequence[Var]) -> Var | None:
    """The first axis of at least SHORTEST rows along which every load is contiguous or constant and at least one is contiguous; or None."""
    for axis in axes:
        strides = [coefficient(load.index[0], axis) for load in loads(*bodies) if len(load.index) == 1]
        if (axis.extent or 0) >= SHORTEST and any(stride == 1 for stride in strides) and all(stride in (0, 1) for stride in strides):
            return axis
    return None


@dataclass(frozen=True)
class Across:
    """Emits statements for a block of rows along `lane`: `vectors` vectors of `width`, or `vectors` elements if the width is 1. `names`: the
    accumulators, which hold a value of each row, with their types."""

    lane: Var
    width: int
    vectors: int
    names: Mapping[str, str]

    @classmethod
    def of(cls, values: Sequence[Expr], stores: Sequence[Expr], lane: Var, lanes: int, vectors: int, names: Mapping[str, str]) -> Across:
        """A block of at most `vectors` vectors, if the values can be vectors and all stores are contiguous; otherwise of elements."""
        width, extent = vector_width(lane, lanes), lane.extent or 1
        wide = [vectorise(value, lane, width, lambda load: load.buffer in names) if value.dtype in VECTOR_TYPES else None for value in values]
        if width == 1 or None in wide or any(coefficient(where, lane) != 1 for where in stores):
            return cls(lane, 1, min(ELEMENTS, extent), names)
        return cls(lane, width, min(vectors, extent // width), names)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.width * self.vectors

    def array(self, name: str, dtype: str, entries: int = 1) -> Allocate:
        """`entries` values of each row of the block."""
        return Allocate(Buffer(name, dtype, entries * self.rows, "register", self.width))

    def entry(self, name: str, dtype: str, vector: Expr, number: Expr = ZERO) -> Load:
        """An entry of an array, for the rows of a vector."""
        return Load(name, (number * self.rows + vector * self.width,), dtype, self.width)

    def value(self, expr: Expr, vector: Expr) -> Expr:
        """The expression for the rows of a vector."""
        wide: Expr | None = expr
        if self.width > 1:
            wide = vectorise(expr, self.lane, self.width, lambda load: load.buffer in self.names)
        assert wide is not None
        wide = substitute(as_lanes(wide, self.width), {self.lane: self.lane + vector * self.width})
        return replace_loads(wide, {name: self.entry(name, dtype, vector) for name, dtype in self.names.items()})

    def over(self, use: Callable[[Expr], Sequence[Statement]]) -> Statement:
        """What `use` makes for each vector of the block."""
        if self.width > 1 and self.vectors == 1:
            return block(use(ZERO))
        vector = Var("row_vector" if self.width > 1 else "row", self.vectors)
        return For(vector, index_const(self.vectors), block(use(vector)), "unroll" if self.width > 1 else "simd")

    def start(self, step: Step, names: Sequence[str], dtypes: Sequence[str]) -> list[Statement]:
        """Allocates the accumulators of a step and sets them to the identity of its combiner."""
        identities = COMBINERS[step.combiner or ""].identity(tuple(dtypes))
        result: list[Statement] = [self.array(name, dtype) for name, dtype in zip(names, dtypes, strict=True)]
        pairs = list(zip(names, identities, strict=True))
        return [*result, self.over(lambda v: [Store(name, v * self.width, as_lanes(identity, self.width)) for name, identity in pairs])]

    def combine(self, step: Step, names: Sequence[str], bodies: Sequence[Expr], vector: Expr) -> list[Statement]:
        """Combines the accumulators of a vector with bodies that `value` has made."""
        before = tuple(self.entry(name, body.dtype, vector) for name, body in zip(names, bodies, strict=True))
        return combined(names, COMBINERS[step.combiner or ""].combine(before, tuple(bodies)), vector * self.width)

    def store(self, target: str, where: Expr, value: Expr, vector: Expr) -> list[Statement]:
        """target[where] = value for a vector, with a value that `value` has made."""
        lets, (value, where) = bind_shared([value, substitute(where, {self.lane: self.lane + vector * self.width})])
        return [*lets, Store(target, where, value)]

    def blocks(self, outer: Sequence[Var], body: Block, work: int) -> Statement:
        """Loops over all blocks, in parallel. One thread computes those that overlap."""
        extent, rows = self.lane.extent or 1, self.rows
        number = Var("lane_block", extent // rows)
        start: Expr = number * rows
        if extent % rows:
            rest = index_const(extent - (extent // rows - 1) * rows)
            length = select(compare("lt", number, index_const(extent // rows - 1)), index_const(rows), rest) if number.extent != 1 else rest
            inside = swept(replace(self.lane, extent=extent), rows, body, length, start)
        else:
            first = Var(self.lane.name, None)
            inside = block(Let(first, start), substitute_in(body, {self.lane: first}))
        kept = [axis for axis in (*outer, number) if axis.extent != 1]
        return loops(kept, inside if number.extent != 1 else substitute_in(inside, {number: ZERO}), True, work=work)
