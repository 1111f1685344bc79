"""Lowering of the `scan` schema (cumulative sums and the like): serial along a row, or in chunks divided among several threads.

With several threads per row, each thread reduces its own chunk, exchanges totals through shared memory, and scans its chunk again, starting from the
totals of the previous chunks, combined in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import below, bytes_touched, decode, named, reduce_and_final
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import TRUE, Expr, Load, Var, binary, compare, index_const, replace_loads, substitute
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
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels.gpu.scan.space import ScanFacts, ScanSchedule
from tilewright.kernels.gpu.window.lower import accumulator


@dataclass(frozen=True)
class ScanForm:
    """A scan with `rows` in the storage order of the output; bodies, offset and element are over the rows and `along`."""

    output: str
    step: Step
    rows: tuple[Var, ...]
    along: Var
    bodies: tuple[Expr, ...]
    offset: Expr
    element: Expr
    facts: ScanFacts


def scan_form(problem: Problem) -> ScanForm:
    """The form of one scan followed by at most one map. Raises Unsuitable for other regions."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    step, element, index = reduce_and_final(region, "scan")
    assert step.scan is not None
    output = region.outputs[0]
    along = step.scan
    bodies = [substitute(flatten(body, layouts), {step.reduction[0]: along}) for body in step.bodies]
    offset = layouts[output].offset(index)
    rows = storage_order([axis for axis in step.axes if axis != along], offset)
    merged, found = merge_axes(rows, [offset, *bodies, flatten(element, layouts)])
    facts = ScanFacts(
        rows=prod(axis.extent or 0 for axis in merged),
        columns=along.extent or 0,
        bytes_read=bytes_touched(bodies, step.axes, values),
        bytes_written=values[output].bytes,
        accumulator_bytes=sum(size_of(dtype) for dtype in step.dtypes),
    )
    return ScanForm(output, step, merged, along, tuple(found[1:-1]), found[0], found[-1], facts)


def lower_scan(problem: Problem, form: ScanForm, schedule: ScanSchedule) -> Lowered:
    """One kernel that scans the rows."""
    total, threads_per_row = form.facts.rows, schedule.threads_per_row
    launch = Launch((max(1, -(-total // schedule.rows)), 1, 1), (schedule.threads, 1, 1))
    thread = thread_variable(launch)
    local, lane = Var("local_row", schedule.rows), Var("lane", threads_per_row)
    # adjacent threads have adjacent rows, or adjacent chunks if there is one row per block
    root: list[Statement] = [Let(local, thread % schedule.rows), Let(lane, thread // schedule.rows)]
    raw = block_variable(launch) * schedule.rows + local
    row = Var("row", total)
    root.append(Let(row, binary("min", raw, index_const(total - 1)) if total % schedule.rows else raw))
    lets, mapping = named(decode(row, form.rows))
    root += lets
    bodies = [substitute(body, mapping) for body in form.bodies]
    length = form.along.extent or 0
    chunk = -(-length // threads_per_row)
    turn = Var("turn", chunk)
    start, held, update = accumulator(form.step, 1, "total")
    root += start
    valid = compare("lt", raw, index_const(total))

    def over_chunk(body: Callable[[Var], Sequence[Statement]]) -> Statement:
        return For(turn, index_const(chunk), block(below(lane * chunk + turn, length, form.along.name, body)))

    def at(position: Var) -> dict[Var, Expr]:
        return {form.along: position}

    if threads_per_row > 1:
        root.append(over_chunk(lambda v: update([substitute(b, at(v)) for b in bodies])))
        names = [f"chunks{i}" for i in range(len(form.step.dtypes))]
        dtypes = form.step.dtypes
        root += [Allocate(Buffer(n, d, schedule.threads, "shared")) for n, d in zip(names, dtypes, strict=True)]
        root += [Store(n, thread, h) for n, h in zip(names, held.values(), strict=True)]
        root.append(block_barrier())
        assert form.step.combiner is not None
        root += [s for s in start if isinstance(s, Store)]
        before = Var("before", threads_per_row)
        others = [Load(n, (before * schedule.rows + local,), d) for n, d in zip(names, dtypes, strict=True)]
        root.append(For(before, lane, block(update(others))))

    def emit(position: Var) -> list[Statement]:
        here = {**mapping, **at(position)}
        value = replace_loads(substitute(form.element, here), held)
        shared, (where, what) = bind_shared([substitute(form.offset, here), value])
        store: Statement = Store(form.output, where, what)
        stores = [*shared, store]
        step_in = update([substitute(b, at(position)) for b in bodies])
        return [*step_in, *(stores if valid == TRUE else [If(valid, block(stores))])]

    root.append(over_chunk(emit))
    return single(problem, schedule, block(root), launch)
