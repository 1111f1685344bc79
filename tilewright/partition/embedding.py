"""The body of a kernel as a part of another kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.ir.expr import ZERO, Expr, Load, index_const, rewrite, variables
from tilewright.ir.kernel import (
    TRIPS,
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Invoke,
    Kernel,
    Let,
    Place,
    Statement,
    Store,
    With,
    map_expressions,
    statements,
)


def embedded(kernel: Kernel, places: Mapping[str, tuple[str, Expr]], label: str = "local") -> Statement:
    """The body of a kernel as a part of another: each parameter is a buffer of that kernel, from an offset on. Loops that were parallel are serial.
    Local buffers get names that end in the label, which no value has; parts that are in scope together have different labels."""
    bound = {statement.variable.name for statement in statements(kernel.body) if isinstance(statement, (For, Let))}
    moving = {var.name for _, offset in places.values() for var in variables(offset)}
    assert bound.isdisjoint(moving), f"{kernel.name} binds a variable of its addresses"
    places = {**{buffer.name: (f"{buffer.name}.{label}", ZERO) for buffer in _local(kernel.body)}, **places}

    def local(buffer: Buffer) -> Buffer:
        return replace(buffer, name=places[buffer.name][0])

    def read(node: Expr) -> Expr:
        if node == TRIPS:
            return index_const(kernel.trips)
        if not isinstance(node, Load) or node.buffer not in places:
            return node
        name, offset = places[node.buffer]
        return replace(node, buffer=name, index=(node.index[0] + offset,))

    def moved(name: str, offset: Expr) -> tuple[str, Expr]:
        target, base = places.get(name, (name, ZERO))
        return target, offset + base

    def change(statement: Statement) -> Statement:
        if isinstance(statement, Block):
            return Block(tuple(change(part) for part in statement.statements if not isinstance(part, Let) or part.variable != TRIPS))
        if isinstance(statement, For):
            kind = "serial" if statement.kind == "parallel" else statement.kind
            reductions = tuple((places.get(name, (name, ZERO))[0], combiner) for name, combiner in statement.reductions)
            return replace(statement, body=change(statement.body), kind=kind, reductions=reductions, work=0)
        if isinstance(statement, If):
            return replace(statement, then=change(statement.then), otherwise=change(statement.otherwise) if statement.otherwise else None)
        if isinstance(statement, With):
            return replace(statement, buffers=tuple(map(local, statement.buffers)), body=change(statement.body))
        if isinstance(statement, Allocate):
            return Allocate(local(statement.buffer))
        if isinstance(statement, (Store, AtomicAdd)):
            buffer, offset = moved(statement.buffer, statement.offset)
            return replace(statement, buffer=buffer, offset=offset)
        if isinstance(statement, Invoke):
            operands = (Place(*moved(x.buffer, x.offset)) if isinstance(x, Place) else x for x in statement.operands)
            return replace(statement, operands=tuple(operands))
        return statement

    return change(map_expressions(kernel.body, lambda expr: rewrite(expr, read)))


def _local(body: Statement) -> list[Buffer]:
    """The local buffers of a kernel."""
    found = (statement for statement in statements(body) if isinstance(statement, (With, Allocate)))
    return [buffer for statement in found for buffer in (statement.buffers if isinstance(statement, With) else (statement.buffer,))]
