"""Cutting successive regions into tiles: what a tile of the last result needs of every value before it.

A row is one index along a dimension of a region's result. Row y of a region may need several rows of a value that it reads, those of a filter's
window: rows `stride * y + first`, ..., `stride * y + first + span - 1` (`Rows`). A chain is cut along one or more dimensions of its last result
(`axes`); each value is cut along the dimensions that follow from how it is read, and whole along all others. The tile of a region is a region too,
over fewer rows, so that every schema lowers it. Tiles differ only in addresses, because the check whether a row exists is left out: a value outside
the chain must have a halo there, and what the chain keeps in a tile has such rows filled. Tiles that are cut along rows alone are called strips.

This is the overlapped tiling of fused layers (Alwani et al., "Fused-layer CNN accelerators", MICRO 2016; DeepCuts, Jung et al., PLDI 2021,
section 4.4). On a CPU the rows which adjacent strips share are kept instead of computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from tilewright.codegen.access import margin
from tilewright.ir.computation import Step
from tilewright.ir.expr import (
    INDEX,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    checks,
    coefficient,
    linear,
    loads,
    logical_and,
    range_of,
    rewrite,
    substitute,
    variables,
    walk,
)
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Unsuitable


@dataclass(frozen=True)
class Rows:
    """The rows of a value that row y of a region needs, along dimension `dim`: `span` of them from `stride * y + first` on."""

    dim: int
    stride: int = 1
    first: int = 0
    span: int = 1

    def needed(self, count: int) -> int:
        """Rows that `count` adjacent rows of the region need."""
        return (count - 1) * self.stride + self.span


Spans: TypeAlias = tuple[Rows | None, ...]
"""For each axis of a chain the rows of a value that are needed, or None if the value is not cut along this axis."""


@dataclass(frozen=True)
class Cut:
    """A region that can be cut into tiles. `region` reads each value relative to the first row that the tile needs, and does not check rows.

    axes: for each axis of the chain the axis of the region's steps, or None. spans: by value that is cut, the result included. fills: what row checks
    replaced by a constant gave, by value."""

    region: Region
    axes: tuple[Var | None, ...]
    spans: Mapping[str, Spans]
    fills: Mapping[str, Const]

    @property
    def result(self) -> str:
        return self.region.outputs[0]

    def span(self, name: str, axis: int) -> Rows | None:
        """The rows of a value that are needed along an axis of the chain; None if it is not cut along it."""
        return self.spans[name][axis] if name in self.spans else None

    def tile(self, counts: Sequence[int], problem: Problem, layouts: Mapping[str, Layout] | None = None) -> Problem:
        """The problem of that many rows along each axis. `layouts` has the layout of each value in the storage that holds the tile; without it, each
        tile is stored alone. Constants stay whole. `problem` is that of the chain."""
        smaller: dict[Var, Expr] = {axis: Var(axis.name, count) for axis, count in zip(self.axes, counts, strict=True) if axis is not None}
        region = replace(self.region, steps=tuple(_resized(step, smaller) for step in self.region.steps), nodes=(), reasons=())
        shapes = {name: self.shape(name, problem, counts) for name in (*region.inputs, *region.outputs)}
        placed = {
            name: sliced((layouts or problem.layouts)[name], shape, self._dims(name, problem), layouts is None) for name, shape in shapes.items()
        }
        values = {name: replace(problem.values[name], shape=shape) for name, shape in shapes.items()}
        return Problem(region, placed, values, problem.constants & shapes.keys())

    def _dims(self, name: str, problem: Problem) -> frozenset[int]:
        """The dimensions along which a value is cut."""
        return frozenset(rows.dim for rows in self.spans.get(name, ()) if rows is not None and name not in problem.constants)

    def shape(self, name: str, problem: Problem, counts: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a tile of that many rows needs of a value."""
        extents = list(problem.values[name].shape)
        for rows, count in zip(self.spans.get(name, ()), counts, strict=False):
            if rows is not None and name not in problem.constants:
                extents[rows.dim] = rows.needed(count)
        return tuple(extents)


def sliced(layout: Layout, shape: Sequence[int], dims: frozenset[int], alone: bool) -> Layout:
    """The layout of a part that begins where the storage begins along `dims`, and is complete along all others. alone: stored without the rest. What
    follows along the outermost dimension affects no address and is left out: strips of all batches are one problem."""
    if not dims:
        return layout
    halo, around = [], []
    for dim, extent in enumerate(shape):
        outside = layout.outside(dim)
        whole = layout.shape[dim] + sum(layout.halo[dim]) + sum(outside)
        halo.append((0, 0) if dim in dims else layout.halo[dim])
        follows = 0 if alone or layout.order[0] == (dim, 0) else whole - extent
        around.append((0, follows) if dim in dims else outside)
    return Layout(tuple(shape), layout.order, tuple(halo), tuple(around))


def cut(region: Region, dims: Sequence[int | None], problem: Problem, inside: frozenset[str], summed: Var | None = None) -> Cut:
    """The region cut into rows along dimensions of its result, one for each axis of the chain, or None for an axis along which it is not cut.
    `problem` has the layouts of the values outside the chain; those `inside` are kept in tiles. `summed`: an axis of the chain, after the others,
    over which the region sums: a part of it gives a part of each sum.

    Raises:
        Unsuitable: if a row of the result depends on its place in any other way than through the rows that it reads.
    """
    last = region.steps[-1]
    if region.checks or any(checks(*step.bodies) for step in region.steps):
        raise Unsuitable("indices are checked at run time")
    axes = (*(None if dim is None else _axis(last, dim) for dim in dims), *([summed] if summed is not None else []))
    finder = _Finder(region, axes, problem, inside, summed)
    steps = tuple(finder.without_checks(step) for step in region.steps)
    finder.spans[last.name] = (*(None if dim is None else Rows(dim) for dim in dims), *([None] if summed is not None else []))
    for step in steps:
        finder.read(step)
    steps = tuple(finder.relative(step) for step in steps)
    finder.add_parts()
    return Cut(replace(region, steps=steps), axes, MappingProxyType(finder.spans), MappingProxyType(finder.fills))


def _axis(step: Step, dim: int) -> Var:
    axis = step.index[dim]
    if not isinstance(axis, Var) or axis not in step.axes:
        raise Unsuitable(f"dimension {dim} of {step.name} is no axis of its own")
    return axis


class _Finder:
    """Collects what a region reads of each value for one row."""

    def __init__(self, region: Region, axes: tuple[Var | None, ...], problem: Problem, inside: frozenset[str], summed: Var | None) -> None:
        self.own = {name for step in region.steps for name in step.names}
        self.axes, self.problem, self.inside, self.summed = axes, problem, inside, summed
        self.cut = frozenset(axis for axis in axes if axis is not None)
        self.spans: dict[str, Spans] = {}
        self.fills: dict[str, Const] = {}

    def without_checks(self, step: Step) -> Step:
        """The step without checks whether the rows that it reads exist."""

        def visit(node: Expr) -> Expr:
            if not (isinstance(node, Apply) and node.operation == "select" and self.depends(node.args[0])):
                return node
            condition, load, other = node.args
            if not isinstance(load, Load) or not isinstance(other, Const) or load.buffer in self.own:
                raise Unsuitable(f"{step.name} computes something else for some rows")
            if self.fills.setdefault(load.buffer, other) != other:
                raise Unsuitable(f"{load.buffer} is padded with several values")
            positions = [(load.index[dim], self.problem.values[load.buffer].shape[dim]) for dim in self._dims(load) if dim is not None]
            rest = _other_conditions(condition, positions)
            if any(map(self.depends, rest)):
                raise Unsuitable(f"{step.name} computes something else for some rows")
            return Apply("select", (logical_and(*rest), load, other), node.dtype) if rest else load

        return replace(step, bodies=tuple(rewrite(body, visit) for body in step.bodies))

    def depends(self, expr: Expr) -> bool:
        """Whether an expression depends on the place of the tile."""
        return not variables(expr).isdisjoint(self.cut)

    def _dims(self, load: Load) -> tuple[int | None, ...]:
        """For each axis the dimension of the load that it indexes, if any."""
        found = [[dim for dim, position in enumerate(load.index) if axis is not None and axis in variables(position)] for axis in self.axes]
        if any(len(dims) > 1 for dims in found):
            raise Unsuitable(f"{load.buffer} is read along a diagonal")
        return tuple(dims[0] if dims else None for dims in found)

    def read(self, step: Step) -> None:
        """Adds the rows that a step reads."""
        if not self.cut - {self.summed} <= {*step.axes}:
            raise Unsuitable(f"{step.name} reduces over rows")
        for load in loads(*step.bodies):
            if load.buffer in self.own:
                continue
            found = tuple(self._rows(load, axis, dim, step) for axis, dim in zip(self.axes, self._dims(load), strict=True))
            self.spans[load.buffer] = self._together(load.buffer, self.spans.get(load.buffer, found), found)
        for name, spans in self.spans.items():
            if name not in self.inside and name not in self.own:
                for axis, rows in zip(self.axes, spans, strict=True):
                    if axis is not None and rows is not None:
                        self._require_halo(name, axis, rows, step)

    def add_parts(self) -> None:
        """Adds the rows of inner results that are read as parts of concatenations."""
        for name, whole in self.problem.region.wholes:
            if name not in self.inside or whole not in self.spans:
                continue
            shape, other = self.problem.values[name].shape, self.problem.values[whole].shape
            if any(rows is not None and shape[rows.dim] != other[rows.dim] for rows in self.spans[whole]):
                raise Unsuitable(f"{name} has other rows than {whole}")
            if self.spans.setdefault(name, self.spans[whole]) != self.spans[whole]:
                raise Unsuitable(f"{name} is read in two ways")
            if whole in self.fills and self.fills.setdefault(name, self.fills[whole]) != self.fills[whole]:
                raise Unsuitable(f"{name} is padded with several values")

    def _together(self, name: str, known: Spans, found: Spans) -> Spans:
        """The rows that two loads of a value need."""
        result: list[Rows | None] = []
        for a, b in zip(known, found, strict=True):
            if (a is None) != (b is None):
                raise Unsuitable(f"all rows of {name} are read for each row")
            if a is None or b is None:
                result.append(None)
                continue
            if (a.dim, a.stride) != (b.dim, b.stride):
                raise Unsuitable(f"{name} is read in two ways")
            first = min(a.first, b.first)
            result.append(replace(a, first=first, span=max(a.first + a.span, b.first + b.span) - first))
        return tuple(result)

    def _rows(self, load: Load, axis: Var | None, dim: int | None, step: Step) -> Rows | None:
        if axis is None or dim is None:
            return None
        position = load.index[dim]
        stride = coefficient(position, axis)
        rest = position - axis * (stride or 0)
        low, high = range_of(rest)
        if not stride or stride < 0 or not variables(rest) <= {*step.reduction} or any(isinstance(part, Load) for part in walk(rest)):
            raise Unsuitable(f"{load.buffer} is not read row by row")
        return Rows(dim, stride, int(low), int(high - low) + 1)

    def _require_halo(self, name: str, axis: Var, rows: Rows, step: Step) -> None:
        """Of a value in memory all rows that are read must exist, with zeros beyond its own."""
        layout, last = self.problem.layouts[name], rows.stride * ((axis.extent or 1) - 1) + rows.first + rows.span
        before, after = layout.halo[rows.dim]
        outside = rows.first < 0 or last > layout.shape[rows.dim]
        if -rows.first > before or last > layout.shape[rows.dim] + after or outside and self.fills[name].value != 0:
            raise Unsuitable(f"{name} has no halo for the rows that {step.name} reads beyond its own")
        if layout.dense_strides() is None:
            raise Unsuitable(f"{name} is stored in blocks")

    def relative(self, step: Step) -> Step:
        """The step with indices relative to the first row that it reads along each axis."""

        def visit(node: Expr) -> Expr:
            if not isinstance(node, Load) or node.buffer not in self.spans or node.buffer in self.own:
                return node
            index = list(node.index)
            for rows in self.spans[node.buffer]:
                if rows is not None:
                    index[rows.dim] = index[rows.dim] - rows.first
            return replace(node, index=tuple(index))

        moved = replace(step, bodies=tuple(rewrite(body, visit) for body in step.bodies))
        of_place: set[int] = set()  # the parts that depend on the tile's place otherwise than through what is read there
        for part in walk(*moved.bodies):
            if isinstance(part, Var) and part in self.cut or isinstance(part, Apply) and any(id(arg) in of_place for arg in part.args):
                of_place.add(id(part))
            loose = isinstance(part, Apply) and part.dtype != INDEX and any(arg.dtype == INDEX and self.depends(arg) for arg in part.args)
            if loose or isinstance(part, Load) and part.buffer in self.own and not self._at_own_row(part):
                raise Unsuitable(f"{step.name} depends on the place of a row")
        if any(id(body) in of_place for body in moved.bodies):  # such as the position of a maximum
            raise Unsuitable(f"{step.name} depends on the place of a row")
        return moved

    def _at_own_row(self, load: Load) -> bool:
        """Whether an earlier result is read at the current row: each position is a plain axis, or depends on none of those that are cut."""
        return all(isinstance(position, Var) or not self.depends(position) for position in load.index)


def _other_conditions(condition: Expr, positions: Sequence[tuple[Expr, int]]) -> list[Expr]:
    """The conjuncts that do not say that a position is within its extent."""
    if isinstance(condition, Apply) and condition.operation == "and":
        return [part for arg in condition.args for part in _other_conditions(arg, positions)]
    within = [linear(bound) for position, extent in positions for bound in (position, (extent - 1) - position)]
    return [] if margin(condition) in within else [condition]


def _resized(step: Step, smaller: Mapping[Var, Expr]) -> Step:
    """The step over fewer rows."""

    def axis(var: Var) -> Var:
        found = smaller.get(var, var)
        assert isinstance(found, Var)
        return found

    index = tuple(substitute(position, smaller) for position in step.index)
    shape = tuple(
        (position.extent or 0) if isinstance(position, Var) and old in smaller else extent
        for position, old, extent in zip(index, step.index, step.shape, strict=True)
    )
    return replace(
        step, shape=shape, axes=tuple(map(axis, step.axes)), bodies=tuple(substitute(body, smaller) for body in step.bodies), index=index,
        reduction=tuple(map(axis, step.reduction)),
    )  # fmt: skip


def dims_of(problem: Problem) -> list[int]:
    """The dimensions of the first result along which strips are considered, in this order: those of more than one index, the first one last."""
    output = problem.region.outputs[0]
    dims = [dim for dim, extent in enumerate(problem.values[output].shape) if extent > 1]
    return [*(dim for dim in dims if dim), *(dim for dim in dims if not dim)]


def cuts_of(problem: Problem, dims: Sequence[int], chunked: bool = False) -> tuple[Cut, ...]:
    """The regions of a canonical chain cut along dimensions of its first result. A result that several regions read is cut along the dimensions that
    all of them need; one that none of them reads is cut like the first, of whose rows it must have as many. `chunked`: also, as the last axis, along
    that over which the last region sums the result before; each result then has one reader.

    Raises:
        Unsuitable: if one of them cannot be cut.
    """
    stages = problem.region.stages
    inside = frozenset(stage.outputs[0] for stage in stages[:-1])
    if chunked and not is_path(problem.region):
        raise Unsuitable("a result has other readers than the next region")
    cuts = [cut(stages[-1], dims, problem, inside, _summed(*stages[-2:]) if chunked else None)]
    for stage in stages[-2::-1]:
        name = stage.outputs[0]
        needed = {tuple(None if rows is None else rows.dim for rows in part.spans[name]) for part in cuts if name in part.spans}
        if len(needed) > 1:
            raise Unsuitable(f"{name} is cut along different dimensions for its readers")
        cuts.insert(0, cut(stage, next(iter(needed)) if needed else _as_first(name, dims, problem), problem, inside))
    return tuple(cuts)


def is_path(chain: Region) -> bool:
    """Whether each region of a chain is the only one that needs the result of the one before."""
    made = [stage.outputs[0] for stage in chain.stages]
    read = [[name for name in made if name in stage.inputs] for stage in chain.stages]
    return len(chain.outputs) == 1 and all(names == made[max(number - 1, 0) : number] for number, names in enumerate(read))


def _as_first(name: str, dims: Sequence[int], problem: Problem) -> tuple[int, ...]:
    """The dimensions of a result of the chain that none of its regions reads."""
    first, *others = problem.region.outputs
    shape, own = problem.values[first].shape, problem.values[name].shape
    if name not in others:
        raise Unsuitable(f"{name} is not needed")
    if any(dim >= len(own) or own[dim] != shape[dim] for dim in dims):
        raise Unsuitable(f"{name} has other rows than {first}")
    return tuple(dims)


def readers_in(cuts: Sequence[Cut]) -> tuple[tuple[int, ...], ...]:
    """For each region of a chain the numbers of those that read its result."""
    return tuple(tuple(at for at, part in enumerate(cuts) if at != number and own.result in part.spans) for number, own in enumerate(cuts))


def reads_all_rows(region: Region, name: str, shape: Sequence[int]) -> bool:
    """Whether the rows of a region's result together need all rows of a value of this shape, whatever dimension both are cut along. False also where
    that is not seen."""

    def all_of(step: Step, position: Expr, extent: int) -> bool:
        moving = variables(position) & {*step.axes}
        if not moving or extent == 1:  # not cut along this dimension
            return True
        axis, *others = moving
        stride = coefficient(position, axis)
        if others or not stride or stride < 0 or axis.extent is None:
            return False
        low, high = range_of(position - axis * stride)
        return low <= 0 and high - low + 1 >= stride and high + (axis.extent - 1) * stride >= extent - 1

    return any(
        all(all_of(step, position, extent) for position, extent in zip(load.index, shape, strict=True))
        for step in region.steps
        for load in loads(*step.bodies)
        if load.buffer == name
    )


def computes_all_rows(problem: Problem) -> bool:
    """Whether the tiles of a chain, canonical or not, together compute all rows of every result. False also where that is not seen."""
    region = problem.region
    for stage in region.stages[:-1]:
        name = stage.outputs[0]
        whole, readers = region.memory_of(name), [region.stages[at] for at in region.readers_of(name)]
        shape = problem.values[whole].shape
        if name not in region.outputs and not any(reads_all_rows(reader, whole, shape) for reader in readers):
            return False
    return True


def fill_of(cuts: Sequence[Cut], number: int) -> Const | None:
    """What readers of a region's result take instead of rows that do not exist; None if these are needed only for rows that do not exist either.

    Raises:
        Unsuitable: if they take several values.
    """
    name = cuts[number].result
    found = {part.fills[name] for part in cuts if name in part.fills}
    if len(found) > 1:
        raise Unsuitable(f"{name} is padded with several values")
    return next(iter(found), None)


def _summed(producer: Region, region: Region) -> Var:
    """The longest axis over which a region sums along a dimension of what the region before it stores."""
    first = region.steps[0]
    read = [position for load in loads(*first.bodies) if load.buffer == producer.outputs[0] for position in load.index]
    axes = [position for position in read if isinstance(position, Var) and position in first.reduction]
    if region.kind != "contraction" or not axes:
        raise Unsuitable(f"{region.name} sums over no dimension of {producer.name}")
    return max(axes, key=lambda axis: axis.extent or 0)
