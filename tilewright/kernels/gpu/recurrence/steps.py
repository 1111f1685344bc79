"""What the kernels of a recurrent layer have in common, whatever multiplies: what a step waits for, computes from its sums, and passes on.

    keep weights
    for each step t:
        sums of the block's rows, gates and units, in shared memory                                       (`Steps.sums`, of the schema)
        block barrier
        one thread per row and unit: gates = its sums; states[row, unit] = value(gates, states[row, unit] of the step before)
        all blocks meet

Blocks of a grid store states of each step in entries of their own in memory, so nothing that a slow block may still read is overwritten, and read
them by loads past level 1. All blocks must be resident at once: there is at most one per processor, and the launch is cooperative. The counter of the
barrier is set to zero by a kernel before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.barriers import COUNTER, block_barrier, grid_barrier
from tilewright.codegen.sharing import certainly_evaluated
from tilewright.ir.dtypes import FLOAT32, computed_in, size_of
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
    Invoke,
    Kernel,
    Launch,
    Let,
    Place,
    Statement,
    Store,
    block_variable,
    statements,
    thread_variable,
)  # fmt: skip
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.kernels.gpu.counts import WORD
from tilewright.kernels.recurrence_form import GATES, Product, RecurrenceForm, recurrence_form

ONE = Const(1.0, FLOAT32)


def shared_form(problem: Problem) -> RecurrenceForm:
    """The form of a recurrence whose steps read states of the step before, computed in float32: sums those of all units, values their own.

    Raises:
        Unsuitable: as `recurrence_form`, and if it has another form.
    """
    form = recurrence_form(problem)
    if any(computed_in(problem.values[name].dtype) != FLOAT32 for name in form.outputs):
        raise Unsuitable("its states are not computed in float32")
    if any(len({load.buffer for load in loads(product.a)} & set(form.outputs)) != 1 for product in form.products):
        raise Unsuitable("a sum does not read one state")
    readers = [(product.a, _unit_of(product)) for product in form.products] + [(value, form.unit) for value in form.values]
    for expr, unit in readers:
        for load in loads(expr):
            if load.buffer not in form.outputs:
                continue
            before = linear(stored_at(form, load.buffer, form.step - 1, form.row, unit))
            found = linear(load.index[0])
            if (dict(found.terms), found.constant) != (dict(before.terms), before.constant):
                raise Unsuitable("it reads other states than those of the step before")
    states = exchanged_states(form)
    together = min(WORD // size_of(problem.values[state].dtype) for state in states)
    even = all(product.size_r % together == 0 for product in form.products) and all(units_adjacent(form, state, together) for state in states)
    return replace(form, facts=replace(form.facts, together=together if even else 1))


def _unit_of(product: Product) -> Expr:
    """The unit whose state a sum reads, if it reads all of them in order."""
    unit, below = ZERO, 1
    for axis in reversed(product.r):
        unit, below = axis * below + unit, below * (axis.extent or 0)
    return unit


def stored_at(form: RecurrenceForm, output: str, step: Expr, row: Expr, unit: Expr) -> Expr:
    """The place of a result of a step."""
    return substitute(form.offsets[form.outputs.index(output)], {form.step: step, form.row: row, form.unit: unit})


def units_adjacent(form: RecurrenceForm, state: str, vector: int) -> bool:
    """Whether units of a sequence are adjacent, and begin at multiples of `vector` in every step."""
    unit = Var("unit", form.facts.units)
    place = linear(stored_at(form, state, form.step, form.row, unit))
    return all(factor == 1 if variable == unit else factor % vector == 0 for variable, factor in place.terms) and place.constant % vector == 0


def exchanged_states(form: RecurrenceForm) -> tuple[str, ...]:
    """The state that each product reads."""
    return tuple(next(load.buffer for load in loads(product.a) if load.buffer in form.outputs) for product in form.products)


def in_rows(problem: Problem, product: Product, number: int) -> Storage:
    """The weights of a product as (gate, unit, reduced...), so that a warp reads adjacent ones."""
    sizes = product.view[0]
    value = Value(f"{product.b}@{problem.region.name}.{number}", sizes, problem.values[product.b].dtype)
    return Storage(value, row_major(sizes), product.b, product.view)


def without_division(node: Expr) -> Expr:
    """1 / (1 + exp(x)) as the square of a reciprocal square root, to a relative error of 4e-7: a division branches, as its result might be
    subnormal, so those of a thread's gates would wait for one another."""
    if isinstance(node, Apply) and node.operation == "div" and node.args[0] == ONE and isinstance(node.args[1], Apply):
        divisor = node.args[1]
        if divisor.operation == "add" and ONE in divisor.args and any(isinstance(a, Apply) and a.operation == "exp" for a in divisor.args):
            root = unary("rsqrt", divisor)
            return root * root
    return node


@dataclass(frozen=True)
class Steps(ABC):
    """Emits the program of a thread. `weights`: the names of the products' weights; `launch`: that of the kernel; `counter`: where blocks of a grid
    count their arrivals; `sharing`: the number of forms among which the blocks are divided. A block has `units` units from `first_unit` on and `rows`
    sequences from `first_row` on."""

    form: RecurrenceForm
    weights: tuple[str, ...]
    problem: Problem
    launch: Launch
    counter: str
    sharing: int

    @property
    @abstractmethod
    def units(self) -> int: ...

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @property
    @abstractmethod
    def first_unit(self) -> Expr: ...

    @property
    @abstractmethod
    def first_row(self) -> Expr: ...

    @abstractmethod
    def kept(self) -> list[Statement]:
        """What is allocated, and loaded once, before the first step."""

    @abstractmethod
    def sums(self) -> Block:
        """The sums of a step: each warp's parts in shared memory."""

    @abstractmethod
    def parts(self, row: Expr, gate: int, unit: Expr) -> Sequence[Expr]:
        """The parts of the sum of a row and unit of the block, in the order in which they are added."""

    def begin(self) -> list[Statement]:
        """What is done between the first loads and the first step."""
        return []

    def met(self, again: Expr, stores: Statement, ahead: Sequence[Statement], turn: Var) -> list[Statement]:
        """Stores the states, loads operands of the next step, and waits for all blocks."""
        arrivals = (self.form.step + 1) * self.launch.grid[0]
        return [stores, If(again, block(ahead, grid_barrier(Place(self.counter, ZERO), arrivals)))]

    def emit(self) -> Block:
        """The body of the kernel."""
        facts, step = self.form.facts, self.form.step
        early, ahead, values, turn = self._operands()
        results, stores = self._results(values, turn)
        again = compare("lt", step, index_const(facts.steps - 1))
        each = block(self.sums(), block_barrier(), results, *self.met(again, stores, ahead, turn))
        return block(*self.kept(), early, *self.begin(), For(step, index_const(facts.steps), each))

    @property
    def block(self) -> Expr:
        """The number of the block among those of the form."""
        number = block_variable(self.launch)
        return number if self.sharing == 1 else mod(number, self.launch.grid[0] // self.sharing)

    @property
    def thread(self) -> Var:
        return thread_variable(self.launch)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.launch.block[0]

    @property
    def exchanged(self) -> tuple[str, ...]:
        """The state that each product reads."""
        return exchanged_states(self.form)

    @property
    def ragged(self) -> bool:
        """Whether the last block has fewer units."""
        return self.form.facts.units % self.units != 0

    def place(self, turn: Var) -> tuple[dict[Var, Expr], Expr]:
        """Row and unit of a thread in a turn, at most the last ones, and whether they exist."""
        units, facts = self.units, self.form.facts
        position = turn * self.threads + self.thread
        row, unit = self.first_row + position // units, self.first_unit + mod(position, units)
        inside = compare("lt", position, index_const(self.rows * units))
        if facts.rows % self.rows:
            inside = logical_and(inside, compare("lt", row, index_const(facts.rows)))
        if self.ragged:
            inside = logical_and(inside, compare("lt", unit, index_const(facts.units)))
            unit = binary("min", unit, index_const(facts.units - 1))
        row = binary("min", row, index_const(facts.rows - 1))
        return {self.form.row: row if facts.rows > 1 else ZERO, self.form.unit: unit}, inside

    def _operands(self) -> tuple[list[Statement], list[Statement], tuple[Expr, ...], Var]:
        """What values read besides gates, in registers: own states, which stay there, and streams, loaded a step ahead. Returns the statements before
        the first step, those at the end of each step but the last, the values with these registers, and the turns in which a block's threads compute
        all its rows and units."""
        form = self.form
        count = -(-self.rows * self.units // self.threads)
        turn = Var("turn", count)
        place, inside = self.place(turn)
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
            if own:
                first.append(Store(name, turn, substitute(load, {**place, form.step: ZERO})))
                continue
            # as it is stored: a conversion would wait for the load ahead of the barrier
            raw = replace(load, dtype=self.problem.values[load.buffer].dtype)
            first.append(Store(name, turn, substitute(raw, {**place, form.step: ZERO})))
            allocated.append(Allocate(Buffer(name, raw.dtype, count, "register")))
            if form.step in variables(load):
                ahead.append(Store(name, turn, substitute(raw, {**place, form.step: form.step + 1})))

        def kept(node: Expr) -> Expr:
            return names.get(node, node) if isinstance(node, Load) else without_division(node)

        values = tuple(rewrite(value, kept) for value in form.values)

        def turns(body: Sequence[Statement]) -> list[Statement]:
            return [For(turn, index_const(count), If(inside, block(body)), "unroll")] if body else []

        return [*allocated, *turns(first)], turns(ahead), values, turn

    def _results(self, values: Sequence[Expr], turn: Var) -> tuple[Statement, Statement]:
        """All gates of a thread's rows and units, and the states that follow from them, in registers; and their stores."""
        form = self.form
        place, inside = self.place(turn)
        number = turn * self.threads + self.thread
        gates = [Var(f"gate{gate}", None, FLOAT32) for gate in range(form.facts.gates)]
        lets: list[Statement] = []
        for position, gate in enumerate(gates):
            total, *terms = self.parts(number // self.units, position, mod(number, self.units))
            for term in terms:
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


def either(condition: Expr, one: Statement, other: Statement) -> Statement:
    """One statement or the other: what they share stands outside of the condition, barriers in any case.

    Raises:
        Unsuitable: if they allocate different buffers, or name different values that later statements may read.
    """
    if one == other:
        return one
    if isinstance(one, Block) and isinstance(other, Block) and len(one.statements) == len(other.statements):
        return Block(tuple(either(condition, *pair) for pair in zip(one.statements, other.statements, strict=True)))
    if any(isinstance(inner, Invoke) and inner.intrinsic.order == "barrier" for inner in statements(one)):
        if isinstance(one, For) and isinstance(other, For) and replace(one, body=other.body) == other:
            return replace(one, body=either(condition, one.body, other.body))
        if isinstance(one, If) and isinstance(other, If) and (one.condition, one.otherwise) == (other.condition, other.otherwise):
            return replace(one, then=either(condition, one.then, other.then))
        raise Unsuitable("its parts meet at different barriers")
    if isinstance(one, Allocate | Let) or isinstance(other, Allocate | Let):
        raise Unsuitable("its parts keep different values")
    return If(condition, one, other)


def lower_steps(
    problem: Problem,
    forms: Sequence[RecurrenceForm],
    said: str,
    launch: Launch,
    cluster: int,
    make: Callable[[RecurrenceForm, tuple[str, ...], Problem, str], Steps],
) -> Lowered:
    """The kernel of all steps, whose thread's program `make` gives for a form, the names of its weights, the problem with their storage, and the
    counter; that of a grid (`cluster` 0) behind one that sets its counter to zero. Of two forms each half of the blocks computes one."""
    region = problem.region
    products = [product for form in forms for product in form.products]
    weights = [in_rows(problem, product, number) for number, product in enumerate(products)]
    storage = {entry.value.name: entry for entry in weights}
    counter = f"{region.name}#arrivals"
    written = region.outputs
    if not cluster:
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

    if not cluster:
        add("arrivals", Store(counter, ZERO, const(0, COUNTER)), (counter,), Launch((1, 1, 1), (1, 1, 1)), "no block has arrived at the barrier")
    names = iter([entry.value.name for entry in weights])
    first, *others = (make(form, tuple(next(names) for _ in form.products), stored, counter).emit() for form in forms)
    body: Statement = first
    for other in others:
        body = either(compare("lt", block_variable(launch), index_const(launch.grid[0] // 2)), body, other)
    add("recurrence", body, written, launch, f"{described(problem)}\n{said}", 1, max(cluster, 1))
    return Lowered(region, said, tuple(kernels), tuple(calls), MappingProxyType(storage))
