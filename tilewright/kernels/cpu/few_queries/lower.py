"""Lowering of attention of few queries on CPUs: softmax(Q K^T) V, with vectors along the elements of keys and of values (flash decoding: Dao et al.,
2023).

    for each head, part of its keys:                                         (in parallel)
        for each tile of keys:
            for `lanes` keys at a time, each query:
                products[key] = sum over r of K[key, r] * Q[query, r]        (vectors along r)
                scores[query, keys] = their lanes added up                   (transposed in registers)
            logits; greatest; weights = exp(logits - greatest)               (vectors along keys)
            sums[query, d] += weight * V[key, d]                             (vectors along d)
        out = epilogue(sums / total), or sums, greatest and total of the part -> workspace
    for each head, query:                                                    (in parallel, if there are several parts)
        out = epilogue(the parts' sums, scaled to a common greatest logit / total)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

from tilewright.codegen.access import bind_shared, vectorise
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import decode, named
from tilewright.codegen.describe import described
from tilewright.ir.computation import lowest
from tilewright.ir.expr import (
    ZERO,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    add,
    as_lanes,
    binary,
    compare,
    index_const,
    loads,
    replace_loads,
    select,
    substitute,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Let, Statement, Store
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage
from tilewright.kernels.attention_form import SCORE, SUM, AttentionForm, finite, inverse
from tilewright.kernels.cpu.common import loops
from tilewright.kernels.cpu.few_queries.space import ACCUMULATORS, FewQueriesSchedule
from tilewright.kernels.cpu.transposition import transposed

QUERIES, SCORES, SUMS, LINE = "queries", "scores", "sums", "line"
GREATEST, TOTAL = "greatest", "total"
SQUARE = ("square", "turned")


def vectors_of(form: AttentionForm, lanes: int) -> tuple[Load, Load] | None:
    """Vectors of a key along r and of a value along d; None if they are not adjacent in memory, or no whole number of vectors."""
    if len(form.r) != 1 or len(form.d) != 1 or form.facts.r % lanes or form.facts.d % lanes or lanes & (lanes - 1):
        return None
    k, v = vectorise(form.k, form.r[0], lanes), vectorise(form.v, form.d[0], lanes)
    whole = isinstance(k, Load) and isinstance(v, Load) and k.lanes == v.lanes == lanes
    return (k, v) if whole else None  # type: ignore[return-value]


def lower_few_queries(problem: Problem, form: AttentionForm, schedule: FewQueriesSchedule) -> Lowered:
    """One kernel, or one for the parts and one that combines them."""
    work: dict[str, Storage] = {}
    if schedule.parts > 1:
        shape = (form.facts.batch * schedule.parts, form.facts.m, form.facts.d + 2)
        name = f"{form.output}#parts"
        work[name] = Storage(Value(name, shape, form.dtype), row_major(shape))
    emitter = _Parts(form, schedule, next(iter(work), ""))
    bodies = [(emitter.parts(), (next(iter(work), form.output),))]
    if work:
        bodies.append((emitter.combination(), (form.output,)))
    roles = {**{load.buffer: "queries" for load in loads(form.q)}, form.k.buffer: "keys", form.v.buffer: "values"}
    header = f"{described(problem)}\n{schedule}"
    made = [assemble("attention", body, problem.with_storage(work), written, header=header, roles=roles) for body, written in bodies]
    calls = tuple(Call.of(kernel, arguments) for kernel, arguments in made)
    return Lowered(problem.region, str(schedule), tuple(kernel for kernel, _ in made), calls, work)


class _Parts:
    """Emits both kernels. Local buffers hold [query][element]; `total` holds a vector for each query, whose lanes are added up at the end."""

    def __init__(self, form: AttentionForm, schedule: FewQueriesSchedule, work: str) -> None:
        vectors = vectors_of(form, schedule.lanes)
        assert vectors is not None
        self.form, self.facts, self.dtype, self.work = form, form.facts, form.dtype, work
        self.k, self.v = vectors
        self.lanes, self.keys, self.split = schedule.lanes, schedule.keys, schedule.parts
        self.tiles = -(-self.facts.n // self.keys)
        self.each = -(-self.tiles // self.split)
        self.ragged = self.facts.n % self.keys != 0
        self.columns = self.facts.d // self.lanes
        self.query, self.part, self.column = Var("query", self.facts.m), Var("part", self.split), Var("column", self.columns)
        self.lets, self.at_query = named(decode(self.query, form.m))

    def parts(self) -> Statement:
        """The kernel that computes the parts; with a single one, the result."""
        facts = self.facts
        sizes = {QUERIES: facts.r, SCORES: self.keys, SUMS: facts.d, TOTAL: self.lanes}
        tile, first = Var("tile", self.each), self.part * self.each
        count = index_const(self.each) if self.tiles % self.each == 0 else binary("min", self.tiles - first, index_const(self.each))
        query = Store(QUERIES, self.query * facts.r + self.form.r[0], substitute(self.form.q, self.at_query))
        body = block(
            [Allocate(Buffer(name, self.dtype, size * facts.m, "register", self.lanes)) for name, size in sizes.items()],
            Allocate(Buffer(GREATEST, self.dtype, facts.m, "register")),
            self._queries(
                *self.lets,
                loops(self.form.r, query, False),
                Store(GREATEST, self.query, lowest(self.dtype)),
                Store(TOTAL, self.query * self.lanes, self._wide(self._zero)),
                self._columns(lambda at: Store(SUMS, self.query * facts.d + at, self._wide(self._zero))),
            ),
            For(tile, count, self._tile((first + tile) * self.keys)),
            self._queries(*self._finished()),
        )
        return loops([*self.form.batch, self.part], body, True)

    def combination(self) -> Statement:
        """The kernel that combines the parts of each query."""
        facts, part = self.facts, self.part
        greatest, base, scale = self._scalar(GREATEST, ZERO), Var("base", None, self.dtype), Var("scale", None, self.dtype)

        def added(at: Expr) -> Statement:
            return Store(SUMS, at, self._vector(SUMS, at) + self._wide(scale) * self._vector(self.work, self._place(part) + at))

        body = block(
            Allocate(Buffer(SUMS, self.dtype, facts.d, "register", self.lanes)),
            [Allocate(Buffer(name, self.dtype, 1, "register")) for name in (GREATEST, TOTAL)],
            self.lets,
            self._columns(lambda at: Store(SUMS, at, self._wide(self._zero))),
            Store(GREATEST, ZERO, lowest(self.dtype)),
            Store(TOTAL, ZERO, self._zero),
            self._over(part, Store(GREATEST, ZERO, self._applied("max", greatest, self._scalar(self.work, self._place(part) + facts.d)))),
            Let(base, finite(greatest)),
            self._over(
                part,
                Let(scale, self._applied("exp", self._scalar(self.work, self._place(part) + facts.d) - base)),
                Store(TOTAL, ZERO, self._scalar(TOTAL, ZERO) + scale * self._scalar(self.work, self._place(part) + (facts.d + 1))),
                self._columns(added),
            ),
            self._result(ZERO, self._scalar(TOTAL, ZERO)),
        )
        return loops([*self.form.batch, self.query], body, True)

    # -- pieces --

    @property
    def _zero(self) -> Expr:
        return Const(0.0, self.dtype)

    def _wide(self, value: Expr) -> Expr:
        return as_lanes(value, self.lanes)

    def _vector(self, name: str, at: Expr) -> Load:
        return Load(name, (at,), self.dtype, self.lanes)

    def _scalar(self, name: str, at: Expr) -> Load:
        return Load(name, (at,), self.dtype)

    def _applied(self, operation: str, *args: Expr) -> Expr:
        return Apply(operation, args, self.dtype, max(arg.lanes for arg in args))

    def _over(self, variable: Var, *statements: Statement, kind: str = "serial") -> Statement:
        return For(variable, index_const(variable.extent or 0), block(*statements), kind)

    def _queries(self, *statements: Statement) -> Statement:
        return self._over(self.query, *statements)

    def _columns(self, body: Callable[[Expr], Statement]) -> Statement:
        """The statement for each vector of a row of d elements, given its first one."""
        return self._over(self.column, body(self.column * self.lanes))

    def _place(self, part: Expr) -> Expr:
        """The first element of a part's row in the workspace: d sums, greatest logit, total."""
        head: Expr = ZERO
        for axis in self.form.batch:
            head = head * (axis.extent or 1) + axis
        return ((head * self.split + part) * self.facts.m + self.query) * (self.facts.d + 2)

    # -- tiles of keys --

    def _tile(self, start: Expr) -> Block:
        """Scores, weights and sums of the keys from `start` on."""
        group = Var("group", self.keys // self.lanes)
        return block(
            self._over(group, self._queries(*self._scores(start, group * self.lanes))),
            self._queries(*self._weights(start), *self._sums(start)),
        )

    def _scores(self, start: Expr, first: Expr) -> list[Statement]:
        """The scores of `lanes` keys. Keys past the end repeat the last one."""
        lane, key = Var("lane", self.lanes), Var("key", self.facts.n)
        position: Expr = start + first + lane
        if self.ragged:
            position = binary("min", position, index_const(self.facts.n - 1))
        products: Iterator[Expr] = (
            substitute(self.k, {self.form.n: key, self.form.r[0]: index_const(at)}) * self._vector(QUERIES, self.query * self.facts.r + at)
            for at in range(0, self.facts.r, self.lanes)
        )
        turns, turned = transposed(*SQUARE, self.lanes, self.dtype)
        rows: Iterator[Expr] = (self._vector(turned, index_const(at * self.lanes)) for at in range(self.lanes))
        return [
            *(Allocate(Buffer(name, self.dtype, self.lanes**2, "register", self.lanes)) for name in SQUARE),
            self._over(lane, Let(key, position), Store(SQUARE[0], lane * self.lanes, reduce(add, products)), kind="unroll"),
            *turns,
            Store(SCORES, self.query * self.keys + first, reduce(add, rows)),
        ]

    def _weights(self, start: Expr) -> list[Statement]:
        """Logits, and weights in their place; greatest logits and totals."""
        key, lane, vector = Var("key", self.keys), Var("lane", self.lanes), Var("vector", self.keys // self.lanes)
        score, held = self._scalar(SCORES, self.query * self.keys + key), self._vector(SCORES, self.query * self.keys + vector * self.lanes)
        logit = replace_loads(substitute(self.form.logit, {**self.at_query, self.form.n: start + key}), {SCORE: score})
        if self.ragged:
            logit = select(compare("lt", start + key, index_const(self.facts.n)), logit, lowest(self.dtype))
        shared, (value,) = bind_shared([logit])
        best, old, line = self._scalar("best", ZERO), self._scalar(GREATEST, self.query), self._vector(LINE, ZERO)
        base, scale = (Var(name, None, self.dtype) for name in ("base", "scale"))
        weight, total = Var("weight", None, self.dtype, self.lanes), self._vector(TOTAL, self.query * self.lanes)
        return [
            *self.lets,
            *([self._over(key, *shared, Store(SCORES, score.index[0], value), kind="simd")] if value != score else []),
            Allocate(Buffer(LINE, self.dtype, self.lanes, "register", self.lanes)),
            Allocate(Buffer("best", self.dtype, 1, "register")),
            Store(LINE, ZERO, self._wide(lowest(self.dtype))),
            self._over(vector, Store(LINE, ZERO, self._applied("max", line, held))),
            Store("best", ZERO, old),
            self._over(lane, Store("best", ZERO, self._applied("max", best, self._scalar(LINE, lane)))),
            Let(base, finite(best)),
            Let(scale, self._applied("exp", old - base)),
            Store(GREATEST, self.query, best),
            Store(TOTAL, total.index[0], total * self._wide(scale)),
            self._over(
                vector,
                Let(weight, self._applied("exp", held - self._wide(base))),
                Store(SCORES, held.index[0], weight),
                Store(TOTAL, total.index[0], total + weight),
            ),
            self._columns(lambda at: self._scaled(at, scale)),
        ]

    def _scaled(self, at: Expr, scale: Expr) -> Store:
        place = self.query * self.facts.d + at
        return Store(SUMS, place, self._vector(SUMS, place) * self._wide(scale))

    def _sums(self, start: Expr) -> list[Statement]:
        """Adds the weighted values of a tile of keys, some columns at a time in registers."""
        key, result = Var("key", self.keys), list[Statement]()
        count = binary("min", self.facts.n - start, index_const(self.keys)) if self.ragged else index_const(self.keys)
        weight = Var("weight", None, self.dtype)
        for first in range(0, self.columns, ACCUMULATORS):
            column = Var("column", min(ACCUMULATORS, self.columns - first))
            at = column * self.lanes
            place = self.query * self.facts.d + (first * self.lanes + at)
            value = substitute(self.v, {self.form.n: start + key, self.form.d[0]: first * self.lanes + at})
            added = self._vector("acc", at) + self._wide(weight) * value
            adding = block(
                Let(weight, self._scalar(SCORES, self.query * self.keys + key)), self._over(column, Store("acc", at, added), kind="unroll")
            )
            result.append(
                block(
                    Allocate(Buffer("acc", self.dtype, (column.extent or 0) * self.lanes, "register", self.lanes)),
                    self._over(column, Store("acc", at, self._vector(SUMS, place)), kind="unroll"),
                    For(key, count, adding),
                    self._over(column, Store(SUMS, place, self._vector("acc", at)), kind="unroll"),
                )
            )
        return result

    # -- results --

    def _finished(self) -> list[Statement]:
        """Stores the result of a query, or its part."""
        lane, total = Var("lane", self.lanes), self._scalar("sum", ZERO)
        added: list[Statement] = [
            Allocate(Buffer("sum", self.dtype, 1, "register")),
            Store("sum", ZERO, self._zero),
            self._over(lane, Store("sum", ZERO, total + self._scalar(TOTAL, self.query * self.lanes + lane))),
        ]
        first = self.query * self.facts.d
        if self.split == 1:
            return [*self.lets, *added, *self._result(first, total)]
        place = self._place(self.part)
        return [
            *added,
            self._columns(lambda at: Store(self.work, place + at, self._vector(SUMS, first + at))),
            Store(self.work, place + self.facts.d, self._scalar(GREATEST, self.query)),
            Store(self.work, place + (self.facts.d + 1), total),
        ]

    def _result(self, first: Expr, total: Expr) -> list[Statement]:
        """Stores the result of a query, whose sums start at `first`."""
        form, axis, factor = self.form, self.form.d[0], Var("factor", None, self.dtype)
        held = self._scalar(SUMS, first + axis) * factor
        element = replace_loads(substitute(form.element, self.at_query), {SUM: held})
        shared, (offset, value) = bind_shared([substitute(form.offset, self.at_query), element])
        store = self._over(axis, *shared, Store(form.output, offset, value), kind="simd")
        return [Let(factor, inverse(total, form.zeroed)), store]
