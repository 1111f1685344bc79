"""Lowering of contractions with a few rows of m (fully connected layers at batch 1, recurrent steps): bound by reading B once.

Every thread holds all rows of m for one vector of columns (or for one column, if B is adjacent along r) and runs through its share of the reduction
with coalesced loads of B. The sums of a column's threads meet in shared memory, where as many threads as there are results add them. The order is
fixed, so results do not vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.codegen.common import below, decode, named, vectors_fit
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import (
    TRUE,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    compare,
    index_const,
    loads,
    logical_and,
    range_of,
    replace_loads,
    rewrite,
    select,
    substitute,
    walk,
)
from tilewright.ir.kernel import (
    Allocate,
    Block,
    Buffer,
    For,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    thread_variable,
)
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemv.space import GATHERED, GEMV_ROWS, GemvSchedule, lanes_of, meeting_size, steps_of, turns_at_once
from tilewright.kernels.gpu.split import in_one_or_two


def lower_gemv(problem: Problem, form: ProductForm, schedule: GemvSchedule, machine: Machine) -> Lowered:
    """One kernel, or two with a workspace if the reduction is split.

    Raises:
        Unsuitable: for more rows than GEMV_ROWS, threads along r that are no power of two, or parts of a split with nothing to reduce.
    """
    is_empty = (schedule.split - 1) * steps_of(form.facts, schedule.split) >= steps_of(form.facts, 1)
    if form.facts.m > GEMV_ROWS or schedule.threads_along_r & (schedule.threads_along_r - 1) or is_empty:
        raise Unsuitable(f"{schedule} is no schedule of {form.facts.m} rows and {form.facts.r} reduced elements")
    return in_one_or_two(problem, form, schedule, machine, lambda form: columns(form, schedule), split=schedule.split)


def columns(form: ProductForm, schedule: GemvSchedule) -> tuple[Block, Launch]:
    """The body for all rows of m and `schedule.columns` vectors of columns per block."""
    facts = form.facts
    n_lanes, r_lanes = lanes_of(facts)
    along_n = facts.b.along == "own"
    width = schedule.columns * n_lanes
    counts = (schedule.split, facts.batch, -(-facts.n // width))
    launch = Launch((prod(counts), 1, 1), (schedule.threads, 1, 1), ((facts.batch, 1),))
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
    else:
        root += [Let(column, thread // schedule.threads_along_r), Let(thread_r, thread % schedule.threads_along_r)]
    # columns past the end repeat the last one and store nothing
    stored = prod(axis.extent or 1 for axis in form.b_n)
    raw = (tile_ * schedule.columns + column) * n_lanes
    n = Var("n", stored)
    root.append(Let(n, binary("min", raw, index_const(stored - n_lanes)) if range_of(raw)[1] > stored - n_lanes else raw))
    n_lets, n_values = named(decode(n, form.b_n))
    root += n_lets
    lanes = max(n_lanes, r_lanes)
    axis = form.b_n[-1] if along_n else form.r[-1] if form.r else None
    b = vectors_fit(form.b, axis, lanes, form.layouts) if axis is not None else form.b
    assert b is not None
    b = substitute(b, {**bind, **n_values})
    rows = facts.m
    # of each row, one vector of sums: of adjacent columns, or of every r_lanes-th product of one column
    root.append(Allocate(Buffer("acc", form.dtype, rows * lanes, "register")))
    at = Var("at", rows * lanes)
    root.append(For(at, index_const(rows * lanes), Store("acc", at, Const(0.0, form.dtype)), "unroll"))
    first = tile_ * width
    outputs = width * rows
    element = substitute(form.element, bind)
    if 1 < schedule.threads_along_r and outputs <= schedule.threads:
        loads_ahead, element = _loaded_ahead(form, element, thread, outputs, first, width)
        root += loads_ahead
    a_vector = vectors_fit(form.a, form.r[-1], r_lanes, form.layouts) if r_lanes > 1 else None
    steps, each = steps_of(facts, 1), steps_of(facts, schedule.split)

    def factor(m: int, first: Expr) -> tuple[list[Statement], Expr]:
        """Statements that load row m's factors of a turn, and their vector."""
        own = {**bind, **decode(index_const(m), form.m)}
        if a_vector is not None or r_lanes == 1:
            value = Var(f"a_value{m}", None, form.dtype, r_lanes)
            return [Let(value, as_lanes(substitute(a_vector or form.a, {**own, **decode(first, form.r)}), r_lanes))], as_lanes(value, lanes)
        name = f"a_lanes{m}"
        stores = [Store(name, index_const(lane), substitute(form.a, {**own, **decode(first + lane, form.r)})) for lane in range(lanes)]
        return [Allocate(Buffer(name, form.dtype, lanes, "register")), *stores], Load(name, (index_const(0),), form.dtype, lanes)

    def turn_body(turn: Expr, ragged: bool = False) -> list[Statement]:
        """Products beyond the end do not count; their loads, of the last factors, do not branch, so that those of all turns are in flight at once."""
        mine = turn * schedule.threads_along_r + thread_r
        place = part_ * each + mine
        inside = compare("lt", mine, index_const(each)) if ragged else TRUE
        if steps % each:
            inside = logical_and(inside, compare("lt", place, index_const(steps)))
        if inside != TRUE:
            place = binary("min", place, index_const(steps - 1))
        wide = Var("b_value", None, form.dtype, lanes)
        result: list[Statement] = [Let(wide, as_lanes(substitute(b, decode(place * r_lanes, form.r)), lanes))]
        for m in range(rows):
            statements, values = factor(m, place * r_lanes)
            slot = index_const(m * lanes)
            product = select(inside, values * wide, as_lanes(Const(0.0, form.dtype), lanes))
            result += [*statements, Store("acc", slot, Load("acc", (slot,), form.dtype, lanes) + product)]
        return result

    whole = each // schedule.threads_along_r
    chunk = min(turns_at_once(rows), whole)
    if chunk:
        step, within = Var("turns", whole // chunk), Var("turn", chunk)
        body = For(within, index_const(chunk), block(turn_body(step * chunk + within)), "unroll")
        root.append(For(step, index_const(whole // chunk), body) if whole >= 2 * chunk else body)
        for rest in range(whole - whole % chunk, whole):
            root += turn_body(index_const(rest))
    if each % schedule.threads_along_r:
        root += turn_body(index_const(whole), ragged=True)
    starts = range(0, rows * lanes, r_lanes)
    sums = [_total([Load("acc", (index_const(start + number),), form.dtype) for number in range(r_lanes)]) for start in starts]
    if schedule.threads_along_r > 1:
        root += _meet(form, schedule, sums, thread, column, thread_r, n_lanes)
        root += _results_of_a_block(form, schedule, element, substitute(form.offset, bind), first, thread, width)
    else:
        wide = min(facts.store_vector, n_lanes)
        for m in range(rows):
            for lane in range(0, n_lanes, wide):
                start = m * n_lanes + lane
                value = Load("acc", (index_const(start),), form.dtype, wide) if wide > 1 else sums[start]
                root += _result(form, element, substitute(form.offset, bind), index_const(m), first + (column * n_lanes + lane), value)
    return block(root), launch


def _total(terms: Sequence[Expr]) -> Expr:
    """Their sum in pairs, so that additions do not wait for each other."""
    half = len(terms) // 2
    return _total(terms[:half]) + _total(terms[half:]) if half else terms[0]


def _meet(form: ProductForm, schedule: GemvSchedule, sums: Sequence[Expr], thread: Var, column: Var, thread_r: Var, n_lanes: int) -> list[Statement]:
    """Stores all threads' sums, [row of m][column][thread along r], with a word between results so that their threads use different banks; if more
    than GATHERED threads share a result, adds GATHERED sums each."""
    width, shared = schedule.columns * n_lanes, meeting_size(schedule.columns * len(sums), schedule.threads_along_r)
    pitch = schedule.threads_along_r + 1
    result: list[Statement] = [Allocate(Buffer("meeting", form.dtype, shared, "shared"))]
    for number, total in enumerate(sums):
        m, lane = divmod(number, n_lanes)
        result.append(Store("meeting", (column * n_lanes + (m * width + lane)) * pitch + thread_r, total))
    result.append(block_barrier())
    if schedule.threads_along_r > GATHERED:
        outputs, groups = width * form.facts.m, schedule.threads_along_r // GATHERED

        def gather(item: Var) -> list[Statement]:
            start = item % outputs * pitch + item // outputs * GATHERED
            return [Store("meeting", start, _total([Load("meeting", (start + number,), form.dtype) for number in range(GATHERED)]))]

        result += _shared_out(outputs * groups, schedule.threads, thread, "item", gather)
        result.append(block_barrier())
    return result


def _shared_out(count: int, threads: int, thread: Var, name: str, body: Callable[[Var], Sequence[Statement]]) -> list[Statement]:
    """The body for `count` numbers, in turns of all threads."""
    rounds = -(-count // threads)
    if rounds == 1:
        return below(thread, count, name, body)
    turn = Var(f"{name}_turn", rounds)
    return [For(turn, index_const(rounds), block(below(turn * threads + thread, count, name, body)), "unroll")]


def _loaded_ahead(form: ProductForm, element: Expr, thread: Var, outputs: int, first: Expr, width: int) -> tuple[list[Statement], Expr]:
    """Statements that load what the epilogue of a thread's one result reads (a bias, a branch), and the element that uses their values: their latency
    passes during the reduction. Threads without a result load that of the last. Loads whose index or use depends on values stay where they are."""
    own = [load for load in loads(element) if load.buffer != form.step.name]
    if not own or any(isinstance(node, Apply) and node.operation == "select" for node in walk(element)) or any(loads(*load.index) for load in own):
        return [], element
    output, n = Var("own_output", outputs), Var("own_n", form.facts.n)
    lets: list[Statement] = [Let(output, binary("min", thread, index_const(outputs - 1)))]
    lets.append(Let(n, binary("min", first + output % width, index_const(form.facts.n - 1))))
    places = {**decode(n, form.n), **decode(output // width, form.m)}
    ahead = {load: Var(f"ahead{number}", None, load.dtype) for number, load in enumerate(own)}
    lets += [Let(value, substitute(load, places)) for load, value in ahead.items()]
    return lets, rewrite(element, lambda node: ahead.get(node, node) if isinstance(node, Load) else node)


def _results_of_a_block(
    form: ProductForm, schedule: GemvSchedule, element: Expr, offset: Expr, first: Expr, thread: Var, width: int
) -> list[Statement]:
    """Adds what has met, and stores the results: each thread has others."""
    pitch, step = schedule.threads_along_r + 1, GATHERED if schedule.threads_along_r > GATHERED else 1

    def result(output: Var) -> list[Statement]:
        total = _total([Load("meeting", (output * pitch + at,), form.dtype) for at in range(0, schedule.threads_along_r, step)])
        return _result(form, element, offset, output // width, first + output % width, total)

    return _shared_out(width * form.facts.m, schedule.threads, thread, "output", result)


def _result(form: ProductForm, element: Expr, offset: Expr, m: Expr, first: Expr, total: Expr) -> list[Statement]:
    """Stores the result of row m at the column `first`, or a vector of results from there, if it lies inside."""
    if total.lanes > 1:
        wide = vectors_fit(element, form.n[-1], total.lanes, form.layouts)
        assert wide is not None
        element = as_lanes(wide, total.lanes)
    held = Var("total", None, form.dtype, total.lanes)
    element = replace_loads(element, {form.step.name: held})

    def store(n: Var) -> list[Statement]:
        lets, values = named({**decode(n, form.n), **decode(m, form.m)})
        shared, (where, what) = bind_shared([substitute(offset, values), substitute(element, values)])
        return [Let(held, total), *lets, *shared, Store(form.output, where, what)]

    return below(first, form.facts.n, "n_out", store)
