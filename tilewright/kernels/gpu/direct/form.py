"""Recognises a sum of products as a 1-d or 2-d convolution, from the coefficients of its axes in the flat offset of its input."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tilewright.codegen.access import flatten
from tilewright.codegen.common import extent_of, guarded_load, widest
from tilewright.graph.contraction import anchor
from tilewright.ir.expr import Expr, Load, Var, coefficient, index_const, linear, substitute
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.direct.schedule import DirectFacts
from tilewright.kernels.gpu.gemm.form import ProductForm, product_form


@dataclass(frozen=True)
class Sliding:
    """A dimension along which the filter slides: the axes of the output and of the filter; None if the extent is one."""

    output: Var | None
    tap: Var | None


@dataclass(frozen=True)
class ConvolutionAxes:
    """Roles of the axes of a sum: sliding dimensions, outermost first, and reduction axes that do not slide."""

    sliding: tuple[Sliding, ...]
    channels: tuple[Var, ...]

    @property
    def order(self) -> tuple[Var, ...]:
        """Reduction axes in the order in which filters are packed: channels, filter rows, filter columns."""
        return (*self.channels, *(one.tap for one in self.sliding if one.tap is not None))

    @property
    def apart(self) -> frozenset[Var]:
        return frozenset(axis for one in self.sliding for axis in (one.output, one.tap) if axis is not None)


@dataclass(frozen=True)
class DirectForm:
    """A convolution: element (images, y, x) of channel c under filter tap (fy, fx) is at offset

        base + c * channel_pitch + (y * stride_y + fy * dilation_y) * row_pitch + (x * stride_x + fx * dilation_x) * column_pitch

    of the buffer `source`. Axes of extent one are placeholders that occur in no expression."""

    product: ProductForm
    axes: ConvolutionAxes
    images: tuple[Var, ...]
    y: Var
    x: Var
    filter_y: Var
    filter_x: Var
    channel: Var
    source: str
    base: Expr
    channel_pitch: int
    row_pitch: int
    column_pitch: int
    facts: DirectFacts

    @property
    def rows(self) -> int:
        """Rows of the input that are read."""
        p = self.facts
        return (p.height - 1) * p.stride_y + (p.filter_y - 1) * p.dilation_y + 1

    @property
    def columns(self) -> int:
        p = self.facts
        return (p.width - 1) * p.stride_x + (p.filter_x - 1) * p.dilation_x + 1


def direct_form(problem: Problem) -> DirectForm:
    """The form of a convolution of a stored input with constant filters. Raises Unsuitable, with the reason, for other regions."""
    axes = convolution_axes(problem)
    product = product_form(problem, axes.order, axes.apart)
    return form_of(product, axes)


def convolution_axes(problem: Problem) -> ConvolutionAxes:
    """The roles of the axes. A dimension of the input slides if its index is linear in one output axis and one reduction axis.

    Among several reduction axes that do not slide, the one with the smallest stride is the channels; others are taps for an output with one row or
    column."""
    region = problem.region
    found = anchor(region.steps, problem.constants)
    if found is None:
        raise Unsuitable(f"the sum of region {region.name} is not a sum of products")
    guarded = guarded_load(found.a)
    offset = flatten(found.a, problem.layouts)
    if guarded is None or not isinstance(offset, Load) or found.b.buffer not in problem.constants:
        raise Unsuitable(f"region {region.name} does not slide constant filters over a stored input with its padding")
    outputs, taps = set(found.m), set(found.r)
    sliding: list[Sliding] = []
    for position in guarded[1].index:
        known = [atom for atom, _ in linear(position).terms if isinstance(atom, Var)]
        reduced = [axis for axis in known if axis in taps]
        slid = [axis for axis in known if axis in outputs]
        if reduced and slid:
            if len(reduced) > 1 or len(slid) > 1:
                raise Unsuitable(f"an index of region {region.name} mixes more than one axis of the output with one that is reduced")
            sliding.append(Sliding(slid[0], reduced[0]))
    used = [axis for one in sliding for axis in (one.output, one.tap)]
    if len(used) != len(set(used)):
        raise Unsuitable(f"an axis of region {region.name} slides along two dimensions")
    still = sorted((axis for axis in found.r if axis not in used), key=lambda axis: abs(coefficient(offset.index[0], axis) or 0))
    channels, lone = tuple(still[:1]), still[1:]
    if len(sliding) + len(lone) > 2:
        raise Unsuitable(f"region {region.name} slides along more than two dimensions")
    sliding += [Sliding(None, axis) for axis in lone]
    ordered = sorted(sliding, key=lambda one: -abs(coefficient(offset.index[0], one.tap) or 0) if one.tap else 0)
    return ConvolutionAxes(tuple(ordered), channels)


def _extent(axis: Var) -> int:
    return axis.extent or 1


def form_of(product: ProductForm, axes: ConvolutionAxes) -> DirectForm:
    """The convolution of a product form whose reduction axes are in the order of `axes`. Raises Unsuitable if an access has another form."""
    if product.row_stages:
        raise Unsuitable("rows of channels are reduced behind the sum")
    if not isinstance(product.a, Load) or len(product.a.index) != 1:
        raise Unsuitable("the input is computed, or guarded, while it is read")
    if not product.storage or len(product.n) != 1 or product.facts.b.along != "own":
        raise Unsuitable("the filters are not a constant that can be packed with output channels innermost")
    offset = product.a.index[0]
    dimensions, rest = _dimensions(product, axes, offset)
    (y, filter_y), (x, filter_x) = dimensions
    others = [axis for axis in product.r if axis not in (filter_y, filter_x)]
    if len(others) > 1:
        raise Unsuitable("the channels are not one axis of the stored input")
    channel = others[0] if others else Var("channel", 1)
    row_pitch, stride_y, dilation_y = _pitch(offset, y, filter_y)
    column_pitch, stride_x, dilation_x = _pitch(offset, x, filter_x)
    channel_pitch = coefficient(offset, channel)
    if channel_pitch is None or channel_pitch < 0:
        raise Unsuitable("the input's offset is not linear in its channels")
    zero = {axis: index_const(0) for axis in (y, x, filter_y, filter_x, channel)}
    facts = DirectFacts(
        images=extent_of(rest),
        groups=product.facts.batch,
        outputs=product.facts.n,
        channels=_extent(channel),
        height=_extent(y),
        width=_extent(x),
        filter_y=_extent(filter_y),
        filter_x=_extent(filter_x),
        stride_y=stride_y,
        stride_x=stride_x,
        dilation_y=dilation_y,
        dilation_x=dilation_x,
        input_vector=widest(product.a, channel, product.layouts) if channel_pitch == 1 else 1,
        filter_vector=product.facts.b.vector_width,
        store_vector=product.facts.store_vector,
        bytes_read=product.facts.a.bytes,
        filter_bytes=product.facts.b.bytes,
        bytes_written=product.facts.bytes_written,
        epilogue_bytes=product.facts.epilogue_bytes,
        epilogue_flops=product.facts.epilogue_flops,
        element_bytes=product.facts.element_bytes,
        stored_bytes=product.facts.a.element_bytes,
    )
    base = substitute(offset, zero)
    return DirectForm(product, axes, rest, y, x, filter_y, filter_x, channel, product.a.buffer, base, channel_pitch, row_pitch, column_pitch, facts)


def _dimensions(product: ProductForm, axes: ConvolutionAxes, offset: Expr) -> tuple[list[tuple[Var, Var]], tuple[Var, ...]]:
    """(output axis, filter axis) of rows and of columns, and the output axes that enumerate images."""
    free = [axis for axis in product.m if axis not in axes.apart]
    pairs = [(one.output, one.tap) for one in axes.sliding]
    if len(pairs) < 2 and free:
        # a dimension with a single filter tap is rows or columns; the larger stride is rows
        other = free.pop()
        own = pairs[0][0] if pairs else None
        inner = own is not None and abs(coefficient(offset, other) or 0) < abs(coefficient(offset, own) or 0)
        pairs = [*pairs, (other, None)] if inner or not pairs else [(other, None), *pairs]
    if len(pairs) < 2 and free:
        pairs = [(free.pop(), None), *pairs]
    pairs = [(None, None)] * (2 - len(pairs)) + pairs
    named = ("y", "x")
    return [(output or Var(f"output_{name}", 1), tap or Var(f"filter_{name}", 1)) for (output, tap), name in zip(pairs, named, strict=True)], tuple(
        free
    )


def _pitch(offset: Expr, output: Var, tap: Var) -> tuple[int, int, int]:
    """(pitch, stride, dilation): the coefficients of the two axes, where they occur, are pitch * stride and pitch * dilation."""
    moved, slid = (coefficient(offset, axis) if axis.extent != 1 else 0 for axis in (output, tap))
    if moved is None or slid is None or (moved <= 0 and output.extent != 1) or (slid <= 0 and tap.extent != 1):
        raise Unsuitable("the input's offset does not grow with the axes that slide over it")
    pitch = gcd(moved, slid) or 1
    return pitch, max(1, moved // pitch), max(1, slid // pitch)
