"""Concatenations in place: producers store their results as slices of the concatenation's buffer, and nothing is copied.

A concatenation is a map that selects by its position along one axis: [0, a) from one source, [a, b) from another, and so on. If a source is stored by
a region of its own, that region stores it straight into its slice of the concatenation's buffer (`Layout.part`), where other readers find it too.
Concatenations nest, and one whose sources are adjacent in another's buffer is a slice of that buffer: a dense block has one buffer, whose prefixes
are the earlier concatenations. The buffer of a concatenation that is a result of the model is row-major and may not have a halo; values that nothing
else reads are stored in that order. Sources for which this is impossible, or slower, are still copied, a run of neighbours at a time; the region that
copies them says why.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import gcd, prod

from tilewright.ir.computation import Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Const, Expr, Load, Var, linear, loads, substitute
from tilewright.ir.graph import Node, Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region
from tilewright.partition.pieces import pieces

VECTOR = 4
"""Elements of the widest vectors that GPU kernels load and store. CPU kernels load vectors from any address."""
SECTOR_BYTES = 32
"""Bytes below which rows that are stored apart cost more than a copy: memory is written in sectors, each of which would be written several times."""


@dataclass(frozen=True)
class Slice:
    """The place of a value inside a larger buffer: `start` is the position of its first element."""

    buffer: str
    start: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """The part [start, end) of a concatenation. source: the value that it is, element for element; empty if it is computed or a part of a value."""

    start: int
    end: int
    source: str


@dataclass(frozen=True)
class Concatenation:
    """A region that is a concatenation along dimension `dim`."""

    region: Region
    dim: int
    parts: tuple[_Part, ...]

    @property
    def name(self) -> str:
        return self.region.outputs[0]

    def place(self, part: _Part, slices: Mapping[str, Slice]) -> Slice:
        """The slice that the part is, in the buffer of which the concatenation is a slice, or in its own."""
        here = slices.get(self.name) or Slice(self.name, (0,) * len(self.region.steps[0].shape))
        return _moved(here, self.dim, part.start)

    def holds(self, part: _Part, slices: Mapping[str, Slice]) -> bool:
        """Whether the part's source is stored in place."""
        return bool(part.source) and slices.get(part.source) == self.place(part, slices)


def _parts(step: Step, values: Mapping[str, Value]) -> tuple[int, tuple[_Part, ...]] | None:
    """The dimension and the parts of a concatenation; None for any other step."""
    found = pieces(step)
    if found is None:
        return None
    dim, each = found
    return dim, tuple(_Part(start, end, _source(step, dim, start, end, body, values)) for start, end, body in each)


def _source(step: Step, dim: int, start: int, end: int, body: Expr, values: Mapping[str, Value]) -> str:
    """The value that the part of the body between `start` and `end` is; empty if there is none."""
    if not isinstance(body, Load) or len(body.index) != len(step.axes):
        return ""
    for at, (position, axis) in enumerate(zip(body.index, step.axes, strict=True)):
        if linear(position) != linear(axis - start if at == dim else axis) and not (axis.extent == 1 and position == Const(0, axis.dtype)):
            return ""
    shape = tuple(end - start if at == dim else axis.extent for at, axis in enumerate(step.axes))
    return body.buffer if values[body.buffer].shape == shape else ""


@dataclass(frozen=True)
class _Placing:
    """What decides where values are stored: why the storage of `fixed` values cannot be chosen, those of them that are `row_major` buffers of
    concatenations, which values regions other than concatenations read (`elsewhere`), and which are stored by `maps`."""

    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    fixed: Mapping[str, str]
    row_major: frozenset[str]
    elsewhere: frozenset[str]
    maps: frozenset[str]

    def refusal(self, name: str, place: Slice) -> str:
        """Why a value cannot be stored as that slice, or would cost more than a copy; empty if there is no reason."""
        if name in self.fixed:
            return self.fixed[name]
        shape, own, whole = self.values[name].shape, self.layouts[name], self.layouts[place.buffer]
        if self.values[name].dtype != self.values[place.buffer].dtype:
            return f"{name} is stored as {self.values[name].dtype}, {place.buffer} as {self.values[place.buffer].dtype}"
        given = place.buffer in self.row_major
        movable = name not in self.elsewhere and (given or name in self.maps)  # maps store in any order, everything else as if it were the result
        if own.order != whole.order and not movable:
            return f"{name} is stored as {Layout(own.shape, own.order)}, {place.buffer} as {Layout(whole.shape, whole.order)}"
        if given and any(map(any, own.halo)):
            return f"{name} needs a zeroed halo, and {place.buffer} is a result"
        if any(any(halo) and extent != whole.shape[at] for at, (halo, extent) in enumerate(zip(own.halo, shape, strict=True))):
            return f"{name} needs a zeroed halo where its neighbours are"
        slice_ = whole.with_halo(()).part(shape, place.start)
        row = _row_bytes(slice_, self.values[name])
        if row < min(SECTOR_BYTES, self.values[name].bytes):
            return f"its rows of {row} B are shorter than a sector of memory"
        if name in self.elsewhere and _vector(slice_) < _vector(own.with_halo(())):
            return f"{name} is also read elsewhere, and vectors of {_vector(own.with_halo(()))} elements are not aligned in {place.buffer}"
        return ""


def _vector(layout: Layout) -> int:
    """Elements of the widest aligned vectors along the innermost dimension, at most VECTOR."""
    strides = [stride for (dim, _), stride in zip(layout.order[:-1], layout.strides, strict=False) if layout.shape[dim] > 1]
    return gcd(VECTOR, layout.start(), layout.shape[layout.order[-1][0]], *strides)


def _row_bytes(layout: Layout, value: Value) -> int:
    """Bytes of the value that are adjacent in the buffer."""
    run = 1
    for (dim, _), stride in zip(reversed(layout.order), reversed(layout.strides), strict=True):
        if value.shape[dim] > 1 and stride != run:
            break
        run *= value.shape[dim]
    return run * size_of(value.dtype)


def concatenations(regions: Sequence[Region], values: Mapping[str, Value]) -> dict[str, Concatenation]:
    """The regions that are concatenations, by the names of their results, in order."""
    found: dict[str, Concatenation] = {}
    for region in regions:
        parts = _parts(region.steps[0], values) if region.kind == "map" and len(region.steps) == 1 else None
        if parts is not None:
            found[region.outputs[0]] = Concatenation(region, *parts)
    return found


def order_of(one: Concatenation, layouts: Mapping[str, Layout], fixed: Container[str]) -> tuple[tuple[int, int], ...] | None:
    """The order of dimensions in which most elements of its parts are stored, apart from parts that are copied in any case; None without others."""
    elements: dict[tuple[tuple[int, int], ...], int] = {}
    for part in one.parts:
        if part.source and part.source not in fixed:
            layout = layouts[part.source]
            elements[layout.order] = elements.get(layout.order, 0) + prod(layout.shape)
    return max(elements, key=lambda order: elements[order], default=None)


def in_place(
    regions: Sequence[Region],
    joined: Mapping[str, Concatenation],
    values: dict[str, Value],
    layouts: dict[str, Layout],
    fixed: Mapping[str, str],
    row_major: frozenset[str],
) -> tuple[list[Region], dict[str, Slice]]:
    """The regions without copies that slices make unnecessary, and the slices. `values` and `layouts` are extended by the parts that are still
    copied; the layouts of buffers get the halos that their slices need. Layouts of slices are left to `with_slices`. `fixed` says why the storage of
    some values cannot be chosen; those of them in `row_major` are in buffers that may hold slices, as row-major as they are."""
    free = {name: one for name, one in joined.items() if name not in fixed or name in row_major}
    elsewhere = frozenset(name for region in regions if region.outputs[0] not in free for name in region.inputs)
    maps = frozenset(region.outputs[0] for region in regions if region.kind == "map")
    placing = _Placing(values, layouts, fixed, row_major, elsewhere, maps)
    order = {name: number for number, name in enumerate(joined)}
    slices: dict[str, Slice] = {}
    why = {(name, part.start): fixed[name] for name, one in joined.items() if name not in free for part in one.parts}
    for one in sorted(free.values(), key=lambda j: (values[j.name].elements, order[j.name]), reverse=True):
        if one.name not in slices and (whole := _adjacent(one, slices, placing)) is not None:
            slices[one.name] = whole
            continue
        for part in one.parts:
            place = one.place(part, slices)
            if not part.source or slices.get(part.source) == place:
                continue
            taken = slices.get(part.source)
            reason = f"{part.source} is already stored in {taken.buffer}" if taken is not None else placing.refusal(part.source, place)
            if reason:
                why[one.name, part.start] = reason
            else:
                slices[part.source] = place
    for name, place in slices.items():
        layouts[place.buffer] = layouts[place.buffer].with_halo(
            [
                (max(a, c), max(b, d)) if values[name].shape[dim] == values[place.buffer].shape[dim] else (a, b)
                for dim, ((a, b), (c, d)) in enumerate(zip(layouts[place.buffer].halo, layouts[name].halo, strict=True))
            ]
        )
    return _without_copies(regions, joined, slices, why, values, layouts), slices


def _moved(place: Slice, dim: int, distance: int) -> Slice:
    return replace(place, start=tuple(first + distance * (at == dim) for at, first in enumerate(place.start)))


def _adjacent(one: Concatenation, slices: Mapping[str, Slice], placing: _Placing) -> Slice | None:
    """The slice that the whole concatenation is if all of its sources are already stored next to each other."""
    first = slices.get(one.parts[0].source)
    if first is None or any(slices.get(part.source) != _moved(first, one.dim, part.start) for part in one.parts):
        return None
    return None if placing.refusal(one.name, first) else first


def _without_copies(
    regions: Sequence[Region],
    joined: Mapping[str, Concatenation],
    slices: dict[str, Slice],
    why: Mapping[tuple[str, int], str],
    values: dict[str, Value],
    layouts: dict[str, Layout],
) -> list[Region]:
    """The regions, with each concatenation of which a part is in place reduced to its other parts. One without other parts has no region: the region
    that stores the last of its parts lists its nodes."""
    notes: dict[str, list[str]] = {}
    nodes: dict[str, tuple[Node, ...]] = {}
    last: dict[str, str] = {}
    stored_at = {name: number for number, region in enumerate(regions) for name in region.outputs}
    for one in joined.values():
        for part in one.parts:
            if one.holds(part, slices):
                notes.setdefault(part.source, []).append(f"stored in place, as {part.start} to {part.end} of {one.name}")
        if all(one.holds(part, slices) for part in one.parts):
            name = max((last.get(part.source, part.source) for part in one.parts), key=lambda name: stored_at[name])
            last[one.name] = name
            nodes[name] = (*nodes.get(name, ()), *one.region.nodes)
    result: list[Region] = []
    for region in regions:
        name = region.outputs[0]
        stored = [region]
        if name in last:
            continue
        if name in joined:
            one = joined[name]
            runs = [(held, list(run)) for held, run in groupby(one.parts, partial(one.holds, slices=slices))]
            reasons = [tuple(dict.fromkeys(why[name, part.start] for part in run if (name, part.start) in why)) for _, run in runs]
            if any(held for held, _ in runs):
                stored = [_copied(one, run, said, values) for (held, run), said in zip(runs, reasons, strict=True) if not held]
                for copy, (_, run) in zip(stored, ((held, run) for held, run in runs if not held), strict=True):
                    slices[copy.outputs[0]] = one.place(run[0], slices)
                    layouts[copy.outputs[0]] = Layout(values[copy.outputs[0]].shape, layouts[slices[copy.outputs[0]].buffer].order)
            else:
                stored = [replace(region, reasons=(*region.reasons, *chain.from_iterable(reasons)))]
        stored[-1] = replace(
            stored[-1],
            nodes=(*stored[-1].nodes, *(node for node in nodes.get(name, ()) if node not in stored[-1].nodes)),
            reasons=(*stored[-1].reasons, *notes.get(name, ())),
        )
        result += stored
    return result


def _copied(one: Concatenation, run: Sequence[_Part], why: tuple[str, ...], values: dict[str, Value]) -> Region:
    """The region that stores adjacent parts of a concatenation, as a value of its own."""
    step, start, end = one.region.steps[0], run[0].start, run[-1].end
    name, axis = f"{one.name}.{start}", step.axes[one.dim]
    own = Var(axis.name, end - start)
    axes = (*step.axes[: one.dim], own, *step.axes[one.dim + 1 :])
    shape = tuple(each.extent or 0 for each in axes)
    body = substitute(step.bodies[0], {axis: own + start})
    values[name] = Value(name, shape, values[one.name].dtype)
    inputs = tuple(dict.fromkeys(load.buffer for load in loads(body)))
    said = f"stores {start} to {end} of {one.name}, whose other parts are stored in place"
    steps = (Step(name, shape, axes, (body,)),)
    return replace(one.region, name=name, steps=steps, inputs=inputs, outputs=(name,), reasons=(*one.region.reasons, said, *why))


def with_slices(layouts: Mapping[str, Layout], slices: Mapping[str, Slice]) -> dict[str, Layout]:
    """The layouts, with those of slices derived from their buffers'."""
    return {**layouts, **{name: layouts[place.buffer].part(layouts[name].shape, place.start) for name, place in slices.items()}}


def avoids_copies(step: Step, values: Mapping[str, Value], stored: Container[str]) -> bool:
    """Whether the map is a concatenation of different values that are all stored anyway, in rows that are not too short: then its own storage costs
    nothing."""
    found = _parts(step, values)
    if found is None:
        return False
    sources = [part.source for part in found[1]]
    least = min(part.end - part.start for part in found[1]) * size_of(step.dtypes[0])
    return len(set(sources)) == len(sources) and all(name in stored for name in sources) and least >= SECTOR_BYTES
