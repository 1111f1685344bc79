"""Cutting successive regions into strips of rows: what a strip of the last result needs of every value before it.

A row is one index along a dimension of a region's result. Row y of a region may need several rows of a value that it reads, those of a filter's
window: rows `stride * y + first`, ..., `stride * y + first + span - 1` (`Rows`). Dimensions outside (images of a batch) are cut to one index.
The strip of a region is a region too, over fewer rows, so that every schema lowers it. Strips differ only in addresses, because the check whether a
row exists is left out: a value outside the chain must have a halo there, and what the chain keeps in a tile has such rows filled.

This is the overlapped tiling of fused layers (Alwani et al., "Fused-layer CNN accelerators", MICRO 2016; DeepCuts, Jung et al., PLDI 2021,
section 4.4), except that the rows which adjacent strips share are kept instead of computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

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


@dataclass(frozen=True)
class Cut:
    """A region that can be cut into strips. `region` reads each value relative to the first row that the strip needs, and does not check rows.

    row, outer: the axes of its steps for rows, and for the dimensions that are cut to one index. rows: by value that is cut, the result included.
    images: by value, for each axis of `outer` the dimension that it indexes, if any. fills: what row checks replaced by a constant gave, by value."""

    region: Region
    row: Var
    outer: tuple[Var, ...]
    rows: Mapping[str, Rows]
    images: Mapping[str, tuple[int | None, ...]]
    fills: Mapping[str, Const]

    @property
    def result(self) -> str:
        return self.region.outputs[0]

    def strip(self, count: int, problem: Problem, layouts: Mapping[str, Layout] | None = None) -> Problem:
        """The problem of `count` rows of one image. `layouts` has the layout of each value in the storage that holds the strip; without it, each
        strip is stored alone. `problem` is that of the chain."""
        smaller: dict[Var, Expr] = {self.row: Var(self.row.name, count), **{axis: Var(axis.name, 1) for axis in self.outer}}
        region = replace(self.region, steps=tuple(_resized(step, smaller) for step in self.region.steps), nodes=(), reasons=())
        shapes = {name: self._shape(name, problem.values[name].shape, count) for name in (*region.inputs, *region.outputs)}
        placed = {name: sliced((layouts or problem.layouts)[name], shape, self._cut(name), layouts is None) for name, shape in shapes.items()}
        values = {name: replace(problem.values[name], shape=shape) for name, shape in shapes.items()}
        return Problem(region, placed, values, problem.constants & shapes.keys())

    def _cut(self, name: str) -> frozenset[int]:
        rows = {self.rows[name].dim} if name in self.rows else set()
        return frozenset(rows | {dim for dim in self.images.get(name, ()) if dim is not None})

    def _shape(self, name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        extents = list(shape)
        for dim in self.images.get(name, ()):
            if dim is not None:
                extents[dim] = 1
        if name in self.rows:
            extents[self.rows[name].dim] = self.rows[name].needed(count)
        return tuple(extents)


def sliced(layout: Layout, shape: Sequence[int], dims: frozenset[int], alone: bool) -> Layout:
    """The layout of a part that begins where the storage begins along `dims`, and is complete along all others. alone: stored without the rest."""
    if not dims:
        return layout
    halo, around = [], []
    for dim, extent in enumerate(shape):
        outside = layout.outside(dim)
        whole = layout.shape[dim] + sum(layout.halo[dim]) + sum(outside)
        halo.append((0, 0) if dim in dims else layout.halo[dim])
        around.append(((0, 0) if alone else (0, whole - extent)) if dim in dims else outside)
    return Layout(tuple(shape), layout.order, tuple(halo), tuple(around))


def cut(region: Region, dim: int, outer: Sequence[int], problem: Problem, inside: frozenset[str]) -> Cut:
    """The region cut into rows along dimension `dim` of its result, and to one index along the dimensions `outer`. `problem` has the layouts of the
    values outside the chain; those `inside` are kept in tiles.

    Raises:
        Unsuitable: if a row of the result depends on its place in any other way than through the rows that it reads.
    """
    last = region.steps[-1]
    if region.checks or any(checks(*step.bodies) for step in region.steps):
        raise Unsuitable("indices are checked at run time")
    row, *others = (_axis(last, position) for position in (dim, *outer))
    finder = _Finder(region, row, tuple(others), problem, inside)
    steps = tuple(finder.without_checks(step) for step in region.steps)
    finder.rows[last.name] = Rows(dim)
    finder.images[last.name] = tuple(outer)
    for step in region.steps:
        finder.read(step)
    steps = tuple(finder.relative(step) for step in steps)
    rows, images, fills = MappingProxyType(finder.rows), MappingProxyType(finder.images), MappingProxyType(finder.fills)
    return Cut(replace(region, steps=steps), row, tuple(others), rows, images, fills)


def _axis(step: Step, dim: int) -> Var:
    axis = step.index[dim]
    if not isinstance(axis, Var) or axis not in step.axes:
        raise Unsuitable(f"dimension {dim} of {step.name} is no axis of its own")
    return axis


class _Finder:
    """Collects what a region reads of each value for one row."""

    def __init__(self, region: Region, row: Var, outer: tuple[Var, ...], problem: Problem, inside: frozenset[str]) -> None:
        self.own = {name for step in region.steps for name in step.names}
        self.row, self.outer, self.problem, self.inside = row, outer, problem, inside
        self.rows: dict[str, Rows] = {}
        self.images: dict[str, tuple[int | None, ...]] = {}
        self.fills: dict[str, Const] = {}

    def without_checks(self, step: Step) -> Step:
        """The step without checks whether the rows that it reads exist."""

        def visit(node: Expr) -> Expr:
            if not (isinstance(node, Apply) and node.operation == "select" and self.row in variables(node.args[0])):
                return node
            condition, load, other = node.args
            if not isinstance(load, Load) or not isinstance(other, Const) or load.buffer in self.own:
                raise Unsuitable(f"{step.name} computes something else for some rows")
            dim = self._dim(load, self.row)
            if dim is None:
                raise Unsuitable(f"{step.name} computes something else for some rows")
            if self.fills.setdefault(load.buffer, other) != other:
                raise Unsuitable(f"{load.buffer} is padded with several values")
            rest = _other_conditions(condition, load.index[dim], self._extent(load.buffer, dim))
            if any(self.row in variables(part) for part in rest):
                raise Unsuitable(f"{step.name} computes something else for some rows")
            return Apply("select", (logical_and(*rest), load, other), node.dtype) if rest else load

        return replace(step, bodies=tuple(rewrite(body, visit) for body in step.bodies))

    def _extent(self, name: str, dim: int) -> int:
        return self.problem.values[name].shape[dim]

    def _dim(self, load: Load, axis: Var) -> int | None:
        """The dimension of the load that the axis indexes, if any."""
        dims = [dim for dim, position in enumerate(load.index) if axis in variables(position)]
        if len(dims) > 1:
            raise Unsuitable(f"{load.buffer} is read along a diagonal")
        return dims[0] if dims else None

    def read(self, step: Step) -> None:
        """Adds the rows that a step reads."""
        if any(axis not in step.axes for axis in (self.row, *self.outer)):
            raise Unsuitable(f"{step.name} reduces over rows")
        for load in loads(*step.bodies):
            if load.buffer in self.own:
                continue
            for axis, position in zip(self.outer, self._dims_of_images(load), strict=True):
                if position is None and load.buffer in self.inside or position is not None and load.index[position] != axis:
                    raise Unsuitable(f"{load.buffer} is not read image by image")
            images = self._dims_of_images(load)
            if load.buffer in self.problem.constants and any(dim is not None for dim in images):
                raise Unsuitable(f"each image has its own part of {load.buffer}")
            if self.images.setdefault(load.buffer, images) != images:
                raise Unsuitable(f"{load.buffer} is read in two ways")
            found, known = self._rows(load, step), self.rows.get(load.buffer)
            if found is None:
                if load.buffer in self.inside or known is not None:
                    raise Unsuitable(f"all rows of {load.buffer} are read for each row")
                continue
            if load.buffer in self.problem.constants:
                raise Unsuitable(f"each row has its own part of {load.buffer}")
            if known is not None and (known.dim, known.stride) != (found.dim, found.stride):
                raise Unsuitable(f"{load.buffer} is read in two ways")
            if known is not None:
                first = min(known.first, found.first)
                found = replace(found, first=first, span=max(known.first + known.span, found.first + found.span) - first)
            self.rows[load.buffer] = found
        for name, rows in self.rows.items():
            if name not in self.inside and name not in self.own:
                self._require_halo(name, rows, step)

    def _dims_of_images(self, load: Load) -> tuple[int | None, ...]:
        return tuple(self._dim(load, axis) for axis in self.outer)

    def _rows(self, load: Load, step: Step) -> Rows | None:
        dim = self._dim(load, self.row)
        if dim is None:
            return None
        position = load.index[dim]
        stride = coefficient(position, self.row)
        rest = position - self.row * (stride or 0)
        low, high = range_of(rest)
        if not stride or stride < 0 or not variables(rest) <= {*step.reduction} or any(isinstance(part, Load) for part in walk(rest)):
            raise Unsuitable(f"{load.buffer} is not read row by row")
        return Rows(dim, stride, int(low), int(high - low) + 1)

    def _require_halo(self, name: str, rows: Rows, step: Step) -> None:
        """Of a value in memory all rows that are read must exist, with zeros beyond its own."""
        layout, last = self.problem.layouts[name], rows.stride * ((self.row.extent or 1) - 1) + rows.first + rows.span
        before, after = layout.halo[rows.dim]
        outside = rows.first < 0 or last > layout.shape[rows.dim]
        if -rows.first > before or last > layout.shape[rows.dim] + after or outside and self.fills[name].value != 0:
            raise Unsuitable(f"{name} has no halo for the rows that {step.name} reads beyond its own")
        if layout.dense_strides() is None:
            raise Unsuitable(f"{name} is stored in blocks")

    def relative(self, step: Step) -> Step:
        """The step with indices relative to the first row that it reads, and to its image."""

        def visit(node: Expr) -> Expr:
            if not isinstance(node, Load) or node.buffer not in self.rows or node.buffer in self.own:
                return node
            rows = self.rows[node.buffer]
            index = (position - rows.first if dim == rows.dim else position for dim, position in enumerate(node.index))
            return replace(node, index=tuple(index))

        moved = replace(step, bodies=tuple(rewrite(body, visit) for body in step.bodies))
        for part in walk(*moved.bodies):
            loose = isinstance(part, Apply) and part.dtype != INDEX and any(arg.dtype == INDEX and self._cut_axes(arg) for arg in part.args)
            if loose or isinstance(part, Load) and part.buffer in self.own and not self._at_own_row(part):
                raise Unsuitable(f"{step.name} depends on the place of a row")
        return moved

    def _cut_axes(self, expr: Expr) -> bool:
        return not variables(expr).isdisjoint((self.row, *self.outer))

    def _at_own_row(self, load: Load) -> bool:
        """Whether an earlier result is read at the current row: each position is a plain axis, or depends on none of those that are cut."""
        return all(isinstance(position, Var) or not self._cut_axes(position) for position in load.index)


def _other_conditions(condition: Expr, position: Expr, extent: int) -> list[Expr]:
    """The conjuncts that do not say that the position is within the extent."""
    if isinstance(condition, Apply) and condition.operation == "and":
        return [part for arg in condition.args for part in _other_conditions(arg, position, extent)]
    return [] if margin(condition) in (linear(position), linear((extent - 1) - position)) else [condition]


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
        step, shape=shape, axes=tuple(axis(var) for var in step.axes), bodies=tuple(substitute(body, smaller) for body in step.bodies), index=index
    )
