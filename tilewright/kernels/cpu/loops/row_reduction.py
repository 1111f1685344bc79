"""Lowering of the `row reduction` schema on CPUs: reductions over whole rows and the maps between them.

If corresponding elements of neighbouring rows are adjacent in memory, rows fill the vector lanes; otherwise the lanes divide each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, split_divided_rows, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.graph.rows import rows_of
from tilewright.ir.computation import Step
from tilewright.ir.expr import ZERO, Apply, Expr, Load, Var, coefficient, loads, replace_loads, rewrite, substitute, walk
from tilewright.ir.guards import guards
from tilewright.ir.kernel import Allocate, Buffer, Let, Statement, Store, substitute_in
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.ir.scalar import OPERATIONS
from tilewright.kernels.cpu.common import SHORTEST, halves, loops, reduction, swept, vector_reduction, vector_store, vector_width
from tilewright.kernels.cpu.loops.across import Across, adjacent_axis, held
from tilewright.kernels.cpu.loops.space import RowSchedule
from tilewright.kernels.cpu.loops.window import has_vectors

KEPT, MOST_KEPT = "kept", 4096
"""The array for what the last reduction computes and the map after it needs again, and its largest size: a row stays in the nearest cache."""
MOST_KEPT_ACROSS = 1 << 15
"""The largest size of that array for a block of neighbouring rows: it stays in level 2, and reading it there costs less than the function."""
COSTLY = 8
"""Fewest operations of a function that is worth keeping."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A region of reductions over rows, with flat offsets and one set of row variables, `axes`, for all steps.

    flat: the bodies of each step by its name, in which `held` stands for results of reductions. where: the offset of the stored element. columns: the
    axes of the last step, if it is a map, inside of a row. lane: the axis of adjacent rows that may lie across the lanes of vectors; None if there is
    none."""

    steps: tuple[Step, ...]
    flat: Mapping[str, Sequence[Expr]]
    where: Expr
    axes: tuple[Var, ...]
    columns: tuple[Var, ...]
    lane: Var | None

    @property
    def reduces(self) -> list[Step]:
        return [step for step in self.steps if step.kind == "reduce"]

    @property
    def outer(self) -> list[Var]:
        """The axes of rows that do not lie across lanes."""
        return [axis for axis in self.axes if axis is not self.lane]


def accumulator(name: str) -> str:
    """The buffer that holds the result of a reduction of that name."""
    return f"acc_{name.replace('.', '_')}"


def rows_in(problem: Problem, lanes: int) -> Rows:
    """The rows of a problem, for vectors of `lanes`.

    Raises:
        Unsuitable: if a window is no row: its steps share none, or it reads beyond edges; or if it gains nothing as one, since vectors of results or
            none at all can be loaded.
    """
    region, layouts = problem.region, problem.layouts
    steps = split_divided_rows(region.steps)
    if rows_of(steps) is None:
        steps = region.steps
    row_of_last = rows_of(steps)
    if row_of_last is None:
        raise Unsuitable("its steps do not share rows")
    reduces = [step for step in steps if step.kind == "reduce"]
    last, row_axes, columns = steps[-1], reduces[0].axes, tuple[Var, ...]()
    # one set of row variables for all steps
    renamed = {step.name: dict(zip(step.axes, row_axes, strict=True)) for step in reduces}
    if last.kind == "map":
        renamed[last.name] = {axis: row for axis, row in zip(row_of_last, row_axes, strict=True) if axis in last.axes}
        plain = tuple(axis for axis in last.axes if axis not in renamed[last.name])
        columns = tuple(Var("c" + axis.name, axis.extent) for axis in plain)
        renamed[last.name] |= dict(zip(plain, columns, strict=True))
    results: dict[str, Expr] = {name: held(accumulator(name), dtype) for step in reduces for name, dtype in zip(step.names, step.dtypes, strict=True)}
    flat = {step.name: [replace_loads(substitute(flatten(b, layouts), renamed[step.name]), results) for b in step.bodies] for step in steps}
    where = substitute(layouts[region.outputs[0]].offset(last.index), renamed[last.name])
    longest = max(reduces, key=lambda step: prod(axis.extent or 0 for axis in step.reduction))
    order = storage_order(row_axes, largest_offset(flat[longest.name], row_axes))
    if region.kind == "window":
        _check_window(problem, reduces[0], flat[reduces[0].name], lanes)
    kept_apart = _merged(steps, flat, where, order, longest, row_axes[0] if row_axes else None)
    if kept_apart.lane is None or (kept_apart.lane.extent or 0) >= lanes:
        return replace(kept_apart, columns=columns)
    return replace(_merged(steps, flat, where, order, longest, None), columns=columns)


def _merged(
    steps: tuple[Step, ...], flat: Mapping[str, Sequence[Expr]], where: Expr, order: Sequence[Var], longest: Step, images: Var | None
) -> Rows:
    """The rows with contiguous axes merged. Images remain apart, so that the code for rows does not depend on their number."""
    exprs = [*(body for step in steps for body in flat[step.name]), where]
    axes, (*bodies, at) = merge_axes(order, exprs, lambda outer, inner: outer != images)
    remaining = iter(bodies)
    merged = {step.name: [next(remaining) for _ in step.bodies] for step in steps}
    return Rows(steps, merged, at, axes, (), adjacent_axis(merged[longest.name], axes))


def _check_window(problem: Problem, reduce: Step, bodies: Sequence[Expr], lanes: int) -> None:
    if any(isinstance(node, Apply) and node.operation == "select" for node in walk(*bodies)):
        raise Unsuitable("its windows read beyond edges")
    if has_vectors(problem, lanes):
        raise Unsuitable("vectors of neighbouring results read their windows")
    order = storage_order(reduce.reduction, largest_offset(bodies, reduce.reduction))
    reduced, merged = merge_axes(order, bodies)
    along = reduced and (reduced[-1].extent or 0) >= SHORTEST and all(coefficient(load.index[0], reduced[-1]) == 1 for load in loads(*merged))
    if not (along and len(bodies) == 1) and adjacent_axis(bodies, reduce.axes) is None:
        raise Unsuitable("neither the elements of a window nor those of neighbouring windows are adjacent")


def lower_row_reduction(problem: Problem, rows: Rows, schedule: RowSchedule) -> Lowered:
    """Reductions over whole rows and the maps between them, in one kernel.

    Raises:
        Unsuitable: for a schedule with rows across lanes, if none are adjacent.
    """
    if schedule.across and rows.lane is None:
        raise Unsuitable("corresponding elements of neighbouring rows are not adjacent")
    body = _across(problem, rows, schedule) if schedule.across else _along(problem, rows, schedule)
    return single(problem, schedule, body)


def _along(problem: Problem, rows: Rows, schedule: RowSchedule) -> Statement:
    """Rows one after the other, each divided among lanes."""
    region, flat, columns, where, reduces = problem.region, dict(rows.flat), rows.columns, rows.where, rows.reduces
    last = rows.steps[-1]
    result: list[Statement] = []
    totals: dict[str, Expr] = {}
    kept = kept_function(rows, None)
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
        order = storage_order(step.reduction, largest_offset(bodies, step.reduction))
        reduced, merged = merge_axes(order, [*bodies, *kept_here])
        merged_step, name = replace(step, reduction=reduced), f"{step.name.replace('.', '_')}_"  # value1 and 0 would be another value's name
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
        totals |= dict(zip(map(accumulator, step.names), results, strict=True))
    if last.kind == "reduce":
        result.append(Store(region.outputs[0], where, totals[accumulator(last.name)]))
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
    return loops(rows.axes, block(result), True, work=sum(step.flops() for step in rows.steps))


def block_of(rows: Rows, vectors: int, lanes: int) -> Across:
    """Blocks of at most `vectors` vectors of adjacent rows."""
    assert rows.lane is not None
    names = {accumulator(name): dtype for step in rows.reduces for name, dtype in zip(step.names, step.dtypes, strict=True)}
    return Across.of([body for step in rows.steps for body in rows.flat[step.name]], [rows.where], rows.lane, lanes, vectors, names)


def kept_function(rows: Rows, block: Across | None) -> Expr | None:
    """The largest part of the last reduction's body that computes a function which the map computes again; None if there is none, or if a row (or the
    rows of a block) is too long to keep."""
    last = rows.steps[-1]
    if last.kind != "map":
        return None
    reduce = rows.reduces[-1]
    bodies, values = rows.flat[reduce.name], rows.flat[last.name]
    extents = [axis.extent or 1 for axis in rows.columns]
    most = MOST_KEPT if block is None else MOST_KEPT_ACROSS // block.rows
    if [axis.extent or 1 for axis in reduce.reduction] != extents or prod(extents) > most:
        return None
    row: dict[Var, Expr] = dict(zip(rows.columns, reduce.reduction, strict=True))
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


def _across(problem: Problem, rows: Rows, schedule: RowSchedule) -> Statement:
    """Blocks of neighbouring rows. What the last reduction computes and the map needs again is kept for the rows of a block."""
    flat, last, target = rows.flat, rows.steps[-1], problem.region.outputs[0]
    across = block_of(rows, schedule.across, schedule.lanes)
    kept = kept_function(rows, across)
    result: list[Statement] = []
    if kept is not None:
        row: dict[Var, Expr] = dict(zip(rows.columns, rows.reduces[-1].reduction, strict=True))
        again, place = substitute(kept, dict(zip(rows.reduces[-1].reduction, rows.columns, strict=True))), _position(rows.columns)
        result.append(across.array(KEPT, kept.dtype, prod(axis.extent or 1 for axis in rows.columns)))
    for step in rows.reduces:
        accumulators = [accumulator(name) for name in step.names]
        result += across.start(step, accumulators, step.dtypes)
        order = storage_order(step.reduction, largest_offset(flat[step.name], step.reduction))
        keeps = kept if step is rows.reduces[-1] else None

        def combine(vector: Expr, step: Step = step, keeps: Expr | None = keeps, accumulators: Sequence[str] = accumulators) -> list[Statement]:
            bodies, lets = [across.value(body, vector) for body in flat[step.name]], list[Statement]()
            if keeps is not None:
                value = across.value(keeps, vector)
                variable = Var("keep", None, value.dtype, value.lanes)
                at = across.entry(KEPT, keeps.dtype, vector, substitute(place, row)).index[0]
                lets = [Let(variable, value), Store(KEPT, at, variable)]
                bodies = [_instead(body, value, variable) for body in bodies]
            return [*lets, *across.combine(step, accumulators, bodies, vector)]

        inner = across.over(combine)
        zero: dict[Var, Expr] = {axis: ZERO for axis in step.reduction if axis.extent == 1}
        result.append(loops([axis for axis in order if axis.extent != 1], substitute_in(inner, zero), False))
    if last.kind == "reduce":
        total = held(accumulator(last.name), last.dtypes[0])
        result.append(across.over(lambda vector: across.store(target, rows.where, across.value(total, vector), vector)))
    else:
        (body,) = flat[last.name]

        def store(vector: Expr) -> list[Statement]:
            value = across.value(body, vector)
            if kept is not None:
                value = _instead(value, across.value(again, vector), across.entry(KEPT, kept.dtype, vector, place))
            return across.store(target, rows.where, value, vector)

        inner = across.over(store)
        zero = {axis: ZERO for axis in rows.columns if axis.extent == 1}
        result.append(loops([axis for axis in storage_order(rows.columns, rows.where) if axis.extent != 1], substitute_in(inner, zero), False))
    return across.blocks(rows.outer, block(result), sum(step.flops() for step in rows.steps))


def largest_offset(bodies: Sequence[Expr], axes: Sequence[Var]) -> Expr:
    """The load offset that depends on the most axes; it decides their order."""
    best: Expr = ZERO
    most = -1
    for load in loads(*bodies):
        if len(load.index) == 1:
            known = sum(bool(coefficient(load.index[0], axis)) for axis in axes)
            if known > most:
                best, most = load.index[0], known
    return best
