"""The indices of a graph that are checked when it runs: those that its constants and integer ranges do not prove valid.

An operator's definition checks every data-dependent index (`ir.expr.checked`). An index whose range is within the dimension (argmax over the
dimension's extent, a byte into a table of 256 rows) needs no check. Every other index gets a site of its own, so that a fault can name the operator.
Constant indices have one too, although they are also checked at compile time: a saved model's constants are stored beside its kernels, and changing
them must not make the kernels read elsewhere. Ranges are exact, in Python's integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tilewright.errors import IndexOutOfRange, InvalidModel
from tilewright.graph import table
from tilewright.graph.reference import evaluate_expressions, to_numpy
from tilewright.ir.computation import Computation, Step
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, checks, constants, index_const, loads, rewrite, select, variables, walk
from tilewright.ir.graph import Graph, Node
from tilewright.ir.region import IndexCheck, Region
from tilewright.ir.scalar import OPERATIONS

Range = tuple[int, int] | None
"""Least and greatest value; None for floating-point numbers, whose range is unknown."""
BYTE = (0, 255)
"""The range of a boolean in memory: kernels write 0 and 1, but a caller's tensor may hold any byte."""
MOST_POINTS = 1 << 26
"""Maximum number of one operator's indices that are evaluated at compile time; if there are more, only the kernels check them."""


@dataclass
class IndexChecks:
    """The checked indices of one graph, numbered in the order in which its nodes are requested."""

    graph: Graph
    ranges: Mapping[str, Range]
    found: list[IndexCheck] = field(default_factory=list)

    @staticmethod
    def of(graph: Graph) -> IndexChecks:
        return IndexChecks(graph, known_ranges(graph))

    def computation(self, node: Node) -> Computation:
        """The node's steps, with a site for each index that is checked when they run.

        Raises:
            InvalidModel: if a constant index is out of range.
        """
        made = table.computation(node, self.graph.values)
        if not checks(*(body for step in made.steps for body in step.bodies)):
            return made
        inner = dict(self.ranges)
        steps = []
        for step in made.steps:
            steps.append(replace(step, bodies=tuple(rewrite(body, lambda part: self.settled(part, node, inner)) for body in step.bodies)))
            inner.update(zip(step.names, _results(step, inner), strict=True))
        return replace(made, steps=tuple(steps))

    def numbered(self, region: Region) -> Region:
        """The region with its sites numbered from 0, so that equal regions have the same numbers."""
        order = dict.fromkeys(_site(check) for step in region.steps for check in checks(*step.bodies))
        if not order:
            return region
        numbers = {site: index_const(number) for number, site in enumerate(order)}

        def fix(part: Expr) -> Expr:
            if not _is_checked(part):
                return part
            assert isinstance(part, Apply)
            return replace(part, args=(*part.args[:3], numbers[_site(part)]))

        steps = tuple(replace(step, bodies=tuple(rewrite(body, fix) for body in step.bodies)) for step in region.steps)
        return replace(region, steps=steps, checks=tuple(self.found[site] for site in order))

    def settled(self, part: Expr, node: Node, ranges: Mapping[str, Range]) -> Expr:
        if not _is_checked(part):
            return part
        assert isinstance(part, Apply)
        index = part.args[0]
        least, extent, _ = constants(part.args[1:])
        known = range_in(index, ranges)
        if known is not None and least <= known[0] and known[1] < extent:
            return index if known[0] >= 0 else select(index < 0, index + extent, index)
        values = self._constant(index)
        if values is not None:
            outside = values[(values < least) | (values >= extent)]
            if outside.size:
                raise invalid(IndexOutOfRange.at(node.described, int(outside.flat[0]), extent))
        check = IndexCheck(node.described, least, extent)
        if check not in self.found:
            self.found.append(check)
        return replace(part, args=(*part.args[:3], index_const(self.found.index(check))))

    def _constant(self, index: Expr) -> np.ndarray | None:
        """Every value of the index if it depends on constants alone, else None."""
        read = {load.buffer for load in loads(index)}
        axes = sorted(variables(index), key=lambda axis: axis.name)
        extents = [axis.extent for axis in axes]
        if not read <= self.graph.constants.keys() or None in extents or prod(extent or 0 for extent in extents) > MOST_POINTS:
            return None
        grid = {axis.name: np.arange(axis.extent or 0).reshape([-1 if j == k else 1 for j in range(len(axes))]) for k, axis in enumerate(axes)}
        (values,) = evaluate_expressions([index], grid, {name: to_numpy(self.graph.constants[name]) for name in read})
        return values


def invalid(error: IndexOutOfRange) -> InvalidModel:
    """The error for an index out of range that the model's own constants cause."""
    return InvalidModel(error.cause, "correct the model: PyTorch refuses this index as well")


def _is_checked(part: Expr) -> bool:
    return isinstance(part, Apply) and part.operation == "checked"


def _site(check: Apply) -> int:
    return constants(check.args[3:])[0]


# --- ranges of integers -----------------------------------------------------------------------------------------------


def known_ranges(graph: Graph) -> dict[str, Range]:
    """Least and greatest value of the graph's integers and booleans, as far as its operators bound them for any constants."""
    ranges: dict[str, Range] = {}
    for node in graph.nodes:
        if node.operator in table.STRUCTURAL or all(_bounds_of(graph.values[name].dtype) is None for name in node.outputs):
            continue
        inner = dict(ranges)
        for step in table.computation(node, graph.values).steps:
            inner.update(zip(step.names, _results(step, inner), strict=True))
        ranges.update((name, inner[name]) for name in node.outputs if name in inner)
    return ranges


def _results(step: Step, ranges: Mapping[str, Range]) -> tuple[Range, ...]:
    """The range of each result of a step."""
    known = tuple(range_in(body, ranges) for body in step.bodies)
    if step.combiner is None or step.combiner in ("max", "min", "argmax", "pooled_argmax", "argmin") and all(axis.extent for axis in step.reduction):
        return known
    return tuple(_bounds_of(dtype) for dtype in step.dtypes)


def _bounds_of(dtype: str) -> Range:
    """The range of a type."""
    if dtype == "bool":
        return BYTE
    if ELEMENT_TYPES[dtype].kind == "int":
        limits = np.iinfo(ELEMENT_TYPES[dtype].numpy)
        return int(limits.min), int(limits.max)
    return None


def range_in(root: Expr, ranges: Mapping[str, Range]) -> Range:
    """Least and greatest value of an integer expression, given the ranges of the values that it loads. A result beyond its type wraps around and may
    be any value of the type."""
    done: dict[int, Range] = {}
    for node in walk(root):
        bounds, found = _bounds_of(node.dtype), _range(node, done, ranges)
        fits = bounds is not None and found is not None and bounds[0] <= found[0] and found[1] <= bounds[1]
        done[id(node)] = found if fits else bounds
    return done[id(root)]


def _range(node: Expr, done: Mapping[int, Range], ranges: Mapping[str, Range]) -> Range:
    if isinstance(node, Const):
        return (int(node.value), int(node.value)) if _bounds_of(node.dtype) is not None else None
    if isinstance(node, Var):
        return (0, max(node.extent - 1, 0)) if node.extent is not None else None
    if isinstance(node, Load):
        return ranges.get(node.buffer)
    if node.operation == "checked":
        return 0, max(constants(node.args[2:3])[0] - 1, 0)
    if OPERATIONS[node.operation].boolean:
        return 0, 1
    args = [done[id(arg)] for arg in node.args]
    if node.operation == "select":
        return _hull(args[1:])
    if node.operation == "cast" and node.dtype != "bool":
        return args[0]
    return _arithmetic(node.operation, args)


def _hull(ranges: Sequence[Range]) -> Range:
    known = [found for found in ranges if found is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(ranges) else None


def _arithmetic(operation: str, ranges: Sequence[Range]) -> Range:
    """The range of an operation on two operands: operations that are monotonic in each, and remainders, which have the divisor's sign."""
    functions: Mapping[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "min": min,
        "max": max,
        "floordiv": lambda a, b: a // b,
    }
    operands = [found for found in ranges if found is not None]
    if len(operands) != 2 or len(ranges) != 2 or operation not in {*functions, "mod"}:
        return None
    left, right = operands
    if operation in ("floordiv", "mod") and right[0] <= 0:
        return None
    if operation == "mod":
        return 0, right[1] - 1
    corners = [functions[operation](a, b) for a in left for b in right]
    return min(corners), max(corners)
