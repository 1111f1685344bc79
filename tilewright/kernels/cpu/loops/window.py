"""CPU windows: pooling and other small reductions, each output element reduced serially (depthwise convolutions: see `depthwise`).

    for each tile of pixels and block of channels:           (in parallel)
        acc[pixel][vector] = identity
        for taps:                                            (unrolled)
            acc[pixel][vector] = combine(acc, body)          (vectors of neighbouring channels)
        out = epilogue(acc)

A constant that is not contiguous along the channels (a depthwise filter) is packed so that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from tilewright.codegen.access import VECTOR_TYPES, bind_shared, flatten, merge_axes, storage_order, vectorise
from tilewright.codegen.assemble import block, single
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.dtypes import computed_in
from tilewright.ir.expr import TRUE, ZERO, Apply, Expr, Load, Var, as_lanes, coefficient, index_const, loads, rewrite, substitute, variables
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Statement, Store, substitute_in
from tilewright.ir.layout import permuted
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Storage
from tilewright.kernels.cpu.common import loops, nest, reduction, with_results
from tilewright.kernels.cpu.loops.space import LoopSchedule

UNROLLED_POINTS = 49
UNROLLED_COMPARISONS = 9
"""Maximum unrolled scalar comparisons: GCC 12 takes 0.3 s to compile a chain of 9 NaN-propagating maxima, 2 s for 16, 13 s for 49."""
VECTORS = (4, 2, 1)  # vectors of channels in a tile: the first that divides the channels
PIXELS = 7  # pixels in a tile if no tap is guarded: each tap of a filter is loaded once for all of them


def lower_window(problem: Problem, schedule: LoopSchedule) -> Lowered:
    """Each output element reduces its window serially; neighbouring channels fill the vector lanes."""
    offset = problem.layouts[problem.region.outputs[0]].offset(problem.region.steps[-1].index)
    lane = storage_order(problem.region.steps[0].axes, offset)[-1:]
    problem, storage = packed_along(problem, lane)
    region, layouts = problem.region, problem.layouts
    reduce, final = region.steps[0], region.steps[-1]
    bodies = [flatten(b, layouts) for b in reduce.bodies]
    result = flatten(final.bodies[0], layouts) if final is not reduce else None
    images = reduce.axes[0] if reduce.axes else None

    def may_merge(outer: Var, inner: Var) -> bool:
        return outer != images or (inner.extent or 0) < schedule.lanes  # code for channels should not depend on the number of images

    axes, merged = merge_axes(storage_order(reduce.axes, offset), [*bodies, offset, *([result] if result is not None else [])], may_merge)
    points = prod(axis.extent or 0 for axis in reduce.reduction)

    unrolled = points <= (UNROLLED_POINTS if reduce.combiner == "sum" else UNROLLED_COMPARISONS)
    accumulate, totals = reduction(reduce, list(merged[: len(bodies)]), "unroll" if unrolled else "serial")
    component = reduce.names.index(region.outputs[0]) if region.outputs[0] in reduce.names else 0
    value = totals[component] if result is None else with_results(merged[-1], reduce, totals)
    lets, (value, where) = bind_shared([value, merged[len(bodies)]])
    element = block(accumulate, lets, Store(region.outputs[0], where, value))
    tiles = _vector_tiles(region, reduce, axes, merged, points, schedule.lanes)
    lowered = single(problem, schedule, tiles or nest(axes, element, max(reduce.flops(), 1)))
    return replace(lowered, storage=MappingProxyType(storage))


def has_vectors(problem: Problem, lanes: int) -> bool:
    """Whether vectors along the innermost axis of the result can load the elements of windows, all under one guard."""
    region, layouts = problem.region, problem.layouts
    reduce, offset = region.steps[0], layouts[region.outputs[0]].offset(region.steps[-1].index)
    bodies = [flatten(body, layouts) for body in reduce.bodies]
    axes, (*bodies, offset) = merge_axes(storage_order(reduce.axes, offset), [*bodies, offset])
    if not axes or len(bodies) != 1 or (axes[-1].extent or 0) < lanes:
        return False
    if isinstance(bodies[0], Apply) and bodies[0].operation == "select" and axes[-1] in variables(bodies[0].args[0]):
        return False
    strides = [coefficient(load.index[0], axes[-1]) for load in loads(*bodies) if load.buffer not in problem.constants]
    return bodies[0].dtype in VECTOR_TYPES and all(stride in (0, 1) for stride in strides)


def packed_along(problem: Problem, lane: Sequence[Var]) -> tuple[Problem, dict[str, Storage]]:
    """The problem with constants that are strided along the lane axis replaced by copies with that dimension innermost, and 16-bit ones by copies in
    the type that kernels compute with; and the copies."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    storage: dict[str, Storage] = {}
    names: dict[str, str] = {}
    for load in loads(*region.steps[0].bodies):
        if load.buffer not in problem.constants or load.buffer in names or not lane:
            continue
        shape, dtype = values[load.buffer].shape, computed_in(values[load.buffer].dtype)
        inner = [dim for dim, position in enumerate(load.index) if lane[0] in variables(position)]
        if len(inner) != 1 or coefficient(layouts[load.buffer].offset(load.index), lane[0]) in (0, 1, None):
            if dtype == values[load.buffer].dtype:
                continue
            inner = []
        order = (*(dim for dim in range(len(shape)) if dim not in inner), *inner)
        names[load.buffer] = packed = f"{load.buffer}@{region.name}"
        value = replace(values[load.buffer], name=packed, dtype=dtype)
        storage[packed] = Storage(value, permuted(shape, order), load.buffer)

    def renamed(node: Expr) -> Expr:
        return replace(node, buffer=names[node.buffer]) if isinstance(node, Load) and node.buffer in names else node

    first = replace(region.steps[0], bodies=tuple(rewrite(body, renamed) for body in region.steps[0].bodies))
    return replace(problem, region=replace(region, steps=(first, *region.steps[1:]))).with_storage(storage), storage


@dataclass(frozen=True)
class _Tile:
    """Emits the tiles of a window. `guard` has one value for all lanes; `wide` and `value` are vectors along `lane`."""

    region: Region
    reduce: Step
    lane: Var
    pixel: Var | None
    guard: Expr
    wide: Expr
    value: Expr
    offset: Expr
    lanes: int
    vectors: int
    unrolled: bool

    def row(self, channel: Expr) -> Statement:
        """All pixels of a row, for the block of channels from `channel`."""
        if self.pixel is None:
            return self.emit(channel, ZERO, 1)
        across = self.pixel.extent or 0
        size = min(PIXELS, across)
        at = Var("tile", across // size)
        full = self.emit(channel, at * size, size)
        return block(
            For(at, index_const(across // size), full) if at.extent != 1 else substitute_in(full, {at: ZERO}),
            [self.emit(channel, index_const(across // size * size), across % size)] if across % size else [],
        )

    def emit(self, channel: Expr, start: Expr, pixels: int) -> Block:
        """The tile of `pixels` adjacent pixels from `start`, for the block of channels from `channel`."""
        combiner = COMBINERS[self.reduce.combiner or ""]
        (identity,) = combiner.identity((self.wide.dtype,))
        size = pixels * self.vectors
        k, j, v = Var("k", size), Var("j", pixels), Var("v", self.vectors)
        at = (j * self.vectors + v) * self.lanes
        held = Load("acc", (at,), self.wide.dtype, self.lanes)
        here: dict[Var, Expr] = {self.lane: channel + v * self.lanes}
        if self.pixel is not None:
            here[self.pixel] = start + j
        here |= {axis: ZERO for axis in self.reduce.reduction if axis.extent == 1}
        (combined,) = combiner.combine((held,), (substitute(self.wide, here),))
        tap: Statement = _over(Store("acc", at, combined), j, v)
        if self.guard != TRUE:
            tap = If(substitute(self.guard, here), tap)
        for axis in reversed([axis for axis in self.reduce.reduction if axis.extent != 1]):
            tap = For(axis, index_const(axis.extent or 0), tap, "unroll" if self.unrolled else "serial")
        result = rewrite(substitute(self.value, here), lambda n: held if isinstance(n, Load) and n.buffer == self.reduce.name else n)
        lets, (result, where) = bind_shared([as_lanes(result, self.lanes), substitute(self.offset, here)])
        zero = as_lanes(identity, self.lanes)
        return block(
            Allocate(Buffer("acc", self.wide.dtype, size * self.lanes, "register", self.lanes)),
            For(k, index_const(size), Store("acc", k * self.lanes, zero), "unroll"),
            tap,
            _over(block(lets, Store(self.region.outputs[0], where, result)), j, v),
        )


def _over(body: Statement, *axes: Var) -> Statement:
    for axis in reversed(axes):
        if axis.extent != 1:
            body = For(axis, index_const(axis.extent or 0), body, "unroll")
    return body


def _vector_tiles(region: Region, reduce: Step, axes: Sequence[Var], merged: Sequence[Expr], points: int, lanes: int) -> Statement | None:
    """The window with accumulators in vector registers over the innermost axis; None if that axis is short or an access cannot be vectorised.

    `merged` is (body, store offset, [value])."""
    if not axes or len(reduce.bodies) != 1:
        return None
    *outer, lane = axes
    body, offset = merged[0], merged[1]
    value: Expr = Load(reduce.name, tuple(reduce.axes), body.dtype) if len(merged) == 2 else merged[2]
    extent = lane.extent or 0
    if extent < lanes or body.dtype not in VECTOR_TYPES or coefficient(offset, lane) != 1:
        return None
    guard = TRUE
    (identity,) = COMBINERS[reduce.combiner or ""].identity((body.dtype,))
    if isinstance(body, Apply) and body.operation == "select" and body.args[2] == identity and lane not in variables(body.args[0]):
        guard, body = body.args[0], body.args[1]
    wide = vectorise(body, lane, lanes)
    wide_value = vectorise(value, lane, lanes, resident=lambda load: load.buffer == reduce.name)
    if wide is None or wide_value is None:
        return None
    adjacent = bool(outer) and outer[-1] != reduce.axes[0]  # not the images of one pixel each
    pixel = outer.pop() if adjacent and guard == TRUE and points <= UNROLLED_POINTS else None
    vectors = next((v for v in VECTORS[pixel is not None :] if extent % (v * lanes) == 0), 1)
    width = vectors * lanes
    blocks, rest = Var("lane_block", extent // width), extent % width
    tile = _Tile(region, reduce, lane, pixel, guard, wide, wide_value, offset, lanes, vectors, points <= UNROLLED_POINTS)
    inside = tile.row(blocks * width)
    work = reduce.flops()
    if not rest:
        kept = [axis for axis in (*outer, blocks) if axis.extent != 1]
        return loops(kept, inside if blocks.extent != 1 else substitute_in(inside, {blocks: ZERO}), True, work=work)
    # the last vector overlaps the one before; one thread computes both
    return loops(outer, block(For(blocks, index_const(extent // width), inside), tile.row(index_const(extent - width))), True, work=work)
