"""Lowering of attention on tile registers (AMX): softmax(Q K^T) V with products of bfloat16, in one kernel after one that copies the values.

    for each head, 32 keys, 16 elements d:                                   (in parallel)
        values[d][n] = V, transposed                                         (pairs of keys; zeros after the last one)
    for each head, tile of queries:                                          (in parallel)
        queries[r / 2][m][2] = Q, transposed                                 (pairs of elements)
        for each block of keys:
            scores[n][m] = K * queries                                       (tile registers; K as stored in memory)
            weights[n / 2][m][2] = 2^(scale (logit(scores) - greatest))      (pairs of keys; totals and sums are rescaled)
            sums[d][m] += values * weights                                   (tile registers)
        out = epilogue(sums[d][m] / total[m]), transposed

Queries are the columns of all tiles, so that maxima, totals and rescaled sums are vectors of queries, and no reduction crosses lanes. Registers are
named by their roles: four tiles of sums, and one tile of each factor, which is loaded as a block of 2 x 2 tiles needs it. The last tile of keys
begins earlier if there are no 16 keys left; it stores the scores that it shares with the tile before again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import e, log2

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics import amx as tiles
from tilewright.codegen.intrinsics.amx import TILE_CHANNELS, TILE_PIXELS
from tilewright.codegen.intrinsics.vectors import LANES, greater, pair, power_of_two, transpose_pairs
from tilewright.ir.expr import (
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
    from_linear,
    index_const,
    linear,
    select,
    substitute,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Let, Place, Statement, Store
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage
from tilewright.kernels.attention_form import SCORE, finite
from tilewright.kernels.cpu.amx.space import CHUNK
from tilewright.kernels.cpu.attention.frame import QUERIES, SCORES, SUMS, QueryTiles, flat_position, roles_of
from tilewright.kernels.cpu.common import loops
from tilewright.kernels.cpu.tile_attention.form import TileAttentionForm
from tilewright.kernels.cpu.tile_attention.space import TileAttentionSchedule

PAIRED, WEIGHTS, POWERS = "paired_queries", "weights", "powers"
PAIR = 2 * LANES
"""Elements of a vector of pairs."""
ACROSS = 2
"""Tiles of a block in each direction."""


def lower_tile_attention(problem: Problem, form: TileAttentionForm, schedule: TileAttentionSchedule) -> Lowered:
    """Two kernels: the copy of the values, and attention."""
    attention, facts = form.attention, form.facts
    shape = (*(axis.extent or 1 for axis in form.copies), facts.key_blocks, facts.columns, CHUNK)
    name = f"{attention.v.buffer}@{problem.region.name}"
    storage = {name: Storage(Value(name, shape, tiles.FACTOR), row_major(shape))}
    extended, header = problem.with_storage(storage), f"{described(problem)}\n{schedule}"
    made = [
        assemble("values", _copy(form, name), extended, (name,), header=header, roles={attention.v.buffer: "values"}),
        assemble(
            "tile_attention",
            _Tiles(form, schedule, name).emit(),
            extended,
            (attention.output,),
            header=header,
            roles={**roles_of(attention), name: "values of 32 keys, transposed"},
        ),
    ]
    calls = tuple(Call.of(kernel, arguments) for kernel, arguments in made)
    return Lowered(problem.region, str(schedule), tuple(kernel for kernel, _ in made), calls, storage)


def _copy(form: TileAttentionForm, target: str) -> Statement:
    """The loops that copy values: blocks of CHUNK keys, transposed."""
    attention, facts, (d,) = form.attention, form.facts, form.attention.d
    extents = [axis.extent or 1 for axis in form.copies]
    key_block, element = Var("key_block", facts.key_blocks), Var("d", d.extent)
    first = flat_position([*zip(form.copies, extents, strict=True), (key_block, facts.key_blocks)]) * (facts.columns * CHUNK)
    n, whole = attention.facts.n, attention.facts.n % CHUNK == 0
    places = dict(zip(form.places, form.copies, strict=True))

    def value(row: Expr, at: Expr, lanes: int) -> tuple[list[Statement], Expr]:
        """The element of a key at a row of the block, or the vector that begins with it; zeros after the last key."""
        key = key_block * CHUNK + row
        there = key if whole else binary("min", key, index_const(n - 1))
        offset = substitute(_placed(attention.v.index[0], places), {attention.n: there, d: at})
        shared, (held,) = bind_shared([Load(attention.v.buffer, (offset,), attention.dtype, lanes)])
        zero = as_lanes(Const(0.0, attention.dtype), lanes)
        return list(shared), held if whole else select(compare("lt", key, index_const(n)), held, zero)

    if not facts.adjacent:
        row = Var("row", CHUNK)
        shared, one = value(row, element, 1)
        body: Statement = block(shared, Store(target, first + element * CHUNK + row, one))
        return loops([*form.copies, key_block], loops([element, row], body, False), True)
    tile, i, start = Var("tile", -(-facts.attention.d // TILE_PIXELS)), Var("i", CHUNK // 2), Var("start")
    begin: Expr = tile * TILE_PIXELS
    if facts.attention.d % TILE_PIXELS:
        begin = binary("min", begin, index_const(facts.attention.d - TILE_PIXELS))
    vectors: list[Statement] = [Allocate(Buffer(POWERS, attention.dtype, PAIR, "register", LANES))]
    for which in (0, 1):
        shared, vector = value(i * 2 + which, start, LANES)
        vectors += [*shared, Store(POWERS, index_const(which * LANES), vector)]
    paired = pair(Place("rows", i * PAIR), Place(POWERS, index_const(0)), Place(POWERS, index_const(LANES)))
    body = block(
        Let(start, begin),
        Allocate(Buffer("rows", tiles.FACTOR, CHUNK // 2 * PAIR, "register", PAIR)),
        For(i, index_const(CHUNK // 2), block(vectors, paired), "unroll"),
        transpose_pairs(Place(target, first + start * CHUNK), Place("rows", index_const(0))),
    )
    return loops([*form.copies, key_block], For(tile, index_const(tile.extent or 1), body), True)


def _placed(offset: Expr, places: dict[Expr, Var]) -> Expr:
    """The offset with variables in the places of what it depends on."""
    parts = linear(offset)
    return from_linear(replace(parts, terms=tuple((places.get(atom, atom), scale) for atom, scale in parts.terms)))


class _Tiles(QueryTiles):
    """Products in tile registers."""

    def __init__(self, form: TileAttentionForm, schedule: TileAttentionSchedule, values: str) -> None:
        super().__init__(form.attention, schedule.vectors, LANES, schedule.keys, form.facts.columns)
        self.chunk, self.values = form.facts.chunk, values
        self.scale, self.bare = Const(form.scale * log2(e), self.dtype), form.bare
        blocks = form.facts.key_blocks
        extents = [axis.extent or 1 for axis in form.copies]
        self.first_value = flat_position([*zip(form.places, extents, strict=True)]) * (blocks * self.columns * CHUNK)
        self.accumulators = [[tiles.tile(f"tile{i}{j}", TILE_PIXELS, TILE_CHANNELS, tiles.SUM) for j in range(ACROSS)] for i in range(ACROSS)]
        self.key_tile = tiles.tile("key_tile", TILE_PIXELS, self.chunk, tiles.FACTOR)
        self.query_tile = tiles.tile("query_tile", self.chunk // 2, PAIR, tiles.FACTOR)
        self.value_tile = tiles.tile("value_tile", TILE_PIXELS, CHUNK, tiles.FACTOR)
        self.weight_tile = tiles.tile("weight_tile", CHUNK // 2, PAIR, tiles.FACTOR)

    def within(self, body: Block) -> Statement:
        registers = (*(tile for row in self.accumulators for tile in row), self.key_tile, self.query_tile, self.value_tile, self.weight_tile)
        return tiles.with_tiles(registers, body)

    def prepared(self) -> list[Statement]:
        """Pairs of the queries' elements."""
        k, line = Var("k", self.facts.r // 2), self.v * self.lanes
        at = self.v * (self.facts.r * LANES) + k * PAIR
        low, high = (Place(QUERIES, (k * 2 + which) * self.queries + line) for which in (0, 1))
        return [
            Allocate(Buffer(PAIRED, tiles.FACTOR, self.facts.r * self.queries, "register", PAIR)),
            Allocate(Buffer(WEIGHTS, tiles.FACTOR, -(-self.keys // CHUNK) * CHUNK * self.queries, "register", PAIR)),
            For(k, index_const(self.facts.r // 2), self.each(pair(Place(PAIRED, at), low, high))),
        ]

    # -- products --

    def _groups(self) -> list[range]:
        """Tiles of queries, as many at a time as a block has."""
        return [range(first, min(first + ACROSS, self.vectors)) for first in range(0, self.vectors, ACROSS)]

    def _multiplied(
        self, lines: Sequence[Place], stride: int, columns: Sequence[Place], distance: int, first: Buffer, second: Buffer
    ) -> list[Statement]:
        """The products of a block of tiles: rows of factors from `lines` on by columns from `columns` on. Every other row takes the columns in
        reverse, so that the last one is loaded already."""
        result: list[Statement] = []
        loaded = -1
        for i, line in enumerate(lines):
            result.append(tiles.load(first, line.buffer, line.offset, stride))
            order = range(len(columns)) if i % 2 == 0 else range(len(columns) - 1, -1, -1)
            for j in order:
                if j != loaded:
                    result.append(tiles.load(second, columns[j].buffer, columns[j].offset, distance))
                    loaded = j
                result.append(tiles.multiply(self.accumulators[i][j], first, second))
        return result

    def _scores(self, start: Expr, count: int) -> list[Statement]:
        """The scores of all queries of the tile with `count` keys, at least TILE_PIXELS."""
        each, rest = ACROSS * TILE_PIXELS, count % (ACROSS * TILE_PIXELS)
        number = Var("keys_strip", count // each)
        result: list[Statement] = []
        if number.extent:
            firsts = [number * each + i * TILE_PIXELS for i in range(ACROSS)]
            result.append(For(number, index_const(number.extent), block(self._score_block(start, firsts))))
        if rest:
            last = index_const(count - TILE_PIXELS)
            result += self._score_block(start, [last] if rest <= TILE_PIXELS else [index_const(count - rest), last])
        return result

    def _score_block(self, start: Expr, firsts: Sequence[Expr]) -> list[Statement]:
        """The scores with the tiles of keys that begin at `firsts`."""
        form, (r,) = self.form, self.form.r
        step, stride = Var("step", self.facts.r // self.chunk), coefficient(form.k.index[0], form.n) or 0
        result: list[Statement] = []
        for group in self._groups():
            cleared = [tiles.zero(self.accumulators[i][j]) for i in range(len(firsts)) for j in range(len(group))]
            lines = [Place(form.k.buffer, substitute(form.k.index[0], {form.n: start + first, r: step * self.chunk})) for first in firsts]
            columns = [Place(PAIRED, step * (self.chunk * LANES) + v * self.facts.r * LANES) for v in group]
            products = self._multiplied(lines, stride, columns, PAIR, self.key_tile, self.query_tile)
            stored = [
                tiles.store(self.accumulators[i][j], SCORES, first * self.queries + v * LANES, self.queries)
                for i, first in enumerate(firsts)
                for j, v in enumerate(group)
            ]
            result += [*cleared, For(step, index_const(step.extent or 1), block(products)), *stored]
        return result

    def _sums(self, start: Expr, count: int) -> list[Statement]:
        """Adds the values of a block of keys to the sums."""
        full, rest = divmod(self.columns // TILE_PIXELS, ACROSS)
        number = Var("columns_strip", full)
        result: list[Statement] = []
        if full:
            firsts = [number * (ACROSS * TILE_PIXELS) + i * TILE_PIXELS for i in range(ACROSS)]
            result.append(For(number, index_const(full), block(self._sum_block(start, count, firsts))))
        return result + (self._sum_block(start, count, [index_const(full * ACROSS * TILE_PIXELS)]) if rest else [])

    def _sum_block(self, start: Expr, count: int, firsts: Sequence[Expr]) -> list[Statement]:
        """Adds to the sums of the elements of values that begin at `firsts`, a tile each."""
        step = Var("step", -(-count // CHUNK))
        result: list[Statement] = []
        for group in self._groups():
            held = [(self.accumulators[i][j], first * self.queries + v * LANES) for i, first in enumerate(firsts) for j, v in enumerate(group)]
            lines = [Place(self.values, self.first_value + start * self.columns + (step * self.columns + first) * CHUNK) for first in firsts]
            columns = [Place(WEIGHTS, step * (CHUNK * self.queries) + v * PAIR) for v in group]
            products = self._multiplied(lines, CHUNK, columns, 2 * self.queries, self.value_tile, self.weight_tile)
            result += [
                *(tiles.load(tile, SUMS, at, self.queries) for tile, at in held),
                For(step, index_const(step.extent or 1), block(products)),
                *(tiles.store(tile, SUMS, at, self.queries) for tile, at in held),
            ]
        return result

    # -- blocks of keys --

    def tile_of_keys(self, start: Expr, count: int, logit: Expr) -> Block:
        """As in the module's docstring. `best` is the greatest logit, then as it is in the exponents."""
        lanes, fresh = self.lanes, Var("fresh", None, self.dtype, self.lanes)
        line, d = self.v * lanes, Var("d", self.columns)
        rescaled = self.each(
            Let(fresh, Apply("max", (self.held("greatest"), self.held("best")), self.dtype, lanes)),
            Store("best", line, finite(fresh) * self.scale if self.bare else finite(fresh)),
            Store("factor", line, self._exponent(self.held("greatest"))),
            power_of_two(Place("factor", line)),
            Store("greatest", line, fresh),
            Store("total", line, self.held("total") * self.held("factor")),
        )
        sums = self.each(Store(SUMS, d * self.queries + line, self.held(SUMS, d) * self.held("factor")))
        return block(
            Allocate(Buffer("best", self.dtype, self.queries, "register", lanes)),
            self._scores(start, count),
            self._logits(start, count, logit),
            rescaled,
            For(d, index_const(self.columns), sums),
            self._weights(count),
            self._sums(start, count),
        )

    def _exponent(self, logit: Expr) -> Expr:
        """The power of two that a logit's weight is, relative to that of the greatest. A bare score takes one multiply-add; other logits are
        subtracted first, since a mask may have added numbers that must not grow."""
        return logit * self.scale - self.held("best") if self.bare else (logit - self.held("best")) * self.scale

    def greater(self, value: Expr) -> Statement:
        held = Buffer("logit", self.dtype, self.lanes, "register", self.lanes)
        return block(Allocate(held), Store("logit", ZERO, value), greater(Place("best", self.v * self.lanes), Place("logit", ZERO)))

    def _logits(self, start: Expr, count: int, logit: Expr) -> list[Statement]:
        """Logits in place of the scores, and the greatest of them."""
        n, clear = Var("n_inner", count), self.each(Store("best", self.v * self.lanes, self.wide(Const(-float("inf"), self.dtype))))
        if isinstance(logit, Load) and logit.buffer == SCORE:
            return [clear, For(n, index_const(count), self.each(self.greater(self.held(SCORES, n))))]
        wide = self.vector(logit)
        if wide is None:
            return [clear, *self.apart(start, count, logit)]
        stored = self.stored_logits(wide, start + n, self.held(SCORES, n), n * self.queries + self.v * self.lanes, "value")
        return [clear, For(n, index_const(count), self.each(stored))]

    def _weights(self, count: int) -> list[Statement]:
        """The weights of pairs of keys; zeros after the last key."""
        number, full = Var("key_pair", count // 2), count // 2
        result: list[Statement] = [For(number, index_const(full), self._weight_pair(number, 2))]
        if count % 2:
            result.append(self._weight_pair(index_const(full), 1))
        first, end = -(-count // 2), -(-count // CHUNK) * CHUNK // 2
        after = Var("after", end - first)
        return [*result, For(after, index_const(end - first), self._weight_pair(after + first, 0))] if end > first else result

    def _weight_pair(self, number: Expr, keys: int) -> Statement:
        """The weights of a pair of which `keys` exist."""
        powers: list[Statement] = []
        for which in range(2):
            place = index_const(which * self.lanes)
            logit = self.held(SCORES, number * 2 + which)
            power = Load(POWERS, (place,), self.dtype, self.lanes)
            if which < keys:
                powers += [Store(POWERS, place, self._exponent(logit)), power_of_two(Place(POWERS, place))]
                powers.append(Store("total", self.v * self.lanes, self.held("total") + power))
            else:
                powers.append(Store(POWERS, place, self.zero))
        paired = pair(
            Place(WEIGHTS, number * (2 * self.queries) + self.v * PAIR), Place(POWERS, index_const(0)), Place(POWERS, index_const(self.lanes))
        )
        return self.each(Allocate(Buffer(POWERS, self.dtype, 2 * self.lanes, "register", self.lanes)), *powers, paired)
