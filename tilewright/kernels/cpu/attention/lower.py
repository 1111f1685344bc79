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

from collections.abc import Callable

from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import decode
from tilewright.codegen.describe import described
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import lowest
from tilewright.ir.expr import (
    Apply,
    Expr,
    Load,
    Var,
    index_const,
    substitute,
)
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Let, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered
from tilewright.kernels.attention_form import AttentionForm, finite
from tilewright.kernels.cpu.attention.frame import QUERIES, SCORES, SUMS, QueryTiles, roles_of
from tilewright.kernels.cpu.attention.space import CpuAttentionSchedule
from tilewright.kernels.cpu.common import common_origin, loops


def lower_attention(problem: Problem, form: AttentionForm, schedule: CpuAttentionSchedule, machine: Machine) -> Lowered:
    """One kernel."""
    kernel, arguments = assemble(
        "attention",
        _Tiles(form, schedule).emit(),
        problem,
        (form.output,),
        header=f"{described(problem)}\n{schedule}",
        roles=roles_of(form),
    )
    return Lowered(problem.region, str(schedule), (kernel,), (Call.of(kernel, arguments),))


class _Tiles(QueryTiles):
    """Products in register tiles of `rows` keys or columns of the values."""

    def __init__(self, form: AttentionForm, schedule: CpuAttentionSchedule) -> None:
        super().__init__(form, schedule.vectors, schedule.lanes, schedule.keys, form.facts.d)
        self.rows = schedule.rows

    def within(self, body: Block) -> Statement:
        return body

    def prepared(self) -> list[Statement]:
        return []

    def tile_of_keys(self, start: Expr, count: int, logit: Expr) -> Block:
        """Scores, weights and sums for `count` keys from `start` on."""
        best = Allocate(Buffer("best", self.dtype, self.queries, "register", self.lanes))
        lanes, fresh, base, scale = self.lanes, *(Var(name, None, self.dtype, self.lanes) for name in ("fresh", "base", "scale"))
        wide = self.vector(logit)
        rescaled = self.each(
            Let(fresh, Apply("max", (self.held("greatest"), self.held("best")), self.dtype, lanes)),
            Let(base, finite(fresh)),
            Let(scale, self._exponential(self.held("greatest") - base)),
            Store("factor", self.v * lanes, scale),
            Store("greatest", self.v * lanes, fresh),
            Store("best", self.v * lanes, base),
            Store("total", self.v * lanes, self.held("total") * scale),
        )
        n, weight = Var("n_inner", count), Var("weight", None, self.dtype, lanes)
        weights = self.each(
            Let(weight, self._exponential(self.held(SCORES, n) - self.held("best"))),
            Store(SCORES, n * self.queries + self.v * lanes, weight),
            Store("total", self.v * lanes, self.held("total") + weight),
        )
        return block(
            best,
            self.each(Store("best", self.v * lanes, self.wide(lowest(self.dtype)))),
            self._strips(count, "keys", lambda first, rows: self._scores(start, first, rows, wide)),
            self.apart(start, count, logit) if wide is None else [],
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
        update = self.each(Store("acc", at, Load("acc", (at,), self.dtype, self.lanes) + product))
        origin, element = common_origin(element, (t,))
        return [
            Allocate(Buffer("vector", self.dtype, self.queries, "register", self.lanes)),
            self.each(Store("vector", self.v * self.lanes, self.held(buffer, line))),
            *origin,
            For(t, index_const(rows), block(Let(scalar, element), update), "unroll"),
        ]

    def _scores(self, start: Expr, first: Expr, rows: int, logit: Expr | None) -> Block:
        """The scores of some keys, as logits if these are vectors, and the greatest of them."""
        form, t = self.form, Var("t", rows)
        at = t * self.queries + self.v * self.lanes
        key = substitute(form.k, {form.n: start + first + t})
        inner = loops(form.r, block(self._accumulated(rows, key, t, self.position(form.r), QUERIES)), False)
        held = Load("acc", (at,), self.dtype, self.lanes)
        place = (first + t) * self.queries + self.v * self.lanes
        if logit is None:
            store: list[Statement] = [Store(SCORES, place, held)]
        else:
            store = self.stored_logits(logit, start + first + t, held, place, "logit")
        return block(self._accumulators(rows, lambda at: self.zero), inner, For(t, index_const(rows), self.each(store), "unroll"))

    def _accumulators(self, rows: int, start: Callable[[Expr], Expr]) -> list[Statement]:
        t = Var("t", rows)
        clear = For(t, index_const(rows), self.each(Store("acc", t * self.queries + self.v * self.lanes, start(t))), "unroll")
        return [Allocate(Buffer("acc", self.dtype, rows * self.queries, "register", self.lanes)), clear]

    def _sums(self, start: Expr, count: int, first: Expr, rows: int) -> Block:
        """Rescales the sums of some columns of the values, and adds those of a tile of keys."""
        form, t, n = self.form, Var("t", rows), Var("n_inner", count)
        axes = decode(first + t, form.d)
        element = substitute(form.v, {form.n: start + n, **axes})
        begin = self._accumulators(rows, lambda t: self.held(SUMS, first + t) * self.held("factor"))
        inner = For(n, index_const(count), block(self._accumulated(rows, element, t, n, SCORES)))
        held = Load("acc", (t * self.queries + self.v * self.lanes,), self.dtype, self.lanes)
        stores = For(t, index_const(rows), self.each(Store(SUMS, (first + t) * self.queries + self.v * self.lanes, held)), "unroll")
        return block(begin, inner, stores)

    def greater(self, value: Expr) -> Statement:
        return Store("best", self.v * self.lanes, Apply("max", (self.held("best"), value), self.dtype, self.lanes))
