"""Lowering of the `map` schema: elements of the output in storage order, with adjacent threads on adjacent elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.access import bind_shared, flatten, split_divided_axes
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import (
    Walk,
    below,
    bytes_touched,
    decode,
    expression_flops,
    named,
    vectors_fit,
    walk_in_order,
    widest,
)
from tilewright.ir.dtypes import NARROW_FLOATS, size_of
from tilewright.ir.expr import Expr, Load, Var, as_lanes, coefficient, index_const, loads, substitute
from tilewright.ir.graph import Value
from tilewright.ir.kernel import For, Launch, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.counts import SECTOR_WORDS, WORD
from tilewright.kernels.gpu.map.space import MapFacts, MapSchedule


@dataclass(frozen=True)
class MapForm:
    """The region's map in the storage order of its output: `space.expressions` are the store's offset and the element."""

    output: str
    space: Walk
    facts: MapFacts


def map_form(problem: Problem) -> MapForm:
    """The form of a region that is one map. Raises Unsuitable for other regions."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    if len(region.steps) != 1 or region.steps[0].kind != "map":
        raise Unsuitable(f"region {region.name} is not one map step")
    step = split_divided_axes(region.steps[0])
    offset = layouts[region.outputs[0]].offset(step.index)
    body = flatten(step.bodies[0], layouts)
    space = walk_in_order(step.axes, (offset, body), offset)
    lanes = widest(space.expressions[1], space.fastest, layouts, space.expressions[0], most_lanes(problem)) if space.fastest else 1
    strides = [(load, coefficient(load.index[0], space.fastest) if space.fastest is not None else 0) for load in loads(space.expressions[1])]
    facts = MapFacts(
        points=space.points,
        vector_width=lanes,
        bytes_read=bytes_touched([body], step.axes, values),
        bytes_written=values[region.outputs[0]].bytes,
        flops=expression_flops(body),
        requests=1 + len(loads(space.expressions[1])),
        scattered=space.points * sum(_stored_bytes(load, values) for load, stride in strides if stride is not None and abs(stride) >= SECTOR_WORDS),
        inner=space.fastest.extent or 1 if space.fastest is not None else 1,
        element_bytes=WIDEST_BYTES // most_lanes(problem),
    )
    return MapForm(region.outputs[0], space, facts)


def _stored_bytes(load: Load, values: Mapping[str, Value]) -> int:
    return size_of(values[load.buffer].dtype if load.buffer in values else load.dtype)


def most_lanes(problem: Problem) -> int:
    """Lanes of the widest vectors of maps, windows and rows: 16 bytes of the narrowest floats that are loaded or stored."""
    region = problem.region
    names = (*region.inputs, *region.outputs)
    return WIDEST_BYTES // min((size_of(problem.values[name].dtype) for name in names if problem.values[name].dtype in NARROW_FLOATS), default=WORD)


def lower_map(problem: Problem, form: MapForm, schedule: MapSchedule) -> Lowered:
    """One kernel; raises Unsuitable for vectors that the region's accesses do not allow."""
    offset, body = form.space.expressions
    lanes = schedule.vector_width
    if lanes > 1:
        body = wide_or_refuse(body, form.space.fastest, lanes, form.facts.vector_width, problem.layouts)
    vectors = form.space.points // lanes
    chunk = schedule.threads * schedule.items
    launch = Launch((max(1, -(-vectors // chunk)), 1, 1), (schedule.threads, 1, 1), ((vectors, chunk),))
    first = block_variable(launch) * chunk + thread_variable(launch)
    item = Var("item", schedule.items)
    root = block(
        below(
            first + item * schedule.threads,
            vectors,
            "position",
            lambda position: element_store(form.output, offset, body, decode(position, form.space.axes, lanes)),
        )
    )
    if schedule.items > 1:
        root = block(For(item, index_const(schedule.items), root, "unroll"))
    return single(problem, schedule, root, launch)


def wide_or_refuse(expr: Expr, axis: Var | None, lanes: int, widest_vector: int, stored: Mapping[str, Layout]) -> Expr:
    """The expression for a vector along the axis; raises Unsuitable if that is not possible."""
    wide = vectors_fit(expr, axis, lanes, stored) if axis is not None and lanes <= widest_vector else None
    if wide is None:
        raise Unsuitable(f"vectors of {lanes} along {axis.name if axis else 'no axis'}: accesses are not adjacent or not aligned")
    return as_lanes(wide, lanes)


def element_store(output: str, offset: Expr, value: Expr, axes: Mapping[Var, Expr]) -> list[Statement]:
    """Variables for the axes, variables for common subexpressions, and the store."""
    lets, mapping = named(axes)
    shared, (where, what) = bind_shared([substitute(offset, mapping), substitute(value, mapping)])
    return [*lets, *shared, Store(output, where, what)]
