"""CPU kernels without tiles: maps, rows and prefixes, as loops over threads around loops over vector lanes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Callable, Mapping, Sequence

from tilewright.codegen.access import bind_shared, flatten, merge_axes, split_divided_axes
from tilewright.codegen.assemble import assemble, block, order_by
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.expr import INDEX, Const, Expr, Load, Var, binary, coefficient, loads, rewrite, substitute
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Statement, Store
from tilewright.ir.layout import Layout
from tilewright.ir.region import Call, Lowered, Region

# Below this many element operations a parallel region costs more than it saves.
SERIAL_WORK = 1 << 14
CHUNK = 2048
LANE_BLOCK = 64
UNROLLED_POINTS = 49
ZERO = Const(0, INDEX)


def count(extent: int) -> Expr:
    return Const(extent, INDEX)


def lower_map(region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], machine: Machine) -> Lowered:
    """out[index] = body, in the order of the output's layout, contiguous axes merged."""
    step = split_divided_axes(region.steps[-1])
    body, offset = flat_step(step, region, layouts)
    axes, (body, offset) = merge_axes(order_by(step.axes, offset), [body, offset])

    def element(_: Sequence[Var]) -> list[Statement]:
        lets, (value, where) = bind_shared([body, offset])
        return [*lets, Store(region.outputs[0], where, value)]

    flops = max(step.flops(), prod(step.shape))
    return _single(region, layouts, values, nest(axes, element, flops))


def lower_rows(region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], machine: Machine) -> Lowered:
    """Reductions over whole rows and the maps between them. Where neighbouring rows lie side by side in memory they fill the vector
    lanes; otherwise the lanes divide each row."""
    from tilewright.graph.rows import rows_of

    steps = tuple(split_divided_axes(step) for step in region.steps)
    if rows_of(steps) is None:
        steps = region.steps
    row_of_last = rows_of(steps)
    assert row_of_last is not None
    reduces = [step for step in steps if step.kind == "reduce"]
    last = steps[-1]
    offset = layouts[region.outputs[0]].offset(last.index)
    row_axes = reduces[0].axes
    flat = {step.name: [flatten(b, layouts) for b in step.bodies] for step in steps}
    # one set of row variables for all steps
    renamed = {step.name: dict(zip(step.axes, row_axes, strict=True)) for step in reduces}
    if last.kind == "map":
        renamed[last.name] = {axis: row for axis, row in zip(row_of_last, row_axes, strict=True) if axis in last.axes}
        columns = tuple(axis for axis in last.axes if axis not in renamed[last.name])
        columns = tuple(Var("c" + axis.name, axis.extent) for axis in columns)
        plain = tuple(axis for axis in last.axes if axis not in renamed[last.name])
        renamed[last.name] |= dict(zip(plain, columns, strict=True))
    flat = {name: [substitute(b, renamed[name]) for b in bodies] for name, bodies in flat.items()}
    where = substitute(offset, renamed[last.name])
    lane = _contiguous_axis(flat[reduces[0].name], row_axes)
    if lane is not None:
        statements = _rows_across(region, steps, reduces, flat, where, row_axes, lane, columns if last.kind == "map" else ())
        work = sum(step.flops() for step in steps)
        outer = [axis for axis in row_axes if axis is not lane and axis.extent != 1]
        blocks = Var("lane_block", -(-(lane.extent or 1) // LANE_BLOCK))
        return _single(region, layouts, values, loops([*outer, blocks], statements, work > SERIAL_WORK))

    def row(_: Sequence[Var]) -> list[Statement]:
        result: list[Statement] = []
        totals: dict[str, Expr] = {}
        for step in reduces:
            bodies = [_inner(b, totals) for b in flat[step.name]]
            order = order_by(step.reduction, _largest_offset(bodies, step.reduction))
            reduced, merged = merge_axes(order, bodies)
            accumulate, results = reduction(replace(step, reduction=reduced), list(merged), "simd", step.name.replace(".", "_"))
            result += accumulate
            totals |= dict(zip(step.names, results, strict=True))
        if last.kind == "reduce":
            return [*result, Store(region.outputs[0], where, totals[last.name])]
        body = _inner(flat[last.name][0], totals)
        inner, (value, at) = merge_axes(order_by(columns, where), [body, where])
        lets, (value, at) = bind_shared([value, at])
        store = block(lets, Store(region.outputs[0], at, value))
        return [*result, loops(inner, store, False, simd=True)]

    work = sum(step.flops() for step in steps)
    rows = [axis for axis in row_axes if axis.extent != 1]
    return _single(region, layouts, values, loops(rows, block(row(rows)), work > SERIAL_WORK))


def _rows_across(
    region: Region,
    steps: Sequence[Step],
    reduces: Sequence[Step],
    flat: Mapping[str, Sequence[Expr]],
    where: Expr,
    row_axes: Sequence[Var],
    lane: Var,
    columns: Sequence[Var],
) -> Block:
    """One block of neighbouring rows: every loop over a reduction or over columns has the loop over the rows innermost."""
    extent = lane.extent or 1
    blocks = Var("lane_block", -(-extent // LANE_BLOCK))
    within = Var("lane", LANE_BLOCK)
    at_lane: dict[Var, Expr] = {lane: blocks * LANE_BLOCK + within, **{axis: ZERO for axis in row_axes if axis.extent == 1 and axis is not lane}}
    lanes: Expr = count(LANE_BLOCK)
    if extent % LANE_BLOCK:
        rest = extent - blocks * LANE_BLOCK
        lanes = count(extent) if extent < LANE_BLOCK else binary("min", rest, count(LANE_BLOCK))
    result: list[Statement] = []
    totals: dict[str, Expr] = {}

    def over_lanes(*parts: Statement) -> For:
        return For(within, lanes, block(*parts), "simd")

    for step in reduces:
        combiner = COMBINERS[step.combiner or ""]
        names = [f"acc_{step.name.replace('.', '_')}_{i}" for i in range(combiner.components)]
        held = tuple(Load(name, (within,), dtype) for name, dtype in zip(names, step.dtypes, strict=True))
        result += [Allocate(Buffer(name, dtype, LANE_BLOCK, "register")) for name, dtype in zip(names, step.dtypes, strict=True)]
        result.append(over_lanes(*[Store(n, within, v) for n, v in zip(names, combiner.identity(step.dtypes), strict=True)]))
        bodies = tuple(substitute(_inner(b, totals), at_lane) for b in flat[step.name])
        inner = over_lanes(*_combine(names, combiner.combine(held, bodies), within))
        result.append(loops([r for r in step.reduction if r.extent != 1], block(inner), False) if step.reduction else inner)
        totals |= dict(zip(step.names, held, strict=True))
    last = steps[-1]
    if last.kind == "reduce":
        result.append(over_lanes(Store(region.outputs[0], substitute(where, at_lane), totals[last.name])))
    else:
        lets, (value, at) = bind_shared([substitute(_inner(flat[last.name][0], totals), at_lane), substitute(where, at_lane)])
        store = over_lanes(*lets, Store(region.outputs[0], at, value))
        kept = [c for c in columns if c.extent != 1]
        zero: dict[Var, Expr] = {c: ZERO for c in columns if c.extent == 1}
        result.append(loops(kept, block(_substituted(store, zero)), False))
    return block(result)


def _substituted(statement: Statement, mapping: Mapping[Var, Expr]) -> Statement:
    from tilewright.codegen.assemble import map_expressions

    class Change:
        def buffer(self, name: str) -> str:
            return name

        def __call__(self, expr: Expr) -> Expr:
            return substitute(expr, mapping)

    return map_expressions(statement, Change()) if mapping else statement


def lower_prefix(region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], machine: Machine) -> Lowered:
    """An inclusive scan: rows in parallel, serial along the scanned axis."""
    step = region.steps[0]
    final = region.steps[-1]
    assert step.scan is not None
    combiner = COMBINERS[step.combiner or ""]
    along = step.scan
    names = [f"acc{i}" for i in range(combiner.components)]
    held = tuple(Load(name, (ZERO,), dtype) for name, dtype in zip(names, step.dtypes, strict=True))
    bodies = tuple(substitute(flatten(b, layouts), {step.reduction[0]: along}) for b in step.bodies)
    offset = layouts[region.outputs[0]].offset(final.index)
    value: Expr = held[0]
    if final is not step:
        value = with_results(substitute(flatten(final.bodies[0], layouts), dict(zip(final.axes, step.axes, strict=True))), step, held)
        offset = substitute(offset, dict(zip(final.axes, step.axes, strict=True)))
    else:
        component = {name: i for i, name in enumerate(step.names)}
        value = held[component.get(region.outputs[0], 0)]
    inside = block(_combine(names, combiner.combine(held, bodies), ZERO), Store(region.outputs[0], offset, value))
    start = [Allocate(Buffer(name, dtype, 1, "register")) for name, dtype in zip(names, step.dtypes, strict=True)]
    start += [Store(name, ZERO, v) for name, v in zip(names, combiner.identity(step.dtypes), strict=True)]  # type: ignore[misc]
    row = block(start, For(along, count(along.extent or 0), inside))
    rows = [axis for axis in order_by(step.axes, offset) if axis is not along and axis != along and axis.extent != 1]
    zero: dict[Var, Expr] = {axis: ZERO for axis in step.axes if axis.extent == 1 and axis != along}
    return _single(region, layouts, values, loops(rows, block(_substituted(row, zero)), step.flops() > SERIAL_WORK))


# --- parts ------------------------------------------------------------------------------------------------------------


def flat_step(step: Step, region: Region, layouts: Mapping[str, Layout]) -> tuple[Expr, Expr]:
    """(body, store offset) of a map with flat loads."""
    return flatten(step.bodies[0], layouts), layouts[region.outputs[0]].offset(step.index)


def with_results(body: Expr, step: Step, totals: Sequence[Expr]) -> Expr:
    """The body with loads of the step's results replaced by where they are held."""
    held = dict(zip(step.names, totals, strict=True))
    return _inner(body, held)


def _inner(body: Expr, totals: Mapping[str, Expr]) -> Expr:
    if not totals:
        return body
    return rewrite(body, lambda node: totals[node.buffer] if isinstance(node, Load) and node.buffer in totals else node)


def reduction(step: Step, bodies: Sequence[Expr], kind: str, prefix: str = "acc") -> tuple[list[Statement], list[Expr]]:
    """Statements that reduce flat bodies over the step's reduced axes into scalars, and loads of the results."""
    combiner = COMBINERS[step.combiner or ""]
    names = [f"{prefix}{i}" for i in range(combiner.components)]
    dtypes = tuple(body.dtype for body in bodies)
    held = tuple(Load(name, (ZERO,), dtype) for name, dtype in zip(names, dtypes, strict=True))
    result: list[Statement] = []
    for name, dtype, identity in zip(names, dtypes, combiner.identity(dtypes), strict=True):
        result += [Allocate(Buffer(name, dtype, 1, "register")), Store(name, ZERO, identity)]
    zero: dict[Var, Expr] = {axis: ZERO for axis in step.reduction if axis.extent == 1}
    bodies = [substitute(b, zero) for b in bodies] if zero else bodies
    update = block(_combine(names, combiner.combine(held, tuple(bodies)), ZERO))
    axes = [axis for axis in step.reduction if axis.extent != 1]
    simd_safe = combiner.components == 1 and step.combiner in ("sum", "prod", "max", "min") and dtypes[0] in ("f32", "f64", "i32", "i64")
    inner: Statement = update
    for depth, axis in enumerate(reversed(axes)):
        if kind == "simd":
            if depth == 0 and simd_safe:
                inner = For(axis, count(axis.extent or 0), inner, "simd", ((names[0], step.combiner or ""),))
            else:
                inner = For(axis, count(axis.extent or 0), inner)
        else:
            inner = For(axis, count(axis.extent or 0), inner, kind)
    return [*result, inner], list(held)


def _combine(names: Sequence[str], values: Sequence[Expr], offset: Expr) -> list[Statement]:
    """acc = combined, all components at once (a component's update must not see another's new value)."""
    if len(names) == 1:
        lets, (value,) = bind_shared([values[0]], "w")
        return [*lets, Store(names[0], offset, value)]
    from tilewright.ir.kernel import Let

    lets, fresh = bind_shared(list(values), "w")
    held = [Let(Var(f"next{i}", None, value.dtype), value) for i, value in enumerate(fresh)]
    return [*lets, *held, *[Store(name, offset, h.variable) for name, h in zip(names, held, strict=True)]]


def loops(axes: Sequence[Var], body: Statement, parallel: bool, simd: bool = False) -> Statement:
    """Loops over the axes, outermost first; parallel: all of them (collapsed) across threads; simd: the innermost across lanes."""
    result = body
    for depth, axis in enumerate(reversed(axes)):
        kind = "parallel" if parallel else "simd" if simd and depth == 0 else "serial"
        result = For(axis, count(axis.extent or 0), result, kind)
    return result


def nest(axes: Sequence[Var], element: Callable[[Sequence[Var]], list[Statement]], work: int) -> Statement:
    """Threads over the outer axes and lanes over the innermost; a long single axis is cut into chunks for the threads."""
    body = block(element(axes))
    if not axes:
        return body
    if work <= SERIAL_WORK:
        return loops(axes, body, False, simd=True)
    *outer, inner = axes
    extent = inner.extent or 0
    if prod(axis.extent or 0 for axis in outer) >= 32:
        return loops(outer, For(inner, count(extent), body, "simd"), True)
    chunks = -(-extent // CHUNK)
    if chunks <= 1:
        return loops(outer, For(inner, count(extent), body, "simd"), bool(outer))
    chunk, within = Var("chunk", chunks), Var("within", CHUNK)
    length: Expr = count(CHUNK)
    if extent % CHUNK:
        length = binary("min", extent - chunk * CHUNK, count(CHUNK))
    moved = _substituted(body, {inner: chunk * CHUNK + within})
    return loops([*outer, chunk], For(within, length, moved, "simd"), True)


def _contiguous_axis(bodies: Sequence[Expr], axes: Sequence[Var]) -> Var | None:
    """The row axis along which the (largest) loads are contiguous, if any has at least a few neighbours."""
    for axis in axes:
        if (axis.extent or 0) < 4:
            continue
        strides = [coefficient(load.index[0], axis) for load in loads(*bodies) if len(load.index) == 1]
        if strides and any(stride == 1 for stride in strides) and all(stride in (0, 1) for stride in strides):
            return axis
    return None


def _largest_offset(bodies: Sequence[Expr], axes: Sequence[Var]) -> Expr:
    """The offset that knows most of the axes: it decides their order."""
    best: Expr = ZERO
    most = -1
    for load in loads(*bodies):
        if len(load.index) == 1:
            known = sum(bool(coefficient(load.index[0], axis)) for axis in axes)
            if known > most:
                best, most = load.index[0], known
    return best


def _single(region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], body: Statement) -> Lowered:
    dtypes = {name: value.dtype for name, value in values.items()}
    kernel, arguments = assemble(region.kind, body, layouts, dtypes, region.outputs)
    return Lowered(region, "loops", (kernel,), (Call(kernel.name, arguments),))
