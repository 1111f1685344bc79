"""A recurrent layer as one GPU kernel: a block owns hidden units, keeps their weights on chip, and meets all other blocks after each step.

    each thread: weights[gate][unit][j] = B_gate[unit, j * T + thread of the group]                     in registers or shared memory, once
    for each step t (`steps.Steps`):
        for each tile of rows:
            each thread: sums[row][gate][unit] += A[row, j * T + thread of the group] * weights[gate][unit][j]
            a warp halves its sums by exchanges until each lane holds one of them; parts[group][sum][warp] in shared memory
        gates, states and their exchange

A block's threads form groups of T threads, each with units of its own. There are two ways in which blocks get the states of others: through memory,
as all kernels of steps do, or if they are those of one cluster, they have copies of all states in their shared memory, of even and of odd steps, into
which every block stores what it computed. A block stores into a copy when all have arrived at the barrier after the step that read it. Results go to
memory, and operands of the next step come from there, between arrival at the barrier and its end. A single block does the same without other blocks.

Sums are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.assemble import block
from tilewright.codegen.common import decode
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_arrive, cluster_barrier, cluster_store, cluster_wait, shared_load
from tilewright.codegen.intrinsics.shuffle import exchange
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import ZERO, Const, Expr, Load, Var, binary, compare, const, index_const, mod, rewrite, select, substitute
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Let, Place, Statement, Store, block_variable, substitute_in
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.recurrence.space import GpuRecurrenceSchedule
from tilewright.kernels.gpu.recurrence.steps import Steps, lower_steps, stored_at
from tilewright.kernels.recurrence_form import Product, RecurrenceForm

LANES = 32
NOTHING = Const(0.0, FLOAT32)


def lower_recurrence(problem: Problem, form: RecurrenceForm, schedule: GpuRecurrenceSchedule, machine: Machine) -> Lowered:
    """The kernel of all steps.

    Raises:
        Unsuitable: if the blocks cannot all be resident.
    """
    forms = form.parts if schedule.divided else (form,)
    blocks = -(-form.facts.units // (schedule.units * schedule.groups)) * len(forms)
    fits = blocks == schedule.cluster if schedule.cluster else 1 < blocks <= machine.processors
    if not fits or len(forms) != 1 + schedule.divided or schedule.threads % (LANES * schedule.groups):
        raise Unsuitable(f"{schedule} is no schedule of {form.facts.units} units on {machine.processors} processors")
    launch = Launch((blocks, 1, 1), (schedule.threads, 1, 1))
    make = lambda form, weights, stored, counter: DividedSums(form, weights, stored, launch, counter, len(forms), schedule)  # noqa: E731
    return lower_steps(problem, forms, str(schedule), launch, schedule.cluster, make)


@dataclass(frozen=True)
class DividedSums(Steps):
    """Sums that the threads of a group divide along what is reduced."""

    schedule: GpuRecurrenceSchedule

    @property
    def group_threads(self) -> int:
        return self.schedule.threads // self.schedule.groups

    @property
    def member(self) -> Expr:
        """The thread's number in its group."""
        return mod(self.thread, self.group_threads)

    @property
    def units(self) -> int:
        return self.schedule.units * self.schedule.groups

    @property
    def rows(self) -> int:
        return self.form.facts.rows

    @property
    def first_unit(self) -> Expr:
        return self.block * self.units

    @property
    def first_row(self) -> Expr:
        return ZERO

    @property
    def warps(self) -> int:
        """Warps of a group."""
        return self.group_threads // LANES

    @property
    def held(self) -> int:
        """Sums of a group and tile of rows, rounded up to a power of two."""
        sums = self.form.facts.gates * self.schedule.units * self.schedule.rows
        return 1 << (sums - 1).bit_length()

    @property
    def tiles(self) -> int:
        return -(-self.form.facts.rows // self.schedule.rows)

    def kept(self) -> list[Statement]:
        parts = Allocate(Buffer("parts", FLOAT32, self.tiles * self.schedule.groups * self.held * self.warps, "shared"))
        copies = self._copies() if self.schedule.cluster else []
        return [*(s for number in range(len(self.form.products)) for s in self._weights(number)), parts, *copies]

    def sums(self) -> Block:
        tile = Var("tile", self.tiles)
        if self.tiles == 1:
            return block(substitute_in(self._tile(tile), {tile: ZERO}))
        return block(For(tile, index_const(self.tiles), self._tile(tile)))

    def parts(self, row: Expr, gate: int, unit: Expr) -> Sequence[Expr]:
        rows, units = self.schedule.rows, self.schedule.units
        number = (mod(row, rows) * self.form.facts.gates + gate) * units + mod(unit, units)
        return [Load("parts", (self._part(row // rows, unit // units, number, index_const(warp)),), FLOAT32) for warp in range(self.warps)]

    # --- states in shared memory ---

    def begin(self) -> list[Statement]:
        if not self.schedule.cluster:
            return []
        return [cluster_barrier() if self.launch.grid[0] > 1 else block_barrier()]

    def met(self, again: Expr, stores: Statement, ahead: Sequence[Statement], turn: Var) -> list[Statement]:
        if not self.schedule.cluster:
            return super().met(again, stores, ahead, turn)
        arrive, wait = ([cluster_arrive()], cluster_wait()) if self.launch.grid[0] > 1 else ([], block_barrier())
        return [If(again, block(self._sent(turn), arrive)), stores, If(again, block(ahead, wait))]

    @property
    def _copied(self) -> tuple[str, ...]:
        """The states of which blocks have copies."""
        return tuple(dict.fromkeys(self.exchanged))

    def _copy(self, state: str, rank: Expr, step: Expr, row: Expr, unit: Expr) -> Expr:
        """The place of an element of a state that is read in a step, in a block's copy."""
        rows, units, count = self.form.facts.rows, self.form.facts.units, len(self._copied)
        return (rank * 2 + mod(step, 2)) * (count * rows * units) + (row + self._copied.index(state) * rows) * units + unit

    def _copies(self) -> list[Statement]:
        """Copies of all states for two steps, and the states before the first step in them."""
        rows, units, blocks = self.form.facts.rows, self.form.facts.units, self.launch.grid[0]
        turn = Var("turn", -(-rows * units // self.schedule.threads))
        position = turn * self.schedule.threads + self.thread
        row, unit = position // units, mod(position, units)
        stores = [
            Store(
                "states",
                self._copy(state, block_variable(self.launch), ZERO, row, unit),
                Load(state, (stored_at(self.form, state, index_const(-1), row, unit),), FLOAT32),
            )
            for state in self._copied
        ]
        fill = If(compare("lt", position, index_const(rows * units)), block(stores))
        size, space = blocks * 2 * len(self._copied) * rows * units, "cluster" if blocks > 1 else "shared"
        return [Allocate(Buffer("states", FLOAT32, size, space)), For(turn, index_const(turn.extent or 0), fill)]

    def _sent(self, turn: Var) -> Statement:
        """Stores the thread's new states in the copies of all blocks."""
        place, inside = self.place(turn)
        rank = Var("rank", self.launch.grid[0])
        sends: list[Statement] = []
        for name in self._copied:
            state = Load(f"own_{self.form.outputs.index(name)}", (turn,), FLOAT32)
            target = self._copy(name, rank, self.form.step + 1, place[self.form.row], place[self.form.unit])
            if rank.extent == 1:
                sends.append(Store("states", substitute(target, {rank: ZERO}), state))
            else:
                sends.append(For(rank, index_const(rank.extent or 0), cluster_store(Place("states", target), state), "unroll"))
        return For(turn, index_const(turn.extent or 0), If(inside, block(sends)), "unroll")

    # --- weights ---

    @property
    def _together(self) -> int:
        """Adjacent elements that a thread reduces: those of a word if states come from memory."""
        return 1 if self.schedule.cluster else self.form.facts.together

    def _slice(self, product: Product) -> int:
        """Reduced elements per thread."""
        return -(-product.size_r // (self.group_threads * self._together)) * self._together

    def _element(self, product: Product, j: Expr) -> tuple[Expr, Expr]:
        """A thread's reduced element number j, and whether it exists; if not, it is one of the last word."""
        together, threads = self._together, self.group_threads
        word, words = j // together * threads + self.member, product.size_r // together
        if words % threads == 0:
            return word * together + mod(j, together), const(True, "bool")
        last = index_const(words - 1)
        return binary("min", word, last) * together + mod(j, together), compare("le", word, last)

    def _weight(self, product: Product, gate: Expr, unit: Expr, j: Expr) -> Expr:
        """The place of a weight in the thread's registers or in shared memory, where a warp accesses adjacent ones."""
        place = (gate * self.schedule.units + unit) * self._slice(product) + j
        return place * self.schedule.threads + self.thread if self.schedule.shared else place

    def _weights(self, number: int) -> list[Statement]:
        """Loads the thread's weights of a product; those past the last element are zeros."""
        product, source = self.form.products[number], self.weights[number]
        size = product.gates * self.schedule.units * self._slice(product)
        space, count = ("shared", size * self.schedule.threads) if self.schedule.shared else ("register", size)
        gate, unit, j = Var("g", product.gates), Var("u", self.schedule.units), Var("j", self._slice(product))
        element, inside = self._element(product, j)
        owned = self.first_unit + self.thread // self.group_threads * self.schedule.units + unit
        owned = binary("min", owned, index_const(self.form.facts.units - 1)) if self.ragged else owned
        index = self.problem.layouts[source].offset((gate, owned, *decode(element, product.r).values()))
        value = select(inside, Load(source, (index,), FLOAT32), NOTHING)
        body: Statement = Store(f"w{number}", self._weight(product, gate, unit, j), value)
        for axis in (j, unit, gate):
            body = For(axis, index_const(axis.extent or 0), body, "unroll")
        return [Allocate(Buffer(f"w{number}", FLOAT32, count, space)), body]

    # --- sums ---

    def _tile(self, tile: Var) -> Block:
        """The sums of a tile of rows: each warp's parts in shared memory."""
        form, schedule = self.form, self.schedule
        k = Var("k", self.held)
        clear = For(k, index_const(self.held), Store("acc", k, NOTHING), "unroll")
        loaded = [self._states(number, tile) for number in range(len(form.products))]
        products = [self._multiplied(number, value) for number, (_, value) in enumerate(loaded)]
        acc = Allocate(Buffer("acc", FLOAT32, self.held, "register"))
        assert schedule.rows <= self.held
        return block(*(statements for statements, _ in loaded), acc, clear, *products, self._halved(tile))

    def _states(self, number: int, tile: Var) -> tuple[list[Statement], Expr]:
        """Loads of what a product multiplies with its weights, and its value for row i of the tile and a thread's element j."""
        form, product = self.form, self.form.products[number]
        rows, count = self.schedule.rows, self._slice(product)
        i, j = Var("i", rows), Var("j", count)
        element, inside = self._element(product, j)
        row = tile * rows + i
        row = binary("min", row, index_const(form.facts.rows - 1)) if form.facts.rows % rows else row
        place = {form.row: row, **decode(element, product.r)}
        value, exchanged = substitute(product.a, place), self.exchanged[number]
        statements: list[Statement] = []
        if self.schedule.cluster:
            copied = Load("states", (self._copy(exchanged, block_variable(self.launch), form.step, row, element),), FLOAT32)
        else:
            copied = Load(f"state{number}", (i * count + j,), FLOAT32)
            stored = self.problem.values[exchanged].dtype
            together = self._together
            word = Var("word", count // together)
            before = substitute(stored_at(form, exchanged, form.step - 1, row, element), {j: word * together})
            body: Statement = shared_load(Place(copied.buffer, i * count + word * together), Place(exchanged, before), stored, together)
            for axis in (word, i):
                body = For(axis, index_const(axis.extent or 0), body, "unroll")
            statements = [Allocate(Buffer(copied.buffer, stored, rows * count, "register")), body]
        value = rewrite(value, lambda node: copied if isinstance(node, Load) and node.buffer == exchanged else node)
        return statements, select(inside, value, NOTHING)

    def _multiplied(self, number: int, value: Expr) -> Statement:
        """acc[row][gate][unit] += states[row][j] * weights[gate][unit][j]"""
        product, units = self.form.products[number], self.schedule.units
        i, j, gate, unit = Var("i", self.schedule.rows), Var("j", self._slice(product)), Var("g", product.gates), Var("u", units)
        state = Var("state", None, FLOAT32)
        place = (i * self.form.facts.gates + product.first + gate) * units + unit
        term = state * Load(f"w{number}", (self._weight(product, gate, unit, j),), FLOAT32)
        add: Statement = Store("acc", place, Load("acc", (place,), FLOAT32) + term)
        for axis in (unit, gate):
            add = For(axis, index_const(axis.extent or 0), add, "unroll")
        body: Statement = block(Let(state, value), add)
        for axis in (j, i):
            body = For(axis, index_const(axis.extent or 0), body, "unroll")
        return body

    def _halved(self, tile: Var) -> Block:
        """Adds the parts of a warp's lanes. At each distance the lanes whose number has that bit keep the upper half of the sums, and the others the
        lower half; with one sum left, both keep it. A lane ends with sums / LANES sums, at least one."""
        lane = mod(self.thread, LANES)
        statements: list[Statement] = [Allocate(Buffer("other", FLOAT32, max(self.held // 2, 1), "register"))]
        held = self.held
        for distance in (16, 8, 4, 2, 1):
            half = max(held // 2, 1)
            k = Var("k", half)
            low, high = Load("acc", (k,), FLOAT32), Load("acc", (k + held // 2,), FLOAT32)
            upper = compare("ge", mod(lane, 2 * distance), index_const(distance))
            sent, own = (select(upper, low, high), select(upper, high, low)) if held > 1 else (low, low)
            statements.append(For(k, index_const(half), exchange(Place("other", k), sent, distance), "unroll"))
            statements.append(For(k, index_const(half), Store("acc", k, own + Load("other", (k,), FLOAT32)), "unroll"))
            held = half
        sharing = max(LANES // self.held, 1)
        k = Var("k", held)
        number = lane // sharing * held + k
        part = self._part(tile, self.thread // self.group_threads, number, self.member // LANES)
        store: Statement = Store("parts", part, Load("acc", (k,), FLOAT32))
        store = For(k, index_const(held), store, "unroll")
        statements.append(If(compare("eq", mod(lane, sharing), ZERO), store) if sharing > 1 else store)
        return block(statements)

    def _part(self, tile: Expr, group: Expr, number: Expr, warp: Expr) -> Expr:
        return ((tile * self.schedule.groups + group) * self.held + number) * self.warps + warp
