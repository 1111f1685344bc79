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
have logits of minus infinity and values of 0. With `split` the keys of a query are divided among blocks (`parts`).
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.async_copy import await_groups, commit, copy
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import lowest
from tilewright.ir.expr import (
    Const,
    Expr,
    Load,
    Var,
    binary,
    compare,
    index_const,
    loads,
    unary,
)
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Let, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels.attention_form import AttentionForm, finite
from tilewright.kernels.gpu.attention.frame import attention_frame
from tilewright.kernels.gpu.attention.parts import with_parts
from tilewright.kernels.gpu.attention.places import adjacent, column_of, place_of, row_of
from tilewright.kernels.gpu.attention.space import PADDING, AttentionSchedule, blocks_to_ask_for, key_pitch, key_vector

QUERIES, KEYS, VALUES, WEIGHTS = "queries", "keys", "values", "weights"
WARP = 32
UNROLLED_PRODUCTS = 512
"""Maximum multiply-adds in one unrolled run of a product's loop."""


def lower_attention(problem: Problem, form: AttentionForm, schedule: AttentionSchedule, machine: Machine) -> Lowered:
    """One kernel, and a second one if the keys are divided."""
    tiles = _Tiles(form, schedule)
    body, launch = tiles.emit()
    parts = tiles.frame.parts
    kernel, arguments = assemble(
        "attention",
        body,
        problem.with_storage(parts.storage(form)),
        parts.written(),
        header=f"{described(problem)}\n{schedule}",
        roles={**{load.buffer: "queries" for load in loads(form.q)}, form.k.buffer: "keys", form.v.buffer: "values"},
        launch=launch,
        blocks_per_processor=blocks_to_ask_for(schedule, form.facts, machine),
    )
    return with_parts(problem, form, parts, kernel, arguments, str(schedule), 1.0)


class _Tiles:
    """Emits the program of one thread."""

    def __init__(self, form: AttentionForm, schedule: AttentionSchedule) -> None:
        self.frame = frame = attention_frame(form, schedule.block_m, schedule.block_n, schedule.threads, schedule.split)
        self.form, self.facts, self.dtype = frame.form, form.facts, form.dtype
        self.bm, self.bn, self.tm, self.tn = schedule.block_m, schedule.block_n, schedule.thread_m, schedule.thread_n
        self.copies, self.buffers = schedule.stages > 0, max(schedule.stages, 1)
        self.sharing = schedule.sharing
        self.columns = -(-form.facts.d // self.sharing)
        self.pitch, self.key_pitch, self.value_pitch = self.bm + PADDING, key_pitch(form.facts), self.columns * self.sharing
        self.most_passes, self.passes = frame.most_passes, frame.passes
        self.thread_m, self.thread_n = Var("thread_m", self.bm // self.tm), Var("thread_n", self.sharing)
        neighbours = 1 if self.sharing == WARP else 2
        self.distances = [neighbours << bit for bit in reversed(range(self.sharing.bit_length() - 1))]

    def emit(self) -> tuple[Block, Launch]:
        tile = Var("tile", self.most_passes)
        root = block(
            self.frame.statements,
            self._places(),
            self._allocations(),
            self._keys(index_const(0)), self._group(),
            self._values(index_const(0)), self._group(),
            self._queries(),
            self._awaited(1),
            For(tile, self.passes, self._turn(tile) if self.buffers == 1 else self._turn_ahead(tile)),
            self._results(),
        )  # fmt: skip
        return root, self.frame.launch

    def _turn(self, tile: Var) -> Block:
        """A tile of keys, with one buffer each: keys are replaced after the scores, values after the sums."""
        following, several = tile + 1, self.most_passes > 1
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
        """The thread's place among those of the block."""
        m, n = place_of(self.frame.thread, self.sharing)
        return [Let(self.thread_n, n), Let(self.thread_m, m)]

    # -- places --

    def _row(self, i: Expr) -> Expr:
        return row_of(i, self.thread_m, self.bm, self.tm)

    def _column(self, j: Expr) -> Expr:
        return column_of(j, self.thread_n, self.sharing, self.columns)

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

            result += self.frame.turns(self.buffers * self.bn * beyond, zero)
        return result

    # -- filling shared memory --

    def _queries(self) -> list[Statement]:
        """The queries, transposed: neighbouring threads take neighbouring queries, so that they store to neighbouring places."""
        lanes = self.facts.q_vector

        def put(row: Expr, first: Expr) -> list[Statement]:
            return [Store(QUERIES, (first + lane) * self.pitch + row, self._held("query", lane)) for lane in range(lanes)]

        return self.frame.queries(lanes, True, self.form.q, put)

    def _keys(self, tile: Expr) -> list[Statement]:
        buffer, pitch = self._buffer(tile, self.bn * self.key_pitch), self.key_pitch
        put = lambda row, first, value: self._fetched(KEYS, buffer + row * pitch + first, value, self.form.stored[0])  # noqa: E731
        return self.frame.keys(tile, self.facts.k_vector, self.dtype, put)

    def _values(self, tile: Expr) -> list[Statement]:
        buffer, pitch = self._buffer(tile, self.bn * self.value_pitch), self.value_pitch
        put = lambda row, first, value: self._fetched(VALUES, buffer + row * pitch + first, value, self.form.stored[1])  # noqa: E731
        return self.frame.values(tile, self.facts.v_vector, self.dtype, put)

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
        i, j, wide, buffer = Var("i", self.tm), Var("j", self.columns), adjacent(self.columns), self._buffer(tile, self.bn * self.value_pitch)

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
        wide = adjacent(self.tm)
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
            *self.frame.combined("best", "max", self.distances),
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
        wide = adjacent(self.tm)
        line = (self.thread_n + j * self.sharing) * self.pitch
        vectors = ((number, self._held("scores", j * self.tm + number, wide)) for number in range(0, self.tm, wide))
        stores = [Store(WEIGHTS, line + self._row(index_const(number)), vector) for number, vector in vectors]
        return [For(i, index_const(self.tm), block(row), "unroll"), For(j, index_const(self.tn), block(stores), "unroll")]

    def _logits(self, tile: Expr, i: Var, j: Var, score: Load, best: Load) -> list[Statement]:
        """The logits of one row of the thread in place of its scores, and the greatest of them."""
        key = Var("key", self.frame.key_tiles * self.bn)
        query_lets, logit = self.frame.logit(self._row(i), key, score)
        lets, (value,) = bind_shared([logit])
        fresh = Var("logit", None, self.dtype)
        each: list[Statement] = [Let(key, self.frame.position(tile, self.thread_n + j * self.sharing)), *lets, Let(fresh, value)]
        each += [Store("scores", score.index[0], fresh), Store("best", index_const(0), binary("max", best, fresh))]
        return [*query_lets, For(j, index_const(self.tn), block(each), "unroll")]

    # -- results --

    def _results(self) -> list[Statement]:
        wide = next(lanes for lanes in (4, 2, 1) if lanes <= min(self.facts.store_vector, adjacent(self.columns)))
        register = lambda i, j: i * self.columns + j  # noqa: E731
        return self.frame.results(self.tm, self.columns, wide, self._row, self._column, register, self.distances)
