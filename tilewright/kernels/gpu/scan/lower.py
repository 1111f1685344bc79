"""Lowering of the `scan` schema (cumulative sums and the like): serial along a row, or in turns by several threads that share it.

In a turn each thread scans a few successive elements in registers. The threads' totals are scanned in shared memory (Hillis and Steele, Data parallel
algorithms, 1986), and combined with those of earlier threads and turns the elements are stored. So data are read once, by adjacent threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, storage_order
from tilewright.codegen.assemble import block, single
from tilewright.codegen.common import below, bytes_touched, combine, decode, named, reduce_and_final
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import TRUE, Expr, Load, Var, binary, coefficient, compare, index_const, replace_loads, substitute
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

Read = Callable[[Var], list[Expr]]
"""The elements to combine at a position of the row, one for each component."""
Stored = Callable[[Var, Mapping[str, Expr]], list[Statement]]
"""Statements that store the element at a position from the results there, by name."""


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
    contiguous = bool(merged) and coefficient(found[0], merged[-1]) == 1 and (merged[-1].extent or 0) > 1
    facts = ScanFacts(
        rows=prod(axis.extent or 0 for axis in merged),
        columns=along.extent or 0,
        bytes_read=bytes_touched(bodies, step.axes, values),
        bytes_written=values[output].bytes,
        accumulator_bytes=sum(size_of(dtype) for dtype in step.dtypes),
        row_contiguous=contiguous,
    )
    return ScanForm(output, step, merged, along, tuple(found[1:-1]), found[0], found[-1], facts)


def lower_scan(problem: Problem, form: ScanForm, schedule: ScanSchedule) -> Lowered:
    """One kernel that scans the rows."""
    total, threads_per_row = form.facts.rows, schedule.threads_per_row
    launch = Launch((max(1, -(-total // schedule.rows)), 1, 1), (schedule.threads, 1, 1))
    thread = thread_variable(launch)
    local, lane = Var("local_row", schedule.rows), Var("lane", threads_per_row)
    if form.facts.row_contiguous:
        root: list[Statement] = [Let(local, thread % schedule.rows), Let(lane, thread // schedule.rows)]
    else:
        root = [Let(local, thread // threads_per_row), Let(lane, thread % threads_per_row)]
    raw = block_variable(launch) * schedule.rows + local
    row = Var("row", total)
    # threads past the last row repeat it, so that every thread reaches the barriers; they store nothing
    root.append(Let(row, binary("min", raw, index_const(total - 1)) if total % schedule.rows else raw))
    lets, mapping = named(decode(row, form.rows))
    bodies, offset, element = [substitute(body, mapping) for body in form.bodies], substitute(form.offset, mapping), substitute(form.element, mapping)
    valid = compare("lt", raw, index_const(total))

    def read(position: Var) -> list[Expr]:
        return [substitute(body, {form.along: position}) for body in bodies]

    def stored(position: Var, results: Mapping[str, Expr]) -> list[Statement]:
        value = replace_loads(substitute(element, {form.along: position}), results)
        shared, (where, what) = bind_shared([substitute(offset, {form.along: position}), value])
        stores: list[Statement] = [*shared, Store(form.output, where, what)]
        return stores if valid == TRUE else [If(valid, block(stores))]

    scan = _serial(form, read, stored) if threads_per_row == 1 else _in_turns(form, schedule, thread, lane, read, stored)
    return single(problem, schedule, block([*root, *lets, *scan]), launch)


def _serial(form: ScanForm, read: Read, stored: Stored) -> list[Statement]:
    """A thread that scans its row alone."""
    position = Var(form.along.name, form.facts.columns)
    start, held, update = accumulator(form.step, 1, "total")
    return [*start, For(position, index_const(form.facts.columns), block([*update(read(position)), *stored(position, held)]))]


def _in_turns(form: ScanForm, schedule: ScanSchedule, thread: Var, lane: Var, read: Read, stored: Stored) -> list[Statement]:
    """Threads that share a row. `total` is a thread's of its elements, then of all up to it in this turn; `kept` are the partial ones of its
    elements, `before` is what comes before them, and `carry` the total of earlier turns."""
    step, dtypes, items, shared_by = form.step, form.step.dtypes, schedule.items, schedule.threads_per_row
    assert step.combiner is not None
    zero, length = index_const(0), form.facts.columns
    turns = -(-length // (shared_by * items))
    turn, item = Var("turn", turns), Var("item", items)
    start, held, update = accumulator(step, 1, "total")
    start_carry, carry, update_carry = accumulator(step, 1, "carry")
    start_before, before, update_before = accumulator(step, 1, "before")
    kept = [Buffer(f"kept{i}", dtype, items, "register") for i, dtype in enumerate(dtypes)]
    exchanged = [Buffer(f"exchanged{i}", dtype, 2 * schedule.threads, "shared") for i, dtype in enumerate(dtypes)]
    distance = schedule.rows if form.facts.row_contiguous else 1
    steps = shared_by.bit_length() - 1

    def total_of(half: int, whose: Expr) -> list[Expr]:
        return [Load(buffer.name, (whose + half * schedule.threads,), buffer.dtype) for buffer in exchanged]

    def put(names: Iterable[str], where: Expr, values: Iterable[Expr]) -> list[Statement]:
        return [Store(name, where, value) for name, value in zip(names, values, strict=True)]

    def preceded(other: Sequence[Expr]) -> list[Statement]:
        """Combines the total with one that comes before it."""
        assert step.combiner is not None
        lets, values = bind_shared(list(combine(step.combiner, other, tuple(held.values()))), "w")
        new = [Let(Var(f"new{i}", None, value.dtype), value) for i, value in enumerate(values)]
        return [*lets, *new, *put((load.buffer for load in held.values()), zero, (let.variable for let in new))]

    def over_items(body: Callable[[Var], Sequence[Statement]]) -> Statement:
        inner = block(below((turn * shared_by + lane) * items + item, length, form.along.name, body))
        return For(item, index_const(items), inner, "unroll")

    def scan_item(position: Var) -> list[Statement]:
        return [*update(read(position)), *put((buffer.name for buffer in kept), item, held.values())]

    def store_item(position: Var) -> list[Statement]:
        assert step.combiner is not None
        own = tuple(Load(buffer.name, (item,), buffer.dtype) for buffer in kept)
        lets, values = bind_shared(list(combine(step.combiner, tuple(before.values()), own)), "v")
        results = {name: Var(f"result{i}", None, value.dtype) for i, (name, value) in enumerate(zip(step.names, values, strict=True))}
        return [*lets, *(Let(result, value) for result, value in zip(results.values(), values, strict=True)), *stored(position, results)]

    body: list[Statement] = [s for s in start if isinstance(s, Store)]
    body += [over_items(scan_item), *put((buffer.name for buffer in exchanged), thread, held.values())]
    for number in range(steps):
        other = total_of(number % 2, thread - index_const(distance << number))
        body += [
            block_barrier(),
            If(compare("ge", lane, index_const(1 << number)), block(preceded(other))),
            *put((buffer.name for buffer in exchanged), thread + (number + 1) % 2 * schedule.threads, held.values()),
        ]
    last = steps % 2
    body += [block_barrier(), *put((load.buffer for load in before.values()), zero, carry.values())]
    body.append(If(compare("ge", lane, index_const(1)), block(update_before(total_of(last, thread - distance)))))
    if turns > 1:
        body += update_carry(total_of(last, thread + (index_const(shared_by - 1) - lane) * distance))
    body.append(over_items(store_item))
    if turns > 1:
        body.append(block_barrier())  # the next turn's totals take the place of these
    allocated = [*start, *start_carry, *start_before, *map(Allocate, (*kept, *exchanged))]
    return [*allocated, For(turn, index_const(turns), block(body))]
