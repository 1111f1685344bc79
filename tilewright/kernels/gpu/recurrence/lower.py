"""A recurrent layer as one GPU kernel: a block owns hidden units, keeps their weights on chip, and meets all other blocks after each step.

    each thread: weights[gate][unit][j] = B_gate[unit, j * threads + thread]                            in registers or shared memory, once
    for each step t:
        for each tile of rows:
            each thread: states[row][j] = A[row, j * threads + thread]                                    from level 2
                         sums[row][gate][unit] += states[row][j] * weights[gate][unit][j]
            a warp halves its sums by exchanges until each lane holds one of them; parts[sum][warp] in shared memory
        block barrier
        one thread per row and unit: gates = sum of the warps' parts; out[t + 1, row, unit] = value(gates, what is stored for t)
        grid barrier

The states of every step are stored in entries of their own, so nothing that a slow block may still read is overwritten. Blocks read what others
stored by loads past level 1. All blocks must be resident at once: there is at most one per processor, and the launch is cooperative. The counter of
the barrier is set to zero by a kernel before. Sums are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import decode
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.barriers import COUNTER, block_barrier, grid_barrier, shared_load
from tilewright.codegen.intrinsics.shuffle import exchange
from tilewright.codegen.sharing import certainly_evaluated
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import ZERO, Const, Expr, Load, Var, binary, compare, const, index_const, loads, logical_and, mod, rewrite, select, substitute
from tilewright.ir.graph import Value
from tilewright.ir.kernel import (
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Launch,
    Let,
    Place,
    Statement,
    Store,
    block_variable,
    substitute_in,
    thread_variable,
)
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.kernels.gpu.recurrence.space import GpuRecurrenceSchedule
from tilewright.kernels.recurrence_form import GATES, Product, RecurrenceForm, recurrence_form

LANES = 32
NOTHING = Const(0.0, FLOAT32)


def shared_form(problem: Problem) -> RecurrenceForm:
    """The form of a recurrence whose steps read stored states in float32.

    Raises:
        Unsuitable: as `recurrence_form`, and if states are stored in another type or read under a condition.
    """
    form = recurrence_form(problem)
    if any(problem.values[name].dtype != FLOAT32 for name in form.outputs):
        raise Unsuitable("its states are not stored in float32")
    for expr in (*(product.a for product in form.products), *form.values):
        certain = certainly_evaluated([expr])
        if any(load.buffer in form.outputs and id(load) not in certain for load in loads(expr)):
            raise Unsuitable("it reads states under a condition")
    return form


def lower_recurrence(problem: Problem, form: RecurrenceForm, schedule: GpuRecurrenceSchedule, machine: Machine) -> Lowered:
    """The kernel of all steps, behind one that sets its counter to zero.

    Raises:
        Unsuitable: if the blocks cannot all be resident.
    """
    blocks = -(-form.facts.units // schedule.units)
    if blocks > machine.processors or schedule.threads % LANES:
        raise Unsuitable(f"{schedule} is no schedule of {form.facts.units} units on {machine.processors} processors")
    region = problem.region
    weights = [_in_rows(problem, product, number) for number, product in enumerate(form.products)]
    storage = {entry.value.name: entry for entry in weights}
    launch = Launch((blocks, 1, 1), (schedule.threads, 1, 1))
    counter = f"{region.name}#arrivals"
    if blocks > 1:
        storage[counter] = Storage(Value(counter, (1,), COUNTER), row_major((1,)))
    stored = problem.with_storage(storage)
    kernels: list[Kernel] = []
    calls: list[Call] = []

    def add(kind: str, body: Statement, written: Sequence[str], launch: Launch, header: str, occupancy: int = 0) -> None:
        roles = {name: "weights" for name in storage if name != counter} | {counter: "arrivals at the barrier"}
        kernel, arguments = assemble(kind, body, stored, written, header=header, roles=roles, launch=launch, blocks_per_processor=occupancy)
        kernels.append(kernel)
        calls.append(Call(kernel.name, arguments))

    if blocks > 1:
        add("arrivals", Store(counter, ZERO, const(0, COUNTER)), (counter,), Launch((1, 1, 1), (1, 1, 1)), "no block has arrived at the barrier")
    body = _Steps(form, schedule, tuple(entry.value.name for entry in weights), stored, launch, counter).emit()
    written = (*region.outputs, counter) if blocks > 1 else region.outputs
    add("recurrence", body, written, launch, f"{described(problem)}\n{schedule}", 1)
    return Lowered(region, str(schedule), tuple(kernels), tuple(calls), MappingProxyType(storage))


def _in_rows(problem: Problem, product: Product, number: int) -> Storage:
    """The weights of a product as (gate, unit, reduced...), so that a warp reads adjacent ones."""
    sizes = product.view[0]
    value = Value(f"{product.b}@{problem.region.name}.{number}", sizes, problem.values[product.b].dtype)
    return Storage(value, row_major(sizes), product.b, product.view)


@dataclass(frozen=True)
class _Steps:
    """Emits the program of a thread."""

    form: RecurrenceForm
    schedule: GpuRecurrenceSchedule
    weights: tuple[str, ...]
    problem: Problem
    launch: Launch
    counter: str

    @property
    def thread(self) -> Var:
        return thread_variable(self.launch)

    @property
    def first_unit(self) -> Expr:
        return block_variable(self.launch) * self.schedule.units

    @property
    def warps(self) -> int:
        return self.schedule.threads // LANES

    @property
    def sums(self) -> int:
        """Sums of a tile of rows, rounded up to a power of two."""
        sums = self.form.facts.gates * self.schedule.units * self.schedule.rows
        return 1 << (sums - 1).bit_length()

    @property
    def tiles(self) -> int:
        return -(-self.form.facts.rows // self.schedule.rows)

    def emit(self) -> Block:
        form, blocks = self.form, self.launch.grid[0]
        step, last = form.step, form.facts.steps - 1
        kept = [self._weights(number) for number in range(len(form.products))]
        parts = Allocate(Buffer("parts", FLOAT32, self.tiles * self.sums * self.warps, "shared"))
        early, values, turns = self._stored_before()
        tile = Var("tile", self.tiles)
        tiles = For(tile, index_const(self.tiles), self._tile(tile)) if self.tiles > 1 else substitute_in(self._tile(tile), {tile: ZERO})
        meeting = grid_barrier(Place(self.counter, ZERO), (step + 1) * blocks) if blocks > 1 else block_barrier()
        meeting_between: Statement = If(compare("lt", step, index_const(last)), meeting)
        body = block(early, tiles, block_barrier(), self._results(values, turns), meeting_between)
        return block(*kept, parts, For(step, index_const(form.facts.steps), body))

    # --- weights ---

    def _slice(self, product: Product) -> int:
        """Reduced elements per thread."""
        return -(-product.size_r // self.schedule.threads)

    def _element(self, product: Product, j: Expr) -> tuple[Expr, Expr]:
        """A thread's reduced element number j, at most the last one, and whether it exists."""
        element = j * self.schedule.threads + self.thread
        last = product.size_r - 1
        if product.size_r % self.schedule.threads == 0:
            return element, const(True, "bool")
        return binary("min", element, index_const(last)), compare("le", element, index_const(last))

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
        owned = binary("min", self.first_unit + unit, index_const(self.form.facts.units - 1)) if self._ragged else self.first_unit + unit
        index = self.problem.layouts[source].offset((gate, owned, *decode(element, product.r).values()))
        value = select(inside, Load(source, (index,), FLOAT32), NOTHING)
        body: Statement = Store(f"w{number}", self._weight(product, gate, unit, j), value)
        for axis in (j, unit, gate):
            body = For(axis, index_const(axis.extent or 0), body, "unroll")
        return [Allocate(Buffer(f"w{number}", FLOAT32, count, space)), body]

    @property
    def _ragged(self) -> bool:
        return self.form.facts.units % self.schedule.units != 0

    # --- sums ---

    def _tile(self, tile: Var) -> Block:
        """The sums of a tile of rows: each warp's parts in shared memory."""
        form, schedule = self.form, self.schedule
        k = Var("k", self.sums)
        clear = For(k, index_const(self.sums), Store("acc", k, NOTHING), "unroll")
        loaded = [self._states(number, tile) for number in range(len(form.products))]
        products = [self._multiplied(number, value) for number, (_, value) in enumerate(loaded)]
        acc = Allocate(Buffer("acc", FLOAT32, self.sums, "register"))
        assert schedule.rows <= self.sums
        return block(*(statements for statements, _ in loaded), acc, clear, *products, self._halved(tile))

    def _states(self, number: int, tile: Var) -> tuple[list[Statement], Expr]:
        """Loads of what a product multiplies with its weights, and its value for row i of the tile and a thread's element j."""
        form, product = self.form, self.form.products[number]
        rows, count = self.schedule.rows, self._slice(product)
        i, j = Var("i", rows), Var("j", count)
        element, inside = self._element(product, j)
        row = tile * rows + i
        row = binary("min", row, index_const(form.facts.rows - 1)) if form.facts.rows % rows else row
        value = substitute(product.a, {form.row: row, **decode(element, product.r)})
        statements: list[Statement] = []
        names: dict[Load, Load] = {}
        for load in dict.fromkeys(load for load in loads(value) if load.buffer in form.outputs):
            name = f"state{number}_{len(names)}"
            names[load] = Load(name, (i * count + j,), FLOAT32)
            body: Statement = shared_load(Place(name, i * count + j), Place(load.buffer, load.index[0]))
            for axis in (j, i):
                body = For(axis, index_const(axis.extent or 0), body, "unroll")
            statements += [Allocate(Buffer(name, FLOAT32, rows * count, "register")), body]
        value = rewrite(value, lambda node: names.get(node, node) if isinstance(node, Load) else node)
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
        statements: list[Statement] = [Allocate(Buffer("other", FLOAT32, max(self.sums // 2, 1), "register"))]
        held = self.sums
        for distance in (16, 8, 4, 2, 1):
            half = max(held // 2, 1)
            k = Var("k", half)
            low, high = Load("acc", (k,), FLOAT32), Load("acc", (k + held // 2,), FLOAT32)
            upper = compare("ge", mod(lane, 2 * distance), index_const(distance))
            sent, own = (select(upper, low, high), select(upper, high, low)) if held > 1 else (low, low)
            statements.append(For(k, index_const(half), exchange(Place("other", k), sent, distance), "unroll"))
            statements.append(For(k, index_const(half), Store("acc", k, own + Load("other", (k,), FLOAT32)), "unroll"))
            held = half
        sharing = max(LANES // self.sums, 1)
        k = Var("k", held)
        number = lane // sharing * held + k
        store: Statement = Store("parts", self._part(tile * self.sums + number, self.thread // LANES), Load("acc", (k,), FLOAT32))
        store = For(k, index_const(held), store, "unroll")
        statements.append(If(compare("eq", mod(lane, sharing), ZERO), store) if sharing > 1 else store)
        return block(statements)

    def _part(self, number: Expr, warp: Expr) -> Expr:
        return number * self.warps + warp

    # --- results ---

    def _turn(self, turn: Var) -> tuple[dict[Var, Expr], Expr]:
        """Row and unit of a thread in a turn, and whether they exist."""
        units, facts = self.schedule.units, self.form.facts
        position = turn * self.schedule.threads + self.thread
        unit = self.first_unit + mod(position, units)
        inside = compare("lt", position, index_const(facts.rows * units))
        if self._ragged:
            inside = logical_and(inside, compare("lt", unit, index_const(facts.units)))
        return {self.form.row: position // units, self.form.unit: unit}, inside

    def _stored_before(self) -> tuple[list[Statement], tuple[Expr, ...], Var]:
        """Loads of what the values read besides gates, at the beginning of a step, so that it comes during the sums; the values with these loads
        from registers; and the turns in which a block's threads compute all its rows and units."""
        form = self.form
        count = -(-form.facts.rows * self.schedule.units // self.schedule.threads)
        turn = Var("turn", count)
        place, inside = self._turn(turn)
        certain = {load for value in form.values for load in loads(value) if id(load) in certainly_evaluated([value])}
        allocated: list[Statement] = []
        early: list[Statement] = []
        names: dict[Load, Load] = {}
        for load in dict.fromkeys(loads(*form.values)):
            own = load.buffer in form.outputs
            if load.buffer == GATES or load.dtype != FLOAT32 or not own and load not in certain:
                continue
            name = f"stored{len(names)}"
            names[load] = Load(name, (turn,), FLOAT32)
            at = substitute(load, place)
            assert isinstance(at, Load)
            allocated.append(Allocate(Buffer(name, FLOAT32, count, "register")))
            early.append(shared_load(Place(name, turn), Place(at.buffer, at.index[0])) if own else Store(name, turn, at))
        values = tuple(rewrite(value, lambda node: names.get(node, node) if isinstance(node, Load) else node) for value in form.values)
        body = For(turn, index_const(count), If(inside, block(early)), "unroll")
        return [*allocated, *([body] if early else [])], values, turn

    def _results(self, values: Sequence[Expr], turn: Var) -> Statement:
        """All gates of a thread's rows and units, and the results that follow from them."""
        form, rows = self.form, self.schedule.rows
        place, inside = self._turn(turn)
        position = turn * self.schedule.threads + self.thread
        row, unit = position // self.schedule.units, mod(position, self.schedule.units)
        lets: list[Statement] = []
        gates = [Var(f"gate{number}", None, FLOAT32) for number in range(form.facts.gates)]
        for number, gate in enumerate(gates):
            own = (row // rows) * self.sums + (mod(row, rows) * form.facts.gates + number) * self.schedule.units + unit
            terms = [Load("parts", (self._part(own, index_const(warp)),), FLOAT32) for warp in range(self.warps)]
            total: Expr = terms[0]
            for term in terms[1:]:
                total = total + term
            lets.append(Let(gate, total))

        def summed(node: Expr) -> Expr:
            if isinstance(node, Load) and node.buffer == GATES:
                (number,) = node.index
                assert isinstance(number, Const)
                return gates[int(number.value)]
            return node

        found = [rewrite(substitute(value, place), summed) for value in values]
        shared, bound = bind_shared([*found, *(substitute(offset, place) for offset in form.offsets)])
        stores = [Store(name, where, value) for name, value, where in zip(form.outputs, bound, bound[len(found) :], strict=False)]
        return For(turn, index_const(turn.extent or 0), If(inside, block(lets, shared, stores)), "unroll")

