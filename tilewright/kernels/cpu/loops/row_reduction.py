"""Lowering of the `row reduction` schema on CPUs: reductions over whole rows and the maps between them.

If corresponding elements of neighbouring rows are adjacent in memory, rows fill the vector lanes; otherwise the lanes divide each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, split_divided_rows, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.graph.rows import rows_of
from tilewright.ir.computation import COMBINERS, Step
from tilewright.ir.expr import ZERO, Apply, Expr, Load, Var, binary, coefficient, index_const, loads, replace_loads, rewrite, substitute, walk
from tilewright.ir.guards import guards
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Statement, Store, substitute_in
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region
from tilewright.ir.scalar import OPERATIONS
from tilewright.kernels.cpu.common import combined, halves, loops, reduction, swept, vector_reduction, vector_store, vector_width
from tilewright.kernels.cpu.loops.space import LoopSchedule

KEPT, MOST_KEPT = "kept", 4096
"""The array for what the last reduction computes and the map after it needs again, and its largest size: a row stays in the nearest cache."""
COSTLY = 8
"""Fewest operations of a function that is worth keeping."""
LANE_BLOCK = 64
"""Neighbouring rows that one thread reduces together."""


def lower_row_reduction(problem: Problem, schedule: LoopSchedule) -> Lowered:
    """Reductions over whole rows and the maps between them, in one kernel."""
    region, layouts = problem.region, problem.layouts
    steps = split_divided_rows(region.steps)
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
        plain = tuple(axis for axis in last.axes if axis not in renamed[last.name])
        columns = tuple(Var("c" + axis.name, axis.extent) for axis in plain)
        renamed[last.name] |= dict(zip(plain, columns, strict=True))
    flat = {name: [substitute(b, renamed[name]) for b in bodies] for name, bodies in flat.items()}
    where = substitute(offset, renamed[last.name])
    longest = max(reduces, key=lambda step: prod(axis.extent or 0 for axis in step.reduction))
    lane = _contiguous_axis(flat[longest.name], row_axes)
    if lane is not None:
        statements = _rows_across(region, steps, reduces, flat, where, row_axes, lane, columns if last.kind == "map" else ())
        work = sum(step.flops() for step in steps)
        outer = [axis for axis in row_axes if axis is not lane and axis.extent != 1]
        blocks = Var("lane_block", -(-(lane.extent or 1) // LANE_BLOCK))
        return single(problem, schedule, loops([*outer, blocks], statements, True, work=work))

    result: list[Statement] = []
    totals: dict[str, Expr] = {}
    kept = _kept(reduces[-1], flat[reduces[-1].name], flat[last.name], columns) if last.kind == "map" else None
    if kept is not None:
        row: dict[Var, Expr] = dict(zip(columns, reduces[-1].reduction, strict=True))
        again, place = substitute(kept, dict(zip(reduces[-1].reduction, columns, strict=True))), _position(columns)
        result.append(Allocate(Buffer(KEPT, kept.dtype, prod(axis.extent or 1 for axis in columns), "register")))
        flat[last.name] = [_instead(b, again, Load(KEPT, (place,), kept.dtype)) for b in flat[last.name]]
    for step in reduces:
        bodies, kept_here = [replace_loads(b, totals) for b in flat[step.name]], list[Expr]()
        if kept is not None and step is reduces[-1]:
            kept_here = [substitute(place, row), replace_loads(kept, totals)]
            bodies = [_instead(b, kept_here[1], Load(KEPT, (kept_here[0],), kept.dtype)) for b in bodies]
        order = storage_order(step.reduction, _largest_offset(bodies, step.reduction))
        reduced, merged = merge_axes(order, [*bodies, *kept_here])
        merged_step, name = replace(step, reduction=reduced), step.name.replace(".", "_")
        width = vector_width(reduced[-1], schedule.lanes) if reduced else 1
        reads, kept_at = list(merged[: len(bodies)]), merged[len(bodies) :]
        wide = None
        if width > 1:
            vectors = vector_store(KEPT, kept_at[0], kept_at[1], reduced[-1], width) if kept_at else None
            wide = vector_reduction(merged_step, reads[0], width, name, vectors) if vectors or not kept_at else None
        if wide is None:
            accumulate, results = reduction(merged_step, reads, "simd", name, Store(KEPT, kept_at[0], kept_at[1]) if kept_at else None)
        else:
            accumulate, results = wide[0], [wide[1]]
        result += accumulate
        totals |= dict(zip(step.names, results, strict=True))
    if last.kind == "reduce":
        result.append(Store(region.outputs[0], where, totals[last.name]))
    else:
        body = replace_loads(flat[last.name][0], totals)
        inner, (value, at) = merge_axes(storage_order(columns, where), [body, where])
        width = vector_width(inner[-1], schedule.lanes) if inner else 1
        parts = halves(problem, inner[-1], width) if width > 1 else 1
        store = vector_store(region.outputs[0], at, value, inner[-1], width, parts) if width > 1 else None
        if store is not None:
            result.append(loops(inner[:-1], swept(inner[-1], parts * width, store), False))
        else:
            lets, (value, at) = bind_shared([value, at])
            result.append(loops(inner, block(lets, Store(region.outputs[0], at, value)), False, simd=True))
    work = sum(step.flops() for step in steps)
    rows = [axis for axis in row_axes if axis.extent != 1]
    return single(problem, schedule, loops(rows, block(result), True, work=work))


def _kept(reduce: Step, bodies: Sequence[Expr], values: Sequence[Expr], columns: Sequence[Var]) -> Expr | None:
    """The largest part of the reduction's body that computes a function which the map computes again; None if there is none or a row is too long."""
    extents = [axis.extent or 1 for axis in columns]
    if [axis.extent or 1 for axis in reduce.reduction] != extents or prod(extents) > MOST_KEPT:
        return None
    row: dict[Var, Expr] = dict(zip(columns, reduce.reduction, strict=True))
    again, reached = set(walk(*(substitute(value, row) for value in values))), guards(bodies)
    costly = [
        node
        for node in walk(*bodies)
        if isinstance(node, Apply) and OPERATIONS[node.operation].flops >= COSTLY and node in again and () in reached[id(node)]
    ]
    return costly[-1] if costly else None


def _position(axes: Sequence[Var]) -> Expr:
    """The flat position of the axes' point."""
    position: Expr = ZERO
    for axis in axes:
        position = position * (axis.extent or 1) + axis
    return position


def _instead(expr: Expr, part: Expr, other: Expr) -> Expr:
    return rewrite(expr, lambda node: other if node == part else node)


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
    """One block of neighbouring rows: the loop over rows is innermost in every loop over a reduction or over columns."""
    extent = lane.extent or 1
    blocks = Var("lane_block", -(-extent // LANE_BLOCK))
    within = Var("lane", LANE_BLOCK)
    at_lane: dict[Var, Expr] = {lane: blocks * LANE_BLOCK + within, **{axis: ZERO for axis in row_axes if axis.extent == 1 and axis is not lane}}
    lanes: Expr = index_const(LANE_BLOCK)
    if extent % LANE_BLOCK:
        rest = extent - blocks * LANE_BLOCK
        lanes = index_const(extent) if extent < LANE_BLOCK else binary("min", rest, index_const(LANE_BLOCK))
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
        bodies = tuple(substitute(replace_loads(b, totals), at_lane) for b in flat[step.name])
        inner = over_lanes(*combined(names, combiner.combine(held, bodies), within))
        result.append(loops([r for r in step.reduction if r.extent != 1], block(inner), False) if step.reduction else inner)
        totals |= dict(zip(step.names, held, strict=True))
    last = steps[-1]
    if last.kind == "reduce":
        result.append(over_lanes(Store(region.outputs[0], substitute(where, at_lane), totals[last.name])))
    else:
        lets, (value, at) = bind_shared([substitute(replace_loads(flat[last.name][0], totals), at_lane), substitute(where, at_lane)])
        store = over_lanes(*lets, Store(region.outputs[0], at, value))
        kept = [c for c in columns if c.extent != 1]
        zero: dict[Var, Expr] = {c: ZERO for c in columns if c.extent == 1}
        result.append(loops(kept, block(substitute_in(store, zero)), False))
    return block(result)


def _contiguous_axis(bodies: Sequence[Expr], axes: Sequence[Var]) -> Var | None:
    """The first row axis of extent at least 4 along which every load is contiguous or constant and at least one is contiguous; or None."""
    for axis in axes:
        if (axis.extent or 0) < 4:
            continue
        strides = [coefficient(load.index[0], axis) for load in loads(*bodies) if len(load.index) == 1]
        if strides and any(stride == 1 for stride in strides) and all(stride in (0, 1) for stride in strides):
            return axis
    return None


def _largest_offset(bodies: Sequence[Expr], axes: Sequence[Var]) -> Expr:
    """The load offset that depends on the most axes; it decides their order."""
    best: Expr = ZERO
    most = -1
    for load in loads(*bodies):
        if len(load.index) == 1:
            known = sum(bool(coefficient(load.index[0], axis)) for axis in axes)
            if known > most:
                best, most = load.index[0], known
    return best
