"""Float32 values that products may read as TF32 are rounded to the nearest TF32 where they are stored.

`wgmma` cuts float32 factors off, towards zero, so that every product is 0.035 % too small in the mean: the errors of successive layers add up instead
of averaging out. Constant factors are rounded when they are packed (`Storage.numbers`); other factors are in memory that the copy engine reads, so
that the region which stores them rounds them. All its readers see the rounded value, as if it were of a type of 19 bits: if each product rounded for
itself, a residual connection would add what the product did not read.

    out[i] = body       ->  out[i] = nearest_tf32(body)
    out[i] = sum(...)   ->  sum[i] = sum(...), out[i] = nearest_tf32(sum[i])

Exact stay results of the model and what is stored in their memory, and what PyTorch nodes and loops read or write. Values that are rounded already
(copies and maxima of rounded values) are not rounded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tilewright.codegen.common import guarded_load
from tilewright.graph.contraction import anchor
from tilewright.graph.windows import pooling_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32, nearest_tf32
from tilewright.ir.expr import Apply, Const, Expr, Load, unary, variables
from tilewright.ir.graph import Graph
from tilewright.ir.region import Region
from tilewright.ir.scalar import NEAREST_TF32
from tilewright.partition.concatenation import Slice
from tilewright.partition.layouts import LaidOut, fixed_values, in_graph

EXACT = ".exact"
"""Suffix of the reductions whose results a region rounds."""
_CHOOSING = {"max": (0, 1), "min": (0, 1), "select": (1, 2)}
"""Operations whose result is one of these operands."""


def with_nearest_factors(graph: Graph, laid_out: LaidOut) -> LaidOut:
    """The partition with the regions that store factors rounding them."""
    constants = frozenset(graph.constants)
    factors = _Places.of(laid_out, (name for region in laid_out.regions for name in _factors(region, laid_out, constants)))
    exact = _Places.of(laid_out, fixed_values(graph, laid_out.regions))
    nearest: set[str] = set()
    regions: list[Region] = []
    for region in laid_out.regions:
        name, last = region.outputs[0], region.steps[-1] if region.steps else None
        if last is not None and last.dtypes == (FLOAT32,) and laid_out.values[name].dtype == FLOAT32:
            known = _is_nearest(region.steps, nearest)
            if not known and last.scan is None and factors.meet(name) and not exact.meet(in_graph(name)):
                region, known = _rounding(region), True
            nearest |= {name} if known else set()
        regions.append(region)
    return replace(laid_out, regions=tuple(regions))


def _factors(region: Region, laid_out: LaidOut, constants: frozenset[str]) -> Iterator[str]:
    """The values that the region may multiply by `wgmma`: float32 factors that are not computed while they are read. None of a region that has a
    single row, which CUDA cores multiply, that reduces rows, or that is a depthwise convolution, whose sums are over taps alone, for each channel."""
    found = anchor(region.steps, constants) if region.kind == "contraction" else None
    if found is None or found.size_m == 1 or (any(step.reduction for step in region.steps[1:]) and pooling_of(region.steps) is None):
        return
    read = [guarded[1] for factor in (found.a, found.b) if (guarded := guarded_load(factor)) is not None]
    if len(read) < 2 or any(laid_out.values[load.buffer].dtype != FLOAT32 for load in read):
        return
    used = [variables(position) for position in read[0].index]
    if not found.batch or any(not axes.isdisjoint(found.r) and axes.isdisjoint(found.m) for axes in used):
        yield from {load.buffer for load in read} - constants


Box = tuple[tuple[int, int], ...]
"""First position and end along each dimension of a buffer."""


@dataclass(frozen=True)
class _Places:
    """Where some values are stored, by the buffer."""

    laid_out: LaidOut
    boxes: dict[str, list[Box]]

    @staticmethod
    def of(laid_out: LaidOut, names: Iterable[str]) -> _Places:
        places = _Places(laid_out, {})
        for name in names:
            buffer, box = places._box(name)
            places.boxes.setdefault(buffer, []).append(box)
        return places

    def _box(self, name: str) -> tuple[str, Box]:
        shape = self.laid_out.values[name].shape
        place = self.laid_out.slices.get(name) or Slice(name, (0,) * len(shape))
        return place.buffer, tuple((start, start + extent) for start, extent in zip(place.start, shape, strict=True))

    def meet(self, name: str) -> bool:
        """Whether some of the values have elements of this one."""
        buffer, box = self._box(name)
        return any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)) for other in self.boxes.get(buffer, ())
        )  # fmt: skip


def _is_nearest(steps: Iterable[Step], nearest: set[str]) -> bool:
    """Whether the last result has no more bits than TF32, given the values that have not."""
    known = set(nearest)
    for step in steps:
        if step.combiner in (None, "max", "min") and all(_is_chosen(body, known) for body in step.bodies):
            known.add(step.name)
    return step.name in known


def _is_chosen(root: Expr, nearest: set[str]) -> bool:
    """Whether the element is one of rounded elements and constants."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        if isinstance(node, Apply) and node.operation in _CHOOSING:
            chosen = [node.args[at] for at in _CHOOSING[node.operation] if id(node.args[at]) not in seen]
            seen.update(map(id, chosen))
            waiting += chosen
        elif isinstance(node, Const):
            value = np.array(node.value, np.float32)
            if nearest_tf32(value) != value:
                return False
        elif not isinstance(node, Load) or node.buffer not in nearest:
            return False
    return True


def _rounding(region: Region) -> Region:
    """The region, whose last step rounds."""
    *steps, last = region.steps
    if last.kind == "map":
        final = replace(last, bodies=(unary(NEAREST_TF32, last.bodies[0]),))
    else:
        steps.append(inner := replace(last, name=last.name + EXACT))
        rounded = unary(NEAREST_TF32, Load(inner.name, last.axes, FLOAT32))
        final = Step(last.name, last.shape, last.axes, (rounded,), index=last.index)
    reasons = (*region.reasons, f"{last.name} is stored as the nearest TF32, since tensor cores cut off factors that they multiply")
    return replace(region, steps=(*steps, final), reasons=reasons)
