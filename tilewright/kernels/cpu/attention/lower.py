"""Lowering of the `attention` schema on CPUs: softmax(Q K^T) V in one kernel, without the scores in memory (FlashAttention, Dao et al., 2022).

    for each head, tile of queries:                                          (in parallel)
        queries[r][m] = Q, transposed                                        (vectors along m, here and below)
        for each tile of keys:
            scores[n][m] = logit(sum over r of K[n, r] * queries[r][m])      (K broadcast)
            weights[n][m] = exp(scores[n][m] - greatest[m]), in place        (totals and sums are rescaled)
            sums[d][m] += sum over n of V[n, d] * weights[n][m]              (V broadcast)
        out = epilogue(sums[d][m] / total[m]), transposed

With queries in the lanes K and V are read as they are stored, one element at a time, and no reduction crosses lanes. Lanes past the last query repeat
it and are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.codegen.access import bind_shared, vectorise
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import below, decode, named
from tilewright.codegen.describe import described
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import lowest
from tilewright.ir.expr import (
    TRUE,
    ZERO,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    coefficient,
    compare,
    index_const,
    loads,
    replace_loads,
    substitute,
    variables,
)
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Let, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered
from tilewright.kernels.attention_form import SCORE, SUM, AttentionForm, finite, inverse
from tilewright.kernels.cpu.attention.space import CpuAttentionSchedule
from tilewright.kernels.cpu.common import common_origin, loops
from tilewright.kernels.cpu.transposition import transposed

QUERIES, SCORES, SUMS = "queries", "scores", "sums"
SQUARE = ("square", "turned")


def lower_attention(problem: Problem, form: AttentionForm, schedule: CpuAttentionSchedule, machine: Machine) -> Lowered:
    """One kernel."""
    kernel, arguments = assemble(
        "attention",
        _Tiles(form, schedule).emit(),
        problem,
        (form.output,),
        header=f"{described(problem)}\n{schedule}",
        roles={**{load.buffer: "queries" for load in loads(form.q)}, form.k.buffer: "keys", form.v.buffer: "values"},
    )
    return Lowered(problem.region, str(schedule), (kernel,), (Call.of(kernel, arguments),))


class _Tiles:
    """Emits the loop over tiles of queries."""

    def __init__(self, form: AttentionForm, schedule: CpuAttentionSchedule) -> None:
        self.form, self.facts, self.dtype = form, form.facts, form.dtype
        self.lanes, self.vectors, self.rows, self.keys = schedule.lanes, schedule.vectors, schedule.rows, schedule.keys
        self.queries = schedule.queries
        self.tile = Var("tile", -(-self.facts.m // self.queries))
        self.first = self.tile * self.queries
        self.zero = self._wide(Const(0.0, self.dtype))
        self.v = Var("v", self.vectors)

    def emit(self) -> Statement:
        facts = self.facts
        sizes = {QUERIES: facts.r, SCORES: self.keys, SUMS: facts.d, "greatest": 1, "total": 1, "factor": 1}
        at = Var("at", facts.d * self.vectors)
        clear = [
            self._each(Store("greatest", self.v * self.lanes, self._wide(lowest(self.dtype))), Store("total", self.v * self.lanes, self.zero)),
            For(at, index_const(facts.d * self.vectors), Store(SUMS, at * self.lanes, self.zero)),
        ]
        body = block(
            [Allocate(Buffer(name, self.dtype, count * self.queries, "register", self.lanes)) for name, count in sizes.items()],
            self._queries(),
            clear,
            self._passes(),
            self._results(),
        )
        return loops([*self.form.batch, self.tile], body, True)

    # -- vectors --

    def _wide(self, value: Expr) -> Expr:
        return as_lanes(value, self.lanes)

    def _held(self, name: str, line: Expr = ZERO) -> Load:
        """The loop's vector of queries in one line of a local buffer."""
        return Load(name, (line * self.queries + self.v * self.lanes,), self.dtype, self.lanes)

    def _each(self, *statements: Statement | Sequence[Statement]) -> Statement:
        """The statements for each vector of queries."""
        return For(self.v, index_const(self.vectors), block(*statements), "unroll")

    def _query(self, row: Expr) -> Expr:
        """The query at a row of the tile; past the end, the last one."""
        position = self.first + row
        return position if self.facts.m % self.queries == 0 else binary("min", position, index_const(self.facts.m - 1))

    def _squares(self, extent: int, width: int, square: Callable[[Expr, Expr], list[Statement]]) -> Statement:
        """The statements for squares of `width` lines by the lanes of each vector, over an axis of this extent. If squares do not divide it, the last
        one begins earlier."""
        number = Var("square", -(-extent // width))
        start = number * width
        if extent % width:
            start = binary("min", start, index_const(extent - width))
        line = Var("line", extent)
        held: list[Statement] = [Allocate(Buffer(name, self.dtype, width * width, "register", width)) for name in SQUARE]
        return For(number, index_const(number.extent or 1), block(Let(line, start), self._each(held, square(line, self.v * self.lanes))))

    # -- queries and results --

    def _queries(self) -> list[Statement]:
        form, lanes = self.form, self.lanes
        axis = form.r[-1]
        wide = vectorise(form.q, axis, lanes)
        power = lanes & (lanes - 1) == 0
        if len(form.r) == 1 and self.facts.r >= lanes and power and wide is not None and wide.lanes == lanes:

            def square(line: Expr, first: Expr) -> list[Statement]:
                row, k = Var("row", lanes), Var("k", lanes)
                lets, query = named(decode(self._query(first + row), form.m))
                shared, (value,) = bind_shared([substitute(wide, {**query, axis: line})])
                turns, turned = transposed(*SQUARE, lanes, self.dtype)
                store = Store(QUERIES, (line + k) * self.queries + first, Load(turned, (k * lanes,), self.dtype, lanes))
                return [
                    For(row, index_const(lanes), block(lets, shared, Store(SQUARE[0], row * lanes, value)), "unroll"),
                    *turns,
                    For(k, index_const(lanes), store, "unroll"),
                ]

            return [self._squares(self.facts.r, lanes, square)]
        row = Var("row", self.queries)
        lets, query = named(decode(self._query(row), form.m))
        store = Store(QUERIES, self._position(form.r) * self.queries + row, substitute(form.q, query))
        return [For(row, index_const(self.queries), block(lets, loops(form.r, store, False)))]

    def _results(self) -> list[Statement]:
        form, lanes = self.form, self.lanes
        scale = Store("factor", self.v * lanes, inverse(self._held("total"), form.zeroed))
        axis = form.d[-1]
        wide = vectorise(form.element, axis, lanes, lambda load: load.buffer == SUM)
        power = lanes & (lanes - 1) == 0
        suits = len(form.d) == 1 and self.facts.d >= lanes and power and coefficient(form.offset, axis) == 1
        if suits and wide is not None and wide.dtype == self.dtype:

            def square(line: Expr, first: Expr) -> list[Statement]:
                row, k = Var("row", lanes), Var("k", lanes)
                scaled = Load(SUMS, ((line + k) * self.queries + first,), self.dtype, lanes) * self._held("factor")
                turns, turned = transposed(*SQUARE, lanes, self.dtype)

                def stored(m: Var) -> list[Statement]:
                    lets, query = named(decode(m, form.m))
                    held = Load(turned, (row * lanes,), self.dtype, lanes)
                    value = replace_loads(substitute(as_lanes(wide, lanes), {**query, axis: line}), {SUM: held})
                    shared, (offset, value) = bind_shared([substitute(form.offset, {**query, axis: line}), value])
                    return [*lets, *shared, Store(form.output, offset, value)]

                return [
                    For(k, index_const(lanes), Store(SQUARE[0], k * lanes, scaled), "unroll"),
                    *turns,
                    For(row, index_const(lanes), block(below(self.first + first + row, self.facts.m, "m", stored)), "unroll"),
                ]

            return [self._each(scale), self._squares(self.facts.d, lanes, square)]

        row, column = Var("row", self.queries), self._position(form.d)

        def each(m: Var) -> list[Statement]:
            lets, query = named(decode(m, form.m))
            held = Load(SUMS, (column * self.queries + row,), self.dtype) * Load("factor", (row,), self.dtype)
            shared, (offset, value) = bind_shared([substitute(form.offset, query), replace_loads(substitute(form.element, query), {SUM: held})])
            return [*lets, loops(form.d, block(shared, Store(form.output, offset, value)), False)]

        return [self._each(scale), For(row, index_const(self.queries), block(below(self.first + row, self.facts.m, "m", each)))]

    def _position(self, axes: Sequence[Var]) -> Expr:
        """The flat position of axes."""
        position: Expr = ZERO
        for axis in axes:
            position = position * (axis.extent or 1) + axis
        return position

    # -- tiles of keys --

    def _passes(self) -> list[Statement]:
        """The tiles of keys: with a causal mask first those that all queries of the tile see, then those that some see."""
        facts, full, rest = self.facts, self.facts.n // self.keys, self.facts.n % self.keys
        step, last = Var("key_tile", full), index_const(full * self.keys)
        if facts.shift is None:
            result: list[Statement] = [For(step, index_const(full), self._keys(step * self.keys, self.keys, self.form.logit))] if full else []
            return [*result, self._keys(last, rest, self.form.logit)] if rest else result
        seen, reached = Var("seen", full + 1), Var("reached", full + 1)
        by_all, by_some = self.first + (facts.shift + 1), self.first + (self.queries + facts.shift + self.keys - 1)
        result = [Let(var, binary("min", keys // self.keys, index_const(full))) for var, keys in ((seen, by_all), (reached, by_some))]
        if full:
            result.append(For(step, seen, self._keys(step * self.keys, self.keys, self.form.seen)))
            masked = Var("masked_tile", full)
            result.append(For(masked, binary("max", reached - seen, ZERO), self._keys((seen + masked) * self.keys, self.keys, self.form.logit)))
        if rest:
            some = compare("gt", self.first + (self.queries + facts.shift), last)
            tail = self._keys(last, rest, self.form.logit)
            result += tail.statements if some == TRUE else [If(some, tail)]
        return result

    def _keys(self, start: Expr, count: int, logit: Expr) -> Block:
        """Scores, weights and sums for `count` keys from `start` on."""
        best = Allocate(Buffer("best", self.dtype, self.queries, "register", self.lanes))
        lanes, fresh, base, scale = self.lanes, *(Var(name, None, self.dtype, self.lanes) for name in ("fresh", "base", "scale"))
        wide = self._vector(logit)
        rescaled = self._each(
            Let(fresh, Apply("max", (self._held("greatest"), self._held("best")), self.dtype, lanes)),
            Let(base, finite(fresh)),
            Let(scale, self._exponential(self._held("greatest") - base)),
            Store("factor", self.v * lanes, scale),
            Store("greatest", self.v * lanes, fresh),
            Store("best", self.v * lanes, base),
            Store("total", self.v * lanes, self._held("total") * scale),
        )
        n, weight = Var("n_inner", count), Var("weight", None, self.dtype, lanes)
        weights = self._each(
            Let(weight, self._exponential(self._held(SCORES, n) - self._held("best"))),
            Store(SCORES, n * self.queries + self.v * lanes, weight),
            Store("total", self.v * lanes, self._held("total") + weight),
        )
        return block(
            best,
            self._each(Store("best", self.v * lanes, self._wide(lowest(self.dtype)))),
            self._strips(count, "keys", lambda first, rows: self._scores(start, first, rows, wide)),
            self._apart(start, count, logit) if wide is None else [],
            rescaled,
            For(n, index_const(count), weights),
            self._strips(self.facts.d, "columns", lambda first, rows: self._sums(start, count, first, rows)),
        )

    def _exponential(self, value: Expr) -> Expr:
        return Apply("exp", (value,), self.dtype, self.lanes)

    def _strips(self, count: int, name: str, strip: Callable[[Expr, int], Statement]) -> list[Statement]:
        """The strip for all `count` lines: in a loop over whole strips of `rows`, and once for the rest."""
        full, rest = count // self.rows, count % self.rows
        number = Var(f"{name}_strip", full)
        result: list[Statement] = [For(number, index_const(full), strip(number * self.rows, self.rows))] if full else []
        return [*result, strip(index_const(full * self.rows), rest)] if rest else result

    def _accumulated(self, rows: int, element: Expr, t: Var, line: Expr, buffer: str) -> list[Statement]:
        """acc[t][v] += element(t) * line of the buffer"""
        scalar = Var("a", None, self.dtype)
        at = t * self.queries + self.v * self.lanes
        product = Apply("mul", (scalar, Load("vector", (self.v * self.lanes,), self.dtype, self.lanes)), self.dtype, self.lanes)
        update = self._each(Store("acc", at, Load("acc", (at,), self.dtype, self.lanes) + product))
        origin, element = common_origin(element, (t,))
        return [
            Allocate(Buffer("vector", self.dtype, self.queries, "register", self.lanes)),
            self._each(Store("vector", self.v * self.lanes, self._held(buffer, line))),
            *origin,
            For(t, index_const(rows), block(Let(scalar, element), update), "unroll"),
        ]

    def _scores(self, start: Expr, first: Expr, rows: int, logit: Expr | None) -> Block:
        """The scores of some keys, as logits if these are vectors, and the greatest of them."""
        form, t = self.form, Var("t", rows)
        at = t * self.queries + self.v * self.lanes
        key = substitute(form.k, {form.n: start + first + t})
        inner = loops(form.r, block(self._accumulated(rows, key, t, self._position(form.r), QUERIES)), False)
        held = Load("acc", (at,), self.dtype, self.lanes)
        place = (first + t) * self.queries + self.v * self.lanes
        if logit is None:
            store: list[Statement] = [Store(SCORES, place, held)]
        else:
            value = Var("logit", None, self.dtype, self.lanes)
            m = self.first + self.v * self.lanes
            placed = substitute(logit, {form.n: start + first + t, **({form.m[0]: m} if form.m else {})})
            shared, (placed,) = bind_shared([replace_loads(placed, {SCORE: held})])
            store = [*shared, Let(value, self._wide(placed)), Store(SCORES, place, value), self._greater(value)]
        return block(self._accumulators(rows, lambda at: self.zero), inner, For(t, index_const(rows), self._each(store), "unroll"))

    def _greater(self, value: Expr) -> Statement:
        return Store("best", self.v * self.lanes, Apply("max", (self._held("best"), value), self.dtype, self.lanes))

    def _accumulators(self, rows: int, start: Callable[[Expr], Expr]) -> list[Statement]:
        t = Var("t", rows)
        clear = For(t, index_const(rows), self._each(Store("acc", t * self.queries + self.v * self.lanes, start(t))), "unroll")
        return [Allocate(Buffer("acc", self.dtype, rows * self.queries, "register", self.lanes)), clear]

    def _sums(self, start: Expr, count: int, first: Expr, rows: int) -> Block:
        """Rescales the sums of some columns of the values, and adds those of a tile of keys."""
        form, t, n = self.form, Var("t", rows), Var("n_inner", count)
        axes = decode(first + t, form.d)
        element = substitute(form.v, {form.n: start + n, **axes})
        begin = self._accumulators(rows, lambda t: self._held(SUMS, first + t) * self._held("factor"))
        inner = For(n, index_const(count), block(self._accumulated(rows, element, t, n, SCORES)))
        held = Load("acc", (t * self.queries + self.v * self.lanes,), self.dtype, self.lanes)
        stores = For(t, index_const(rows), self._each(Store(SUMS, (first + t) * self.queries + self.v * self.lanes, held)), "unroll")
        return block(begin, inner, stores)

    def _vector(self, logit: Expr) -> Expr | None:
        """The logits of a vector of queries; None if they are no vectors in memory, or might lie beyond the last query."""
        form = self.form
        if set(form.m) & variables(logit) and (len(form.m) != 1 or self.facts.m % self.queries):
            return None
        return vectorise(logit, form.m[0] if form.m else Var("m", 1), self.lanes, lambda load: load.buffer == SCORE)

    def _apart(self, start: Expr, count: int, logit: Expr) -> list[Statement]:
        """Logits of a tile of keys in place of their scores, computed for one query at a time."""
        n, row = Var("n_inner", count), Var("row", self.queries)
        there: Expr = index_const(self.queries)
        if self.facts.m % self.queries:
            there = binary("min", self.facts.m - self.first, there)
        lets, query = named(decode(self.first + row, self.form.m))
        value = replace_loads(substitute(logit, {**query, self.form.n: start + n}), {SCORE: Load("line", (row,), self.dtype)})
        shared, (value,) = bind_shared([value])
        line = Load("line", (self.v * self.lanes,), self.dtype, self.lanes)
        body = block(
            Allocate(Buffer("line", self.dtype, self.queries, "register")),
            self._each(Store("line", self.v * self.lanes, self._held(SCORES, n))),
            For(row, there, block(lets, shared, Store("line", row, value)), "simd"),
            self._each(Store(SCORES, n * self.queries + self.v * self.lanes, line), self._greater(line)),
        )
        return [For(n, index_const(count), body)]
