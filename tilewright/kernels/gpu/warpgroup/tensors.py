"""Factors of a product as tensors that the copy engine reads: matrices, or columns of pixels of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from tilewright.codegen.common import decode, guarded_load
from tilewright.codegen.operand import operand_view
from tilewright.graph.contraction import Contraction
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import TRUE, Apply, Expr, Load, Var, constants, index_const, linear
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import AS_THEY_ARE, F16_PAIR, F16_SCALE, NUMBERS, TF32, Storage, Unsuitable
from tilewright.ir.tensor_map import MOST_FILTER, PIECE_BYTES, TensorMap


@dataclass(frozen=True)
class Rows:
    """A matrix [batch, row, tap, channel] with dense channels; the other strides in elements. Its rows are those of the product, and its reduction
    runs over taps, and channels within them. An element may be the sum of `parts` numbers: there are as many such matrices, one behind the other."""

    buffer: str
    dtype: str
    extents: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int
    parts: int = 1

    def map(self, name: str, rows: int, row_bytes: int) -> TensorMap:
        """Boxes of `rows` rows of so many bytes at one tap."""
        extents: tuple[int, ...] = self.extents[::-1]
        strides: tuple[int, ...] = self.strides[::-1]
        box: tuple[int, ...] = (row_bytes // size_of(self.dtype), 1, rows, 1)
        if self.parts > 1:
            extents, strides, box = (*extents, self.parts), (*strides, self.extents[0] * self.strides[0]), (*box, 1)
        return TensorMap(name, self.buffer, self.dtype, extents, strides, box, row_bytes, self.offset)

    def at(self, batch: Expr, row: Expr, tap: Expr, channel: Expr, part: int = 0) -> tuple[list[Expr], list[Expr]]:
        """Coordinates of a box."""
        return [channel, tap, row, batch, *([index_const(part)] if self.parts > 1 else [])], []


@dataclass(frozen=True)
class Slide:
    """A spatial dimension of an image: element output * stride + tap * dilation + first, at output positions and taps below these counts. `axis`: the
    output's, None if it has a single position."""

    axis: Var | None
    outputs: int
    taps: int
    stride: int
    dilation: int
    first: int


@dataclass(frozen=True)
class Pixels:
    """Images [image, spatial dimensions..., channel] with dense channels, over which a filter slides; a row of the product is an image and an output
    position. `taps`: places of the spatial dimensions in the order of the filter's taps. `groups`: equal parts of the channels, each of which belongs
    to one product of a batch."""

    parts: ClassVar[int] = 1
    buffer: str
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    slides: tuple[Slide, ...]
    taps: tuple[int, ...]
    groups: int = 1

    def map(self, name: str, rows: int, row_bytes: int) -> TensorMap:
        """Columns of `rows` pixels with so many bytes of channels."""
        inner = self.slides[::-1]
        # the last output position begins at the last pixel that a column may begin with
        corners = tuple(
            (one.first, one.first + (one.outputs - 1) * one.stride + 1 - extent) for one, extent in zip(inner, self.extents[-2:0:-1], strict=True)
        )
        steps = tuple(one.stride for one in inner)
        box = (row_bytes // size_of(self.dtype), rows)
        return TensorMap(name, self.buffer, self.dtype, self.extents[::-1], self.strides[::-1], box, row_bytes, self.offset, corners, steps)

    def channel(self, batch: Expr, channel: Expr) -> Expr:
        """A channel of a product, among all channels."""
        return batch * (self.extents[-1] // self.groups) + channel if self.groups > 1 else channel

    def at(self, batch: Expr, row: Expr, tap: Expr, channel: Expr, part: int = 0) -> tuple[list[Expr], list[Expr]]:
        """Coordinates of the column that begins with a row, and the filter's offsets."""
        positions = [Var(f"position{i}", one.outputs) for i, one in enumerate(self.slides)]
        image = Var("image", self.extents[0])
        where = decode(row, (image, *positions))
        begins = [where.get(p, index_const(0)) * one.stride + one.first for p, one in zip(positions, self.slides, strict=True)]
        numbers = [Var(f"tap{i}", self.slides[i].taps) for i in self.taps]
        moved = decode(tap, tuple(numbers))
        filters: list[Expr] = [index_const(0)] * len(self.slides)
        for number, place in zip(numbers, self.taps, strict=True):
            filters[place] = moved.get(number, index_const(0)) * self.slides[place].dilation
        return [self.channel(batch, channel), *reversed(begins), where.get(image, index_const(0))], list(reversed(filters))


@dataclass(frozen=True)
class Factor:
    """The tensor, the axes of its taps in their order, and the axis of its channels."""

    tensor: Rows | Pixels
    taps: tuple[Var, ...]
    channel: Var


def factor(
    problem: Problem, expr: Expr, rows: Sequence[Var], batch: Sequence[Var], r: Sequence[Var], spatial: frozenset[Var] = frozenset()
) -> Factor:
    """A factor in memory, whose rows are the points of `rows` (in this order, axes of extent 1 left out). `spatial`: axes along which an image is
    one even if a filter of a single tap makes it a matrix.

    Raises:
        Unsuitable: if it is not a load with zeros outside of a tensor, or its elements are not where a tensor map can have them.
    """
    guarded = guarded_load(expr)
    if guarded is None:
        raise Unsuitable("a factor is computed while it is read")
    condition, load = guarded
    layout = problem.layouts[load.buffer]
    _require_bounds(condition, load, layout)
    strides = layout.dense_strides()
    if strides is None:
        raise Unsuitable("a factor is stored in blocks")
    dims = sorted((d for d in range(len(strides)) if layout.shape[d] != 1), key=lambda d: -strides[d])
    if not dims or strides[dims[-1]] != 1:
        raise Unsuitable("a factor's innermost dimension is not dense")
    terms = {d: {axis: number for axis, number in _terms(load.index[d]).items() if axis is None or axis.extent != 1} for d in dims}
    *outer, last = dims
    extents, pitches = dict(enumerate(layout.shape)), dict(enumerate(strides))
    channel = next((axis for axis, number in terms[last].items() if axis in r and number == 1), None)
    row = next((axis for axis in terms[last] if axis in rows), None)
    if channel is not None and row is not None and terms[last] == {row: terms[last][row], channel: 1, None: 0}:
        # windows of one row of memory: a dimension for their number, in which they may overlap
        count, pitch, number = row.extent or 1, terms[last][row], len(strides)
        if (count - 1) * pitch + (channel.extent or 1) > layout.shape[last]:
            raise Unsuitable("a factor's innermost dimension ends within a window")
        outer, extents[number], pitches[number] = [*outer, number], count, pitch
        terms[number], terms[last] = {row: 1, None: 0}, {channel: 1, None: 0}
    group = next((axis for axis in terms[last] if axis in batch), None)
    if channel is not None and group is not None and terms[last] == {group: channel.extent, channel: 1, None: 0}:
        number = len(strides)  # a dimension for the group
        outer, extents[number], pitches[number] = [number, *outer], group.extent or 1, channel.extent or 1
        terms[number], terms[last] = {group: 1, None: 0}, {channel: 1, None: 0}
    if channel is None or terms[last] != {channel: 1, None: 0}:
        raise Unsuitable("a factor's innermost dimension is not one that is reduced")
    dtype, used = problem.dtypes[load.buffer], {axis for one in terms.values() for axis in one}
    start = constants([layout.offset([index_const(0)] * len(layout.shape))])[0]
    if not {*rows, *batch} <= used:
        raise Unsuitable("a factor is the same for several of its rows")
    axes = [_lone(terms[d], extents[d]) for d in outer]
    count = len(batch)
    images, height = (_collapsed([(extents[d], pitches[d]) for d in part]) for part in (outer[:count], outer[count:]))
    if axes == [*batch, *rows] and not spatial and images is not None and height is not None:
        shape, apart = (images[0], height[0], 1, channel.extent or 1), (images[1], height[1], PIECE_BYTES, 1)
        return Factor(Rows(load.buffer, dtype, shape, apart, start), (), channel)
    groups = 1
    if batch:
        if group is None or len(batch) > 1:
            raise Unsuitable("a factor of several products is not a matrix in memory")
        groups, outer = group.extent or 1, outer[1:]
    return _pixels(load.buffer, dtype, [(extents[d], pitches[d], terms[d]) for d in outer], rows, r, channel, groups, start, spatial)


def _pixels(
    buffer: str,
    dtype: str,
    dims: Sequence[tuple[int, int, Mapping[Var | None, int]]],
    rows: Sequence[Var],
    r: Sequence[Var],
    channel: Var,
    groups: int,
    start: int,
    spatial: frozenset[Var],
) -> Factor:
    """The columns of a convolution, given extent, stride and terms of each dimension but the channels, outermost first. `groups`: of channels;
    `spatial`: axes that are no images."""
    images = [(extent, stride) for extent, stride, terms in dims[:1] if _lone(terms, extent) in {*rows[:1]} - spatial]
    inner = dims[len(images) :]
    slides, taps = [], []
    for _, _, terms in inner:
        own, slid = ([axis for axis in terms if axis is not None and axis in some] for some in (rows, r))
        mixed = len(own) > 1 or len(slid) > 1 or len(terms) != 1 + len(own) + len(slid)
        if mixed or any(number <= 0 for axis, number in terms.items() if axis is not None):
            raise Unsuitable("an index of a factor mixes axes otherwise than a filter that slides")
        axis, tap = next(iter(own), None), next(iter(slid), None)
        counts = [1 if one is None else one.extent or 1 for one in (axis, tap)]
        slides.append(Slide(axis, counts[0], counts[1], terms.get(axis, 1) if axis else 1, terms.get(tap, 1) if tap else 1, terms[None]))
        taps.append(tap)
    reduced = [axis for axis in r if axis != channel]
    order = [*([rows[0]] if images else []), *(one.axis for one in slides if one.axis is not None)]
    if order != list(rows) or {*reduced} != {tap for tap in taps if tap is not None}:
        raise Unsuitable("rows of the product are no pixels in the order of memory")
    if not 1 <= len(slides) <= 3:
        raise Unsuitable(f"a filter slides along {len(slides)} dimensions")
    if any((one.taps - 1) * one.dilation >= MOST_FILTER[len(slides)] for one in slides):
        raise Unsuitable(f"a filter reaches further than {MOST_FILTER[len(slides)] - 1} pixels")
    around = images or [(1, PIECE_BYTES)]
    extents = (around[0][0], *(extent for extent, _, _ in inner), groups * (channel.extent or 1))
    strides = (around[0][1], *(stride for _, stride, _ in inner), 1)
    tensor = Pixels(buffer, dtype, extents, strides, start, tuple(slides), tuple(taps.index(axis) for axis in reduced), groups)
    return Factor(tensor, tuple(reduced), channel)


def packed(problem: Problem, found: Contraction, rows: Sequence[Var], batch: Sequence[Var], like: Factor) -> tuple[Rows, dict[str, Storage]]:
    """Constant weights packed as [batch, row, tap, channel], channels padded to whole pieces; taps and channels are those of the other factor. Tensor
    cores cut float32 off to TF32, so that weights are rounded before.

    Raises:
        Unsuitable: if they cannot be packed so.
    """
    load = found.b
    value = problem.values[load.buffer]
    view = operand_view(load, value.shape, (*batch, *rows, *like.taps, like.channel))
    if view is None or {*like.taps, like.channel} != {axis for axis in found.r if axis.extent != 1}:
        raise Unsuitable("the filters are not a constant that can be packed with channels innermost")
    extents, name = view[0], f"{load.buffer}@{problem.region.name}"
    batches, count, taps = (prod(axis.extent or 1 for axis in axes) for axes in (batch, rows, like.taps))
    whole = (batches, count, taps, extents[-1])
    tensor, layout = Rows(name, value.dtype, whole, _strides(whole, value.dtype), 0), _in_pieces(extents, range(len(extents)), value.dtype)
    numbers = TF32 if value.dtype == FLOAT32 else AS_THEY_ARE
    return tensor, {name: Storage(Value(name, extents, value.dtype), layout, load.buffer, view, numbers=numbers)}


def in_pairs(tensor: Rows, storage: Storage, numbers: str) -> tuple[Rows, dict[str, Storage]]:
    """A packed float32 constant whose elements are pairs of TF32 or of float16, their parts one behind the other; of float16 also the unit."""
    dtype, parts = "f16" if numbers == F16_PAIR else FLOAT32, NUMBERS[numbers]
    value = Value(tensor.buffer, (parts, *storage.value.shape), dtype)
    layout = _in_pieces(value.shape, [0, *(dim + 1 for dim, factor in storage.layout.order if not factor)], dtype)
    made = replace(tensor, dtype=dtype, strides=_strides(tensor.extents, dtype), parts=parts)
    packed = {tensor.buffer: replace(storage, value=value, layout=layout, numbers=numbers)}
    if numbers == F16_PAIR:
        unit = unit_of(tensor.buffer)
        packed[unit] = replace(storage, value=Value(unit, (1,), FLOAT32), layout=row_major((1,)), numbers=F16_SCALE)
    return made, packed


def _in_pieces(shape: tuple[int, ...], order: Sequence[int], dtype: str) -> Layout:
    """Dimensions in an order, outermost first, of which the last is padded to whole pieces."""
    last, lanes = order[-1], PIECE_BYTES // size_of(dtype)
    return Layout(shape, (*((dim, 0) for dim in order), *([(last, lanes)] if shape[last] % lanes else [])))


def _strides(extents: tuple[int, int, int, int], dtype: str) -> tuple[int, int, int, int]:
    """Of [batch, row, tap, channel] with channels so padded, in elements."""
    _, rows, taps, channels = extents
    lanes = PIECE_BYTES // size_of(dtype)
    pitch = -(-channels // lanes) * lanes
    return rows * taps * pitch, taps * pitch, pitch, 1


def unit_of(weights: str) -> str:
    """The buffer with the unit of products with weights that are pairs of float16."""
    return f"{weights}@unit"


def _terms(index: Expr) -> dict[Var | None, int]:
    """Coefficients of the axes, and the constant under None."""
    form = linear(index)
    if any(not isinstance(atom, Var) for atom, _ in form.terms):
        raise Unsuitable("an index of a factor is not linear")
    return {**{atom: number for atom, number in form.terms if isinstance(atom, Var)}, None: form.constant}


def _lone(terms: Mapping[Var | None, int], extent: int) -> Var | None:
    """The axis that is the index, if that is all and it covers the dimension."""
    axes = [axis for axis in terms if axis is not None]
    return axes[0] if len(axes) == 1 and terms[axes[0]] == 1 and terms[None] == 0 and axes[0].extent == extent else None


def _collapsed(dims: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(extent, stride) of dimensions (outermost first) as one, if they are at one distance."""
    if any(outer != extent * inner for (_, outer), (extent, inner) in zip(dims, dims[1:], strict=False)):
        return None
    return prod(extent for extent, _ in dims), dims[-1][1] if dims else PIECE_BYTES


def _require_bounds(condition: Expr, load: Load, layout: Layout) -> None:
    """Raises Unsuitable unless the condition says no more than that the load is inside of its tensor."""
    waiting = [condition] if condition != TRUE else []
    while waiting:
        one = waiting.pop()
        if isinstance(one, Apply) and one.operation == "and":
            waiting += one.args
            continue
        sides = one.args if isinstance(one, Apply) else ()
        inside = len(sides) == 2 and any(
            sides[0] == position and one.operation == operation and sides[1] == index_const(limit)  # type: ignore[union-attr]
            for position, extent in zip(load.index, layout.shape, strict=True)
            for operation, limit in (("ge", 0), ("lt", extent))
        )
        if not inside:
            raise Unsuitable("a factor is zero elsewhere than outside of a tensor")
