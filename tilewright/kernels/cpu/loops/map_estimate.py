"""Predicted times of maps on CPUs, counted from the loops and index expressions that `map.lower_map` emits.

An innermost loop over `extent` elements is n vectors, where the compiler makes vectors of it, and otherwise `extent` elements. Of each:

| access along the innermost axis | instructions |
|---|---|
| constant | none: it is loaded before the loop |
| adjacent, ascending | one load or store |
| adjacent, descending | and one that moves lanes |
| every second to fourth element | as many loads as the stride, and as many that move lanes |
| further apart, or at positions that vectors compute | a load or a store and one that moves lanes, for each element |

An index with a quotient or a remainder that is no shift, or one that is data, has no vectors: the loop works element by element, and each quotient
takes DIVIDED instructions. The time is that of the resource that is needed longest: load, store, move and arithmetic ports, or issue.

Worked example, a rotation of rows of 52 elements, x[(i + 47) mod 52]: 52 remainders of 5 instructions on two ports are 130 cycles a row. A copy of
such a row has 3 vectors of 16 and one of 4, and waits for memory alone.
"""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.computation import arithmetic
from tilewright.ir.dtypes import size_of
from tilewright.ir.estimate import Estimate
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, coefficient, linear, loads, range_of, variables, walk
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.loops.estimate import MOVES, loop_estimate, with_lines
from tilewright.kernels.cpu.loops.lines import HELD, Access, access, distinct_lines, lines_loaded
from tilewright.kernels.cpu.loops.map import Elements, square_of

DIVIDED = 5
"""Instructions of a quotient by a constant: a product of 128 bits and shifts; of a remainder also a product and a difference."""
STARTED = 10
"""Instructions that start and end a loop and compute the addresses of a row, besides one for each access."""
GROUPED = 4
"""Largest stride, in elements, for which compilers load whole vectors and move lanes."""

SCALAR = frozenset({"pow", "fmod", "atan2", "checked"})
"""Operations of which compilers make no vectors: functions of the C library, and checks of positions."""


def map_estimate(elements: Elements, lanes: int, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of a map: its instructions, and the lines that caches load for each of its accesses."""
    workers = min(threads, machine.processors)
    base = loop_estimate(counts, machine, threads)
    cycles = _cycles(elements, lanes, machine)
    arithmetic_seconds = np.full(len(counts), cycles / (machine.clock_hz * workers))
    return with_lines(base, {"arithmetic": arithmetic_seconds}, [_lines(elements, lanes, machine)] * len(counts), counts, machine, workers)


def _accesses(elements: Elements) -> list[tuple[str, Expr]]:
    """The buffers and flat offsets that are loaded, each once, and those that are stored."""
    loaded = dict.fromkeys((load.buffer, load.index[0]) for load in loads(elements.body) if len(load.index) == 1)
    return [*loaded, (elements.problem.region.outputs[0], elements.offset)]


def _cycles(elements: Elements, lanes: int, machine: Machine) -> float:
    axes, count = elements.axes, prod(axis.extent or 1 for axis in elements.axes)
    if not axes or not count:
        return 0.0
    square = square_of(elements, lanes)
    operations = arithmetic(elements.body)
    if square is not None:
        strided = sum(coefficient(offset, square.other) != 0 for _, offset in _accesses(elements)[:-1])
        each = square.width
        rounds = each.bit_length() - 1
        resources = _slowest(machine, strided * each, each, MOVES * each * rounds / 2, operations * each, STARTED)
        return prod(axis.extent or 1 for axis in square.outer) * prod(part.extent or 1 for part in square.parts.values()) * resources
    inner = axes[-1]
    extent = inner.extent or 1
    rows, width = count // extent, _width(elements, inner, lanes)
    vectors = _pieces(extent, width)
    *loads_made, (_, place) = _accesses(elements)
    costs = [_access_cost(coefficient(offset, inner), width) for _, offset in loads_made if coefficient(offset, inner) != 0]
    stored, moves_stored = _access_cost(coefficient(place, inner), width)
    loaded, moved = sum(cost for cost, _ in costs), moves_stored + sum(moves for _, moves in costs)
    indices = _index_operations(elements, inner)
    start = STARTED + len(loads_made) + 1
    return rows * (vectors * _slowest(machine, loaded, stored, moved, operations + indices, 1) + start / machine.issue_width)


def _slowest(machine: Machine, loaded: float, stored: float, moved: float, operations: float, others: float) -> float:
    """Cycles of instructions: those of the port that is busy longest, or of issue."""
    issued = (loaded + stored + moved + operations + others) / machine.issue_width
    return max(loaded / machine.load_ports, stored / machine.store_ports, moved, operations / machine.fma_ports, issued)


def _access_cost(along: int | None, width: int) -> tuple[float, float]:
    """Loads (or stores) and moves of lanes for a vector of `width` elements."""
    if width == 1 or along == 1:
        return 1.0, 0.0
    if along == -1:
        return 1.0, 1.0
    if along is not None and abs(along) <= GROUPED:
        return float(abs(along)), float(abs(along))
    return float(width), float(width)


def _pieces(extent: int, width: int) -> int:
    """Iterations of a loop over vectors, with shorter ones for the rest and single elements for what fills none of four."""
    found, size = extent // width, width // 2
    rest = extent % width
    while size >= 4:
        found, rest, size = found + rest // size, rest % size, size // 2
    return found + rest


def _width(elements: Elements, inner: Var, lanes: int) -> int:
    """Lanes of the vectors that the compiler makes of the innermost loop; 1 if it makes none."""
    nodes = list(walk(elements.body, elements.offset))
    for node in nodes:
        if inner not in variables(node):
            continue
        if isinstance(node, Apply) and (node.operation in SCALAR or node.operation in ("floordiv", "mod") and not _is_shift(node)):
            return 1
        if isinstance(node, Load) and any(isinstance(part, Load) for part in walk(*node.index)):
            return 1
    widest = max((size_of(node.dtype) for node in nodes if isinstance(node, (Load, Apply)) and node.dtype not in (INDEX, "bool")), default=4)
    return max(1, lanes * 4 // max(widest, 4))


def _is_shift(node: Apply) -> bool:
    """Whether a quotient or remainder of indices is a shift or a mask."""
    divisor = node.args[1]
    if node.dtype != INDEX or not isinstance(divisor, Const):
        return False
    return int(divisor.value) & (int(divisor.value) - 1) == 0 and range_of(node.args[0])[0] >= 0


def _index_operations(elements: Elements, inner: Var) -> float:
    """Instructions that compute indices which depend on the innermost axis otherwise than linearly, and conditions on it."""
    total = 0.0
    for node in walk(elements.body, elements.offset):
        if not isinstance(node, Apply) or inner not in variables(node):
            continue
        if node.operation in ("floordiv", "mod"):
            total += 1 if _is_shift(node) else DIVIDED
        elif node.operation in ("min", "max", "checked", "select") and node.dtype == INDEX or node.dtype == "bool" and node.args[0].dtype == INDEX:
            total += 1
    return total


def _nest(elements: Elements, offset: Expr, lanes: int) -> Access:
    """An access in the loops as they are lowered, innermost first."""
    square = square_of(elements, lanes)
    if square is None:
        return access(offset, list(reversed(elements.axes)))
    nest: list[tuple[float, int]] = []
    pair = access(offset, [square.other, square.inner])
    nest += [(stride, square.width) for stride, _ in pair]
    own = [axis for axis in (square.inner, square.other)]
    nest += [(stride * square.width, -(-(axis.extent or 1) // square.width)) for (stride, _), axis in zip(reversed(pair), own, strict=True)]
    return [*nest, *access(offset, list(reversed([*elements.axes[: elements.depth], *square.outer])))]


def _lines(elements: Elements, lanes: int, machine: Machine) -> list[float]:
    """Lines that each level of cache loads from the next. Loads of a value that differ by a constant share their lines if the level holds them."""
    levels = [0.0] * len(machine.caches)
    seen: set[tuple[str, tuple[tuple[Expr, int], ...]]] = set()
    for name, offset in _accesses(elements):
        nest, line = _nest(elements, offset, lanes), machine.caches[0].line_bytes // size_of(elements.problem.values[name].dtype)
        form = name, linear(offset).terms
        inner = distinct_lines(nest[:1], line)
        for number, cache in enumerate(machine.caches):
            held = cache.bytes / cache.line_bytes
            if form not in seen or inner > held * HELD:
                levels[number] += lines_loaded(nest, line, held)
        seen.add(form)
    return levels
