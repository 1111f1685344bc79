"""Lowering of contractions with a few rows of m (fully connected layers at batch 1, recurrent steps): bound by reading B once.

Every thread holds all rows of m for one vector of columns (or for one column, if B is adjacent along r) and runs through its share of the reduction
with coalesced loads of B. The threads of a column combine their sums in a tree in shared memory. The order is fixed, so results do not vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.codegen.common import below, decode, named, vectors_fit
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Const, Expr, Load, Var, as_lanes, binary, compare, index_const, range_of, replace_loads, substitute
from tilewright.ir.kernel import (
    Allocate,
    Block,
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
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemv.space import GemvSchedule
from tilewright.kernels.gpu.split import in_one_or_two

UNROLLED_TURNS = 8
"""Unrolled iterations of the reduction, and so the number of a thread's loads in flight."""


def lower_gemv(problem: Problem, form: ProductForm, schedule: GemvSchedule, machine: Machine) -> Lowered:
    """One kernel, or two with a workspace if the reduction is split."""
    return in_one_or_two(problem, form, schedule, machine, lambda form: columns(form, schedule), split=schedule.split)


def columns(form: ProductForm, schedule: GemvSchedule) -> tuple[Block, Launch]:
    """The body for all rows of m and `schedule.columns` vectors of columns per block."""
    facts = form.facts
    along_n = facts.b.along == "own"
    n_lanes = facts.b.vector_width if along_n else 1
    r_lanes = 1 if along_n else facts.b.vector_width
    if r_lanes > 1 and (form.r[-1].extent or 0) % r_lanes:
        r_lanes = 1
    width = schedule.columns * n_lanes
    counts = (schedule.split, facts.batch, -(-facts.n // width))
    launch = Launch((prod(counts), 1, 1), (schedule.threads, 1, 1))
    thread = thread_variable(launch)
    part, batch, tile = Var("part", counts[0]), Var("batch", counts[1]), Var("tile", counts[2])
    lets, where = named(decode(block_variable(launch), (part, batch, tile)))
    root: list[Statement] = list(lets)
    part_, batch_, tile_ = (where.get(v, v) for v in (part, batch, tile))
    batch_lets, batch_values = named(decode(batch_, form.batch))
    root += batch_lets
    bind = {**batch_values, **({part: part_} if part in where else {})}
    column, thread_r = Var("column", schedule.columns), Var("thread_r", schedule.threads_along_r)
    if along_n:
        root += [Let(column, thread % schedule.columns), Let(thread_r, thread // schedule.columns)]
        distance = schedule.columns
    else:
        root += [Let(column, thread // schedule.threads_along_r), Let(thread_r, thread % schedule.threads_along_r)]
        distance = 1
    # columns past the end repeat the last one and store nothing
    stored = prod(axis.extent or 1 for axis in form.b_n)
    raw = (tile_ * schedule.columns + column) * n_lanes
    n = Var("n", stored)
    root.append(
        Let(n, binary("min", raw, index_const(stored - n_lanes)) if range_of(raw)[1] > stored - n_lanes else raw)
    )
    n_lets, n_values = named(decode(n, form.b_n))
    root += n_lets
    axis = form.b_n[-1] if along_n else form.r[-1] if form.r else None
    lanes = n_lanes if along_n else r_lanes
    b = vectors_fit(form.b, axis, lanes, form.layouts) if axis is not None else form.b
    assert b is not None
    b = substitute(b, {**bind, **n_values})
    rows = facts.m
    root.append(Allocate(Buffer("acc", form.dtype, rows * n_lanes, "register")))
    at = Var("at", rows * n_lanes)
    root.append(For(at, index_const(rows * n_lanes), Store("acc", at, Const(0.0, form.dtype)), "unroll"))
    steps = facts.r // r_lanes
    each = -(-steps // schedule.split)
    turns = -(-each // schedule.threads_along_r)

    def turn_body(turn: Expr) -> list[Statement]:
        mine = turn * schedule.threads_along_r + thread_r
        everything = part_ * each + mine
        limit = index_const(steps)
        inner: list[Statement] = []
        r_values = decode(everything * r_lanes, form.r)
        wide = Var("b_value", None, form.dtype, lanes)
        inner.append(Let(wide, as_lanes(substitute(b, r_values), lanes)))
        for m in range(rows):
            a = substitute(form.a, {**bind, **decode(index_const(m), form.m)})
            if along_n:
                factor: Expr = Var(f"a_value{m}", None, form.dtype)
                inner.append(Let(factor, substitute(a, r_values)))  # type: ignore[arg-type]
                slot = index_const(m * n_lanes)
                held = Load("acc", (slot,), form.dtype, n_lanes)
                inner.append(Store("acc", slot, held + as_lanes(factor, n_lanes) * wide))
            else:
                inner.append(Allocate(Buffer("b_lanes", form.dtype, lanes, "register"))) if m == 0 else None
                if m == 0:
                    inner.append(Store("b_lanes", index_const(0), wide))
                for lane in range(lanes):
                    factor = substitute(a, decode(everything * r_lanes + lane, form.r))
                    slot = index_const(m)
                    product = factor * Load("b_lanes", (index_const(lane),), form.dtype)
                    inner.append(Store("acc", slot, Load("acc", (slot,), form.dtype) + product))
        conditions = []
        if each % schedule.threads_along_r:
            conditions.append(compare("lt", mine, index_const(each)))
        if steps % each:
            conditions.append(compare("lt", everything, limit))
        result: list[Statement] = inner
        for condition in conditions:
            result = [If(condition, block(result))]
        return result

    chunk = min(UNROLLED_TURNS, turns)
    chunks = turns // chunk
    step, within = Var("turns", chunks), Var("turn", chunk)
    body = For(within, index_const(chunk), block(turn_body(step * chunk + within)), "unroll")
    root.append(
        For(step, index_const(chunks), body)
        if chunks > 1
        else For(within, index_const(chunk), block(turn_body(within)), "unroll")
    )
    if turns % chunk:
        rest = Var("rest", turns % chunk)
        root.append(For(rest, index_const(turns % chunk), block(turn_body(rest + chunks * chunk)), "unroll"))
    if schedule.threads_along_r > 1:
        root += _meet(rows * n_lanes, form.dtype, schedule, thread, thread_r, distance)
    root += _store(form, schedule, bind, raw, thread_r, n_lanes)
    return block(root), launch


def _meet(size: int, dtype: str, schedule: GemvSchedule, thread: Var, thread_r: Var, distance: int) -> list[Statement]:
    """Adds the accumulators of the threads that share a column, in a tree; the result is in the first of them."""
    # [element][thread]: adjacent threads at adjacent addresses
    place = Var("place", size)
    threads = schedule.threads
    result: list[Statement] = [Allocate(Buffer("meeting", dtype, size * threads, "shared"))]
    put = Store("meeting", place * threads + thread, Load("acc", (place,), dtype))
    result.append(For(place, index_const(size), put, "unroll"))
    stride = schedule.threads_along_r // 2
    while stride:
        at = place * threads + thread
        total = Load("meeting", (at,), dtype) + Load("meeting", (at + stride * distance,), dtype)
        add = For(place, index_const(size), Store("meeting", at, total), "unroll")
        result += [block_barrier(), If(compare("lt", thread_r, index_const(stride)), block([add]))]
        stride //= 2
    take = Store("acc", place, Load("meeting", (place * threads + thread,), dtype))
    result.append(For(place, index_const(size), take, "unroll"))
    return result


def _store(
    form: ProductForm, schedule: GemvSchedule, bind: Mapping[Var, Expr], raw: Expr, thread_r: Var, n_lanes: int
) -> list[Statement]:
    lanes = min(form.facts.store_vector, n_lanes)
    element, offset = substitute(form.element, bind), substitute(form.offset, bind)
    if lanes > 1:
        wide = vectors_fit(element, form.n[-1], lanes, form.layouts)
        assert wide is not None
        element = as_lanes(wide, lanes)
    result: list[Statement] = []
    for m in range(form.facts.m):
        for start in range(0, n_lanes, lanes):
            held = Load("acc", (index_const(m * n_lanes + start),), form.dtype, lanes)
            here = replace_loads(element, {form.step.name: held})

            def store(n: Var, m: int = m, here: Expr = here) -> list[Statement]:
                lets, mapping = named(decode(n, form.n))
                everything = {**mapping, **decode(index_const(m), form.m)}
                shared, (where, what) = bind_shared([substitute(offset, everything), substitute(here, everything)])
                return [*lets, *shared, Store(form.output, where, what)]

            result.append(block(below(raw + start, form.facts.n, "n_out", store)))
    first = compare("lt", thread_r, index_const(1))
    return [If(first, block(result))] if schedule.threads_along_r > 1 else result
