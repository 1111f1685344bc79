"""What both schemas of attention on a GPU share: a block's tile of queries, the tiles of keys that it passes over, fills of shared memory, and stores
of the result, or of its part if the keys are divided (`parts`)."""

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
from tilewright.ir.kernel import Allocate, Buffer, For, If, Launch, Let, Place, Statement, Store, block_variable, thread_variable
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import SCORE, AttentionForm, inverse
from tilewright.kernels.gpu.attention.parts import Parts, stored

UNROLLED_TURNS = 8
"""Maximum turns of an unrolled loop that fills shared memory."""

Put = Callable[[Expr, Expr, Expr], Statement]
"""Maps a row of the tile, the first element along it and the loaded vector to the statement that stores it."""


@dataclass(frozen=True)
class AttentionFrame:
    """A block with the `block_m` queries from `first` on, which passes over `passes`, at most `most_passes`, of `key_tiles` tiles of `block_n` keys,
    from tile `begin` on. `statements` come first in its body; `form` has the values of the batch's axes. `batch`: the block's place in the batch.
    `parts`: of the keys, of which the block has number `part`."""

    form: AttentionForm
    block_m: int
    block_n: int
    launch: Launch
    thread: Var
    statements: tuple[Statement, ...]
    first: Expr
    passes: Expr
    most_passes: int
    key_tiles: int
    begin: Expr
    batch: Expr
    parts: Parts
    part: Expr

    @property
    def threads(self) -> int:
        return self.launch.block[0]

    def query(self, row: Expr) -> Expr:
        """The query at a row of the tile; past the end, the last one."""
        position = self.first + row
        return position if range_of(position)[1] < self.form.facts.m else binary("min", position, index_const(self.form.facts.m - 1))

    def position(self, tile: Expr, row: Expr) -> Expr:
        """The key at a row of the block's tile with this number."""
        return (self.begin + tile) * self.block_n + row

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
            key = self.position(tile, row)
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
            key = self.position(tile, row)
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
        """Stores the thread's rows x columns elements, the sums (in `register` of `sums`) over the totals of their rows, in vectors of `wide`. Of a
        part of the keys it stores the sums, the greatest logits and the totals."""
        form, facts, dtype, parts = self.form, self.form.facts, self.form.dtype, self.parts
        wide = wide if parts.count == 1 or facts.d % wide == 0 else 1
        i, j = Var("i", rows), Var("j", columns // wide)
        scale, zero = Var("scale", None, dtype), index_const(0)
        sums, whole = Load("sums", (register(i, j * wide),), dtype, wide), Load("whole", (zero,), dtype)

        def at(m: Var) -> list[Statement]:
            lets, query = named(decode(m, form.m))
            part = parts.place(self.batch * facts.m + m, self.part)

            def vector(d: Var) -> list[Statement]:
                if parts.count > 1:
                    return [Store(parts.sums, part * facts.d + d, sums)]
                return stored(form, query, d, sums * as_lanes(scale, wide), wide)

            vectors = For(j, index_const(columns // wide), block(below(column(j * wide), facts.d, "d", vector)), "unroll")
            if parts.count == 1:
                return [*lets, vectors]
            row_of_part = [Store(parts.rows, part * 2, Load("greatest", (i,), dtype)), Store(parts.rows, part * 2 + 1, whole)]
            return [If(compare("eq", column(zero), zero), block(row_of_part)), vectors]

        total = [
            Allocate(Buffer("whole", dtype, 1, "register")),
            Store("whole", zero, Load("total", (i,), dtype)),
            *self.combined("whole", "add", distances),
            *([Let(scale, inverse(whole, form.zeroed))] if parts.count == 1 else []),
        ]
        return [For(i, index_const(rows), block(total, below(self.first + row(i), facts.m, "m", at)), "unroll")]


def attention_frame(form: AttentionForm, block_m: int, block_n: int, threads: int, split: int = 1) -> AttentionFrame:
    """The frame of blocks of `threads` threads, of which `split` share the keys of the same queries, or fewer if there are fewer tiles. With a causal
    mask later queries see more keys: their blocks start first.

    Raises:
        Unsuitable: if the keys are divided that a causal mask hides from some queries.
    """
    facts = form.facts
    causal = facts.shift is not None
    if causal and split > 1:
        raise Unsuitable("with a causal mask the keys of a query are not divided evenly")
    key_tiles = -(-facts.n // block_n)
    each = -(-key_tiles // split)
    parts = Parts(form.output, -(-key_tiles // each))
    counts = facts.batch, -(-facts.m // block_m)
    launch = Launch((prod(counts) * parts.count, 1, 1), (threads, 1, 1), ((facts.batch, 1), (facts.m, block_m)))
    batch, tile_m, part = Var("batch", counts[0]), Var("tile_m", counts[1]), Var("part", parts.count)
    order = (tile_m, batch) if causal else (batch, tile_m)
    lets, where = named(decode(block_variable(launch), (*order, part)))
    more, axes = named(decode(where.get(batch, batch), form.batch))
    statements: list[Statement] = [*lets, *more]
    place = where.get(tile_m, tile_m)
    first = (counts[1] - 1 - place if causal else place) * block_m
    begin = where.get(part, part) * each
    passes: Expr = index_const(each)
    if facts.shift is not None:
        passes = Var("passes", key_tiles + 1)
        needed = (first + (block_m - 1 + facts.shift)) // block_n + 1
        statements.append(Let(passes, binary("min", needed, index_const(key_tiles))))
    elif key_tiles % each:
        passes = Var("passes", each + 1)
        statements.append(Let(passes, binary("min", index_const(key_tiles) - begin, index_const(each))))
    return AttentionFrame(
        form.bound(axes), block_m, block_n, launch, thread_variable(launch), tuple(statements), first, passes, each, key_tiles, begin,
        where.get(batch, batch), parts, where.get(part, part),
    )  # fmt: skip
