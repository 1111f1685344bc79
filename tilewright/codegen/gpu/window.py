"""Lowering of the `window` schema: each thread reduces the windows of a few output elements serially.

Neighbouring threads hold neighbouring elements (or vectors) of the output's storage. Several items a thread lie along the axis just outside the
fastest one, so that their windows overlap. A constant that is not stored along the fastest axis (depthwise filters) is packed so that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import bind_shared, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import (
    Walk,
    below,
    bytes_touched,
    combine,
    decode,
    expression_flops,
    flat,
    identity,
    named,
    reduce_and_final,
    vectors_fit,
    walk_in_order,
    widest,
)
from tilewright.codegen.gpu.map import wide_or_refuse
from tilewright.codegen.operand import operand_view
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, Var, coefficient, index_const, loads, replace_loads, rewrite, substitute, variables
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Buffer, For, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.region import Lowered, Region, Storage
from tilewright.schedule.gpu_map import PointProblem
from tilewright.schedule.gpu_window import UNROLLED_WINDOW, WindowSchedule


@dataclass(frozen=True)
class WindowForm:
    """The reduction and what follows it, flat, in the order of the output's storage.

    `space.expressions`: the store's offset, the bodies of the reduction, the stored element (over loads of the reduction's names)."""

    output: str
    step: Step
    space: Walk
    layouts: Mapping[str, Layout]
    storage: Mapping[str, Storage]
    problem: PointProblem

    @property
    def offset(self) -> Expr:
        return self.space.expressions[0]

    @property
    def bodies(self) -> tuple[Expr, ...]:
        return self.space.expressions[1:-1]

    @property
    def element(self) -> Expr:
        return self.space.expressions[-1]


def window_form(
    region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str]
) -> WindowForm:
    """Raises Unsuitable where the region is not one reduction with at most one map behind it."""
    step, element, index = reduce_and_final(region)
    offset = layouts[region.outputs[0]].offset(index)
    fastest = storage_order(step.axes, offset)[-1] if step.axes else None
    bodies, storage = _pack(region, step, fastest, values, constants)
    layouts = {**layouts, **{name: item.layout for name, item in storage.items()}}
    values = {**values, **{name: item.value for name, item in storage.items()}}
    flat_bodies = [flat(body, layouts, values) for body in bodies]
    flat_element = flat(element, layouts, values)
    space = walk_in_order(step.axes, (offset, *flat_bodies, flat_element), offset)
    points = prod(axis.extent or 0 for axis in step.reduction)
    lanes = 1
    if space.fastest is not None and len(bodies) == 1:
        lanes = widest(space.expressions[-1], space.fastest, layouts, space.expressions[0])
        lanes = min(lanes, widest(space.expressions[1], space.fastest, layouts))
    problem = PointProblem(
        points=space.points,
        lanes=lanes,
        bytes_read=bytes_touched([*flat_bodies, flat_element], (*step.axes, *step.reduction), values),
        bytes_written=values[region.outputs[0]].bytes,
        flops=points * (expression_flops(*flat_bodies) + len(bodies)) + expression_flops(flat_element),
        requests=1 + points * max(1, len(loads(*flat_bodies))) + len(loads(flat_element)),
        reduced=points,
    )
    return WindowForm(region.outputs[0], step, space, layouts, storage, problem)


def _pack(
    region: Region, step: Step, fastest: Var | None, values: Mapping[str, Value], constants: frozenset[str]
) -> tuple[tuple[Expr, ...], dict[str, Storage]]:
    """The bodies with constants that the fastest axis walks in strides replaced by packed copies: reduced axes, other axes, fastest axis."""
    storage: dict[str, Storage] = {}
    bodies = list(step.bodies)
    for load in loads(*bodies):
        if load.buffer not in constants or load.dtype != "f32" or fastest is None:
            continue
        shape = values[load.buffer].shape
        stride = coefficient(row_major(shape).offset(load.index), fastest)
        used = variables(*load.index)
        name = f"{load.buffer}@{region.name}"
        if stride in (None, 0, 1) or name in storage:
            continue
        axes = tuple(a for a in (*step.reduction, *step.axes) if a in used and a != fastest and a.extent != 1) + (
            fastest,
        )
        view = operand_view(load, shape, axes)
        if view is None:
            continue
        extents = tuple(axis.extent or 1 for axis in axes)
        storage[name] = Storage(Value(name, extents, load.dtype), row_major(extents), load.buffer, view)
        packed = Load(name, axes, load.dtype)
        bodies = [rewrite(body, lambda node, old=load, new=packed: new if node == old else node) for body in bodies]  # type: ignore[misc]
    return tuple(bodies), storage


def lower_window(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    schedule: WindowSchedule,
) -> Lowered:
    """One kernel; raises Unsuitable for another form of region, or vectors that its accesses do not allow."""
    form = window_form(region, layouts, values, constants)
    lanes = schedule.lanes
    bodies, element = list(form.bodies), form.element
    axes = list(form.space.axes)
    if lanes > 1:
        bodies = [wide_or_refuse(bodies[0], form.space.fastest, lanes, form.problem.lanes, form.layouts)]
        wide = vectors_fit(element, axes[-1], lanes, form.layouts)
        assert wide is not None
        element = wide
    items = schedule.items
    extents = [axis.extent or 1 for axis in axes]
    if lanes > 1:
        extents[-1] //= lanes
    split = len(axes) - 2 if len(axes) > 1 else 0
    if axes:
        extents[split] = -(-extents[split] // items)
    total = prod(extents)
    launch = Launch((max(1, -(-total // schedule.threads)), 1, 1), (schedule.threads, 1, 1))
    position = block_variable(launch) * schedule.threads + thread_variable(launch)

    def thread(where: Var) -> list[Statement]:
        coarse = [Var(axis.name, extent) for axis, extent in zip(axes, extents, strict=True)]
        parts = decode(where, coarse)
        values_of = {axis: parts[c] * (lanes if axis == axes[-1] else 1) for axis, c in zip(axes, coarse, strict=True)}
        if items == 1 or not axes:
            lets, mapping = named(values_of)
            return [*lets, *_element(form, bodies, element, mapping, lanes)]
        inner = axes[split]
        base = values_of.pop(inner)
        lets, mapping = named(values_of)
        statements: list[Statement] = list(lets)
        stride = lanes if inner == axes[-1] else 1
        for item in range(items):
            at = base * items + item * stride
            statements.append(
                block(
                    below(
                        at,
                        inner.extent or 1,
                        inner.name,
                        lambda v: _element(form, bodies, element, {**mapping, inner: v}, lanes),
                    )
                )
            )
        return statements

    root = block(below(position, total, "position", thread))
    packed = {name: entry.value for name, entry in form.storage.items()}
    result = single(region, schedule, root, form.layouts, {**values, **packed}, launch)
    return replace(result, storage=form.storage)


def _element(
    form: WindowForm, bodies: Sequence[Expr], element: Expr, mapping: Mapping[Var, Expr], lanes: int
) -> list[Statement]:
    """Reduces one element (or vector) and stores it."""
    held, statements = serial_reduction(form.step, [substitute(body, mapping) for body in bodies], lanes, "total")
    value = replace_loads(substitute(element, mapping), held)
    lets, (where, what) = bind_shared([substitute(form.offset, mapping), value])
    return [*statements, *lets, Store(form.output, where, what)]


def serial_reduction(
    step: Step, bodies: Sequence[Expr], lanes: int, prefix: str
) -> tuple[dict[str, Expr], list[Statement]]:
    """Statements that reduce over all reduced axes of the step, and where each named result is then held."""
    start, held, update = accumulator(step, lanes, prefix)
    reduced = storage_order([a for a in step.reduction if a.extent != 1], main_offset_of(bodies))
    zero = {axis: index_const(0) for axis in step.reduction if axis.extent == 1}
    body: Statement = block(update([substitute(b, zero) for b in bodies]))
    points = prod(axis.extent or 0 for axis in reduced)
    for axis in reversed(reduced):
        body = For(axis, index_const(axis.extent or 0), body, "unroll" if points <= UNROLLED_WINDOW else "serial")
    return dict(held), [*start, body]


def main_offset_of(bodies: Sequence[Expr]) -> Expr:
    """The first flat offset: window bodies read their data first."""
    found = [load for load in loads(*bodies) if len(load.index) == 1]
    return found[0].index[0] if found else index_const(0)


def accumulator(step: Step, lanes: int, prefix: str) -> tuple[list[Statement], dict[str, Load], Callable[[Sequence[Expr]], list[Statement]]]:
    """Registers for the components of a reduction: statements that set them to the identity, the loads that read them by result name, and a
    function from bodies to the statements that combine them in."""
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
