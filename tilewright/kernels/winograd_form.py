"""The form of a region for transforms of blocks (Winograd's algorithm, Fourier), on any machine: a convolution with stride 1 along one or two
dimensions, its tiles, and their places in memory.

A tile at the lower or right edge may extend beyond the image: it reads the last stored row or column again, and results outside the image are not
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.access import bind_shared, flatten
from tilewright.codegen.assemble import block
from tilewright.codegen.common import guarded_load, reduce_and_final
from tilewright.codegen.operand import operand_view
from tilewright.graph.contraction import anchor
from tilewright.ir.computation import Step
from tilewright.ir.expr import (
    TRUE,
    Expr,
    Load,
    Var,
    binary,
    coefficient,
    compare,
    index_const,
    linear,
    logical_and,
    range_of,
    replace_loads,
    substitute,
)
from tilewright.ir.kernel import If, Statement, Store
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.block_transforms import transforms_of
from tilewright.kernels.winograd_transform import Shape


@dataclass(frozen=True)
class WinogradForm:
    """A convolution with stride 1:

        out[images, k, y, x] = sum over tap_y, tap_x, c of source[.., y + tap_y, .., x + tap_x, ..] * filters

    Where the filters have taps along one dimension only, be it rows or columns, it is x, the other one is among `images`, and y and tap_y have extent
    1. `source` has logical indices, `read` is the same load in flat form; `element`, over loads of the reduction's name, is stored at `offset` of
    `output`, both flat."""

    output: str
    step: Step
    source: Load
    read: Load
    images: tuple[Var, ...]
    y: Var
    x: Var
    tap_y: Var
    tap_x: Var
    c: Var
    k: Var
    filters: str
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    element: Expr
    offset: Expr

    @property
    def dtype(self) -> str:
        """The type of sums, products and factors."""
        return self.step.dtypes[0]

    @property
    def axes(self) -> tuple[Var, ...]:
        """Axes of the result: images, row, column, output channel."""
        return (*self.images, self.y, self.x, self.k)

    @property
    def height(self) -> int:
        return self.y.extent or 0

    @property
    def width(self) -> int:
        return self.x.extent or 0

    @property
    def filter_shape(self) -> Shape:
        """Taps along y and x."""
        return self.tap_y.extent or 0, self.tap_x.extent or 0

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return self.c.extent or 0

    @property
    def outputs(self) -> int:
        """Channels of the result."""
        return self.k.extent or 0

    def tiles(self, tile: Shape) -> tuple[Var, ...]:
        """The axes of the tiles: images, and rows and columns of tiles."""
        windows = zip((self.y, self.x), tile, strict=True)
        return (*self.images, *(Var(f"tile_{axis.name}", -(-(axis.extent or 0) // size)) for axis, size in windows))


ONE_ROW = Var("row", 1), Var("tap_row", 1)
"""y and tap_y of filters with taps along one dimension."""


def winograd_form(problem: Problem) -> WinogradForm:
    """The form of a convolution with filters that have a transform, stride 1, constant filters, and an input stored with its padding. Raises
    Unsuitable for other regions."""
    region, layouts = problem.region, problem.layouts
    step, element, index = reduce_and_final(region)
    found = anchor(region.steps, problem.constants)
    if found is None or found.b.buffer not in problem.constants or found.b.dtype != found.dtype:
        raise Unsuitable(f"the sum of region {region.name} is not a product with constant filters")
    ones = {axis: index_const(0) for axis in (*step.axes, *step.reduction) if axis.extent == 1}
    m, n, r = ([axis for axis in axes if axis.extent != 1] for axes in (found.m, found.n, found.r))
    if any(axis.extent != 1 for axis in found.batch) or len(n) != 1 or len(r) not in (2, 3):
        raise Unsuitable(f"region {region.name} is not a convolution of one group of channels by filters of one or two dimensions")
    guarded = guarded_load(found.a)
    flat_source = substitute(flatten(found.a, layouts), ones)
    if guarded is None or guarded[1].buffer not in layouts or not isinstance(flat_source, Load):
        raise Unsuitable(f"the input of region {region.name} is computed or guarded while it is read")
    source = guarded[1]
    source = Load(source.buffer, tuple(substitute(position, ones) for position in source.index), source.dtype)
    windows = [pair for pair in (_window(position, m, r) for position in source.index) if pair is not None]
    if len(windows) != len(r) - 1 or len({axis for pair in windows for axis in pair}) != 2 * len(windows):
        raise Unsuitable(f"region {region.name} does not slide filters with stride 1 over one or two dimensions")
    (y, tap_y), (x, tap_x) = windows if len(windows) == 2 else (ONE_ROW, *windows)
    if not transforms_of((tap_y.extent or 0, tap_x.extent or 0)):
        raise Unsuitable(f"there is no transform for the filters of {tap_y.extent} x {tap_x.extent} of region {region.name}")
    (c,) = (axis for axis in r if axis not in (tap_y, tap_x))
    images = tuple(axis for axis in m if axis not in (y, x))
    view = operand_view(found.b, problem.values[found.b.buffer].shape, (tap_y, tap_x, c, n[0]))
    if coefficient(flat_source.index[0], c) != 1 or view is None:
        raise Unsuitable(f"the input of region {region.name} is not stored channels last, or its filters are not one array")
    element, offset = (substitute(e, ones) for e in (flatten(element, layouts), layouts[region.outputs[0]].offset(index)))
    return WinogradForm(region.outputs[0], step, source, flat_source, images, y, x, tap_y, tap_x, c, n[0], found.b.buffer, view, element, offset)


def _window(position: Expr, m: Sequence[Var], r: Sequence[Var]) -> tuple[Var, Var] | None:
    """(axis, tap) of an index of the form axis + tap + constant; None for other indices."""
    terms = linear(position).terms
    own = [atom for atom, scale in terms if atom in m and scale == 1]
    taps = [atom for atom, scale in terms if atom in r and scale == 1]
    if len(terms) != 2 or len(own) != 1 or len(taps) != 1:
        return None
    axis, tap = own[0], taps[0]
    return (axis, tap) if isinstance(axis, Var) and isinstance(tap, Var) else None


def input_index(form: WinogradForm, tiles: Sequence[Var], layout: Layout, where: Mapping[Var, Expr], tile: Shape, i: Expr, j: Expr) -> list[Expr]:
    """The logical index of element (i, j) of a tile of the input, clamped to the last stored row and column."""
    taps = {form.tap_y: i, form.tap_x: j, form.y: where[tiles[-2]] * tile[0], form.x: where[tiles[-1]] * tile[1]}
    index = []
    for position, extent, (_, after) in zip(form.source.index, layout.shape, layout.halo, strict=True):
        at = substitute(position, {**where, **taps})
        index.append(binary("min", at, index_const(extent - 1 + after)) if range_of(at)[1] > extent - 1 + after else at)
    return index


def store_vectors(
    form: WinogradForm, tiles: Sequence[Var], wide: Expr, where: Mapping[Var, Expr], tile: Shape, first: Expr, sums: Sequence[Sequence[Expr]]
) -> list[Statement]:
    """Epilogue and store of the part of adjacent rows of a tile of sums (vectors along the output channels), from row `first` on, that is
    inside the image. `wide` is the stored element, already vectorised."""
    statements: list[Statement] = []
    for i, row in enumerate(sums):
        for j, value in enumerate(row):
            y, x = where[tiles[-2]] * tile[0] + first + i, where[tiles[-1]] * tile[1] + j
            at = {**where, form.y: y, form.x: x}
            element = substitute(replace_loads(wide, {form.step.name: value}), at)
            shared, (offset, what) = bind_shared([substitute(form.offset, at), element], f"e{i}_{j}_")
            inside = logical_and(compare("lt", y, index_const(form.height)), compare("lt", x, index_const(form.width)))
            store = block(*shared, Store(form.output, offset, what))
            statements.append(store if inside == TRUE else If(inside, store))
    return statements
