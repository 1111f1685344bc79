"""A recurrent layer of many sequences as one GPU kernel on tensor cores: a block owns hidden units of some sequences, keeps their weights in the
fragments of its warps, and meets all other blocks after each step.

    each warp: weights[k][gate, unit] of its part of what is reduced, as second factors                             in registers, once
    for each step t (`recurrence.steps.Steps`):
        for each tile of the block's rows:
            each warp: states[row][k] of its part, as first factors, from level 2
                       sums[row][gate, unit] += states[row][k] weights[k][gate, unit]
                       parts[warp][row][gate, unit] in shared memory
        gates, states and their exchange

What is reduced may be numbered in any order, the same for both factors. A lane loads 16 adjacent bytes of a row, which are its elements of two
fragments: four lanes load 64 bytes of a row, and nothing of the states passes through shared memory. Sums are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics.barriers import shared_loads
from tilewright.codegen.intrinsics.mma import REGISTER_BYTES, M, N, mma, round_to_tf32
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import TRUE, ZERO, Const, Expr, Load, Var, binary, compare, index_const, mod
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Place, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.recurrence.steps import Steps, lower_steps, stored_at
from tilewright.kernels.gpu.tensor_recurrence.form import LANES_OF_ROW, TensorRecurrenceFacts, TensorRecurrenceForm
from tilewright.kernels.gpu.tensor_recurrence.space import PADDING, WARP, TensorRecurrenceSchedule
from tilewright.kernels.recurrence_form import RecurrenceForm

FRAGMENTS = 2
"""Fragments along what is reduced of which a lane loads its elements of a row together."""


def lower_tensor_recurrence(problem: Problem, form: TensorRecurrenceForm, schedule: TensorRecurrenceSchedule, machine: Machine) -> Lowered:
    """The kernel of all steps.

    Raises:
        Unsuitable: if the blocks cannot all be resident, or have no whole matrices.
    """
    sizes = form.facts.sizes
    forms = form.recurrence.parts if schedule.divided else (form.recurrence,)
    blocks = -(-sizes.units // schedule.units) * -(-sizes.rows // schedule.rows) * len(forms)
    whole = not (schedule.units * form.facts.product_gates % N or schedule.together % M or schedule.rows % schedule.together)
    if not 1 < blocks <= machine.processors or len(forms) != 1 + schedule.divided or not whole or schedule.warps < 1:
        raise Unsuitable(f"{schedule} is no schedule of {sizes.units} units and {sizes.rows} sequences on {machine.processors} processors")
    launch = Launch((blocks, 1, 1), (schedule.threads, 1, 1))

    def make(own: RecurrenceForm, weights: tuple[str, ...], stored: Problem, counter: str) -> FragmentSums:
        return FragmentSums(own, weights, stored, launch, counter, len(forms), schedule, replace(form.facts, sizes=own.facts))

    return lower_steps(problem, forms, str(schedule), launch, 0, make)


@dataclass(frozen=True)
class FragmentSums(Steps):
    """Sums in fragments, of which each warp has a part of what is reduced."""

    schedule: TensorRecurrenceSchedule
    facts: TensorRecurrenceFacts

    @property
    def units(self) -> int:
        return self.schedule.units

    @property
    def rows(self) -> int:
        return self.schedule.rows

    @property
    def first_unit(self) -> Expr:
        return mod(self.block, -(-self.facts.sizes.units // self.units)) * self.units

    @property
    def first_row(self) -> Expr:
        return self.block // -(-self.facts.sizes.units // self.units) * self.rows

    @property
    def lane(self) -> Expr:
        return mod(self.thread, WARP)

    @property
    def warp(self) -> Expr:
        return self.thread // WARP

    @property
    def columns(self) -> int:
        """Gates and units of a block."""
        return self.facts.gates * self.units

    @property
    def matrices(self) -> tuple[int, int]:
        """Matrices of 16 sequences that are computed at a time, and of 8 gates of a product and units."""
        return self.schedule.together // M, self.facts.product_gates * self.units // N

    @property
    def in_all(self) -> int:
        """Pairs of fragments along what is reduced."""
        return self.facts.reduced // self.facts.deep

    @property
    def rounds(self) -> int:
        """Those of a warp."""
        return -(-self.in_all // self.schedule.warps)

    def _pair(self, turn: Expr) -> tuple[Expr, Expr]:
        """The number of a warp's pair of fragments, at most the last one, and whether it exists: warps take pairs in turns."""
        pair = turn * self.schedule.warps + self.warp
        if self.in_all % self.schedule.warps == 0:
            return pair, TRUE
        return binary("min", pair, index_const(self.in_all - 1)), compare("lt", pair, index_const(self.in_all))

    def _element(self, pair: Expr) -> Expr:
        """The first of the elements of a row that a lane loads of a pair of fragments."""
        return pair * self.facts.deep + mod(self.lane, LANES_OF_ROW) * self.facts.vector

    def _fragments(self, name: str, count: int) -> Statement:
        return Allocate(Buffer(name, self.facts.shape.stored, count, "register", REGISTER_BYTES // self.facts.element_bytes))

    def _rounded(self, name: str, first: Expr, count: int) -> list[Statement]:
        """Rounds float32 in registers to TF32."""
        if self.facts.kind != "tf32":
            return []
        at = Var("at", count)
        rounding = round_to_tf32(Place(name, first + at), Load(name, (first + at,), FLOAT32))
        return [For(at, index_const(count), rounding, "unroll")]

    def kept(self) -> list[Statement]:
        _, columns = self.matrices
        loops = [self._weights(number) for number in range(self.facts.products)]
        parts = self.schedule.warps * self.rows * (self.columns + PADDING)
        count = self.facts.products * self.rounds * columns * FRAGMENTS * self.facts.shape.b.size
        return [self._fragments("weights", count), *loops, Allocate(Buffer("parts", FLOAT32, parts, "shared"))]

    def _weights(self, number: int) -> Statement:
        """Loads the warp's part of the weights of a product."""
        _, columns = self.matrices
        size = FRAGMENTS * self.facts.shape.b.size
        turn, j = Var("turn", self.rounds), Var("j", columns)
        column = j * N + self.lane // LANES_OF_ROW
        gate, unit = column // self.units, self.first_unit + mod(column, self.units)
        if self.ragged:
            unit = binary("min", unit, index_const(self.facts.sizes.units - 1))
        pair, _ = self._pair(turn)
        source = (gate * self.facts.sizes.units + unit) * self.facts.reduced + self._element(pair)
        first = ((turn + number * self.rounds) * columns + j) * size
        stored = self.facts.shape.stored
        load = block(shared_loads(Place("weights", first), [Place(self.weights[number], source)], stored), self._rounded("weights", first, size))
        return For(turn, index_const(self.rounds), For(j, index_const(columns), load, "unroll"), "unroll")

    def sums(self) -> Block:
        rows, columns = self.matrices
        count = rows * columns * self.facts.shape.sums.size
        at, tile = Var("at", count), Var("tile", self.rows // self.schedule.together)
        clear = For(at, index_const(count), Store("acc", at, Const(0.0, FLOAT32)), "unroll")
        size = FRAGMENTS * self.facts.shape.a.size
        first = tile * self.schedule.together if tile.extent != 1 else ZERO
        body = block(
            self._fragments("states", self.facts.products * self.rounds * rows * size),
            [self._states(number, first) for number in range(self.facts.products)],
            Allocate(Buffer("acc", FLOAT32, count, "register")),
            *([clear, self._products(number), self._stored(number, first)] for number in range(self.facts.products)),
        )
        return body if tile.extent == 1 else block(For(tile, index_const(tile.extent or 0), body))

    def _states(self, number: int, first_row: Expr) -> Statement:
        """Loads what the warp's rows of a product's states from `first_row` of the block on have of its pairs of fragments."""
        sizes, form = self.facts.sizes, self.form
        rows, _ = self.matrices
        size = FRAGMENTS * self.facts.shape.a.size
        turn, i = Var("turn", self.rounds), Var("i", rows)
        pair, _ = self._pair(turn)

        def source(half: int) -> Place:
            row = self.first_row + first_row + i * M + half * (M // 2) + self.lane // LANES_OF_ROW
            row = binary("min", row, index_const(sizes.rows - 1)) if sizes.rows % self.rows else row
            return Place(self.exchanged[number], stored_at(form, self.exchanged[number], form.step - 1, row, self._element(pair)))

        first = ((turn + number * self.rounds) * rows + i) * size
        load = block(shared_loads(Place("states", first), [source(0), source(1)], self.facts.shape.stored), self._rounded("states", first, size))
        return For(turn, index_const(self.rounds), For(i, index_const(rows), load, "unroll"), "unroll")

    def _products(self, number: int) -> Statement:
        """sums += states weights, for all pairs of fragments that the warp has of a product."""
        rows, columns = self.matrices
        shape = self.facts.shape
        turn, half, i, j = Var("turn", self.rounds), Var("half", FRAGMENTS), Var("i", rows), Var("j", columns)
        a = (((turn + number * self.rounds) * rows + i) * FRAGMENTS + half) * shape.a.size
        b = (((turn + number * self.rounds) * columns + j) * FRAGMENTS + half) * shape.b.size
        sums = Place("acc", (i * columns + j) * shape.sums.size)
        product: Statement = mma(self.facts.kind, sums, Place("states", a), Place("weights", b))
        for axis in (j, i, half):
            product = For(axis, index_const(axis.extent or 0), product, "unroll")
        _, exists = self._pair(turn)
        return For(turn, index_const(self.rounds), product if exists == TRUE else If(exists, product), "unroll")

    def _stored(self, number: int, first_row: Expr) -> Statement:
        """The warp's parts of the sums of a product, in shared memory: lanes have the rows lane / 4 and 8 + lane / 4 of a fragment, and two adjacent
        columns."""
        rows, columns = self.matrices
        size = self.facts.shape.sums.size
        i, j, half = Var("i", rows), Var("j", columns), Var("half", 2)
        row = first_row + i * M + half * (M // 2) + self.lane // LANES_OF_ROW
        pair = Load("acc", ((i * columns + j) * size + half * 2,), FLOAT32, 2)
        store: Statement = Store("parts", self._part(self.warp, row, (j + number * columns) * N + mod(self.lane, LANES_OF_ROW) * 2), pair)
        for axis in (half, j, i):
            store = For(axis, index_const(axis.extent or 0), store, "unroll")
        return store

    def _part(self, warp: Expr, row: Expr, column: Expr) -> Expr:
        return (warp * self.rows + row) * (self.columns + PADDING) + column

    def parts(self, row: Expr, gate: int, unit: Expr) -> Sequence[Expr]:
        column = unit + gate * self.units
        return [Load("parts", (self._part(index_const(warp), row, column),), FLOAT32) for warp in range(self.schedule.warps)]
