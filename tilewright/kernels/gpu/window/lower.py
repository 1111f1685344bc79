"""Lowering of the `window` schema: each thread reduces the windows of a few output elements serially.

Adjacent threads have adjacent elements (or vectors) of the output's storage. A thread's tile extends along the axis just outside the fastest one
(items) and the axis outside that (rows), so that its windows overlap: everything is unrolled, and the compiler loads shared elements once. A constant
that is not stored along the fastest axis (depthwise filters) is packed so that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import VECTOR_TYPES, bind_shared, flatten, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import (
    Walk,
    below,
    bytes_touched,
    combine,
    decode,
    expression_flops,
    identity,
    named,
    reduce_and_final,
    vectors_fit,
    walk_in_order,
    widest,
)
from tilewright.codegen.operand import operand_view
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import (
    Expr,
    Linear,
    Load,
    Var,
    coefficient,
    from_linear,
    index_const,
    linear,
    loads,
    replace_loads,
    rewrite,
    substitute,
    variables,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Buffer, For, If, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Storage, Unsuitable
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.map.lower import most_lanes, wide_or_refuse
from tilewright.kernels.gpu.window.space import UNROLLED_WINDOW, TiledLoad, WindowFacts, WindowSchedule, blocks_to_ask_for


@dataclass(frozen=True)
class WindowForm:
    """The reduction and the map after it, flat, in the storage order of the output.

    `space.expressions`: the store's offset, the bodies of the reduction, the stored element (over loads of the reduction's names)."""

    output: str
    step: Step
    space: Walk
    layouts: Mapping[str, Layout]
    storage: Mapping[str, Storage]
    facts: WindowFacts

    @property
    def offset(self) -> Expr:
        return self.space.expressions[0]

    @property
    def bodies(self) -> tuple[Expr, ...]:
        return self.space.expressions[1:-1]

    @property
    def element(self) -> Expr:
        return self.space.expressions[-1]


def window_form(problem: Problem) -> WindowForm:
    """The form of one reduction followed by at most one map. Raises Unsuitable for other regions."""
    region = problem.region
    step, element, index = reduce_and_final(region)
    offset = problem.layouts[region.outputs[0]].offset(index)
    fastest = storage_order(step.axes, offset)[-1] if step.axes else None
    bodies, storage = _pack(problem, step, fastest)
    packed = problem.with_storage(storage)
    layouts, values = packed.layouts, packed.values
    flat_bodies = [flatten(body, layouts) for body in bodies]
    flat_element = flatten(element, layouts)
    space = walk_in_order(step.axes, (offset, *flat_bodies, flat_element), offset)
    points = prod(axis.extent or 0 for axis in step.reduction)
    lanes = 1
    if space.fastest is not None and len(bodies) == 1:
        most = most_lanes(packed)
        lanes = widest(space.expressions[-1], space.fastest, layouts, space.expressions[0], most)
        lanes = min(lanes, widest(space.expressions[1], space.fastest, layouts, most=most))
    row, item = tile_axes(space.axes)
    row_extent, item_extent = (axis.extent or 1 if axis is not None else 1 for axis in (row, item))
    inner = 1 if item is None or item == space.axes[-1] else space.axes[-1].extent or 1
    read = [load for load in loads(*space.expressions[1:]) if load.buffer not in step.names]
    facts = WindowFacts(
        points=space.points,
        vector_width=lanes,
        bytes_read=bytes_touched([*flat_bodies, flat_element], (*step.axes, *step.reduction), values),
        bytes_written=values[region.outputs[0]].bytes,
        flops=points * (expression_flops(*flat_bodies) + len(bodies)) + expression_flops(flat_element),
        reduced=points,
        loads=tuple(tiled_load(load, row, item, step.reduction) for load in read),
        row_extent=row_extent,
        item_extent=item_extent,
        inner=inner,
        extents=tuple(axis.extent or 1 for axis in space.axes),
        strides=tuple(tuple(coefficient(load.index[0], axis) or 0 for axis in space.axes) for load in read),
        element_bytes=WIDEST_BYTES // most_lanes(packed),
    )
    return WindowForm(region.outputs[0], step, space, layouts, storage, facts)


def tile_axes(axes: Sequence[Var]) -> tuple[Var | None, Var | None]:
    """The axes of a tile's rows and items: the two outside the fastest one. A single axis is that of the items."""
    item = axes[-2] if len(axes) > 1 else axes[-1] if axes else None
    return axes[-3] if len(axes) > 2 else None, item


def tiled_load(load: Load, row: Var | None, item: Var | None, reduction: Sequence[Var]) -> TiledLoad:
    """The loads of a tile for one load of the body: sliding windows along its rows and items, times the extents of all other reduction axes.

    If an offset contains y * s * stride + fy * stride, windows of the extent of fy start s apart."""
    offset = load.index[0]
    left = [axis for axis in reduction if (axis.extent or 1) > 1 and coefficient(offset, axis) != 0]

    def windows(axis: Var | None) -> tuple[int, int]:
        scale = coefficient(offset, axis) if axis is not None else 0
        if not scale:
            return (0 if scale == 0 else 1), 1
        for inner in left:
            each = coefficient(offset, inner)
            if each and scale % each == 0 and 0 < scale // each < (inner.extent or 1):
                left.remove(inner)
                return scale // each, inner.extent or 1
        return 1, 1

    items, rows = windows(item), windows(row)
    return TiledLoad(prod(axis.extent or 1 for axis in left), rows, items)


def _pack(problem: Problem, step: Step, fastest: Var | None) -> tuple[tuple[Expr, ...], dict[str, Storage]]:
    """The bodies with constants that are strided along the fastest axis replaced by copies packed as [reduction axes, other axes, fastest axis]."""
    storage: dict[str, Storage] = {}
    bodies = list(step.bodies)
    for load in loads(*bodies):
        if load.buffer not in problem.constants or load.dtype not in VECTOR_TYPES or fastest is None:
            continue
        shape = problem.values[load.buffer].shape
        stride = coefficient(row_major(shape).offset(load.index), fastest)
        used = variables(*load.index)
        name = f"{load.buffer}@{problem.region.name}"
        if stride in (None, 0, 1) or name in storage:
            continue
        axes = tuple(a for a in (*step.reduction, *step.axes) if a in used and a != fastest and a.extent != 1) + (fastest,)
        view = operand_view(load, shape, axes)
        if view is None:
            continue
        extents = tuple(axis.extent or 1 for axis in axes)
        storage[name] = Storage(Value(name, extents, problem.values[load.buffer].dtype), row_major(extents), load.buffer, view)
        packed = Load(name, axes, load.dtype)
        bodies = [rewrite(body, lambda node, old=load, new=packed: new if node == old else node) for body in bodies]  # type: ignore[misc]
    return tuple(bodies), storage


def lower_window(problem: Problem, form: WindowForm, schedule: WindowSchedule, machine: Machine) -> Lowered:
    """One kernel; raises Unsuitable for vectors that the region's accesses do not allow."""
    lanes = schedule.vector_width
    bodies, element = list(form.bodies), form.element
    axes = list(form.space.axes)
    if lanes > 1:
        bodies = [wide_or_refuse(bodies[0], form.space.fastest, lanes, form.facts.vector_width, form.layouts)]
        wide = vectors_fit(element, axes[-1], lanes, form.layouts)
        assert wide is not None
        element = wide
    row, item = tile_axes(axes)
    if schedule.rows > 1 and row is None:
        raise Unsuitable(f"rows={schedule.rows}: the output has no axis for them")
    tile = {axis: count for axis, count in ((row, schedule.rows), (item, schedule.items)) if axis is not None and count > 1}
    extents = [axis.extent or 1 for axis in axes]
    if lanes > 1:
        extents[-1] //= lanes
    extents = [-(-extent // tile.get(axis, 1)) for axis, extent in zip(axes, extents, strict=True)]
    total = prod(extents)
    launch = Launch((max(1, -(-total // schedule.threads)), 1, 1), (schedule.threads, 1, 1), ((total, schedule.threads),))
    position = block_variable(launch) * schedule.threads + thread_variable(launch)

    def thread(where: Var) -> list[Statement]:
        coarse = [Var(axis.name, extent) for axis, extent in zip(axes, extents, strict=True)]
        parts = decode(where, coarse)
        steps = {axis: lanes if axis == axes[-1] else 1 for axis in axes}
        values_of = {axis: parts[c] * steps[axis] for axis, c in zip(axes, coarse, strict=True)}
        for axis in tile:
            values_of[axis] = values_of[axis] * tile[axis]
        lets, mapping = named(values_of)

        bases: dict[Expr, Var] = {}

        def inside(left: Sequence[Var], known: Mapping[Var, Expr]) -> list[Statement]:
            if not left:
                return _element(form, [with_bases(substitute(body, known), form, bases) for body in bodies], element, known, lanes)
            axis, statements = left[0], list[Statement]()
            for at in range(tile[axis]):
                inner = block(inside(left[1:], {**known, axis: known.get(axis, axis) + at * steps[axis]}))
                reaches = ((extents[axes.index(axis)] - 1) * tile[axis] + at) * steps[axis] >= (axis.extent or 1)
                statements.append(If(known.get(axis, axis) + at * steps[axis] < (axis.extent or 1), inner) if reaches else inner)
            return statements

        elements = inside(list(tile), mapping)
        return [*lets, *(Let(base, value) for value, base in bases.items()), *elements]

    root = block(below(position, total, "position", thread))
    asked = blocks_to_ask_for(schedule, form.facts, machine)
    result = single(problem.with_storage(form.storage), schedule, root, launch, asked)
    return replace(result, storage=form.storage)


def with_bases(body: Expr, form: WindowForm, bases: dict[Expr, Var]) -> Expr:
    """The body with the part of each offset that depends neither on the tap nor on the place in the tile as a variable, which is added to `bases`.

    Offsets then differ only by constants, and the compiler sees which loads of two windows are the same."""

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in form.layouts or loads(*node.index):
            return node
        whole = linear(node.index[0])
        own = Linear(tuple(term for term in whole.terms if not variables(term[0]) & {*form.step.reduction}), 0)
        if not own.terms or own.terms == whole.terms and not whole.constant or isinstance(from_linear(own), Var):
            return node
        base = bases.setdefault(from_linear(own), Var(f"base{len(bases)}"))
        rest = Linear(((base, 1), *(term for term in whole.terms if term not in own.terms)), whole.constant)
        return replace(node, index=(from_linear(rest),))

    return rewrite(body, visit)


def _element(form: WindowForm, bodies: Sequence[Expr], element: Expr, mapping: Mapping[Var, Expr], lanes: int) -> list[Statement]:
    """Reduces the bodies at one element (or vector) and stores it."""
    held, statements = serial_reduction(form.step, bodies, lanes, "total")
    value = replace_loads(substitute(element, mapping), held)
    lets, (where, what) = bind_shared([substitute(form.offset, mapping), value])
    return [*statements, *lets, Store(form.output, where, what)]


def serial_reduction(step: Step, bodies: Sequence[Expr], lanes: int, prefix: str) -> tuple[dict[str, Expr], list[Statement]]:
    """Statements that reduce over all reduction axes of the step, and the register that holds each named result."""
    start, held, update = accumulator(step, lanes, prefix)
    reduced = storage_order([a for a in step.reduction if a.extent != 1], main_offset_of(bodies))
    zero = {axis: index_const(0) for axis in step.reduction if axis.extent == 1}
    body: Statement = block(update([substitute(b, zero) for b in bodies]))
    points = prod(axis.extent or 0 for axis in reduced)
    for axis in reversed(reduced):
        body = For(axis, index_const(axis.extent or 0), body, "unroll" if points <= UNROLLED_WINDOW else "serial")
    return dict(held), [*start, body]


def main_offset_of(bodies: Sequence[Expr]) -> Expr:
    """The first flat offset: the bodies of windows load their input first."""
    found = [load for load in loads(*bodies) if len(load.index) == 1]
    return found[0].index[0] if found else index_const(0)


def accumulator(step: Step, lanes: int, prefix: str) -> tuple[list[Statement], dict[str, Load], Callable[[Sequence[Expr]], list[Statement]]]:
    """Registers for the components of a reduction. Returns statements that set them to the identity, loads of them by result name, and a function
    from bodies to the statements that accumulate them."""
    names = [f"{prefix}{i}" if i else prefix for i in range(len(step.bodies))]
    held = [Load(name, (index_const(0),), dtype, lanes) for name, dtype in zip(names, step.dtypes, strict=True)]
    start: list[Statement] = []
    for name, dtype, value in zip(names, step.dtypes, identity(step, lanes), strict=True):
        start += [Allocate(Buffer(name, dtype, lanes, "register", lanes)), Store(name, index_const(0), value)]

    def update(bodies: Sequence[Expr]) -> list[Statement]:
        assert step.combiner is not None
        combined = combine(step.combiner, held, tuple(bodies))
        lets, fresh = bind_shared(list(combined), "w")
        if len(names) == 1:
            return [*lets, Store(names[0], index_const(0), fresh[0])]
        new = [Let(Var(f"{name}_new", None, e.dtype, e.lanes), e) for name, e in zip(names, fresh, strict=True)]
        return [*lets, *new, *(Store(name, index_const(0), let.variable) for name, let in zip(names, new, strict=True))]

    return start, dict(zip(step.names, held, strict=True)), update
