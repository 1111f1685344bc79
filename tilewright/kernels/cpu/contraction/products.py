"""The steps of a register tile's sums: products of an element of A with vectors of B, or of a pair of bfloat16 with vectors of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tilewright.codegen.access import merge_axes
from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics import pairs
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import ZERO, Apply, Expr, Load, Var, coefficient, index_const, substitute
from tilewright.ir.kernel import Allocate, Buffer, For, Let, Place, Statement, Store
from tilewright.kernels.cpu.common import common_origin
from tilewright.kernels.cpu.contraction.nest import Nest
from tilewright.kernels.cpu.contraction.pairs import PairedNest
from tilewright.kernels.cpu.contraction.second_factor import SecondFactor
from tilewright.kernels.cpu.contraction.space import CpuContractionSchedule
from tilewright.kernels.cpu.contraction.tile_stores import Pixels, over_pixels

SHORT = 8
"""Iterations of the innermost loop below which merging it with the next loop measured faster (gcc 12, 7 x 7 filters)."""


class Products(Protocol):
    """The sums of a tile, `acc[row][column][vector]`, as loops over steps."""

    @property
    def axes(self) -> Sequence[Var]:
        """The loops, outermost first."""

    @property
    def step(self) -> Expr:
        """The number of the step."""

    @property
    def steps(self) -> int: ...

    @property
    def element_bytes(self) -> int:
        """Bytes of B for a step and an output channel."""

    def loaded(self) -> list[Statement]:
        """Loads the step's vectors of B."""

    def added(self, pixels: Pixels) -> list[Statement]:
        """Adds the step's products of these pixels."""


@dataclass(frozen=True)
class VectorProducts:
    """acc[row][column][v] += A[row, column] * B[v], for the channels of a panel."""

    nest: Nest
    schedule: CpuContractionSchedule
    panel: Var
    b: SecondFactor

    @cached_property
    def _merged(self) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
        """The axes of the loops; and, as functions of them, A's element, the offset of B's vectors and the step number. A short innermost loop is
        merged with the next if both factors are contiguous over the two, as with a large filter over an image of three channels."""
        start = substitute(self.b.offset, {self.nest.n: self.panel * self.schedule.panel})
        step: Expr = ZERO
        for axis in self.nest.found.r:
            step = step * (axis.extent or 1) + axis

        def short(outer: Var, inner: Var) -> bool:
            return (inner.extent or 0) < SHORT and (outer.extent or 0) * (inner.extent or 0) >= 2 * SHORT

        return merge_axes(self.nest.found.r, [self.nest.a, start, step], short)

    @property
    def axes(self) -> Sequence[Var]:
        return self._merged[0]

    @property
    def step(self) -> Expr:
        return self._merged[1][2]

    @property
    def steps(self) -> int:
        return self.nest.found.size_r

    @property
    def element_bytes(self) -> int:
        return size_of(self.b.dtype)

    def loaded(self) -> list[Statement]:
        lanes, vectors, dtype = self.schedule.lanes, self.schedule.vectors, self.nest.dtype
        v, base = Var("v", vectors), self._merged[1][1]
        load = Store("b", v * lanes, Load(self.b.buffer, (base + v * lanes,), dtype, lanes))
        return [Allocate(Buffer("b", dtype, vectors * lanes, "register", lanes)), For(v, index_const(vectors), load, "unroll")]

    def added(self, pixels: Pixels) -> list[Statement]:
        lanes, vectors, dtype = self.schedule.lanes, self.schedule.vectors, self.nest.dtype
        i, j, v = Var("i", pixels.rows), Var("j", pixels.columns), Var("v", vectors)
        pixel, at = Var("a", None, dtype), _sums(pixels, i, j, v, self.schedule)
        product = Apply("mul", (pixel, Load("b", (v * lanes,), dtype, lanes)), dtype, lanes)
        update = Store("acc", at, Apply("add", (Load("acc", (at,), dtype, lanes), product), dtype, lanes))
        start, value = common_origin(self.nest.at(self._merged[1][0], pixels.row + i, pixels.column + j), (i, j))
        body: Statement = block(Let(pixel, value), For(v, index_const(vectors), update, "unroll"))
        return [*start, over_pixels(body, i, j)]


@dataclass(frozen=True)
class PairProducts:
    """acc[row][column][v] += the sum over two steps of A[row, column] * B[v]."""

    form: PairedNest
    schedule: CpuContractionSchedule
    panel: Var
    b: SecondFactor

    @cached_property
    def _pair(self) -> Var:
        return Var("pair", self.form.depth // 2)

    @property
    def axes(self) -> Sequence[Var]:
        return (*self.form.reduced, self._pair)

    @property
    def step(self) -> Expr:
        step: Expr = ZERO
        for axis in self.axes:
            step = step * (axis.extent or 1) + axis
        return step

    @property
    def steps(self) -> int:
        return self.form.steps

    @property
    def element_bytes(self) -> int:
        return 2 * size_of(self.b.dtype)

    def loaded(self) -> list[Statement]:
        return []  # by the products themselves; compilers load a vector once for all pixels

    def added(self, pixels: Pixels) -> list[Statement]:
        form, nest, lanes, vectors = self.form, self.form.nest, self.schedule.lanes, self.schedule.vectors
        i, j, v = Var("i", pixels.rows), Var("j", pixels.columns), Var("v", vectors)
        place: Expr = self._pair * 2
        for axis in form.reduced:
            place = place + axis * (coefficient(form.at, axis) or 0)
        first = {axis: ZERO for axis in form.ordered}
        at = nest.at(substitute(form.at, first), pixels.row + i, pixels.column + j) + place
        start, a = common_origin(Load(form.source, (at,), nest.dtype), (i, j))
        assert isinstance(a, Load)
        base = substitute(self.b.offset, {**first, nest.n: self.panel * self.schedule.panel}) + self.step * (2 * self.schedule.panel)
        right = Place(self.b.buffer, base + v * (2 * lanes))
        product = pairs.multiply(Place("acc", _sums(pixels, i, j, v, self.schedule)), Place(form.source, a.index[0]), right)
        return [*start, over_pixels(For(v, index_const(vectors), product, "unroll"), i, j)]


def _sums(pixels: Pixels, i: Var, j: Var, v: Var, schedule: CpuContractionSchedule) -> Expr:
    """Where the tile's sums of a pixel and a vector of channels are."""
    return (i * pixels.columns + j) * schedule.panel + v * schedule.lanes
