"""What the schemas of attention on CPUs with vectors of queries share: a thread's tile of queries of one head, the tiles of keys that it passes over,
logits that are no vectors in memory, and stores of the result.

    for each head, tile of queries:                                          (in parallel)
        queries[r][m] = Q, transposed                                        (vectors along m, here and below)
        for each tile of keys:
            scores, weights and sums[d][m]                                   (`tile_of_keys`: what the schemas differ in)
        out = epilogue(sums[d][m] / total[m]), transposed

Lanes past the last query repeat it and are not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tilewright.codegen.access import bind_shared, vectorise
from tilewright.codegen.assemble import block
from tilewright.codegen.common import below, decode, named
from tilewright.ir.computation import lowest
from tilewright.ir.expr import (
    TRUE,
    ZERO,
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
from tilewright.kernels.attention_form import SCORE, SUM, AttentionForm, inverse
from tilewright.kernels.cpu.common import loops
from tilewright.kernels.cpu.transposition import transposed

QUERIES, SCORES, SUMS = "queries", "scores", "sums"
SQUARE = ("square", "turned")


class QueryTiles(ABC):
    """Emits the loop over tiles of queries: each has `vectors` vectors of `lanes` queries, and passes over `keys` keys at a time. `columns`: lines of
    sums, at least those of the values."""

    def __init__(self, form: AttentionForm, vectors: int, lanes: int, keys: int, columns: int) -> None:
        self.form, self.facts, self.dtype = form, form.facts, form.dtype
        self.lanes, self.vectors, self.keys, self.columns = lanes, vectors, keys, columns
        self.queries = vectors * lanes
        self.tile = Var("tile", -(-self.facts.m // self.queries))
        self.first = self.tile * self.queries
        self.zero = self.wide(Const(0.0, self.dtype))
        self.v = Var("v", self.vectors)

    def emit(self) -> Statement:
        sizes = {QUERIES: self.facts.r, SCORES: self.keys, SUMS: self.columns, "greatest": 1, "total": 1, "factor": 1}
        at = Var("at", self.columns * self.vectors)
        clear = [
            self.each(Store("greatest", self.v * self.lanes, self.wide(lowest(self.dtype))), Store("total", self.v * self.lanes, self.zero)),
            For(at, index_const(self.columns * self.vectors), Store(SUMS, at * self.lanes, self.zero)),
        ]
        body = block(
            [Allocate(Buffer(name, self.dtype, count * self.queries, "register", self.lanes)) for name, count in sizes.items()],
            self._queries(),
            self.prepared(),
            clear,
            self._passes(),
            self._results(),
        )
        return loops([*self.form.batch, self.tile], self.within(body), True)

    # -- what schemas differ in --

    @abstractmethod
    def within(self, body: Block) -> Statement:
        """The statements of a tile of queries, in the context that they need."""

    @abstractmethod
    def prepared(self) -> list[Statement]:
        """What is done once the queries of a tile are known."""

    @abstractmethod
    def tile_of_keys(self, start: Expr, count: int, logit: Expr) -> Block:
        """Scores, weights and sums for `count` keys from `start` on."""

    @abstractmethod
    def greater(self, value: Expr) -> Statement:
        """best[v] = the greater of it and a vector of logits; without NaN if weights pass them on to the total."""

    # -- vectors --

    def wide(self, value: Expr) -> Expr:
        return as_lanes(value, self.lanes)

    def held(self, name: str, line: Expr = ZERO) -> Load:
        """The loop's vector of queries in one line of a local buffer."""
        return Load(name, (line * self.queries + self.v * self.lanes,), self.dtype, self.lanes)

    def each(self, *statements: Statement | Sequence[Statement]) -> Statement:
        """The statements for each vector of queries."""
        return For(self.v, index_const(self.vectors), block(*statements), "unroll")

    def query(self, row: Expr) -> Expr:
        """The query at a row of the tile; past the end, the last one."""
        position = self.first + row
        return position if self.facts.m % self.queries == 0 else binary("min", position, index_const(self.facts.m - 1))

    def squares(self, extent: int, width: int, square: Callable[[Expr, Expr], list[Statement]]) -> Statement:
        """The statements for squares of `width` lines by the lanes of each vector, over an axis of this extent. If squares do not divide it, the last
        one begins earlier."""
        number = Var("square", -(-extent // width))
        start = number * width
        if extent % width:
            start = binary("min", start, index_const(extent - width))
        line = Var("line", extent)
        held: list[Statement] = [Allocate(Buffer(name, self.dtype, width * width, "register", width)) for name in SQUARE]
        return For(number, index_const(number.extent or 1), block(Let(line, start), self.each(held, square(line, self.v * self.lanes))))

    # -- queries and results --

    def _queries(self) -> list[Statement]:
        form, lanes = self.form, self.lanes
        axis = form.r[-1]
        wide = vectorise(form.q, axis, lanes)
        power = lanes & (lanes - 1) == 0
        if len(form.r) == 1 and self.facts.r >= lanes and power and wide is not None and wide.lanes == lanes:

            def square(line: Expr, first: Expr) -> list[Statement]:
                row, k = Var("row", lanes), Var("k", lanes)
                lets, query = named(decode(self.query(first + row), form.m))
                shared, (value,) = bind_shared([substitute(wide, {**query, axis: line})])
                turns, turned = transposed(*SQUARE, lanes, self.dtype)
                store = Store(QUERIES, (line + k) * self.queries + first, Load(turned, (k * lanes,), self.dtype, lanes))
                return [
                    For(row, index_const(lanes), block(lets, shared, Store(SQUARE[0], row * lanes, value)), "unroll"),
                    *turns,
                    For(k, index_const(lanes), store, "unroll"),
                ]

            return [self.squares(self.facts.r, lanes, square)]
        row = Var("row", self.queries)
        lets, query = named(decode(self.query(row), form.m))
        store = Store(QUERIES, self.position(form.r) * self.queries + row, substitute(form.q, query))
        return [For(row, index_const(self.queries), block(lets, loops(form.r, store, False)))]

    def _results(self) -> list[Statement]:
        form, lanes = self.form, self.lanes
        scale = Store("factor", self.v * lanes, inverse(self.held("total"), form.zeroed))
        axis = form.d[-1]
        wide = vectorise(form.element, axis, lanes, lambda load: load.buffer == SUM)
        power = lanes & (lanes - 1) == 0
        suits = len(form.d) == 1 and self.facts.d >= lanes and power and coefficient(form.offset, axis) == 1
        if suits and wide is not None and wide.dtype == self.dtype:

            def square(line: Expr, first: Expr) -> list[Statement]:
                row, k = Var("row", lanes), Var("k", lanes)
                scaled = Load(SUMS, ((line + k) * self.queries + first,), self.dtype, lanes) * self.held("factor")
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

            return [self.each(scale), self.squares(self.facts.d, lanes, square)]

        row, column = Var("row", self.queries), self.position(form.d)

        def each(m: Var) -> list[Statement]:
            lets, query = named(decode(m, form.m))
            held = Load(SUMS, (column * self.queries + row,), self.dtype) * Load("factor", (row,), self.dtype)
            shared, (offset, value) = bind_shared([substitute(form.offset, query), replace_loads(substitute(form.element, query), {SUM: held})])
            return [*lets, loops(form.d, block(shared, Store(form.output, offset, value)), False)]

        return [self.each(scale), For(row, index_const(self.queries), block(below(self.first + row, self.facts.m, "m", each)))]

    def position(self, axes: Sequence[Var]) -> Expr:
        """The flat position of axes."""
        return flat_position([(axis, axis.extent or 1) for axis in axes])

    # -- tiles of keys --

    def _passes(self) -> list[Statement]:
        """The tiles of keys: with a causal mask first those that all queries of the tile see, then those that some see."""
        facts, full, rest = self.facts, self.facts.n // self.keys, self.facts.n % self.keys
        step, last = Var("key_tile", full), index_const(full * self.keys)
        if facts.shift is None:
            result: list[Statement] = [For(step, index_const(full), self.tile_of_keys(step * self.keys, self.keys, self.form.logit))] if full else []
            return [*result, self.tile_of_keys(last, rest, self.form.logit)] if rest else result
        seen, reached = Var("seen", full + 1), Var("reached", full + 1)
        by_all, by_some = self.first + (facts.shift + 1), self.first + (self.queries + facts.shift + self.keys - 1)
        result = [Let(var, binary("min", keys // self.keys, index_const(full))) for var, keys in ((seen, by_all), (reached, by_some))]
        if full:
            result.append(For(step, seen, self.tile_of_keys(step * self.keys, self.keys, self.form.seen)))
            masked = Var("masked_tile", full)
            result.append(
                For(masked, binary("max", reached - seen, ZERO), self.tile_of_keys((seen + masked) * self.keys, self.keys, self.form.logit))
            )
        if rest:
            any_sees = compare("gt", self.first + (self.queries + facts.shift), last)
            tail = self.tile_of_keys(last, rest, self.form.logit)
            result += tail.statements if any_sees == TRUE else [If(any_sees, tail)]
        return result

    def vector(self, logit: Expr) -> Expr | None:
        """The logits of a vector of queries; None if they are no vectors in memory, or might lie beyond the last query."""
        form = self.form
        if set(form.m) & variables(logit) and (len(form.m) != 1 or self.facts.m % self.queries):
            return None
        return vectorise(logit, form.m[0] if form.m else Var("m", 1), self.lanes, lambda load: load.buffer == SCORE)

    def stored_logits(self, wide: Expr, key: Expr, scores: Expr, place: Expr, name: str) -> list[Statement]:
        """Stores the logits of a vector of queries (`vector`) with a key, made of their scores, at a place, and takes the greatest; `name`: that of
        the variable that holds them."""
        value, m = Var(name, None, self.dtype, self.lanes), self.first + self.v * self.lanes
        placed = substitute(wide, {self.form.n: key, **({self.form.m[0]: m} if self.form.m else {})})
        shared, (placed,) = bind_shared([replace_loads(placed, {SCORE: scores})])
        return [*shared, Let(value, self.wide(placed)), Store(SCORES, place, value), self.greater(value)]

    def apart(self, start: Expr, count: int, logit: Expr) -> list[Statement]:
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
            self.each(Store("line", self.v * self.lanes, self.held(SCORES, n))),
            For(row, there, block(lets, shared, Store("line", row, value)), "simd"),
            self.each(Store(SCORES, n * self.queries + self.v * self.lanes, line), self.greater(line)),
        )
        return [For(n, index_const(count), body)]


def flat_position(positions: Sequence[tuple[Expr, int]]) -> Expr:
    """The flat position of (position, extent) pairs, outermost first."""
    flat: Expr = ZERO
    for position, extent in positions:
        flat = flat * extent + position
    return flat


def roles_of(form: AttentionForm) -> dict[str, str]:
    """What each value is used for, in a kernel's header."""
    return {**{load.buffer: "queries" for load in loads(form.q)}, form.k.buffer: "keys", form.v.buffer: "values"}
