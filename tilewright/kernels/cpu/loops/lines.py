"""Lines of memory that loop nests touch, by the level of cache from which they come.

An access in a nest of loops is a list of (stride, extent), innermost loop first, in elements. A level of cache loads its lines once for every
iteration of the loops outside of the largest inner nest whose lines it holds.

Worked example, lines of 16 elements: 64 planes of 28 x 28 are read at one pixel after the other, [(784, 64), (1, 784)]. The inner loop touches
64 lines, both loops 3,136. A level that holds only the former loads 64 x 784 / 16 lines, since a line serves 16 successive pixels; one that does not
hold 64 lines either loads 64 x 784.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

from tilewright.codegen.access import storage_order
from tilewright.ir.expr import Expr, Var, coefficient

Access: TypeAlias = Sequence[tuple[int, int]]
"""(stride, extent) of each loop around an access, innermost first."""
HELD = 0.5
"""Share of a level that holds the lines of one access; the rest has other values."""


def access(offset: Expr, axes: Sequence[Var]) -> Access:
    """The access at a flat offset inside loops over the axes, innermost first. An axis on which it depends otherwise than linearly, such as a
    remainder, is taken to move it by one element."""
    strides = [coefficient(offset, axis) for axis in axes]
    return [(1 if stride is None else abs(stride), axis.extent or 1) for stride, axis in zip(strides, axes, strict=True)]


def innermost_first(axes: Sequence[Var], offset: Expr) -> list[Var]:
    """The axes in the order in which lowerings nest their loops."""
    return list(reversed(storage_order(axes, offset)))


def distinct_lines(nest: Access, line: int) -> float:
    """Expected distinct lines of `line` elements that the loops touch."""
    run, count, moved = 1, 1, [stride for stride, extent in nest if stride and extent > 1]
    for stride, extent in sorted((stride, extent) for stride, extent in nest if stride and extent > 1):
        if stride <= max(run, line - 1):
            run += (extent - 1) * stride
            moved.remove(stride)
        else:
            count *= extent
    aligned = run % line == 0 and all(stride % line == 0 for stride in moved)
    return count * (run / line if aligned else (run + line - 1) / line)


def lines_loaded(nest: Access, line: int, lines: float) -> float:
    """Lines that a level which holds `lines` of them loads from the level beyond."""
    inner = 0
    while inner < len(nest) and distinct_lines(nest[: inner + 1], line) <= lines * HELD:
        inner += 1
    if inner == len(nest):
        return distinct_lines(nest, line)
    # the first loop of which the level does not hold all lines goes through them once, each as long as its neighbours share it
    outside, (stride, extent) = nest[inner + 1 :], nest[inner]
    shared = min(line / stride, extent) if 0 < stride < line else 1.0
    again = distinct_lines(nest[:inner], line)
    return max(again * extent / shared, min(distinct_lines(nest[: inner + 1], line), again * extent)) * prod(trips for _, trips in outside)
