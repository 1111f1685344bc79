"""Lowering of attention on tensor cores: softmax(Q K^T) V in one kernel (FlashAttention-2, Dao, ICLR 2024), with `mma.sync`.

    queries -> shared memory, once
    for each tile of keys, which copies bring ahead:
        scores = queries x keys            registers, as fragments of sums; factors by ldmatrix
        logits where a mask, bias or end of the keys changes them
        weights = 2 ** (scale scores - greatest);  totals and sums are rescaled
        sums += weights x values           weights are rounded to fragments of the first factor in place; values by transposed ldmatrix
    result = sums / totals

Warpgroups (`wide`) multiply with `wgmma` instead, whose sums lie in the registers of each warp as those of `mma.sync` do: only factors differ.
Queries, keys and values lie in panels of 128-byte rows, and weights are first factors in registers. While one warpgroup computes powers, the products
of another, of the same block or of another one, occupy the tensor cores (as in FlashAttention-3, Shah et al., 2024). Two of one block may take turns:
the second issues its first products behind those of the first one, so that the first one has its scores when half of all are computed.

A thread has pairs of scores that are adjacent along the keys, which is where a first factor of 16 bits has its elements. That of TF32 has elements
four apart instead: key c / 2 + 4 (c mod 2) of each eight is then stored in row c of the tile, so that no element changes threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics import mbarrier, wgmma
from tilewright.codegen.intrinsics.async_copy import copy
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.mma import REGISTER_BYTES, M, N, mma, round_to_tf32
from tilewright.codegen.intrinsics.power import power_of_two
from tilewright.codegen.intrinsics.wgmma import Tile
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import lowest
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import FALSE, TRUE, Const, Expr, Load, Var, binary, compare, const, index_const, loads, logical_and
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Let, Place, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.attention_form import finite
from tilewright.kernels.gpu.attention.frame import attention_frame
from tilewright.kernels.gpu.attention.parts import with_parts
from tilewright.kernels.gpu.gemm.staging import Staged, buffers_of, staged_steps
from tilewright.kernels.gpu.gemm.tile import swizzled
from tilewright.kernels.gpu.tensor_attention.form import TensorAttentionForm
from tilewright.kernels.gpu.tensor_attention.space import (
    MOST_GROUPS,
    PANEL,
    WARP,
    WARPS_OF_GROUP,
    TensorAttentionSchedule,
    blocks_to_ask_for,
    warpgroups_multiply,
)
from tilewright.kernels.gpu.tensor_cores.lower import WarpTile
from tilewright.kernels.gpu.warpgroup.space import ALIGNMENT

QUERIES, KEYS, VALUES, TURNS = "queries", "keys", "values", "turns"
ROW_BYTES = 128
"""Of panels of `wgmma`'s factors."""
DISTANCES = (1, 2)
"""Of the lanes that hold elements of one row of a matrix of sums."""


def lower_tensor_attention(problem: Problem, form: TensorAttentionForm, schedule: TensorAttentionSchedule, machine: Machine) -> Lowered:
    """One kernel, and a second one if the keys are divided."""
    tiles, attention = _Tiles(form, schedule, machine), form.attention
    body, launch = tiles.emit()
    parts = tiles.frame.parts
    kernel, arguments = assemble(
        "tensor_attention",
        body,
        problem.with_storage(parts.storage(attention)),
        parts.written(),
        header=f"{described(problem)}\n{schedule}",
        roles={**{load.buffer: "q" for load in loads(attention.q)}, attention.k.buffer: "k", attention.v.buffer: "v"},
        launch=launch,
        blocks_per_processor=blocks_to_ask_for(schedule, form.facts, machine),
    )
    return with_parts(problem, attention, parts, kernel, arguments, str(schedule), form.scale)


@dataclass(frozen=True)
class _Matrix:
    """Rows in shared memory, swizzled; of the factors' `own` axis (`deep`), or of the one that a product sums over."""

    tile: str
    rows: int
    columns: int
    stored: str
    deep: bool = True

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def at(self, own: Expr, k: Expr) -> Expr:
        row, column = (own, k) if self.deep else (k, own)
        return row * self.columns + swizzled(row, column, self.columns, self.stored, self.deep)


@dataclass(frozen=True)
class _Panels(_Matrix):
    """Such rows in panels of 128 bytes of each, one after another, swizzled as `wgmma` reads them."""

    def at(self, own: Expr, k: Expr) -> Expr:
        row, column = (own, k) if self.deep else (k, own)
        return _panel(self.rows, column // PANEL) + row * PANEL + swizzled(row, column % PANEL, PANEL, self.stored, self.deep)


def _panel(rows: int, number: Expr | int) -> Expr:
    """Where a panel of a factor with so many rows begins."""
    return index_const(number * (rows * PANEL)) if isinstance(number, int) else number * (rows * PANEL)


class _Tiles:
    """Emits the program of one thread."""

    def __init__(self, form: TensorAttentionForm, schedule: TensorAttentionSchedule, machine: Machine) -> None:
        if schedule.stages > 1 and not form.facts.copies:
            raise Unsuitable("elements of keys or values are too narrow to be copied asynchronously")
        if schedule.block_m % (M * schedule.warps) or schedule.block_n % 16:
            raise Unsuitable(f"the tile of a warp of {schedule} has no whole matrices")
        groups, rest = divmod(schedule.warps, WARPS_OF_GROUP)
        whole = schedule.block_m == M * schedule.warps and not rest and groups <= MOST_GROUPS
        if schedule.wide and not (whole and warpgroups_multiply(form.facts, machine)):
            raise Unsuitable(f"no warpgroups multiply such factors on {machine.name}, or {schedule} has no whole ones")
        if schedule.wide and schedule.held:
            raise Unsuitable(f"warpgroups read queries from shared memory, and {schedule} holds them in registers")
        if schedule.turns and not (schedule.wide and groups == MOST_GROUPS):
            raise Unsuitable(f"{schedule} has no two warpgroups")
        self.scale, self.bare, self.facts, self.shape = form.scale, form.bare, form.facts, form.facts.shape
        self.frame = attention_frame(form.attention, schedule.block_m, schedule.block_n, schedule.threads, schedule.split)
        self.form, self.sizes, self.dtype, self.stored = self.frame.form, form.attention.facts, form.attention.dtype, self.shape.stored
        self.schedule = schedule
        self.buffers = buffers_of(schedule.stages, self.frame.most_passes) if schedule.stages > 1 else 1
        self.rows, self.score_columns, self.sum_columns = schedule.block_m // (M * schedule.warps), schedule.block_n // N, self.facts.d // N
        self.packed = REGISTER_BYTES // size_of(self.stored)
        matrix = _Panels if schedule.wide else _Matrix
        self.queries = matrix(QUERIES, schedule.block_m, self.facts.r, self.stored)
        self.keys = matrix(KEYS, schedule.block_n, self.facts.r, self.stored)
        self.values = matrix(VALUES, schedule.block_n, self.facts.d, self.stored, deep=False)
        self.lane, self.warp = Var("lane", WARP), Var("warp", schedule.warps)
        self.mine = WarpTile(self.shape, self.rows, self.score_columns, self.warp * (self.rows * M), index_const(0), self.lane)

    def emit(self) -> tuple[Block, Launch]:
        staged = (
            Staged(self.keys.elements, self._keys, lambda buffer: []),
            Staged(self.values.elements, self._values, lambda buffer: []),
        )
        tiles, single = self.frame.most_passes, self.schedule.stages == 1
        copies, ready = self.schedule.stages + self.facts.copies * single, [mbarrier.publish()] if self.schedule.wide else []
        *ahead, loop = staged_steps(staged, copies, self.frame.passes, tiles, self._tile, plain=single, ready=ready)
        root = block(
            self.frame.statements,
            Let(self.lane, self.frame.thread % WARP),
            Let(self.warp, self.frame.thread // WARP),
            self._allocations(),
            ahead,
            self._queries(),
            loop,
            self._results(),
        )
        return root, self.frame.launch

    # -- places --

    def _row(self, i: Expr) -> Expr:
        """The query of the tile that is the thread's i-th."""
        return self.mine.sums.row(i)

    def _key(self, j: Expr) -> Expr:
        """The key of the tile of the thread's j-th score of a row."""
        if self.stored == self.dtype:
            return j // 2 * N + self.lane % 4 + j % 2 * 4
        return self.mine.sums.column(j)

    @staticmethod
    def _register(columns: int, i: Expr, j: Expr) -> Expr:
        """The register of an element of the thread's i-th row and j-th column: fragments one after another, of `columns` in a row."""
        return ((i // 2 * columns + j // 2) * 2 + i % 2) * 2 + j % 2

    def _score(self, i: Expr, j: Expr) -> Load:
        return Load("scores", (self._register(self.score_columns, i, j),), self.dtype)

    def _fragments(self, name: str, count: int) -> Statement:
        return Allocate(Buffer(name, self.stored, count, "register", self.packed))

    def _allocations(self) -> list[Statement]:
        size, rows = self.shape.sums.size, 2 * self.rows
        result: list[Statement] = []
        r, d = self.sizes.r, self.sizes.d
        for matrix, used, buffers in ((self.queries, r, 1), (self.keys, r, self.buffers), (self.values, d, self.buffers)):
            result.append(
                Allocate(Buffer(matrix.tile, self.stored, buffers * matrix.elements, "shared", alignment=ALIGNMENT if self.schedule.wide else 16))
            )
            result += self._zeros(matrix, used, buffers)
        cleared = {"sums": (self.rows * self.sum_columns * size, Const(0.0, self.dtype)), "greatest": (rows, lowest(self.dtype))}
        for name, (count, value) in {**cleared, "total": (rows, Const(0.0, self.dtype))}.items():
            at = Var("at", count)
            result.append(Allocate(Buffer(name, self.dtype, count, "register")))
            result.append(For(at, index_const(count), Store(name, at, value), "unroll"))
        if self.schedule.turns:
            result.append(Allocate(mbarrier.barriers(TURNS, MOST_GROUPS)))
            first = [mbarrier.initialise(Place(TURNS, index_const(number)), 1) for number in range(MOST_GROUPS)]
            result.append(If(compare("eq", self.frame.thread, index_const(0)), block(first)))
        if self.schedule.held:
            result.append(self._fragments("query_part", self.rows * self.shape.a.size * (self.facts.r // self.shape.depth)))
        return result

    def _zeros(self, matrix: _Matrix, used: int, buffers: int) -> list[Statement]:
        """Zeros beyond the columns that are used: sums over them are of zeros, and no NaN is read."""
        beyond = matrix.columns - used
        if not beyond:
            return []

        def zero(place: Var) -> list[Statement]:
            row, column = place // beyond, used + place % beyond
            own, k = (row, column) if matrix.deep else (column, row)
            # rows of all buffers are swizzled alike, since each buffer has whole groups of rows
            return [Store(matrix.tile, matrix.at(own, k), Const(0.0, self.dtype))]

        return self.frame.turns(matrix.rows * buffers * beyond, zero)

    # -- filling shared memory --

    def _queries(self) -> list[Statement]:
        lanes = self.sizes.q_vector
        held = Load("query", (index_const(0),), self.dtype, lanes)
        fill = self.frame.queries(lanes, False, self.form.q, lambda row, first: [Store(QUERIES, self.queries.at(row, first), held)])
        if not self.schedule.held:
            return fill
        parts = [s for turn in range(self.facts.r // self.shape.depth) for s in self._query_parts(turn, turn)]
        return [*fill, block_barrier(), *parts]

    def _query_parts(self, turn: int, place: int) -> list[Statement]:
        """Loads the fragments of all rows of one turn along r."""
        i, size = Var("i", self.rows), self.shape.a.size
        load = self.mine.load(
            self.queries, "query_part", self.mine.first_row + i * M, (place * self.rows + i) * size, index_const(turn * self.shape.depth),
            index_const(0), self.shape.a, 1,
        )  # fmt: skip
        return [For(i, index_const(self.rows), block(load), "unroll")]

    def _fetched(self, matrix: _Matrix, place: Expr, value: Expr) -> Statement:
        return copy(matrix.tile, place, value, self.stored) if self.facts.copies else Store(matrix.tile, place, value)

    def _keys(self, tile: Expr, buffer: Expr) -> list[Statement]:
        def put(key: Expr, first: Expr, value: Expr) -> Statement:
            row = key // N * N + key % 4 * 2 + key % N // 4 if self.stored == self.dtype else key
            return self._fetched(self.keys, buffer + self.keys.at(row, first), value)

        return self.frame.keys(tile, self.sizes.k_vector, self.stored, put)

    def _values(self, tile: Expr, buffer: Expr) -> list[Statement]:
        def put(key: Expr, first: Expr, value: Expr) -> Statement:
            return self._fetched(self.values, buffer + self.values.at(first, key), value)

        return self.frame.values(tile, self.sizes.v_vector, self.stored, put)

    # -- a tile of keys --

    def _tile(self, buffers: Sequence[Expr], tile: Expr) -> list[Statement]:
        keys, values = buffers
        count = self.rows * self.score_columns * self.shape.sums.size
        at = Var("at", count)
        clear = [] if self.schedule.wide else [For(at, index_const(count), Store("scores", at, Const(0.0, self.dtype)), "unroll")]
        return [
            Allocate(Buffer("scores", self.dtype, count, "register")), *clear, *self._scores(keys, tile), *self._logits(tile), *self._weights(),
            *self._sums(values),
        ]  # fmt: skip

    def _scores(self, buffer: Expr, tile: Expr) -> list[Statement]:
        """scores[m, n] += sum over r of queries[m, r] keys[n, r]"""
        if self.schedule.wide:
            return self._wide_scores(buffer, tile)
        result: list[Statement] = []
        if not self.schedule.held:
            result.append(self._fragments("query_part", self.rows * self.shape.a.size))
        for turn in range(self.facts.r // self.shape.depth):
            if not self.schedule.held:
                result += self._query_parts(turn, 0)
            first = self.rows * self.shape.a.size * turn * self.schedule.held
            result += self._products(self.keys, "scores", self.score_columns, "query_part", first, turn, buffer)
        return result

    def _sums(self, buffer: Expr) -> list[Statement]:
        """sums[m, d] += sum over n of weights[m, n] values[n, d]"""
        if self.schedule.wide:
            return self._wide_sums(buffer)
        result: list[Statement] = [self._fragments("weight_part", self.rows * self.shape.a.size)]
        for turn in range(self.schedule.block_n // self.shape.depth):
            result += self._weight_parts(turn)
            result += self._products(self.values, "sums", self.sum_columns, "weight_part", 0, turn, buffer)
        return result

    def _wide_scores(self, buffer: Expr, tile_number: Expr) -> list[Statement]:
        """The products of a warpgroup's queries with the keys of the tile, in its turn."""
        depth = self.shape.depth
        group = self.warp // WARPS_OF_GROUP
        result: list[Statement] = []
        passed: list[Statement] = []
        if self.schedule.turns:
            # the first one waits for the second one's turn of the tile before, of which there is none at the beginning
            result.append(mbarrier.wait(Place(TURNS, group), (tile_number + group + 1) % 2, "warpgroup"))
            arrival = mbarrier.arrive(Place(TURNS, (group + 1) % MOST_GROUPS))
            passed.append(If(compare("eq", self.frame.thread % (WARPS_OF_GROUP * WARP), index_const(0)), arrival))
        result.append(wgmma.fence())
        for turn in range(self.facts.r // depth):
            panel, inside = divmod(turn * depth, PANEL)
            keys = Place(KEYS, buffer + _panel(self.keys.rows, panel) + inside)
            queries = Place(QUERIES, group * (wgmma.M * PANEL) + _panel(self.queries.rows, panel) + inside)
            sums, tiles = Place("scores", index_const(0)), (Tile(ROW_BYTES), Tile(ROW_BYTES))
            result.append(wgmma.multiply(self.facts.kind, self.schedule.block_n, sums, queries, keys, const(turn > 0, "bool"), tiles))
        return [*result, wgmma.commit(), *passed, wgmma.await_sums(self.schedule.block_n, Place("scores", index_const(0)))]

    def _wide_sums(self, buffer: Expr) -> list[Statement]:
        """The products of its weights, in registers, with the values of the tile, whose rows are what is summed over."""
        depth, size, turns = self.shape.depth, self.shape.a.size, self.schedule.block_n // self.shape.depth
        tile = Tile(ROW_BYTES, k_major=False, panel=self.schedule.block_n * PANEL)
        sums = Place("sums", index_const(0))
        result: list[Statement] = [self._fragments("weight_part", turns * size)]
        for turn in range(turns):
            result += self._weight_parts(turn, turn * size)
        result.append(wgmma.fence())
        for turn in range(turns):
            weights, values = Place("weight_part", index_const(turn * size)), Place(VALUES, buffer + turn * depth * PANEL)
            result.append(wgmma.multiply(self.facts.kind, self.facts.d, sums, weights, values, TRUE, (None, tile)))
        return [*result, wgmma.commit(), wgmma.await_sums(self.facts.d, sums)]

    def _weight_parts(self, turn: int, place: int = 0) -> list[Statement]:
        """The thread's weights as elements of a first factor, from register `place` on: those of 16 bits in the order of the scores, for TF32
        [column][row]."""
        size, across = self.shape.a.size, self.shape.depth // N
        i = Var("i", self.rows)
        first = (i * self.score_columns + turn * across) * self.shape.sums.size
        stores: list[Statement] = []
        for number in range(0, size, self.packed):
            if self.packed == 1:
                weight = Load("scores", (first + (number % 2 * 2 + number // 2),), self.dtype)
                stores.append(round_to_tf32(Place("weight_part", i * size + number), weight))
            else:
                stores.append(Store("weight_part", i * size + (place + number), Load("scores", (first + number,), self.dtype, self.packed)))
        return [For(i, index_const(self.rows), block(stores), "unroll")]

    def _products(self, matrix: _Matrix, sums: str, columns: int, name: str, first: int, turn: int, buffer: Expr) -> list[Statement]:
        """sums += a b for the fragments a of all rows, from `first` on in the registers `name`, and those of the second factor, which are loaded
        two at a time."""
        a, b, depth = self.shape.a, self.shape.b, self.shape.depth

        def group(j: Expr, count: int) -> Statement:
            """The products with `count` fragments from the j-th on."""
            load = self.mine.load(matrix, "part", j * N, index_const(0), index_const(turn * depth), buffer, b, count)
            i, k = Var("i", self.rows), Var("k", count)
            place = Place(sums, (i * columns + j + k) * self.shape.sums.size)
            product = mma(self.facts.kind, place, Place(name, i * a.size + first), Place("part", k * b.size))
            each = For(k, index_const(count), For(i, index_const(self.rows), product, "unroll"), "unroll")
            return block(self._fragments("part", count * b.size), load, each)

        j = Var("j", columns // 2)
        pairs = [For(j, index_const(columns // 2), group(j * 2, 2), "unroll")] if columns > 1 else []
        return [*pairs, *([group(index_const(columns - 1), 1)] if columns % 2 else [])]

    def _logits(self, tile: Expr) -> list[Statement]:
        """Logits in place of the scores: nothing is done where they are the scores, because every query of the tile sees each of its keys."""
        bn, shift = self.schedule.block_n, self.sizes.shift
        last = self.frame.position(tile, index_const(bn - 1))
        whole = compare("lt", last, index_const(self.sizes.n))
        if shift is not None:
            whole = logical_and(whole, compare("le", last, self.frame.first + shift))
        plain = [] if self.bare and isinstance(self.form.seen, Load) else [self._logits_of(tile, True)]
        if whole == TRUE:
            return plain
        masked = self._logits_of(tile, False)
        if whole == FALSE:
            return [masked]
        return [If(whole, block(plain), block(masked))]

    def _logits_of(self, tile: Expr, seen: bool) -> Statement:
        i, j, key = Var("i", 2 * self.rows), Var("j", 2 * self.score_columns), Var("key", self.frame.key_tiles * self.schedule.block_n)
        score = self._score(i, j)
        row_lets, logit = self.frame.logit(self._row(i), key, score, seen)
        lets, (value,) = bind_shared([logit])
        each: list[Statement] = [Let(key, self.frame.position(tile, self._key(j))), *lets, Store("scores", score.index[0], value)]
        return For(i, index_const(2 * self.rows), block(row_lets, For(j, index_const(2 * self.score_columns), block(each), "unroll")), "unroll")

    def _weights(self) -> list[Statement]:
        """Weights in place of the logits, the rows' greatest logits and totals, and the rescaling of totals and sums. Powers are of two: a bare score
        takes one multiply-add for its exponent; other logits are subtracted first, since a mask may have added numbers that must not grow."""
        zero, i = index_const(0), Var("i", 2 * self.rows)
        j, k = Var("j", 2 * self.score_columns), Var("k", 2 * self.sum_columns)
        unit = Const(self.scale * log2(e), self.dtype)
        score, best, factor = self._score(i, j), Load("best", (zero,), self.dtype), Load("factor", (zero,), self.dtype)
        greatest, total = Load("greatest", (i,), self.dtype), Load("total", (i,), self.dtype)
        fresh, base, exponent = (Var(name, None, self.dtype) for name in ("fresh", "base", "exponent"))
        weighted = Load("sums", (self._register(self.sum_columns, i, k),), self.dtype)

        def power(logit: Expr) -> Expr:
            return logit * unit - exponent if self.bare else (logit - base) * unit

        row: list[Statement] = [
            Allocate(Buffer("best", self.dtype, 1, "register")),
            Store("best", zero, greatest),
            For(j, index_const(2 * self.score_columns), Store("best", zero, binary("max", best, score)), "unroll"),
            *self.frame.combined("best", "max", DISTANCES),
            Let(fresh, best),
            Let(base, finite(fresh)),
            *([Let(exponent, base * unit)] if self.bare else []),
            Allocate(Buffer("factor", self.dtype, 1, "register")),
            power_of_two(Place("factor", zero), power(greatest)),
            Store("greatest", i, fresh),
            Store("total", i, total * factor),
            For(j, index_const(2 * self.score_columns), block(
                power_of_two(Place("scores", score.index[0]), power(score)), Store("total", i, total + score)
            ), "unroll"),
            For(k, index_const(2 * self.sum_columns), Store("sums", weighted.index[0], weighted * factor), "unroll"),
        ]  # fmt: skip
        return [For(i, index_const(2 * self.rows), block(row), "unroll")]

    # -- results --

    def _results(self) -> list[Statement]:
        register = lambda i, j: self._register(self.sum_columns, i, j)  # noqa: E731
        return self.frame.results(2 * self.rows, 2 * self.sum_columns, self.sizes.store_vector, self._row, self.mine.sums.column, register, DISTANCES)
