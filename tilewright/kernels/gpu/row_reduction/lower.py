"""Lowering of the `row reduction` schema: a block owns rows; the threads that share a row reduce it in a tree in shared memory, and then map it.

If a row's elements are adjacent in memory, adjacent threads have adjacent columns; if rows are adjacent (the spatial mean of a channels-last tensor),
adjacent threads have adjacent rows and the warps divide the columns. Either way loads are coalesced. The tree always adds in the same order, so
results do not vary between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.access import VECTOR_TYPES, bind_shared, flatten, merge_axes, split_divided_rows, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import (
    Walk,
    below,
    bytes_touched,
    combine,
    decode,
    expression_flops,
    extent_of,
    main_offset,
    named,
    vectors_fit,
    walk_in_order,
    widest,
)
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.graph.rows import rows_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    TRUE,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    coefficient,
    compare,
    index_const,
    loads,
    logical_and,
    replace_loads,
    substitute,
)
from tilewright.ir.kernel import (
    Allocate,
    Buffer,
    For,
    If,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    thread_variable,
)
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.map.lower import element_store, most_lanes
from tilewright.kernels.gpu.row_reduction.space import RowReductionFacts, RowReductionSchedule
from tilewright.kernels.gpu.window.lower import accumulator

UNROLLED_ITERATIONS = 8


@dataclass(frozen=True)
class RowStage:
    """One pass over the columns of a row. `space.expressions`: the bodies of a reduction, or (offset, element) of the final map."""

    step: Step
    space: Walk
    vector_width: int

    @property
    def reduces(self) -> bool:
        return self.step.kind == "reduce"

    @property
    def is_single(self) -> bool:
        """Whether there is only one column: every thread of the row computes it, and nothing is shared."""
        return self.space.points == 1


@dataclass(frozen=True)
class RowReductionForm:
    """Stages over common row axes. `where` is the store's offset if the region ends with a reduction; None if the last stage stores."""

    output: str
    rows: tuple[Var, ...]
    stages: tuple[RowStage, ...]
    where: Expr | None
    facts: RowReductionFacts


def row_reduction_form(problem: Problem) -> RowReductionForm:
    """The form of a region whose reductions share rows. Raises Unsuitable for other regions."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    steps = split_divided_rows(region.steps)
    if rows_of(steps) is None:
        steps = region.steps
    row_of_last = rows_of(steps)
    if row_of_last is None:
        raise Unsuitable(f"the reductions of region {region.name} do not share rows")
    output = region.outputs[0]
    reduces = [step for step in steps if step.kind == "reduce"]
    last = steps[-1]
    row_axes = tuple(Var(f"row{i}", axis.extent) for i, axis in enumerate(reduces[0].axes))
    inside: dict[str, Expr] = {
        name: Load(name, (index_const(0),), dtype) for step in reduces for name, dtype in zip(step.names, step.dtypes, strict=True)
    }
    columns: dict[str, tuple[Var, ...]] = {}
    expressions: dict[str, tuple[Expr, ...]] = {}
    for step in steps:
        own: tuple[Var, ...] = step.axes if step.kind == "reduce" else row_of_last
        mapping: dict[Var, Expr] = dict(zip(own, row_axes, strict=True))
        inner = step.reduction if step.kind == "reduce" else tuple(axis for axis in step.axes if axis not in mapping)
        fresh = tuple(Var(f"column{i}", axis.extent) for i, axis in enumerate(inner))
        mapping |= dict(zip(inner, fresh, strict=True))
        # a result always belongs to the current row: dropping its index lets the row axes merge
        found = [replace_loads(substitute(flatten(body, layouts), mapping), inside) for body in step.bodies]
        if step is last:
            found.insert(0, substitute(layouts[output].offset(step.index), mapping))
        columns[step.name], expressions[step.name] = fresh, tuple(found)
    longest = max(reduces, key=lambda step: extent_of(step.reduction))
    main = main_offset(problem, expressions[longest.name][-len(longest.bodies) :])
    ordered = storage_order(row_axes, main)
    everything = [e for step in steps for e in expressions[step.name]]
    merged_rows, merged = merge_axes(ordered, everything)
    rest = list(merged)
    stages: list[RowStage] = []
    where: Expr | None = None
    touched: list[tuple[Expr, tuple[Var, ...]]] = []
    for step in steps:
        offsets, rest = rest[: len(expressions[step.name])], rest[len(expressions[step.name]) :]
        touched += [(e, (*merged_rows, *columns[step.name])) for e in offsets]
        if step is last and step.kind == "reduce":
            where, offsets = offsets[0], offsets[1:]
        by = offsets[0] if step.kind == "map" else main_offset(problem, offsets)
        space = walk_in_order(columns[step.name], offsets, by)
        stages.append(RowStage(step, space, _stage_lanes(step, space, layouts, most_lanes(problem))))
    leading = stages[steps.index(longest)]
    main = main_offset(problem, leading.space.expressions)
    contiguous = bool(merged_rows) and coefficient(main, merged_rows[-1]) == 1
    fastest = leading.space.fastest
    if fastest is not None and coefficient(main, fastest) == 1 and (fastest.extent or 0) > 1:
        contiguous = False
    facts = RowReductionFacts(
        rows=prod(axis.extent or 0 for axis in merged_rows),
        columns=max(stage.space.points for stage in stages),
        row_contiguous=contiguous,
        vector_width=max(stage.vector_width for stage in stages),
        stages=sum(stage.reduces and not stage.is_single for stage in stages),
        bytes_read=max(bytes_touched([e], axes, values) for e, axes in touched) if touched else 0,
        bytes_written=values[output].bytes,
        flops=sum(stage.space.points * (expression_flops(*stage.space.expressions) + 1) for stage in stages),
        accumulator_bytes=sum(size_of(dtype) for step in reduces for dtype in step.dtypes),
        element_bytes=WIDEST_BYTES // most_lanes(problem),
    )
    return RowReductionForm(output, merged_rows, tuple(stages), where, facts)


def _stage_lanes(step: Step, space: Walk, layouts: Mapping[str, Layout], most: int) -> int:
    if space.fastest is None or len(step.bodies) > 1 or step.dtypes[0] not in VECTOR_TYPES:
        return 1
    if step.kind == "map":
        offset, element = space.expressions
        lanes = widest(_plain_results(element, layouts), space.fastest, layouts, offset, most)
        return lanes
    return widest(_plain_results(space.expressions[0], layouts), space.fastest, layouts, most=most)


def _plain_results(expr: Expr, layouts: Mapping[str, Layout]) -> Expr:
    """The expression with results of earlier stages as scalars, constant along the row."""
    return replace_loads(expr, {load.buffer: Var("result", None, load.dtype) for load in loads(expr) if load.buffer not in layouts})


def lower_row_reduction(problem: Problem, form: RowReductionForm, schedule: RowReductionSchedule) -> Lowered:
    """One kernel that reduces the rows and maps them."""
    layouts = problem.layouts
    total = form.facts.rows
    launch = Launch((max(1, -(-total // schedule.rows)), 1, 1), (schedule.threads, 1, 1), ((total, schedule.rows),))
    thread = thread_variable(launch)
    lane, local = Var("lane", schedule.threads_per_row), Var("local_row", schedule.rows)
    if form.facts.row_contiguous:
        ids = [Let(lane, thread // schedule.rows), Let(local, thread % schedule.rows)]
    else:
        ids = [Let(lane, thread % schedule.threads_per_row), Let(local, thread // schedule.threads_per_row)]
    raw = block_variable(launch) * schedule.rows + local
    partial = total % schedule.rows != 0
    row = Var("row", total)
    # threads past the last row repeat it, so that every thread reaches the barriers; they store nothing
    root: list[Statement] = [*ids, Let(row, binary("min", raw, index_const(total - 1)) if partial else raw)]
    lets, row_mapping = named(decode(row, form.rows))
    root += lets
    valid = compare("lt", raw, index_const(total))
    results: dict[str, Expr] = {}
    for number, stage in enumerate(form.stages):
        lanes = min(schedule.vector_width, stage.vector_width)
        expressions = [replace_loads(substitute(e, row_mapping), results) for e in stage.space.expressions]
        if stage.reduces and stage.is_single:
            names = [Var(f"result{number}_{i}", None, e.dtype) for i, e in enumerate(expressions)]
            root += [Let(name, e) for name, e in zip(names, expressions, strict=True)]
            results |= dict(zip(stage.step.names, names, strict=True))
        elif stage.reduces:
            statements, fresh = _reduce(stage, expressions, lanes, schedule, form, number, thread, lane, local, layouts)
            root += statements
            results |= fresh
        else:
            offset, element = expressions
            root += _guard(valid, [_columns(stage, lanes, schedule, lane, offset, element, form.output, layouts)])
    if form.where is not None:
        step = form.stages[-1].step
        component = step.names.index(form.output) if form.output in step.names else 0
        store = Store(form.output, substitute(form.where, row_mapping), results[step.names[component]])
        root += _guard(logical_and(compare("eq", lane, index_const(0)), valid), [store])
    return single(problem, schedule, block(root), launch)


def _guard(condition: Expr, body: list[Statement]) -> list[Statement]:
    return body if condition == TRUE else [If(condition, block(body))]


def _over_columns(stage: RowStage, lanes: int, threads_per_row: int, lane: Var, body: Callable[[Mapping[Var, Expr]], list[Statement]]) -> Statement:
    """The loop of one thread over its share of the columns (or vectors of columns); `body` receives the values of the column axes."""
    count = stage.space.points // lanes
    iterations = -(-count // threads_per_row)
    turn = Var("turn", iterations)

    def at(position: Var) -> list[Statement]:
        lets, mapping = named(decode(position, stage.space.axes, lanes))
        return [*lets, *body(mapping)]

    inner = block(below(turn * threads_per_row + lane, count, "column", at))
    if iterations == 1:
        return inner
    return For(turn, index_const(iterations), inner, "unroll" if iterations <= UNROLLED_ITERATIONS else "serial")


def _widened(exprs: Sequence[Expr], stage: RowStage, lanes: int, layouts: Mapping[str, Layout]) -> list[Expr]:
    if lanes == 1:
        return list(exprs)
    assert stage.space.fastest is not None
    wide = [vectors_fit(e, stage.space.fastest, lanes, layouts) for e in exprs]
    assert all(e is not None for e in wide)
    return [e for e in wide if e is not None]


def _columns(
    stage: RowStage,
    lanes: int,
    schedule: RowReductionSchedule,
    lane: Var,
    offset: Expr,
    element: Expr,
    output: str,
    layouts: Mapping[str, Layout],
) -> Statement:
    (wide,) = _widened([element], stage, lanes, layouts)
    return _over_columns(
        stage,
        lanes,
        schedule.threads_per_row,
        lane,
        lambda m: element_store(output, substitute(offset, m), substitute(as_lanes(wide, lanes), m), {}),
    )


def _reduce(
    stage: RowStage,
    expressions: Sequence[Expr],
    lanes: int,
    schedule: RowReductionSchedule,
    form: RowReductionForm,
    number: int,
    thread: Var,
    lane: Var,
    local: Var,
    layouts: Mapping[str, Layout],
) -> tuple[list[Statement], dict[str, Expr]]:
    """Statements that reduce the row, and the variables that hold the results in every thread of the row."""
    step = stage.step
    prefix = f"part{number}"
    start, held, update = accumulator(step, lanes, prefix)
    bodies = _widened(expressions, stage, lanes, layouts)
    statements: list[Statement] = [*start]
    statements.append(_over_columns(stage, lanes, schedule.threads_per_row, lane, lambda m: update([substitute(b, m) for b in bodies])))
    assert step.combiner is not None
    # combines the lanes of a vector accumulator pairwise
    parts: list[tuple[Expr, ...]] = [tuple(Load(h.buffer, (index_const(i),), h.dtype) for h in held.values()) for i in range(lanes)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [combine(step.combiner, parts[i], parts[i + half]) for i in range(half)]
    totals = list(parts[0])
    results = [Var(f"result{number}_{i}", None, dtype) for i, dtype in enumerate(step.dtypes)]
    if schedule.threads_per_row == 1:
        statements += [Let(v, total) for v, total in zip(results, totals, strict=True)]
        return statements, dict(zip(step.names, results, strict=True))
    names = [f"shared{number}_{i}" for i in range(len(step.dtypes))]
    distance = schedule.rows if form.facts.row_contiguous else 1
    statements += [Allocate(Buffer(n, d, schedule.threads, "shared")) for n, d in zip(names, step.dtypes, strict=True)]
    statements += [Store(n, thread, total) for n, total in zip(names, totals, strict=True)]
    stride = schedule.threads_per_row // 2
    while stride:
        mine = tuple(Load(n, (thread,), d) for n, d in zip(names, step.dtypes, strict=True))
        other = tuple(Load(n, (thread + stride * distance,), d) for n, d in zip(names, step.dtypes, strict=True))
        lets, fresh = bind_shared(list(combine(step.combiner, mine, other)), "w")
        new = [Let(Var(f"new{i}", None, e.dtype), e) for i, e in enumerate(fresh)]
        stores = [Store(n, thread, let.variable) for n, let in zip(names, new, strict=True)]
        statements += [block_barrier(), If(compare("lt", lane, index_const(stride)), block([*lets, *new, *stores]))]
        stride //= 2
    first = local if form.facts.row_contiguous else local * schedule.threads_per_row
    statements.append(block_barrier())
    statements += [Let(v, Load(n, (first,), v.dtype)) for v, n in zip(results, names, strict=True)]
    return statements, dict(zip(step.names, results, strict=True))
