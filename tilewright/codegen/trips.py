"""The loop over the outermost dimension of a CPU kernel's result: its extent becomes an argument of the call.

One kernel then serves every batch size, as nothing else in it depends on that extent if the dimension is stored outermost. A compiler gains from
constant trip counts in inner loops only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.ir.expr import INDEX, Const, Expr, Load, Var, children, linear, loads
from tilewright.ir.kernel import SERIAL_WORK, TRIPS, AtomicAdd, Block, Comment, For, If, Invoke, Kernel, Let, Place, Statement, Store, With


@dataclass(frozen=True)
class Counted:
    """A body that begins with the definition of TRIPS, their number, and the scalars by which each adds to what is accessed of a buffer."""

    body: Statement
    trips: int
    growths: Mapping[str, int]


def counted(body: Statement, sizes: Mapping[str, int], written: Collection[str]) -> Counted | None:
    """The body with TRIPS for the extent of the outer loop that has the largest stride in what is written. `sizes`: scalars of each parameter. None
    unless the loop's variable occurs in addresses only, with one stride for each buffer: what n trips access then is known for every n. Its last
    iteration may be told from the others, as that which computes a partial tile."""
    nest = list(_outer_loops(body))
    uses = _Uses(nest, sizes.keys(), {loop.variable for loop in nest})
    uses.visit(body)
    strides = {loop.variable: [uses.strides(name, loop.variable) for name in written] for loop in nest}
    chosen = max(nest, key=lambda loop: max((stride for found in strides[loop.variable] for stride in found), default=0), default=None)
    if chosen is None or chosen.variable in uses.elsewhere or not isinstance(chosen.extent, Const):
        return None
    variable, trips = chosen.variable, int(chosen.extent.value)
    found = {name: uses.strides(name, variable) for name in sizes}
    growths = {name: next(iter(strides), 0) for name, strides in found.items()}
    known = all(len(strides) < 2 for strides in found.values()) and any(growths[name] > 0 for name in written)
    if not known or not all(0 <= growth * (trips - 1) <= sizes[name] for name, growth in growths.items()):
        return None
    return Counted(defined(_replaced(body, chosen), trips), trips, growths)


def shared(body: Statement, trips: int) -> Statement:
    """A body whose parallel loops have the work of all of it. They get that of one of the kernel's trips, rounded to a power of two, since numbers of
    trips that differ should not make different code; without trips it is decided here whether threads divide them."""
    if isinstance(body, Block):
        return Block(tuple(shared(statement, trips) for statement in body.statements))
    if not isinstance(body, For) or not body.work:
        return body
    each = 1 << (body.work // trips).bit_length() - 1 if body.work >= trips > 0 else 1
    kind = "parallel" if trips or body.work > SERIAL_WORK else "serial"
    return replace(body, kind=kind, work=each if trips and each <= SERIAL_WORK else 0, body=shared(body.body, trips))


def defined(body: Statement, trips: int) -> Block:
    """The body after the definition of TRIPS."""
    return Block((Let(TRIPS, Const(trips, INDEX)), *(body.statements if isinstance(body, Block) else (body,))))


def redefined(body: Statement, trips: int) -> Block:
    """A body that defines TRIPS first, with another number of them."""
    assert isinstance(body, Block) and isinstance(body.statements[0], Let) and body.statements[0].variable == TRIPS
    return Block((Let(TRIPS, Const(trips, INDEX)), *body.statements[1:]))


def with_trips(kernel: Kernel, trips: int) -> Kernel:
    """A CPU kernel that takes its trips as an argument, for another number of them."""
    more = trips - kernel.trips
    parameters = tuple(replace(buffer, size=buffer.size + more * buffer.growth) for buffer in kernel.parameters)
    return replace(kernel, body=redefined(kernel.body, trips), parameters=parameters, trips=trips)


def given(body: Statement, growths: Mapping[str, int]) -> Counted | None:
    """A body that defines TRIPS first; None if it does not."""
    first = body.statements[0] if isinstance(body, Block) else body
    if not isinstance(first, Let) or first.variable != TRIPS or not isinstance(first.value, Const):
        return None
    return Counted(body, int(first.value.value), growths)


def _outer_loops(body: Statement) -> Iterator[For]:
    """The perfect nest of loops that is the body, outermost first."""
    only = _only(body)
    if isinstance(only, For) and only.kind in ("parallel", "serial"):
        yield only
        yield from _outer_loops(only.body)


def _only(body: Statement) -> Statement | None:
    """The statement that is all of a body; None if there are several."""
    if not isinstance(body, Block):
        return body
    inside = [statement for statement in body.statements if not isinstance(statement, Comment)]
    return _only(inside[0]) if len(inside) == 1 else None


def _replaced(body: Statement, chosen: For) -> Statement:
    """The nest with TRIPS for the extent of one of its loops."""
    if isinstance(body, Block):
        return Block(tuple(_replaced(statement, chosen) for statement in body.statements))
    if not isinstance(body, For):
        return body
    return replace(body, extent=TRIPS, body=_told(body.body, chosen)) if body is chosen else replace(body, body=_replaced(body.body, chosen))


def _told(body: Statement, chosen: For) -> Statement:
    """What is inside of a loop with TRIPS for its extent, where its last iteration is told from the others."""
    if isinstance(body, Block):
        return Block(tuple(_told(statement, chosen) for statement in body.statements))
    if isinstance(body, For) and body.variable != chosen.variable:
        return replace(body, body=_told(body.body, chosen))
    if isinstance(body, With):
        return replace(body, body=_told(body.body, chosen))
    if not isinstance(body, If):
        return body
    condition = chosen.variable < TRIPS - 1 if body.condition == _all_but_the_last(chosen) else body.condition
    otherwise = None if body.otherwise is None else _told(body.otherwise, chosen)
    return If(condition, _told(body.then, chosen), otherwise)


def _all_but_the_last(loop: For) -> Expr | None:
    """The condition that holds in all iterations of a loop but the last."""
    return loop.variable < int(loop.extent.value) - 1 if isinstance(loop.extent, Const) and loop.extent.value > 1 else None


@dataclass
class _Uses:
    """Where variables of some loops are used. `variables`: those of the loops, unless an inner loop has the same one. `moved`: by how much each
    variable that a Let defines moves with one of them. `found`: for each buffer the strides of its accesses. `elsewhere`: variables that are used
    otherwise than as linear terms of addresses of `buffers`."""

    loops: Sequence[For]
    buffers: Collection[str]
    variables: set[Var]
    moved: dict[Var, dict[Var, int]] = field(default_factory=dict)
    found: dict[str, list[dict[Var, int]]] = field(default_factory=dict)
    elsewhere: set[Var] = field(default_factory=set)

    def strides(self, buffer: str, variable: Var) -> set[int]:
        """The different strides of accesses of a buffer along a loop."""
        return {strides.get(variable, 0) for strides in self.found.get(buffer, ())}

    def visit(self, statement: Statement) -> None:
        if isinstance(statement, Block):
            for part in statement.statements:
                self.visit(part)
        elif isinstance(statement, Let):
            self.read(statement.value)
            self.moved[statement.variable] = self.motion(statement.value) if statement.value.dtype == INDEX else {}
            if statement.value.dtype != INDEX:
                self.use(statement.value)
        elif isinstance(statement, (Store, AtomicAdd)):
            self.access(statement.buffer, statement.offset)
            self.read(statement.value)
            self.use(statement.value)
        elif isinstance(statement, For):
            self.read(statement.extent)
            self.use(statement.extent)
            hidden = self.variables & {statement.variable} if all(loop is not statement for loop in self.loops) else set()
            self.moved.pop(statement.variable, None)
            self.variables -= hidden
            self.visit(statement.body)
            self.variables |= hidden
        elif isinstance(statement, If):
            self.read(statement.condition)
            if not any(loop.variable in self.variables and statement.condition == _all_but_the_last(loop) for loop in self.loops):
                self.use(statement.condition)
            self.visit(statement.then)
            if statement.otherwise is not None:
                self.visit(statement.otherwise)
        elif isinstance(statement, With):
            self.visit(statement.body)
        elif isinstance(statement, Invoke):
            for operand, given in zip(statement.intrinsic.operands, statement.operands, strict=True):
                if isinstance(given, Place) and operand.access == "address":
                    self.read(given.offset)  # a prefetch neither reads nor writes its place
                elif isinstance(given, Place):
                    self.access(given.buffer, given.offset)
                else:
                    self.read(given)
                    self.use(given)

    def read(self, expr: Expr) -> None:
        """The loads of an expression, those inside the indices of others too."""
        for load in loads(expr):
            self.access(load.buffer, load.index[0], nested=False)

    def access(self, buffer: str, offset: Expr, nested: bool = True) -> None:
        if nested:
            self.read(offset)
        motion = self.motion(offset)
        if buffer in self.buffers:
            self.found.setdefault(buffer, []).append(motion)
        else:
            self.elsewhere |= motion.keys()

    def motion(self, index: Expr) -> dict[Var, int]:
        """By how much an index moves with each of the loops' variables; those in its other parts are used elsewhere. What is loaded does not move."""
        result: dict[Var, int] = {}
        for atom, factor in linear(index).terms:
            if not isinstance(atom, Var):
                self.use(atom)
            for variable, stride in self.motion_of(atom).items() if isinstance(atom, Var) else ():
                result[variable] = result.get(variable, 0) + factor * stride
        return {variable: stride for variable, stride in result.items() if stride}

    def motion_of(self, variable: Var) -> Mapping[Var, int]:
        return {variable: 1} if variable in self.variables else self.moved.get(variable, {})

    def use(self, expr: Expr) -> None:
        """Variables outside of the indices of loads are used elsewhere."""
        seen: set[int] = set()
        waiting = [expr]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Var):
                self.elsewhere |= self.motion_of(node).keys()
            elif not isinstance(node, Load) and id(node) not in seen:
                seen.add(id(node))
                waiting += children(node)
