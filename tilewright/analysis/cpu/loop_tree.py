"""The loop tree of a CPU kernel: loops with trip counts, and at the leaves the memory accesses with their affine offsets.

    Node = Loop(variable, trips, body) | Sequence(parts) | Leaf(loops, accesses)

The accesses of straight-line code, including unrolled loops, are one leaf. A loop whose body depends on its variable through guards or extents (a
partial last tile; a panel that is not full) is divided where they change, so that everything below has fixed trip counts and no guards. Some things
are approximate, always with more accesses rather than fewer: both branches of guards that depend on anything else are taken, and both sides of a
`select`; an extent that depends on several variables has its largest value; an offset that depends on loaded values may be anywhere in its buffer.
Other offsets that are not affine (an index divided into parts, or clamped to bounds) are evaluated.
Buffers in registers are left out: the compiler keeps them there, or in a small part of the stack that stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import TypeAlias

import numpy as np

from tilewright.analysis.cpu.footprints import Strided, strided
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Linear, Load, Var, from_linear, index_const, linear, loads, range_of, substitute, variables
from tilewright.ir.intrinsic import Operand
from tilewright.ir.kernel import SERIAL_WORK, TRIPS, Block, For, If, Invoke, Kernel, Let, Place, Statement, Store, With, statements

MOST_PARTS = 8
"""Maximum number of parts into which a loop is divided."""
LONGEST_DIVIDED = 1 << 14
MOST_PLACES = 1 << 14
"""Maximum number of iterations for which non-affine offsets are evaluated."""


@dataclass(frozen=True)
class Access:
    """`lanes` adjacent elements at start + sum(stride * loop) + rest; `strides` is (loop number, stride) for each loop. `rest` is the non-affine
    part, a function of loops (`loop_variable`), or None; it changes with the loops `rest_loops`, by multiples of `rest_step`. All in elements."""

    buffer: str
    start: int
    strides: tuple[tuple[int, int], ...]
    lanes: int = 1
    writes: bool = False
    rest: Expr | None = None
    rest_loops: tuple[int, ...] = ()
    rest_step: int = 1

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(loop number, elements) for each loop that moves the access: a step of the loop moves it by a multiple of these elements."""
        return (*self.strides, *((number, self.rest_step) for number in self.rest_loops))


def loop_variable(number: int, count: int) -> Var:
    """The variable that stands for a loop of the tree in `Access.rest`."""
    return Var(f"loop {number}", count)


class _Node:
    """Properties of every node: the loops in it, by number with (0, trip count), and the accesses below it, by buffer."""

    @cached_property
    def ranges(self) -> dict[int, tuple[int, int]]:
        raise NotImplementedError

    @cached_property
    def accesses(self) -> dict[str, tuple[Access, ...]]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Leaf(_Node):
    """Accesses in no loop of the tree except unrolled ones (number, trip count)."""

    touches: tuple[Access, ...]
    loops: tuple[tuple[int, int], ...] = ()

    @cached_property
    def ranges(self) -> dict[int, tuple[int, int]]:
        return {number: (0, count) for number, count in self.loops}

    @cached_property
    def accesses(self) -> dict[str, tuple[Access, ...]]:
        return _by_buffer(self.touches)


@dataclass(frozen=True, eq=False)
class Loop(_Node):
    """A loop: `number` is unique in its tree; `variable` is its name in the kernel."""

    variable: str
    number: int
    count: int
    body: Node

    @cached_property
    def ranges(self) -> dict[int, tuple[int, int]]:
        return {self.number: (0, self.count), **self.body.ranges}

    @cached_property
    def accesses(self) -> dict[str, tuple[Access, ...]]:
        return self.body.accesses

    def moves(self, buffer: str) -> bool:
        """Whether an access to the buffer depends on the loop's variable."""
        return any(number == self.number for access in self.accesses[buffer] for number, _ in access.steps)


@dataclass(frozen=True, eq=False)
class Sequence(_Node):
    """Nodes that run one after another."""

    parts: tuple[Node, ...]

    @cached_property
    def ranges(self) -> dict[int, tuple[int, int]]:
        return {number: entry for part in self.parts for number, entry in part.ranges.items()}

    @cached_property
    def accesses(self) -> dict[str, tuple[Access, ...]]:
        return _by_buffer([access for part in self.parts for found in part.accesses.values() for access in found])


Node: TypeAlias = Leaf | Loop | Sequence


def _by_buffer(accesses: list[Access] | tuple[Access, ...]) -> dict[str, tuple[Access, ...]]:
    result: dict[str, dict[Access, None]] = {}
    for access in accesses:
        result.setdefault(access.buffer, {})[access] = None
    return {name: tuple(found) for name, found in result.items()}


@dataclass(frozen=True, eq=False)
class LoopTree:
    """A kernel's tree (None if it accesses no memory), and each buffer's number of elements and bytes per element."""

    root: Node | None
    sizes: Mapping[str, int]
    element_bytes: Mapping[str, int]


def touched(access: Access, ranges: Mapping[int, tuple[int, int]], size: int, line: int) -> Strided:
    """What the access touches while loops run through `ranges` (number to first value and count) and all others stay at 0. If its positions are
    unknown, one line of `line` elements for each execution, from the start of the buffer and at most the whole buffer."""
    inside = [(stride, *ranges[number]) for number, stride in access.strides if number in ranges]
    start = access.start + sum(stride * begin for stride, begin, _ in inside)
    terms = [(1, access.lanes), *((stride, count) for stride, _, count in inside)]
    if access.rest is None:
        return strided(start, terms)
    columns = tuple((number, *ranges.get(number, (0, 1))) for number in access.rest_loops)
    if (places := _places(access.rest, columns)) is not None:
        return strided(start, terms, places)
    times = prod(count for _, _, count in (*columns, *inside))
    return Strided(0, ((1, max(min(size, times * line), 1)),), exact=False)


@lru_cache(maxsize=1 << 14)
def _places(rest: Expr, columns: tuple[tuple[int, int, int], ...]) -> tuple[int, ...] | None:
    """The values of an offset while loops (number, first value, count) run; None if they are unknown or too many."""
    if prod(count for _, _, count in columns) > MOST_PLACES:
        return None
    grid = np.ix_(*(np.arange(begin, begin + count) for _, begin, count in columns))
    values = _evaluated(rest, {f"loop {number}": column for (number, _, _), column in zip(columns, grid, strict=True)})
    return None if values is None else tuple(np.unique(values).tolist())


def loop_tree(kernel: Kernel, threads: int = 1) -> LoopTree:
    """The tree of a CPU kernel as the first of `threads` threads runs it. Parallel loops, outermost first, are divided evenly: this thread runs its
    share of the iterations, rounded up. Scalar parameters count as 0."""
    builder = _Builder(frozenset(buffer.name for buffer in kernel.parameters), threads)
    start: dict[Var, Expr] = {scalar: index_const(0) for scalar in kernel.scalars}
    root = builder.visit(kernel.body, start)
    sizes = {buffer.name: buffer.size for buffer in kernel.parameters}
    return LoopTree(root, sizes, {buffer.name: size_of(buffer.dtype) for buffer in kernel.parameters})


class _Builder:
    """Numbers the loops of one tree, and assigns threads to parallel loops."""

    def __init__(self, buffers: frozenset[str], threads: int) -> None:
        self.buffers = buffers
        self.threads = threads
        self.loops = 0

    def visit(self, statement: Statement, known: Mapping[Var, Expr]) -> Node | None:
        """The statement's tree, with known variables replaced; None if it accesses no memory."""
        if isinstance(statement, Block):
            parts: list[Node] = []
            inside = dict(known)
            for child in statement.statements:
                if (part := self.visit(child, inside)) is not None:
                    parts.append(part)
                if isinstance(child, Let) and child.value.dtype == INDEX:  # with the loads on which it depends, if any
                    inside[child.variable] = substitute(child.value, inside)
            return _joined(parts)
        if isinstance(statement, For):
            return self.loop(statement, known)
        if isinstance(statement, With):
            return self.visit(statement.body, known)
        if isinstance(statement, Invoke):
            found = (self.operand(operand, place, known) for operand, place in statement.places if place.buffer in self.buffers)
            return _joined([leaf for pair in found for leaf in pair])
        if isinstance(statement, If):
            condition = substitute(statement.condition, known)
            sides = [statement.then, statement.otherwise]
            if isinstance(condition, Const):
                sides = sides[:1] if condition.value else sides[1:]
            return _joined([part for side in sides if side is not None and (part := self.visit(side, known)) is not None])
        touches = tuple(self.touches(statement, known))
        return Leaf(touches) if touches else None

    def loop(self, statement: For, known: Mapping[Var, Expr]) -> Node | None:
        extent = int(range_of(substitute(statement.extent, known))[1])
        parts: list[Node] = []
        threads = self.threads
        few = statement.work and int(range_of(substitute(TRIPS * statement.work, known))[1]) <= SERIAL_WORK
        if statement.kind == "parallel" and extent > 1 and not few:
            shares = min(threads, extent)
            extent, self.threads = -(-extent // shares), threads // shares
        for begin, end in _divided(statement, extent, known):
            if end - begin == 1:
                part = self.visit(statement.body, {**known, statement.variable: index_const(begin)})
            else:
                number = self.loops
                self.loops += 1
                variable = loop_variable(number, end - begin)
                body = self.visit(statement.body, {**known, statement.variable: variable + begin})
                part = None if body is None else _repeated(statement, number, end - begin, body)
            if part is not None:
                parts.append(part)
        self.threads = threads
        return _joined(parts)

    def operand(self, operand: Operand, place: Place, known: Mapping[Var, Expr]) -> Iterator[Leaf]:
        """The memory accesses of an instruction's operand: one per row, each for reading and for writing. Prefetches are left out, as the instruction
        does not wait for them."""
        offset = substitute(place.offset, known)
        rows: tuple[tuple[int, int], ...] = ()
        if operand.rows > 1:
            rows = ((self.loops, operand.rows),)
            offset = offset + loop_variable(*rows[0]) * operand.row_stride
            self.loops += 1
        for writes in [False] * operand.reads + [True] * operand.writes:
            yield Leaf((_access(place.buffer, offset, operand.row, writes, {}),), rows)

    def touches(self, statement: Statement, known: Mapping[Var, Expr]) -> Iterator[Access]:
        # comments and allocations access nothing
        if isinstance(statement, (Let, Store)):
            for load in loads(statement.value, *([statement.offset] if isinstance(statement, Store) else [])):
                if load.buffer in self.buffers:
                    yield _access(load.buffer, load.index[0], load.lanes, False, known)
        if isinstance(statement, Store) and statement.buffer in self.buffers:
            yield _access(statement.buffer, statement.offset, statement.value.lanes, True, known)


def _access(buffer: str, offset: Expr, lanes: int, writes: bool, known: Mapping[Var, Expr]) -> Access:
    form = linear(substitute(offset, known))
    affine = {_number(atom): stride for atom, stride in form.terms if isinstance(atom, Var)}
    others = tuple((atom, stride) for atom, stride in form.terms if not isinstance(atom, Var))
    if not others:
        return Access(buffer, form.constant, tuple(sorted(affine.items())), lanes, writes)
    moving = sorted({_number(variable) for atom, _ in others for variable in variables(atom)})
    # a variable of both parts belongs to the rest, so that the places of the rest count it once
    shared = [(atom, stride) for atom, stride in form.terms if isinstance(atom, Var) and _number(atom) in moving]
    rest = from_linear(Linear((*others, *shared), 0))
    strides = tuple(sorted((number, stride) for number, stride in affine.items() if number not in moving))
    return Access(buffer, form.constant, strides, lanes, writes, rest, tuple(moving), gcd(*(stride for _, stride in (*others, *shared))))


def _number(variable: Var) -> int:
    return int(variable.name.removeprefix("loop "))


def _joined(parts: list[Node]) -> Node | None:
    """The parts in order, with neighbouring leaves merged."""
    result: list[Node] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Sequence) else (part,):
            if isinstance(piece, Leaf) and result and isinstance(result[-1], Leaf):
                result[-1] = Leaf((*result[-1].touches, *piece.touches), (*result[-1].loops, *piece.loops))
            else:
                result.append(piece)
    return None if not result else result[0] if len(result) == 1 else Sequence(tuple(result))


def _repeated(statement: For, number: int, count: int, body: Node) -> Node:
    if statement.kind == "unroll" and isinstance(body, Leaf):
        return Leaf(body.touches, (*body.loops, (number, count)))
    return Loop(statement.variable.name, number, count, body)


def _divided(statement: For, extent: int, known: Mapping[Var, Expr]) -> list[tuple[int, int]]:
    """Ranges of the loop's variable in which the guards and extents that depend on it alone are constant."""
    if not 1 < extent <= LONGEST_DIVIDED:
        return [(0, extent)] if extent > 0 else []
    deciding = [s.condition if isinstance(s, If) else s.extent for s in statements(statement.body) if isinstance(s, (If, For))]
    values = {statement.variable.name: np.arange(extent)}
    changes = np.zeros(extent, dtype=bool)
    for expr in deciding:
        expr = substitute(expr, known)
        if statement.variable in variables(expr) and (column := _evaluated(expr, values)) is not None:
            changes[1:] |= column[1:] != column[:-1]
    starts = [0, *np.flatnonzero(changes).tolist()]
    if len(starts) > MOST_PARTS:
        return [(0, extent)]
    return list(zip(starts, [*starts[1:], extent], strict=True))


_OPERATIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod, "min": np.minimum, "max": np.maximum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "select": np.where,
}  # fmt: skip


def _evaluated(expr: Expr, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The expression for arrays of values of its variables, by name; None if it contains other variables, loads, or other operations."""
    if isinstance(expr, Const):
        return np.asarray(expr.value)
    if isinstance(expr, Var):
        return values.get(expr.name)
    if isinstance(expr, Load) or not isinstance(expr, Apply) or expr.operation not in _OPERATIONS:
        return None
    args = [_evaluated(arg, values) for arg in expr.args]
    return None if any(arg is None for arg in args) else np.asarray(_OPERATIONS[expr.operation](*args))  # type: ignore[operator]
