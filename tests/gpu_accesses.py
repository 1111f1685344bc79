"""For tests of static analysis: the accesses of a kernel's threads one by one, random kernels, and counts of an H200."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from hypothesis import strategies as st

from bench.common import RESULTS
from bench.gpu_analysis import counted_layer
from tilewright.hardware import machine
from tilewright.ir.expr import Const, Expr, Load, Var, compare, index_const, select
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Kernel, Launch, Let, Statement, Store

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod, "lt": operator.lt, "min": min,
}  # fmt: skip


def value_of(expr: Expr, at: dict[str, int]) -> Any:
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Var):
        return at[expr.name]
    assert not isinstance(expr, Load)
    return OPERATIONS[expr.operation](*[value_of(arg, at) for arg in expr.args])


def executed(root: Statement, at: dict[str, int]) -> Iterator[tuple[tuple[int, ...], str, int, int]]:
    """(place in the execution, buffer, offset, lanes) of one thread's accesses; equal places of threads are one warp instruction."""
    if isinstance(root, Block):
        for number, child in enumerate(root.statements):
            for place, buffer, offset, lanes in executed(child, at):
                yield (number, *place), buffer, offset, lanes
    elif isinstance(root, Let):
        at[root.variable.name] = value_of(root.value, at)
    elif isinstance(root, For):
        for number in range(value_of(root.extent, at)):
            for place, buffer, offset, lanes in executed(root.body, {**at, root.variable.name: number}):
                yield (number, *place), buffer, offset, lanes
    elif isinstance(root, If):
        if value_of(root.condition, at):
            yield from executed(root.then, at)
    elif isinstance(root, Store):
        value = root.value
        if not isinstance(value, Load) and not isinstance(value, Const):
            condition, value = value.args[:2]  # type: ignore[union-attr]
            if not value_of(condition, at):
                value = Const(0.0, "f32")
        if isinstance(value, Load):
            yield (0,), value.buffer, value_of(value.index[0], at), value.lanes
        yield (1,), root.buffer, value_of(root.offset, at), root.value.lanes


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    """Copies between a global and a shared buffer at offsets with divisions, in loops, behind conditions."""
    launch = Launch((draw(st.integers(1, 3)), draw(st.integers(1, 2)), 1), (draw(st.sampled_from([8, 20, 33])), draw(st.integers(1, 3)), 1))
    variables = [Var("block_x", launch.grid[0]), Var("block_y", launch.grid[1]), Var("thread_x", launch.block[0]), Var("thread_y", launch.block[1])]

    def index() -> Expr:
        total: Expr = index_const(draw(st.integers(0, 9)))
        for variable in variables:
            term: Expr = variable
            kind = draw(st.sampled_from(["", "div", "mod"]))
            if kind:
                term = variable * draw(st.integers(1, 5)) + total
                term = term // draw(st.integers(2, 7)) if kind == "div" else term % draw(st.integers(2, 7))
            total = total + term * draw(st.sampled_from([0, 1, 2, 8, 16, 33]))
        return total

    def statement(depth: int) -> Statement:
        kind = draw(st.sampled_from(["store", "fetch", "loop", "if", "let"] if depth else ["store", "fetch"]))
        if kind == "loop":
            variables.append(Var(f"i{len(variables)}", draw(st.integers(1, 3))))
            variable = variables[-1]
            extent = index_const(variable.extent or 1) if draw(st.booleans()) else variables[2] % index_const(variable.extent or 1) + 1
            body = Block(tuple(statement(depth - 1) for _ in range(2)))
            variables.remove(variable)
            return For(variable, extent, body)
        if kind == "if":
            return If(compare("lt", index(), index()), statement(depth - 1))
        if kind == "let":
            variable = Var(f"v{len(variables)}")
            let = Let(variable, index())
            variables.append(variable)
            inner = statement(depth - 1)
            variables.remove(variable)
            return Block((let, inner))
        source, target = ("g", "s") if kind == "fetch" else ("s", "g")
        value: Expr = Load(source, (index(),), "f32")
        if draw(st.booleans()):
            value = select(compare("lt", index(), index()), value, 0.0)
        return Store(target, index(), value)

    body = Block((Allocate(Buffer("s", "f32", 1 << 20, "shared")), *(statement(2) for _ in range(3))))
    return Kernel("k", (Buffer("g", "f32", 1 << 20, writable=True),), body, launch)


@cache
def counted(name: str) -> list[dict[str, Any]]:
    counters = json.loads((RESULTS / "transactions_h200.json").read_text())
    entry = next(entry for entry in counters["results"] if entry["layer"] == name)
    return counted_layer(entry, machine(counters["settings"]["target"]), 1024)
