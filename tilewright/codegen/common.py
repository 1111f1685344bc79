"""Shared by the schemas: axes in storage order, vectors along the fastest axis, names, and the forms of a region's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from tilewright.codegen.access import VECTOR_TYPES, divide_linear, merge_axes, storage_order, vectorise
from tilewright.codegen.assemble import block
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.expr import (
    INDEX,
    TRUE,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    coefficient,
    index_const,
    linear,
    loads,
    logical_and,
    substitute,
    variables,
    walk,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import If, Let, Statement
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Unsuitable
from tilewright.ir.scalar import OPERATIONS


def below(where: Expr, limit: int, name: str, body: Callable[[Var], Sequence[Statement]]) -> list[Statement]:
    """The body at a position named `name`, guarded if the position can reach the limit."""
    position = Var(name, limit)
    inner = [Let(position, where), *body(position)]
    condition = where < limit
    return inner if condition == TRUE else [If(condition, block(inner))]


Below: TypeAlias = Callable[[Expr, int, str, Callable[[Var], Sequence[Statement]]], list[Statement]]
"""Emits a body at a position below a limit: `below`, or that of `Nearest`."""


@dataclass(frozen=True)
class Nearest:
    """Emits bodies without guards: a position at or beyond its limit is the last multiple of `lanes` below instead, and `inside` then does not hold.
    What a body reads can be read early, since no branch is ahead of it."""

    lanes: int = 1
    conditions: list[Expr] = field(default_factory=list)

    @property
    def inside(self) -> Expr:
        """Whether all positions of the bodies emitted so far are below their limits."""
        return logical_and(*self.conditions)

    def below(self, where: Expr, limit: int, name: str, body: Callable[[Var], Sequence[Statement]]) -> list[Statement]:
        position, condition = Var(name, limit), where < limit
        if condition != TRUE:
            self.conditions.append(condition)
            where = binary("min", where, index_const(limit - self.lanes))
        return [Let(position, where), *body(position)]


def named(axes: Mapping[Var, Expr]) -> tuple[list[Statement], dict[Var, Expr]]:
    """Names the values of axes; variables and constants need no names."""
    lets: list[Statement] = []
    mapping: dict[Var, Expr] = {}
    for axis, expr in axes.items():
        if not isinstance(expr, (Var, Const)):
            lets.append(Let(axis, expr))
        else:
            mapping[axis] = expr
    return lets, mapping


def is_aligned(offset: Expr, axis: Var, lanes: int) -> bool:
    """Whether a vector of `lanes` along `axis` starts at a multiple of `lanes` whenever `axis` is one."""
    form = linear(offset)
    return form.constant % lanes == 0 and all(scale % lanes == 0 for atom, scale in form.terms if atom != axis)


def vectors_fit(expr: Expr, axis: Var, lanes: int, stored: Mapping[str, Layout]) -> Expr | None:
    """The vector expression for `lanes` consecutive values of `axis`, starting at `axis`, if every access is adjacent and aligned or the same for all
    lanes; else None. Loads of names without a layout are vectors already."""
    if lanes == 1:
        return expr
    if axis.extent is None or axis.extent % lanes:
        return None
    for load in loads(expr):
        if load.buffer in stored and coefficient(load.index[0], axis) == 1 and not is_aligned(load.index[0], axis, lanes):
            return None
    return vectorise(expr, axis, lanes, lambda load: load.buffer not in stored)


def widest(expr: Expr, axis: Var, stored: Mapping[str, Layout], offset: Expr | None = None, most: int = 4) -> int:
    """The widest vector (`most`, or a smaller power of two of lanes) along `axis` for the expression, and for a store of it at `offset` if one is
    given."""
    for lanes in (8, 4, 2):
        if lanes > most:
            continue
        if offset is not None and (expr.dtype not in VECTOR_TYPES or coefficient(offset, axis) != 1 or not is_aligned(offset, axis, lanes)):
            continue
        if vectors_fit(expr, axis, lanes, stored) is not None:
            return lanes
    return 1


def combine(combiner: str, left: Sequence[Expr], right: Sequence[Expr]) -> tuple[Expr, ...]:
    """Components of the combination; scalars are broadcast if the other side is a vector."""
    lanes = max(e.lanes for e in (*left, *right))
    return COMBINERS[combiner].combine(tuple(as_lanes(e, lanes) for e in left), tuple(as_lanes(e, lanes) for e in right))


def identity(step: Step, lanes: int = 1) -> tuple[Expr, ...]:
    assert step.combiner is not None
    return tuple(as_lanes(e, lanes) for e in COMBINERS[step.combiner].identity(step.dtypes))


def expression_flops(*roots: Expr) -> float:
    """Arithmetic operations for one evaluation of the expressions (without index arithmetic)."""
    return float(sum(OPERATIONS[n.operation].flops for n in walk(*roots) if isinstance(n, Apply) and n.dtype != INDEX))


def bytes_touched(exprs: Iterable[Expr], axes: Sequence[Var], values: Mapping[str, Value]) -> int:
    """Upper bound on the distinct bytes of stored values that are read: for each load, at most the size of the value and at most one element per
    evaluation."""
    total = 0
    for load in {(node.buffer, node.index): node for node in loads(*exprs)}.values():
        value = values.get(load.buffer)
        if value is None:
            continue
        itemsize = value.bytes // max(value.elements, 1)
        points = (
            prod(axis.extent or 1 for axis in axes if axis in variables(*load.index))
            if not loads(*load.index)
            else prod(axis.extent or 1 for axis in axes)
        )
        total += min(value.bytes, points * itemsize)
    return total


@dataclass(frozen=True)
class Walk:
    """An iteration space in the order of iteration: merged axes, outermost first, and expressions over them."""

    axes: tuple[Var, ...]
    expressions: tuple[Expr, ...]

    @property
    def points(self) -> int:
        return prod(axis.extent or 0 for axis in self.axes)

    @property
    def fastest(self) -> Var | None:
        return self.axes[-1] if self.axes else None


def walk_in_order(axes: Sequence[Var], expressions: Sequence[Expr], by: Expr) -> Walk:
    """The space in the order of the flat offset `by`, with neighbouring axes merged where every access allows it."""
    merged, fresh = merge_axes(storage_order(axes, by), expressions)
    return Walk(merged, fresh)


def decode(position: Expr, axes: Sequence[Var], lanes: int = 1) -> dict[Var, Expr]:
    """The axes as functions of a flat position; with lanes, positions count vectors along the last axis."""
    if not axes:
        return {}
    extents = [axis.extent or 1 for axis in axes]
    extents[-1] //= lanes
    parts = divide_linear(position, extents)
    if lanes > 1:
        parts[-1] = parts[-1] * lanes
    return dict(zip(axes, parts, strict=True))


def main_offset(problem: Problem, exprs: Sequence[Expr]) -> Expr:
    """The offset of the largest value that the expressions read, which decides the order of iteration."""
    found = [load for load in loads(*exprs) if load.buffer in problem.layouts and not loads(*load.index)]
    if not found:
        return index_const(0)
    return max(found, key=lambda load: problem.values[load.buffer].bytes).index[0]


def reduce_and_final(region: Region, kind: str = "reduce") -> tuple[Step, Expr, tuple[Expr, ...]]:
    """The region's only reduction, the element that is stored (over loads of the reduction at its own axes), and the logical index of the store.

    Raises Unsuitable if the region is not one reduction with at most one map that reads it at its own axes."""
    step = region.steps[0]
    if step.kind != kind or len(region.steps) > 2:
        raise Unsuitable(f"region {region.name} is not one {kind} step and at most one map")
    output = region.outputs[0]
    if len(region.steps) == 1:
        component = step.names.index(output) if output in step.names else 0
        return step, Load(step.names[component], step.axes, step.dtypes[component]), step.index
    final = region.steps[1]
    if [axis.extent for axis in final.axes] != [axis.extent for axis in step.axes]:
        raise Unsuitable(f"the map of region {region.name} has other axes than its {kind}")
    mapping: dict[Var, Expr] = dict(zip(final.axes, step.axes, strict=True))
    element = substitute(final.bodies[0], mapping)
    for load in loads(element):
        if load.buffer in step.names and load.index != step.axes:
            raise Unsuitable(f"the map of region {region.name} reads its {kind} elsewhere than at its own axes")
    return step, element, tuple(substitute(position, mapping) for position in final.index)


def guarded_load(expr: Expr) -> tuple[Expr, Load] | None:
    """(condition, load) for a load or a load behind zero guards; None for any other expression. The condition of a plain load is true."""
    if isinstance(expr, Load):
        return (TRUE, expr) if expr.dtype in VECTOR_TYPES else None
    if not (isinstance(expr, Apply) and expr.operation == "select" and expr.args[0].lanes == 1):
        return None
    condition, value, otherwise = expr.args
    zero = otherwise.args[0] if isinstance(otherwise, Apply) and otherwise.operation == "broadcast" else otherwise
    inner = guarded_load(value)
    if inner is None or not isinstance(zero, Const) or zero.value != 0:
        return None
    return logical_and(condition, inner[0]), inner[1]


def extent_of(axes: Iterable[Var]) -> int:
    """Number of points of the space that the axes span."""
    return prod(axis.extent or 0 for axis in axes)
