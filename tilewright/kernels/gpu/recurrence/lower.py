"""A recurrent layer as one GPU kernel: a block owns hidden units, keeps their weights on chip, and meets all other blocks after each step.

    each thread: weights[gate][unit][j] = B_gate[unit, j * T + thread of the group]                     in registers or shared memory, once
    for each step t:
        for each tile of rows:
            each thread: sums[row][gate][unit] += A[row, j * T + thread of the group] * weights[gate][unit][j]
            a warp halves its sums by exchanges until each lane holds one of them; parts[group][sum][warp] in shared memory
        block barrier
        one thread per row and unit: gates = sum of the warps' parts; states[row, unit] = value(gates, states[row, unit] of the step before)
        barrier of all blocks

A block's threads form groups of T threads, each with units of its own. There are two ways in which blocks get the states of others:

- Blocks of a grid store states of each step in entries of their own in memory, so nothing that a slow block may still read is overwritten, and read
  them by loads past level 1. All blocks must be resident at once: there is at most one per processor, and the launch is cooperative. The counter of
  the barrier is set to zero by a kernel before.
- Blocks of one cluster have copies of all states in their shared memory, of even and of odd steps, into which every block stores what it computed. A
  block stores into a copy when all have arrived at the barrier after the step that read it. Results go to memory, and operands of the next step come
  from there, between arrival at the barrier and its end. A single block does the same without other blocks.

Sums are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import decode
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.barriers import (
    COUNTER,
    block_barrier,
    cluster_arrive,
    cluster_barrier,
    cluster_store,
    cluster_wait,
    grid_barrier,
    shared_load,
)
from tilewright.codegen.intrinsics.shuffle import exchange
from tilewright.codegen.sharing import certainly_evaluated
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, computed_in
from tilewright.ir.expr import (
    ZERO,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    binary,
    compare,
    const,
    index_const,
    linear,
    loads,
    logical_and,
    mod,
    rewrite,
    select,
    substitute,
    unary,
    variables,
)
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
NOTHING, ONE = Const(0.0, FLOAT32), Const(1.0, FLOAT32)


def shared_form(problem: Problem) -> RecurrenceForm:
    """The form of a recurrence whose steps read states of the step before, computed in float32: sums those of all units, values their own.

    Raises:
        Unsuitable: as `recurrence_form`, and if it has another form.
    """
    form = recurrence_form(problem)
    if any(computed_in(problem.values[name].dtype) != FLOAT32 for name in form.outputs):
        raise Unsuitable("its states are not computed in float32")
    if len({load.buffer for product in form.products for load in loads(product.a)} & set(form.outputs)) != 1:
        raise Unsuitable("its sums do not read one state")
    readers = [(product.a, _unit_of(product)) for product in form.products] + [(value, form.unit) for value in form.values]
    for expr, unit in readers:
        for load in loads(expr):
            if load.buffer not in form.outputs:
                continue
            before = linear(_stored_at(form, load.buffer, form.step - 1, form.row, unit))
            found = linear(load.index[0])
            if (dict(found.terms), found.constant) != (dict(before.terms), before.constant):
                raise Unsuitable("it reads other states than those of the step before")
    return form


def _unit_of(product: Product) -> Expr:
    """The unit whose state a sum reads, if it reads all of them in order."""
    unit, below = ZERO, 1
    for axis in reversed(product.r):
        unit, below = axis * below + unit, below * (axis.extent or 0)
    return unit


def _stored_at(form: RecurrenceForm, output: str, step: Expr, row: Expr, unit: Expr) -> Expr:
    """The place of a result of a step."""
    return substitute(form.offsets[form.outputs.index(output)], {form.step: step, form.row: row, form.unit: unit})


def lower_recurrence(problem: Problem, form: RecurrenceForm, schedule: GpuRecurrenceSchedule, machine: Machine) -> Lowered:
    """The kernel of all steps; that of a grid behind one that sets its counter to zero.

    Raises:
        Unsuitable: if the blocks cannot all be resident.
    """
    blocks = -(-form.facts.units // (schedule.units * schedule.groups))
    fits = blocks == schedule.cluster if schedule.cluster else 1 < blocks <= machine.processors
    if not fits or schedule.threads % (LANES * schedule.groups):
        raise Unsuitable(f"{schedule} is no schedule of {form.facts.units} units on {machine.processors} processors")
    region = problem.region
    weights = [_in_rows(problem, product, number) for number, product in enumerate(form.products)]
    storage = {entry.value.name: entry for entry in weights}
    launch = Launch((blocks, 1, 1), (schedule.threads, 1, 1))
    counter = f"{region.name}#arrivals"
    written = region.outputs
    if not schedule.cluster:
        storage[counter] = Storage(Value(counter, (1,), COUNTER), row_major((1,)))
        written = (*written, counter)
    stored = problem.with_storage(storage)
    kernels: list[Kernel] = []
    calls: list[Call] = []

    def add(kind: str, body: Statement, written: Sequence[str], launch: Launch, header: str, occupancy: int = 0, cluster: int = 1) -> None:
        roles = {name: "weights" for name in storage if name != counter} | {counter: "arrivals at the barrier"}
        kernel, arguments = assemble(
            kind, body, stored, written, header=header, roles=roles, launch=launch, blocks_per_processor=occupancy, cluster=cluster
        )
        kernels.append(kernel)
        calls.append(Call(kernel.name, arguments))

    if not schedule.cluster:
        add("arrivals", Store(counter, ZERO, const(0, COUNTER)), (counter,), Launch((1, 1, 1), (1, 1, 1)), "no block has arrived at the barrier")
    body = _Steps(form, schedule, tuple(entry.value.name for entry in weights), stored, launch, counter).emit()
    add("recurrence", body, written, launch, f"{described(problem)}\n{schedule}", 1, max(schedule.cluster, 1))
    return Lowered(region, str(schedule), tuple(kernels), tuple(calls), MappingProxyType(storage))


def without_division(node: Expr) -> Expr:
    """1 / (1 + exp(x)) as the square of a reciprocal square root, to a relative error of 4e-7: a division branches, as its result might be
    subnormal, so those of a thread's gates would wait for one another."""
    if isinstance(node, Apply) and node.operation == "div" and node.args[0] == ONE and isinstance(node.args[1], Apply):
        divisor = node.args[1]
        if divisor.operation == "add" and ONE in divisor.args and any(isinstance(a, Apply) and a.operation == "exp" for a in divisor.args):
            root = unary("rsqrt", divisor)
            return root * root
    return node


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
    def threads(self) -> int:
        """Threads of a group."""
        return self.schedule.threads // self.schedule.groups

    @property
    def member(self) -> Expr:
        """The thread's number in its group."""
        return mod(self.thread, self.threads)

    @property
    def units(self) -> int:
        """Units of a block."""
        return self.schedule.units * self.schedule.groups

    @property
    def first_unit(self) -> Expr:
        return block_variable(self.launch) * self.units

    @property
    def warps(self) -> int:
        """Warps of a group."""
        return self.threads // LANES

    @property
    def sums(self) -> int:
        """Sums of a group and tile of rows, rounded up to a power of two."""
        sums = self.form.facts.gates * self.schedule.units * self.schedule.rows
        return 1 << (sums - 1).bit_length()

    @property
    def tiles(self) -> int:
        return -(-self.form.facts.rows // self.schedule.rows)

    def emit(self) -> Block:
        form, step, last = self.form, self.form.step, self.form.facts.steps - 1
        kept = [self._weights(number) for number in range(len(form.products))]
        parts = Allocate(Buffer("parts", FLOAT32, self.tiles * self.schedule.groups * self.sums * self.warps, "shared"))
        early, ahead, values, turn = self._operands()
        tile = Var("tile", self.tiles)
        tiles = For(tile, index_const(self.tiles), self._tile(tile)) if self.tiles > 1 else substitute_in(self._tile(tile), {tile: ZERO})
        results, stores = self._results(values, turn)
        again = compare("lt", step, index_const(last))
        blocks = self.launch.grid[0]
        if not self.schedule.cluster:
            meeting = [stores, If(again, block(ahead, grid_barrier(Place(self.counter, ZERO), (step + 1) * blocks)))]
            return block(*kept, parts, early, For(step, index_const(form.facts.steps), block(tiles, block_barrier(), results, *meeting)))
        begin, arrive, wait = (cluster_barrier(), [cluster_arrive()], cluster_wait()) if blocks > 1 else (block_barrier(), [], block_barrier())
        meeting = [If(again, block(self._sent(turn), arrive)), stores, If(again, block(ahead, wait))]
        return block(
            *kept, parts, self._copies(), early, begin, For(step, index_const(form.facts.steps), block(tiles, block_barrier(), results, *meeting))
        )

    # --- states in shared memory ---

    @property
    def exchanged(self) -> str:
        """The state that sums read."""
        (name,) = {load.buffer for product in self.form.products for load in loads(product.a)} & set(self.form.outputs)
        return name

    def _copy(self, rank: Expr, step: Expr, row: Expr, unit: Expr) -> Expr:
        """The place of a state that is read in a step, in a block's copy."""
        rows, units = self.form.facts.rows, self.form.facts.units
        return rank * (2 * rows * units) + mod(step, 2) * (rows * units) + row * units + unit

    def _copies(self) -> list[Statement]:
        """Copies of all states for two steps, and the states before the first step in them."""
        rows, units, blocks = self.form.facts.rows, self.form.facts.units, self.launch.grid[0]
        turn = Var("turn", -(-rows * units // self.schedule.threads))
        position = turn * self.schedule.threads + self.thread
        row, unit = position // units, mod(position, units)
        value = Load(self.exchanged, (_stored_at(self.form, self.exchanged, index_const(-1), row, unit),), FLOAT32)
        target = self._copy(block_variable(self.launch), ZERO, row, unit)
        fill = If(compare("lt", position, index_const(rows * units)), Store("states", target, value))
        space = "cluster" if blocks > 1 else "shared"
        return [Allocate(Buffer("states", FLOAT32, blocks * 2 * rows * units, space)), For(turn, index_const(turn.extent or 0), fill)]

    def _sent(self, turn: Var) -> Statement:
        """Stores the thread's new states in the copies of all blocks."""
        place, inside = self._turn(turn)
        rank, state = Var("rank", self.launch.grid[0]), Load(f"own_{self.form.outputs.index(self.exchanged)}", (turn,), FLOAT32)
        target = self._copy(rank, self.form.step + 1, place[self.form.row], place[self.form.unit])
        if rank.extent == 1:
            send: Statement = Store("states", substitute(target, {rank: ZERO}), state)
        else:
            send = For(rank, index_const(rank.extent or 0), cluster_store(Place("states", target), state), "unroll")
        return For(turn, index_const(turn.extent or 0), If(inside, send), "unroll")

    # --- weights ---

    def _slice(self, product: Product) -> int:
        """Reduced elements per thread."""
        return -(-product.size_r // self.threads)

    def _element(self, product: Product, j: Expr) -> tuple[Expr, Expr]:
        """A thread's reduced element number j, at most the last one, and whether it exists."""
        element = j * self.threads + self.member
        last = product.size_r - 1
        if product.size_r % self.threads == 0:
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
        owned = self.first_unit + self.thread // self.threads * self.schedule.units + unit
        owned = binary("min", owned, index_const(self.form.facts.units - 1)) if self._ragged else owned
        index = self.problem.layouts[source].offset((gate, owned, *decode(element, product.r).values()))
        value = select(inside, Load(source, (index,), FLOAT32), NOTHING)
        body: Statement = Store(f"w{number}", self._weight(product, gate, unit, j), value)
        for axis in (j, unit, gate):
            body = For(axis, index_const(axis.extent or 0), body, "unroll")
        return [Allocate(Buffer(f"w{number}", FLOAT32, count, space)), body]

    @property
    def _ragged(self) -> bool:
        return self.form.facts.units % self.units != 0

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
        place = {form.row: row, **decode(element, product.r)}
        value = substitute(product.a, place)
        statements: list[Statement] = []
        if self.schedule.cluster:
            copied = Load("states", (self._copy(block_variable(self.launch), form.step, row, element),), FLOAT32)
        else:
            copied = Load(f"state{number}", (i * count + j,), FLOAT32)
            stored = self.problem.values[self.exchanged].dtype
            before = _stored_at(form, self.exchanged, form.step - 1, row, element)
            body: Statement = shared_load(Place(copied.buffer, i * count + j), Place(self.exchanged, before), stored)
            for axis in (j, i):
                body = For(axis, index_const(axis.extent or 0), body, "unroll")
            statements = [Allocate(Buffer(copied.buffer, stored, rows * count, "register")), body]
        value = rewrite(value, lambda node: copied if isinstance(node, Load) and node.buffer == self.exchanged else node)
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
        part = self._part(tile, self.thread // self.threads, number, self.member // LANES)
        store: Statement = Store("parts", part, Load("acc", (k,), FLOAT32))
        store = For(k, index_const(held), store, "unroll")
        statements.append(If(compare("eq", mod(lane, sharing), ZERO), store) if sharing > 1 else store)
        return block(statements)

    def _part(self, tile: Expr, group: Expr, number: Expr, warp: Expr) -> Expr:
        return ((tile * self.schedule.groups + group) * self.sums + number) * self.warps + warp

    # --- results ---

    def _turn(self, turn: Var) -> tuple[dict[Var, Expr], Expr]:
        """Row and unit of a thread in a turn, at most the last ones, and whether they exist."""
        units, facts = self.units, self.form.facts
        position = turn * self.schedule.threads + self.thread
        row, unit = binary("min", position // units, index_const(facts.rows - 1)), self.first_unit + mod(position, units)
        inside = compare("lt", position, index_const(facts.rows * units))
        if self._ragged:
            inside = logical_and(inside, compare("lt", unit, index_const(facts.units)))
            unit = binary("min", unit, index_const(facts.units - 1))
        return {self.form.row: row if facts.rows > 1 else ZERO, self.form.unit: unit}, inside

    def _operands(self) -> tuple[list[Statement], list[Statement], tuple[Expr, ...], Var]:
        """What values read besides gates, in registers: own states, which stay there, and streams, loaded a step ahead. Returns the statements before
        the first step, those at the end of each step but the last, the values with these registers, and the turns in which a block's threads compute
        all its rows and units."""
        form = self.form
        count = -(-form.facts.rows * self.units // self.schedule.threads)
        turn = Var("turn", count)
        place, inside = self._turn(turn)
        certain = {load for value in form.values for load in loads(value) if id(load) in certainly_evaluated([value])}
        allocated: list[Statement] = [Allocate(Buffer(f"own_{number}", FLOAT32, count, "register")) for number in range(len(form.outputs))]
        first: list[Statement] = []
        ahead: list[Statement] = []
        names: dict[Load, Load] = {}
        for load in dict.fromkeys(loads(*form.values)):
            own = load.buffer in form.outputs
            if load.buffer == GATES or load.dtype != FLOAT32 or not own and load not in certain:
                continue
            name = f"own_{form.outputs.index(load.buffer)}" if own else f"operand_{len(allocated)}"
            names[load] = Load(name, (turn,), FLOAT32)
            first.append(Store(name, turn, substitute(load, {**place, form.step: ZERO})))
            if not own:
                allocated.append(Allocate(Buffer(name, FLOAT32, count, "register")))
                if form.step in variables(load):
                    ahead.append(Store(name, turn, substitute(load, {**place, form.step: form.step + 1})))

        def kept(node: Expr) -> Expr:
            return names.get(node, node) if isinstance(node, Load) else without_division(node)

        values = tuple(rewrite(value, kept) for value in form.values)

        def turns(body: Sequence[Statement]) -> list[Statement]:
            return [For(turn, index_const(count), If(inside, block(body)), "unroll")] if body else []

        return [*allocated, *turns(first)], turns(ahead), values, turn

    def _results(self, values: Sequence[Expr], turn: Var) -> tuple[Statement, Statement]:
        """All gates of a thread's rows and units, and the states that follow from them, in registers; and their stores."""
        form, rows = self.form, self.schedule.rows
        place, inside = self._turn(turn)
        row = place[form.row]
        number = mod(turn * self.schedule.threads + self.thread, self.units)
        group, unit = number // self.schedule.units, mod(number, self.schedule.units)
        lets: list[Statement] = []
        gates = [Var(f"gate{gate}", None, FLOAT32) for gate in range(form.facts.gates)]
        for position, gate in enumerate(gates):
            own = (mod(row, rows) * form.facts.gates + position) * self.schedule.units + unit
            terms = [Load("parts", (self._part(row // rows, group, own, index_const(warp)),), FLOAT32) for warp in range(self.warps)]
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

        shared, bound = bind_shared([rewrite(substitute(value, place), summed) for value in values])
        found = [Var(f"new{number}", None, FLOAT32) for number in range(len(bound))]
        new = [Let(variable, value) for variable, value in zip(found, bound, strict=True)]
        kept = [Store(f"own_{number}", turn, variable) for number, variable in enumerate(found)]
        offsets = [substitute(offset, place) for offset in form.offsets]
        stores = [Store(name, at, Load(f"own_{k}", (turn,), FLOAT32)) for k, (name, at) in enumerate(zip(form.outputs, offsets, strict=True))]
        extent = index_const(turn.extent or 0)
        return For(turn, extent, If(inside, block(lets, shared, new, kept)), "unroll"), For(turn, extent, If(inside, block(stores)), "unroll")
