"""GPU kernels whose extent along the outermost dimension is an argument of the call, so that models of many sizes share them.

Of a schedule's kernel for one extent n and that for K n, which only differ in constants, one kernel is made: constants that differ become
a * TRIPS + b, where (n, c(n)) and (K n, c(K n)) are on that line. For n trips it is the first kernel, operation by operation, so that no schema has
to state which of its guards depend on the extent; sizes whose kernels are on the same lines have the same code, and are compiled once. K n is as
large as a buffer of RANGE_BYTES, so that what the code of K n leaves out, such as comparisons that always hold, holds for all sizes below.

Trips are of as few rows as all constants allow: of single rows of a matrix product, so that products of B sequences of S tokens have one kernel for
each B S, and of whole images where what is read grows by images only. The grid follows from the trips (`GridOfTrips`), where the launch states the
tiles that it consists of (`Launch.tiles`).

Where the code of both sizes differs otherwise, the kernel keeps its extents: a single tile, loops that are unrolled, divisions by an extent (the
blocks of causal attention), tensor maps, blocks that compute several tiles in turns, and recurrences, whose blocks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm
from typing import TypeVar

from tilewright.codegen.assemble import block, named_by_code
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, index_const
from tilewright.ir.kernel import (
    RANGE_BYTES,
    TRIPS,
    Allocate,
    AtomicAdd,
    Block,
    Comment,
    For,
    If,
    Invoke,
    Kernel,
    Let,
    Place,
    Statement,
    Store,
    With,
)
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Unsuitable
from tilewright.kernels.images import scaled

T = TypeVar("T")


class _Differs(Exception):
    """Two kernels differ in more than constants on lines."""


def with_trips(problem: Problem, lowered: Lowered, lower: Callable[[Problem], Lowered]) -> Lowered:
    """The lowering of a problem whose kernels take their trips as an argument, where that is possible. `lower`: of the same schedule."""
    tiles = [kernel.launch.tiles for kernel in lowered.kernels if kernel.launch is not None]
    if not any(tiles) or any(call.trips for call in lowered.calls):
        return lowered
    largest = max(buffer.size * size_of(buffer.dtype) for kernel in lowered.kernels for buffer in kernel.parameters)
    alone = lcm(*(each for pairs in tiles for _, each in pairs))
    factor = next((factor for factor in range(2 * RANGE_BYTES // max(largest, 1), 1, -1) if gcd(factor, alone) == 1), 0)
    if factor * largest < RANGE_BYTES:
        return lowered
    try:
        other = lower(scaled(problem, factor))
    except (Unsuitable, OverflowError):
        return lowered
    if len(other.kernels) != len(lowered.kernels):
        return lowered
    changed = {kernel.name: of_both(kernel, large) for kernel, large in zip(lowered.kernels, other.kernels, strict=True)}
    calls = tuple(Call.of(changed[call.kernel], call.arguments) for call in lowered.calls)
    return replace(lowered, kernels=tuple(changed[kernel.name] for kernel in lowered.kernels), calls=calls)


def of_both(kernel: Kernel, large: Kernel) -> Kernel:
    """The kernel of any number of trips, given that of some rows and that of more; the first one, if there is none."""
    try:
        return _of_both(kernel, large)
    except _Differs:
        return kernel


def _of_both(kernel: Kernel, large: Kernel) -> Kernel:
    rows, more, each = _rows(kernel, large)
    same = (kernel.scalars, kernel.cluster, kernel.maps, kernel.trips) == (large.scalars, large.cluster, (), 0)
    if not same or len(kernel.parameters) != len(large.parameters) or rows <= each or (rows % each == 0) != (more % each == 0):
        raise _Differs
    lines = _Lines(rows, more)
    for one, other in zip(kernel.parameters, large.parameters, strict=True):
        if replace(one, size=other.size) != other:
            raise _Differs
        lines.slope(one.size, other.size)
    lines.statement(kernel.body, large.body)  # finds the lines
    if rows % lines.rows or more % lines.rows:
        raise _Differs
    trips, lines.trips = rows // lines.rows, True
    body = block(Let(TRIPS, index_const(trips)), lines.statement(kernel.body, large.body))
    pairs = zip(kernel.parameters, large.parameters, strict=True)
    parameters = tuple(replace(one, growth=int(lines.slope(one.size, other.size) * lines.rows)) for one, other in pairs)
    assert kernel.launch is not None
    if any(buffer.growth < 0 or buffer.size < buffer.growth * (trips - 1) for buffer in parameters):
        raise _Differs
    launch = replace(kernel.launch, tiles=((rows, each),))
    return named_by_code(replace(kernel, body=body, parameters=parameters, trips=trips, launch=launch), kernel.name.rpartition("_")[0])


def _rows(kernel: Kernel, large: Kernel) -> tuple[int, int, int]:
    """The rows of both kernels, and those of a tile: along the only dimension whose extents differ. Tiles along others are of equal numbers."""
    one, other = kernel.launch, large.launch
    if one is None or other is None or len(one.tiles) != len(other.tiles) or (one.block, one.grid[1:]) != (other.block, other.grid[1:]):
        raise _Differs
    found = [(a, b) for a, b in zip(one.tiles, other.tiles, strict=True) if a != b]
    if len(found) != 1 or found[0][0][1] != found[0][1][1]:
        raise _Differs
    ((rows, each), (more, _)) = found[0]
    if one.grid[0] * -(-more // each) != other.grid[0] * -(-rows // each):
        raise _Differs
    return rows, more, each


class _Lines:
    """Kernels of `small` and of `large` rows, compared. At first `rows`, those of a trip, grow as the constants that differ need; with `trips` these
    become expressions of TRIPS. Shared operands stay shared."""

    def __init__(self, small: int, large: int) -> None:
        self.small, self.large = small, large
        self.rows = 1
        self.trips = False
        self._done: dict[tuple[int, int, bool], Expr] = {}

    def slope(self, a: int, b: int) -> Fraction:
        """What each row adds to a number that is `a` for the small kernel, and `b` for the large one."""
        slope = Fraction(b - a, self.large - self.small)
        self.rows = lcm(self.rows, slope.denominator)
        if (a - slope * self.small).denominator != 1:
            raise _Differs
        return slope

    def line(self, a: int, b: int) -> Expr:
        slope = self.slope(a, b)
        factor, base = int(slope * self.rows), int(a - slope * self.small)
        result: Expr = TRIPS if factor == 1 else Apply("mul", (TRIPS, index_const(factor)), INDEX)
        return result if not base else Apply("add" if base > 0 else "sub", (result, index_const(abs(base))), INDEX)

    def expr(self, a: Expr, b: Expr) -> Expr:
        key = (id(a), id(b), self.trips)
        if key not in self._done:
            self._done[key] = self._expr(a, b)
        return self._done[key]

    def _expr(self, a: Expr, b: Expr) -> Expr:
        if isinstance(a, Const) and isinstance(b, Const):
            if a == b and a.lanes == b.lanes:
                return a
            if a.dtype != INDEX or b.dtype != INDEX or a.lanes != 1:
                raise _Differs
            return self.line(int(a.value), int(b.value))
        if isinstance(a, Var) and isinstance(b, Var):
            return self._same(a, (a.name, a.dtype, a.lanes), (b.name, b.dtype, b.lanes))
        if isinstance(a, Load) and isinstance(b, Load):
            self._same(a, (a.buffer, a.dtype, a.lanes, len(a.index)), (b.buffer, b.dtype, b.lanes, len(b.index)))
            index = tuple(self.expr(*pair) for pair in zip(a.index, b.index, strict=True))
            return a if all(map(_is, index, a.index)) else replace(a, index=index)
        if isinstance(a, Apply) and isinstance(b, Apply):
            self._same(a, (a.operation, a.dtype, a.lanes, len(a.args)), (b.operation, b.dtype, b.lanes, len(b.args)))
            fixed = {"floordiv": 1, "mod": 1, "checked": 1}.get(a.operation, len(a.args))
            if a.args[fixed:] != b.args[fixed:]:
                raise _Differs
            args = (*(self.expr(*pair) for pair in zip(a.args[:fixed], b.args, strict=False)), *a.args[fixed:])
            return a if all(map(_is, args, a.args)) else replace(a, args=args)
        raise _Differs

    def statements(self, a: Sequence[Statement], b: Sequence[Statement]) -> tuple[Statement, ...]:
        a, b = ([part for part in parts if not isinstance(part, Comment)] for parts in (a, b))
        self._same(None, len(a), len(b))
        return tuple(self.statement(*pair) for pair in zip(a, b, strict=True))

    def statement(self, a: Statement, b: Statement) -> Statement:
        if isinstance(a, Block) and isinstance(b, Block):
            return Block(self.statements(a.statements, b.statements))
        if isinstance(a, Let) and isinstance(b, Let):
            self.expr(a.variable, b.variable)
            return Let(a.variable, self.expr(a.value, b.value))
        if isinstance(a, (Store, AtomicAdd)) and isinstance(b, (Store, AtomicAdd)):
            self._same(None, (type(a), a.buffer), (type(b), b.buffer))
            return replace(a, offset=self.expr(a.offset, b.offset), value=self.expr(a.value, b.value))
        if isinstance(a, Allocate) and isinstance(b, Allocate):
            return self._same(a, a.buffer, b.buffer)
        if isinstance(a, For) and isinstance(b, For):
            self.expr(a.variable, b.variable)
            self._same(None, (a.kind, a.reductions, a.work), (b.kind, b.reductions, b.work))
            if a.kind != "serial":
                self._same(None, a.extent, b.extent)
            return replace(a, extent=self.expr(a.extent, b.extent), body=self.statement(a.body, b.body))
        if isinstance(a, If) and isinstance(b, If):
            self._same(None, a.otherwise is None, b.otherwise is None)
            otherwise = None if a.otherwise is None or b.otherwise is None else self.statement(a.otherwise, b.otherwise)
            return If(self.expr(a.condition, b.condition), self.statement(a.then, b.then), otherwise)
        if isinstance(a, With) and isinstance(b, With):
            self._same(None, (a.context, a.buffers), (b.context, b.buffers))
            return replace(a, body=self.statement(a.body, b.body))
        if isinstance(a, Invoke) and isinstance(b, Invoke):
            self._same(None, a.intrinsic, b.intrinsic)
            return Invoke(a.intrinsic, tuple(self._operand(*pair) for pair in zip(a.operands, b.operands, strict=True)))
        raise _Differs

    def _operand(self, a: Place | Expr, b: Place | Expr) -> Place | Expr:
        if isinstance(a, Place) and isinstance(b, Place):
            self._same(None, a.buffer, b.buffer)
            return Place(a.buffer, self.expr(a.offset, b.offset))
        if isinstance(a, Place) or isinstance(b, Place):
            raise _Differs
        return self.expr(a, b)

    @staticmethod
    def _same(result: T, a: object, b: object) -> T:
        if a != b:
            raise _Differs
        return result


def _is(a: object, b: object) -> bool:
    return a is b
