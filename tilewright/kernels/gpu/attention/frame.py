"""What both schemas of attention on a GPU share: a block's tile of queries, the tiles of keys that it passes over, fills of shared memory, and stores
of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import block
from tilewright.codegen.common import below, decode, named, vectors_fit
from tilewright.codegen.intrinsics.shuffle import exchange
from tilewright.ir.computation import lowest
from tilewright.ir.expr import Const, Expr, Load, Var, as_lanes, binary, compare, index_const, range_of, replace_loads, select, substitute
from tilewright.ir.kernel import Allocate, Buffer, For, Launch, Let, Place, Statement, Store, block_variable, thread_variable
from tilewright.kernels.attention_form import SCORE, SUM, AttentionForm, inverse

UNROLLED_TURNS = 8
"""Maximum turns of an unrolled loop that fills shared memory."""

Put = Callable[[Expr, Expr, Expr], Statement]
"""Maps a row of the tile, the first element along it and the loaded vector to the statement that stores it."""


@dataclass(frozen=True)
class AttentionFrame:
    """A block with the `block_m` queries from `first` on, which passes over `passes` of `key_tiles` tiles of `block_n` keys. `statements` come first
    in its body; `form` has the values of the batch's axes."""

    form: AttentionForm
    block_m: int
    block_n: int
    launch: Launch
    thread: Var
    statements: tuple[Statement, ...]
    first: Expr
    passes: Expr
    key_tiles: int

    @property
    def threads(self) -> int:
        return self.launch.block[0]

    def query(self, row: Expr) -> Expr:
        """The query at a row of the tile; past the end, the last one."""
        position = self.first + row
        return position if range_of(position)[1] < self.form.facts.m else binary("min", position, index_const(self.form.facts.m - 1))

    def turns(self, points: int, body: Callable[[Var], Sequence[Statement]]) -> list[Statement]:
        """The body for each point, which the threads share."""
        turns = -(-points // self.threads)
        turn = Var("turn", turns)
        each = block(below(turn * self.threads + self.thread, points, "place", body))
        return [For(turn, index_const(turns), each, "unroll" if turns <= UNROLLED_TURNS else "serial")]

    def queries(self, lanes: int, rows_first: bool, factor: Expr, put: Callable[[Expr, Expr], Sequence[Statement]]) -> list[Statement]:
        """The vectors along r of `factor` (of all queries), each in the registers `query`, for `put` to store, given row and first element.
        `rows_first`: adjacent threads have adjacent queries, not adjacent vectors of one query."""
        form, facts = self.form, self.form.facts
        vector = vectors_fit(factor, form.r[-1], lanes, form.layouts)
        assert vector is not None
        vectors = facts.r // lanes

        def one(place: Var) -> list[Statement]:
            row, first = (place % self.block_m, place // self.block_m * lanes) if rows_first else (place // vectors, place % vectors * lanes)
            lets, axes = named({**decode(self.query(row), form.m), **decode(first, form.r)})
            shared, (value,) = bind_shared([as_lanes(substitute(vector, axes), lanes)])
            held = Buffer("query", form.dtype, lanes, "register", lanes)
            return [*lets, *shared, Allocate(held), Store("query", index_const(0), value), *put(row, first)]

        return self.turns(self.block_m * vectors, one)

    def keys(self, tile: Expr, lanes: int, dtype: str, put: Put) -> list[Statement]:
        """Keys of a tile, loaded as `dtype`; past the end, the last one again."""
        form, facts = self.form, self.form.facts
        vectors, last = facts.r // lanes, index_const(facts.n - 1)

        def one(place: Var) -> list[Statement]:
            row, first = place // vectors, place % vectors * lanes
            key = tile * self.block_n + row
            key = key if facts.n % self.block_n == 0 else binary("min", key, last)
            lets, axes = named({form.n: key, **decode(first, form.r)})
            return [*lets, put(row, first, substitute(Load(form.k.buffer, form.k.index, dtype, lanes), axes))]

        return self.turns(self.block_n * vectors, one)

    def values(self, tile: Expr, lanes: int, dtype: str, put: Put) -> list[Statement]:
        """Values of a tile, loaded as `dtype`; past the end, zeros."""
        form, facts = self.form, self.form.facts
        vectors = facts.d // lanes

        def one(place: Var) -> list[Statement]:
            row, first = place // vectors, place % vectors * lanes
            key = tile * self.block_n + row
            lets, axes = named({form.n: key, **decode(first, form.d)})
            load = substitute(Load(form.v.buffer, form.v.index, dtype, lanes), axes)
            return [*lets, put(row, first, select(compare("lt", key, index_const(facts.n)), load, as_lanes(Const(0.0, dtype), lanes)))]

        return self.turns(self.block_n * vectors, one)

    def logit(self, row: Expr, key: Var, score: Load, seen: bool = False) -> tuple[list[Statement], Expr]:
        """Statements that depend on the row alone, and the logit of a score there; minus infinity past the last key. `seen`: both are there, and no
        causal mask hides the key."""
        form, facts = self.form, self.form.facts
        lets, query = named(decode(self.query(row), form.m))
        inside = seen or self.key_tiles * self.block_n == facts.n
        # a key past the end reads what the last one reads
        there = key if inside else binary("min", key, index_const(facts.n - 1))
        logit = replace_loads(substitute(form.seen if seen else form.logit, {**query, form.n: there}), {SCORE: score})
        return lets, logit if inside else select(compare("lt", key, index_const(facts.n)), logit, lowest(form.dtype))

    def combined(self, name: str, operation: str, distances: Sequence[int]) -> list[Statement]:
        """Combines the register with those of the lanes at these distances, which share the row."""
        dtype, zero = self.form.dtype, index_const(0)
        own, other = Load(name, (zero,), dtype), Load("other", (zero,), dtype)
        result: list[Statement] = [Allocate(Buffer("other", dtype, 1, "register"))]
        for distance in distances:
            result += [exchange(Place("other", zero), own, distance), Store(name, zero, binary(operation, own, other))]
        return result

    def results(
        self,
        rows: int,
        columns: int,
        wide: int,
        row: Callable[[Expr], Expr],
        column: Callable[[Expr], Expr],
        register: Callable[[Expr, Expr], Expr],
        distances: Sequence[int],
    ) -> list[Statement]:
        """Stores the thread's rows x columns elements, the sums (in `register` of `sums`) over the totals of their rows, in vectors of `wide`."""
        form, facts, dtype = self.form, self.form.facts, self.form.dtype
        element = vectors_fit(form.element, form.d[-1], wide, form.layouts)
        assert element is not None
        i, j = Var("i", rows), Var("j", columns // wide)
        scale, held = Var("scale", None, dtype), Var("result", None, dtype, wide)
        value = Load("sums", (register(i, j * wide),), dtype, wide) * as_lanes(scale, wide)

        def at(m: Var) -> list[Statement]:
            lets, query = named(decode(m, form.m))

            def vector(d: Var) -> list[Statement]:
                inner, axes = named(decode(d, form.d))
                both = {**query, **axes}
                result = replace_loads(substitute(as_lanes(element, wide), both), {SUM: held})
                shared, (offset, result) = bind_shared([substitute(form.offset, both), result])
                return [*inner, Let(held, value), *shared, Store(form.output, offset, result)]

            return [*lets, For(j, index_const(columns // wide), block(below(column(j * wide), facts.d, "d", vector)), "unroll")]

        whole = [
            Allocate(Buffer("whole", dtype, 1, "register")),
            Store("whole", index_const(0), Load("total", (i,), dtype)),
            *self.combined("whole", "add", distances),
            Let(scale, inverse(Load("whole", (index_const(0),), dtype), form.zeroed)),
        ]
        return [For(i, index_const(rows), block(whole, below(self.first + row(i), facts.m, "m", at)), "unroll")]


def attention_frame(form: AttentionForm, block_m: int, block_n: int, threads: int) -> AttentionFrame:
    """The frame of blocks of `threads` threads. With a causal mask later queries see more keys: their blocks start first."""
    facts = form.facts
    counts = facts.batch, -(-facts.m // block_m)
    key_tiles = -(-facts.n // block_n)
    launch = Launch((prod(counts), 1, 1), (threads, 1, 1))
    batch, tile_m = Var("batch", counts[0]), Var("tile_m", counts[1])
    causal = facts.shift is not None
    lets, where = named(decode(block_variable(launch), (tile_m, batch) if causal else (batch, tile_m)))
    more, axes = named(decode(where.get(batch, batch), form.batch))
    statements: list[Statement] = [*lets, *more]
    place = where.get(tile_m, tile_m)
    first = (counts[1] - 1 - place if causal else place) * block_m
    passes: Expr = index_const(key_tiles)
    if facts.shift is not None:
        passes = Var("passes", key_tiles + 1)
        needed = (first + (block_m - 1 + facts.shift)) // block_n + 1
        statements.append(Let(passes, binary("min", needed, index_const(key_tiles))))
    return AttentionFrame(form.bound(axes), block_m, block_n, launch, thread_variable(launch), tuple(statements), first, passes, key_tiles)
