"""Lowering of the `attention` schema: softmax(Q K^T) V in one kernel, without the scores in memory (FlashAttention, Dao et al., NeurIPS 2022).

    queries [r][m] -> shared memory, once
    for each tile of keys:
        scores = queries x keys                              registers, from shared memory
        logits, and the rows' new greatest one               registers; the threads of a row exchange theirs
        weights [n][m] = exp(logits - greatest)              -> shared memory; totals and sums are rescaled
        sums += weights x values                             registers, from shared memory
    result = sums / totals

With one stage keys and values have one buffer each: the next keys are copied while weights and sums are computed, the next values during the next
scores. With two stages they have two, and the next tile is copied during all of a turn.
Keys stay as they are in memory, [n][r], with an odd pitch in vectors. Rows past the end repeat the last query and are not stored; keys past the end
have logits of minus infinity and values of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import below, decode, named, vectors_fit
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.async_copy import await_groups, commit, copy
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.shuffle import exchange
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import lowest
from tilewright.ir.expr import (
    Const,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    compare,
    index_const,
    loads,
    range_of,
    replace_loads,
    select,
    substitute,
    unary,
)
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Let, Place, Statement, Store, block_variable, thread_variable
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered
from tilewright.kernels.attention_form import SCORE, SUM, AttentionForm, finite, inverse
from tilewright.kernels.gpu.attention.space import PADDING, AttentionSchedule, blocks_to_ask_for, key_pitch, key_vector

QUERIES, KEYS, VALUES, WEIGHTS = "queries", "keys", "values", "weights"
WARP = 32
UNROLLED_PRODUCTS = 512
"""Maximum multiply-adds in one unrolled run of a product's loop."""
UNROLLED_TURNS = 8
"""Maximum turns of an unrolled loop that fills shared memory."""


def lower_attention(problem: Problem, form: AttentionForm, schedule: AttentionSchedule, machine: Machine) -> Lowered:
    """One kernel."""
    body, launch = _Tiles(form, schedule).emit()
    kernel, arguments = assemble(
        "attention",
        body,
        problem,
        (form.output,),
        header=f"{described(problem)}\n{schedule}",
        roles={**{load.buffer: "queries" for load in loads(form.q)}, form.k.buffer: "keys", form.v.buffer: "values"},
        launch=launch,
        blocks_per_processor=blocks_to_ask_for(schedule, form.facts, machine),
    )
    return Lowered(problem.region, str(schedule), (kernel,), (Call(kernel.name, arguments),))


def _wide(count: int) -> int:
    """Elements of a thread's `count` that are adjacent in shared memory."""
    return 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1


class _Tiles:
    """Emits the program of one thread."""

    def __init__(self, form: AttentionForm, schedule: AttentionSchedule) -> None:
        facts = form.facts
        self.form, self.facts, self.dtype = form, facts, form.dtype
        self.bm, self.bn, self.tm, self.tn = schedule.block_m, schedule.block_n, schedule.thread_m, schedule.thread_n
        self.copies, self.buffers = schedule.stages > 0, max(schedule.stages, 1)
        self.sharing, self.threads = schedule.sharing, schedule.threads
        self.columns = -(-facts.d // self.sharing)
        self.pitch, self.key_pitch, self.value_pitch = self.bm + PADDING, key_pitch(facts), self.columns * self.sharing
        self.key_tiles = -(-facts.n // self.bn)
        counts = facts.batch, -(-facts.m // self.bm)
        self.launch = Launch((prod(counts), 1, 1), (self.threads, 1, 1))
        self.thread = thread_variable(self.launch)
        batch, tile_m = Var("batch", counts[0]), Var("tile_m", counts[1])
        self.thread_m, self.thread_n = Var("thread_m", self.bm // self.tm), Var("thread_n", self.sharing)
        causal = facts.shift is not None
        # with a causal mask later queries see more keys: their blocks start first
        lets, where = named(decode(block_variable(self.launch), (tile_m, batch) if causal else (batch, tile_m)))
        more, axes = named(decode(where.get(batch, batch), form.batch))
        self.setup: list[Statement] = [*lets, *more, *self._places()]
        self.form = form.bound(axes)
        place = where.get(tile_m, tile_m)
        self.first = (counts[1] - 1 - place if causal else place) * self.bm
        self.passes: Expr = index_const(self.key_tiles)
        if facts.shift is not None:
            self.passes = Var("passes", self.key_tiles + 1)
            needed = (self.first + (self.bm - 1 + facts.shift)) // self.bn + 1
            self.setup.append(Let(self.passes, binary("min", needed, index_const(self.key_tiles))))

    def emit(self) -> tuple[Block, Launch]:
        tile = Var("tile", self.key_tiles)
        root = block(
            self.setup,
            self._allocations(),
            self._keys(index_const(0)), self._group(),
            self._values(index_const(0)), self._group(),
            self._queries(),
            self._awaited(1),
            For(tile, self.passes, self._turn(tile) if self.buffers == 1 else self._turn_ahead(tile)),
            self._results(),
        )  # fmt: skip
        return root, self.launch

    def _turn(self, tile: Var) -> Block:
        """A tile of keys, with one buffer each: keys are replaced after the scores, values after the sums."""
        following, several = tile + 1, self.key_tiles > 1
        more = compare("lt", following, self.passes)
        return block(
            self._scores(tile),
            [block_barrier(), If(more, block(self._keys(following))), *self._group()] if several else [],
            self._weights(tile),
            self._awaited(1 if several else 0),
            self._sums(tile),
            [If(more, block(self._awaited(0), self._values(following), self._group()))] if several else [],
        )

    def _turn_ahead(self, tile: Var) -> Block:
        """A tile of keys, with two buffers each: the next keys and values are copied from its beginning on."""
        following = tile + 1
        more = compare("lt", following, self.passes)
        return block(
            If(more, block(self._keys(following))), self._group(),
            If(more, block(self._values(following))), self._group(),
            self._scores(tile),
            self._weights(tile),
            self._awaited(2),
            self._sums(tile),
            If(more, block(self._awaited(1))),
        )  # fmt: skip

    def _group(self) -> list[Statement]:
        """Ends a group of copies."""
        return [commit()] if self.copies else []

    def _awaited(self, pending: int) -> list[Statement]:
        """Everything that the block has copied or stored is visible, but for the youngest groups of copies."""
        return [*([await_groups(pending)] if self.copies else []), block_barrier()]

    def _buffer(self, tile: Expr, elements: int) -> Expr:
        """The offset of the buffer with a tile of keys or values."""
        return tile % self.buffers * elements

    def _places(self) -> list[Statement]:
        """The thread's place among those of the block. Adjacent threads alternate between two rows: of vector loads the hardware merges equal
        addresses only between lanes whose numbers differ in the lowest or the second bit."""
        if self.sharing == WARP:
            return [Let(self.thread_n, self.thread % WARP), Let(self.thread_m, self.thread // WARP)]
        pair = 2 * self.sharing
        return [Let(self.thread_n, self.thread % pair // 2), Let(self.thread_m, self.thread // pair * 2 + self.thread % 2)]

    # -- places --

    def _row(self, i: Expr) -> Expr:
        """The query of the tile that is the thread's i-th: adjacent threads have adjacent vectors."""
        wide = _wide(self.tm)
        return i // wide * (self.bm // (self.tm // wide)) + self.thread_m * wide + i % wide

    def _column(self, j: Expr) -> Expr:
        """The column of the values that is the thread's j-th."""
        wide = _wide(self.columns)
        return j // wide * (self.sharing * wide) + self.thread_n * wide + j % wide

    def _query(self, row: Expr) -> Expr:
        """The query at a row of the tile; past the end, the last one."""
        position = self.first + row
        return position if range_of(position)[1] < self.facts.m else binary("min", position, index_const(self.facts.m - 1))

    def _held(self, name: str, offset: Expr | int, lanes: int = 1) -> Load:
        return Load(name, (index_const(offset) if isinstance(offset, int) else offset,), self.dtype, lanes)

    def _allocations(self) -> list[Statement]:
        facts, tm = self.facts, self.tm
        keys, values = (self.buffers * self.bn * pitch for pitch in (self.key_pitch, self.value_pitch))
        shared = {QUERIES: facts.r * self.pitch, KEYS: keys, VALUES: values, WEIGHTS: self.bn * self.pitch}
        copied = dict(zip((KEYS, VALUES), self.form.stored, strict=True)) if self.copies else {}
        registers = {"scores": self.tn * tm, "sums": tm * self.columns, "greatest": tm, "total": tm}
        result: list[Statement] = [Allocate(Buffer(name, copied.get(name, self.dtype), size, "shared")) for name, size in shared.items()]
        result += [Allocate(Buffer(name, self.dtype, size, "register")) for name, size in registers.items()]
        for name, value in (("sums", Const(0.0, self.dtype)), ("greatest", lowest(self.dtype)), ("total", Const(0.0, self.dtype))):
            at = Var("at", registers[name])
            result.append(For(at, index_const(registers[name]), Store(name, at, value), "unroll"))
        if beyond := self.value_pitch - facts.d:

            def zero(place: Var) -> list[Statement]:
                return [Store(VALUES, place // beyond * self.value_pitch + facts.d + place % beyond, Const(0.0, self.dtype))]

            result += self._turns(self.buffers * self.bn * beyond, zero)
        return result

    def _turns(self, points: int, body: Callable[[Var], Sequence[Statement]]) -> list[Statement]:
        """The body for each point, which the threads share."""
        turns = -(-points // self.threads)
        turn = Var("turn", turns)
        each = block(below(turn * self.threads + self.thread, points, "place", body))
        return [For(turn, index_const(turns), each, "unroll" if turns <= UNROLLED_TURNS else "serial")]

    # -- filling shared memory --

    def _queries(self) -> list[Statement]:
        """The queries, transposed: neighbouring threads take neighbouring queries, so that they store to neighbouring places."""
        lanes, form = self.facts.q_vector, self.form
        vector = vectors_fit(form.q, form.r[-1], lanes, form.layouts)
        assert vector is not None

        def one(place: Var) -> list[Statement]:
            row, first = place % self.bm, place // self.bm * lanes
            lets, axes = named({**decode(self._query(row), form.m), **decode(first, form.r)})
            shared, (value,) = bind_shared([as_lanes(substitute(vector, axes), lanes)])
            stores = [Store(QUERIES, (first + lane) * self.pitch + row, self._held("query", lane)) for lane in range(lanes)]
            return [*lets, *shared, Allocate(Buffer("query", self.dtype, lanes, "register", lanes)), Store("query", index_const(0), value), *stores]

        return self._turns(self.bm * self.facts.r // lanes, one)

    def _keys(self, tile: Expr) -> list[Statement]:
        """Keys of a tile; past the end, the last one again."""
        lanes, form = self.facts.k_vector, self.form
        last = index_const(self.facts.n - 1)

        def one(place: Var) -> list[Statement]:
            row, first = place // (self.facts.r // lanes), place % (self.facts.r // lanes) * lanes
            key = tile * self.bn + row
            key = key if self.facts.n % self.bn == 0 else binary("min", key, last)
            lets, axes = named({form.n: key, **decode(first, form.r)})
            load = substitute(Load(form.k.buffer, form.k.index, self.dtype, lanes), axes)
            return [*lets, self._fetched(KEYS, self._buffer(tile, self.bn * self.key_pitch) + row * self.key_pitch + first, load, form.stored[0])]

        return self._turns(self.bn * self.facts.r // lanes, one)

    def _values(self, tile: Expr) -> list[Statement]:
        """Values of a tile; past the end, zeros."""
        lanes, form = self.facts.v_vector, self.form

        def one(place: Var) -> list[Statement]:
            row, first = place // (self.facts.d // lanes), place % (self.facts.d // lanes) * lanes
            key = tile * self.bn + row
            lets, axes = named({form.n: key, **decode(first, form.d)})
            load = substitute(Load(form.v.buffer, form.v.index, self.dtype, lanes), axes)
            value = select(compare("lt", key, index_const(self.facts.n)), load, as_lanes(Const(0.0, self.dtype), lanes))
            target = self._buffer(tile, self.bn * self.value_pitch) + row * self.value_pitch + first
            return [*lets, self._fetched(VALUES, target, value, form.stored[1])]

        return self._turns(self.bn * self.facts.d // lanes, one)

    def _fetched(self, tile: str, place: Expr, value: Expr, stored: str) -> Statement:
        return copy(tile, place, value, stored) if self.copies else Store(tile, place, value)

    # -- a tile of keys --

    def _scores(self, tile: Expr) -> list[Statement]:
        """scores[j, i] = sum over r of queries[r, i] * keys[j, r], reading a vector along r of each key."""
        group, buffer = key_vector(self.facts), self._buffer(tile, self.bn * self.key_pitch)
        cleared = Var("at", self.tn * self.tm)
        i, j, within = Var("i", self.tm), Var("j", self.tn), Var("r_inner", group)

        def part(k: Expr) -> list[Statement]:
            keys: list[Statement] = [Allocate(Buffer("key_part", self.dtype, self.tn * group, "register"))]
            for number in range(self.tn):
                place = buffer + (self.thread_n + number * self.sharing) * self.key_pitch + k * group
                keys.append(Store("key_part", index_const(number * group), self._held(KEYS, place, group)))
            at = j * self.tm + i
            update = Store("scores", at, self._held("scores", at) + self._held("query_part", i) * self._held("key_part", j * group + within))
            products = For(j, index_const(self.tn), For(i, index_const(self.tm), update, "unroll"), "unroll")
            return [*keys, For(within, index_const(group), block(self._rows_of(QUERIES, "query_part", k * group + within), products), "unroll")]

        clear = For(cleared, index_const(self.tn * self.tm), Store("scores", cleared, Const(0.0, self.dtype)), "unroll")
        return [clear, self._reduced("r", self.facts.r // group, group * self.tm * self.tn, part)]

    def _sums(self, tile: Expr) -> list[Statement]:
        """sums[i, j] += sum over the keys of the tile of weights[n, i] * values[n, j]"""
        i, j, wide, buffer = Var("i", self.tm), Var("j", self.columns), _wide(self.columns), self._buffer(tile, self.bn * self.value_pitch)

        def part(n: Expr) -> list[Statement]:
            values: list[Statement] = [Allocate(Buffer("value_part", self.dtype, self.columns, "register"))]
            for number in range(0, self.columns, wide):
                place = buffer + n * self.value_pitch + self._column(index_const(number))
                values.append(Store("value_part", index_const(number), self._held(VALUES, place, wide)))
            at = i * self.columns + j
            update = Store("sums", at, self._held("sums", at) + self._held("weight_part", i) * self._held("value_part", j))
            products = For(i, index_const(self.tm), For(j, index_const(self.columns), update, "unroll"), "unroll")
            return [*self._rows_of(WEIGHTS, "weight_part", n), *values, products]

        return [self._reduced("n_inner", self.bn, self.tm * self.columns, part)]

    def _rows_of(self, tile: str, name: str, line: Expr) -> list[Statement]:
        """The thread's rows of one line of a transposed tile, in registers."""
        wide = _wide(self.tm)
        result: list[Statement] = [Allocate(Buffer(name, self.dtype, self.tm, "register"))]
        for number in range(0, self.tm, wide):
            result.append(Store(name, index_const(number), self._held(tile, line * self.pitch + self._row(index_const(number)), wide)))
        return result

    def _reduced(self, name: str, steps: int, products: int, part: Callable[[Expr], list[Statement]]) -> Statement:
        """The loop over the steps of a product, unrolled as far as its code stays small."""
        unrolled = next(count for count in range(steps, 0, -1) if steps % count == 0 and (count * products <= UNROLLED_PRODUCTS or count == 1))
        outer, inner = Var(f"{name}_outer", steps // unrolled), Var(name, unrolled)
        body = For(inner, index_const(unrolled), block(part(outer * unrolled + inner)), "unroll")
        return For(outer, index_const(steps // unrolled), body) if unrolled < steps else For(inner, index_const(steps), block(part(inner)), "unroll")

    def _weights(self, tile: Expr) -> list[Statement]:
        """Logits, the rows' new greatest ones, weights, and the rescaling of totals and sums."""
        i, j, k = Var("i", self.tm), Var("j", self.tn), Var("k", self.columns)
        at = j * self.tm + i
        score, greatest, total, best = self._held("scores", at), self._held("greatest", i), self._held("total", i), self._held("best", 0)
        weighted = self._held("sums", i * self.columns + k)
        fresh, base, factor, weight = (Var(name, None, self.dtype) for name in ("fresh", "base", "factor", "weight"))
        row: list[Statement] = [
            Allocate(Buffer("best", self.dtype, 1, "register")),
            Store("best", index_const(0), greatest),
            *self._logits(tile, i, j, score, best),
            *self._combined("best", "max"),
            Let(fresh, best),
            Let(base, finite(fresh)),
            Let(factor, unary("exp", greatest - base)),
            Store("greatest", i, fresh),
            Store("total", i, total * factor),
            For(j, index_const(self.tn), block(
                Let(weight, unary("exp", score - base)), Store("scores", at, weight), Store("total", i, total + weight)
            ), "unroll"),
            For(k, index_const(self.columns), Store("sums", i * self.columns + k, weighted * factor), "unroll"),
        ]  # fmt: skip
        wide = _wide(self.tm)
        line = (self.thread_n + j * self.sharing) * self.pitch
        vectors = ((number, self._held("scores", j * self.tm + number, wide)) for number in range(0, self.tm, wide))
        stores = [Store(WEIGHTS, line + self._row(index_const(number)), vector) for number, vector in vectors]
        return [For(i, index_const(self.tm), block(row), "unroll"), For(j, index_const(self.tn), block(stores), "unroll")]

    def _logits(self, tile: Expr, i: Var, j: Var, score: Load, best: Load) -> list[Statement]:
        """The logits of one row of the thread in place of its scores, and the greatest of them."""
        form, key = self.form, Var("key", self.key_tiles * self.bn)
        query_lets, query = named(decode(self._query(self._row(i)), form.m))
        # a key past the end reads what the last one reads
        there = key if self.key_tiles * self.bn == self.facts.n else binary("min", key, index_const(self.facts.n - 1))
        logit = replace_loads(substitute(form.logit, {**query, form.n: there}), {SCORE: score})
        value = select(compare("lt", key, index_const(self.facts.n)), logit, lowest(self.dtype))
        lets, (value,) = bind_shared([value])
        fresh = Var("logit", None, self.dtype)
        place = score.index[0]
        each: list[Statement] = [Let(key, tile * self.bn + self.thread_n + j * self.sharing), *lets, Let(fresh, value)]
        each += [Store("scores", place, fresh), Store("best", index_const(0), binary("max", best, fresh))]
        return [*query_lets, For(j, index_const(self.tn), block(each), "unroll")]

    def _combined(self, name: str, operation: str) -> list[Statement]:
        """Combines the register with those of the threads that share the row."""
        result: list[Statement] = [Allocate(Buffer("other", self.dtype, 1, "register"))]
        neighbours = 1 if self.sharing == WARP else 2
        for bit in reversed(range(self.sharing.bit_length() - 1)):
            result.append(exchange(Place("other", index_const(0)), self._held(name, 0), neighbours << bit))
            result.append(Store(name, index_const(0), binary(operation, self._held(name, 0), self._held("other", 0))))
        return result

    # -- results --

    def _results(self) -> list[Statement]:
        form, facts = self.form, self.facts
        wide = next(lanes for lanes in (4, 2, 1) if lanes <= min(facts.store_vector, _wide(self.columns)))
        element = vectors_fit(form.element, form.d[-1], wide, form.layouts)
        assert element is not None
        i, j = Var("i", self.tm), Var("j", self.columns // wide)
        scale = Var("scale", None, self.dtype)
        held = Var("result", None, self.dtype, wide)
        value = self._held("sums", i * self.columns + j * wide, wide) * as_lanes(scale, wide)

        def row(m: Var) -> list[Statement]:
            lets, query = named(decode(m, form.m))

            def columns(d: Var) -> list[Statement]:
                inner, axes = named(decode(d, form.d))
                both = {**query, **axes}
                result = replace_loads(substitute(as_lanes(element, wide), both), {SUM: held})
                shared, (offset, result) = bind_shared([substitute(form.offset, both), result])
                return [*inner, Let(held, value), *shared, Store(form.output, offset, result)]

            stores = block(below(self._column(j * wide), facts.d, "d", columns))
            return [*lets, For(j, index_const(self.columns // wide), stores, "unroll")]

        whole = [
            Allocate(Buffer("whole", self.dtype, 1, "register")),
            Store("whole", index_const(0), self._held("total", i)),
            *self._combined("whole", "add"),
            Let(scale, inverse(self._held("whole", 0), form.zeroed)),
        ]
        return [For(i, index_const(self.tm), block(whole, below(self.first + self._row(i), facts.m, "m", row)), "unroll")]
