"""From loops to a `Kernel`: canonical parameter names, free scalars, and a name that is a digest of the code.

Two regions that compute the same thing on other values become the same kernel, so a repeated layer is compiled once.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Mapping, Sequence

from tilewright.codegen.source import source_text
from tilewright.ir.expr import Expr, Load, Var, loads, rewrite, variables
from tilewright.ir.kernel import Allocate, Block, Buffer, Copy, For, If, Kernel, Launch, Let, Prefetch, Statement, Store, statements
from tilewright.ir.layout import Layout


def map_expressions(root: Statement, change) -> Statement:
    """The statement with `change` applied to every expression and `change.buffer(name)` to every stored-to buffer."""
    if isinstance(root, Block):
        return Block(tuple(map_expressions(s, change) for s in root.statements))
    if isinstance(root, Let):
        return Let(root.variable, change(root.value))
    if isinstance(root, Store):
        return Store(change.buffer(root.buffer), change(root.offset), change(root.value))
    if isinstance(root, Copy):
        return Copy(change.buffer(root.buffer), change(root.offset), change(root.value))
    if isinstance(root, Prefetch):
        return Prefetch(change.buffer(root.buffer), change(root.offset))
    if isinstance(root, For):
        return replace(root, extent=change(root.extent), body=map_expressions(root.body, change))
    if isinstance(root, If):
        otherwise = map_expressions(root.otherwise, change) if root.otherwise is not None else None
        return If(change(root.condition), map_expressions(root.then, change), otherwise)
    return root


class _Renaming:
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.done: dict[int, tuple[Expr, Expr]] = {}

    def buffer(self, name: str) -> str:
        return self.names.get(name, name)

    def __call__(self, expr: Expr) -> Expr:
        known = self.done.get(id(expr))
        if known is None:
            fresh = rewrite(
                expr, lambda n: replace(n, buffer=self.names[n.buffer]) if isinstance(n, Load) and n.buffer in self.names else n
            )
            self.done[id(expr)] = known = (expr, fresh)
        return known[1]


def expressions(root: Statement) -> list[Expr]:
    """Every expression of the statement, in order."""
    result: list[Expr] = []
    for s in statements(root):
        if isinstance(s, Let):
            result.append(s.value)
        elif isinstance(s, (Store, Copy)):
            result += [s.offset, s.value]
        elif isinstance(s, Prefetch):
            result.append(s.offset)
        elif isinstance(s, For):
            result.append(s.extent)
        elif isinstance(s, If):
            result.append(s.condition)
    return result


def assemble(
    kind: str,
    body: Statement,
    layouts: Mapping[str, Layout],
    dtypes: Mapping[str, str],
    written: Sequence[str],
    *,
    header: str = "",
    launch: Launch | None = None,
    blocks_per_processor: int = 0,
    cluster: int = 1,
) -> tuple[Kernel, tuple[str, ...]]:
    """The kernel of a body whose loads and stores name stored values, and the values its parameters stand for, in order: what it
    reads by first use, then what it writes. Variables that no loop binds become scalars."""
    used = list(dict.fromkeys(load.buffer for load in loads(*expressions(body)) if load.buffer in layouts and load.buffer not in written))
    arguments = (*used, *written)
    names = {name: f"in{i}" for i, name in enumerate(used)}
    names |= {name: "out" if len(written) == 1 else f"out{i}" for i, name in enumerate(written)}
    parameters = tuple(
        Buffer(names[name], dtypes[name], layouts[name].size, "global", 1, name in written) for name in arguments
    )
    body = map_expressions(body, _Renaming(names))
    bound = {s.variable for s in statements(body) if isinstance(s, (For, Let))}
    special = ("thread_", "block_")
    free = {v for e in expressions(body) for v in variables(e)} - bound
    scalars = tuple(sorted((v for v in free if not v.name.startswith(special)), key=lambda v: v.name))
    kernel = Kernel("kernel", parameters, body, launch, scalars, header, blocks_per_processor, cluster)
    return replace(kernel, name=f"{kind}_{_digest(kernel)}"), tuple(arguments)


def _digest(kernel: Kernel) -> str:
    text = source_text(kernel)
    text += "".join(f"{buffer.dtype} {buffer.size};" for buffer in kernel.parameters)  # one name, one kernel: bounds are a part of it
    return sha256(text.encode()).hexdigest()[:12]


def block(*parts: Statement | Sequence[Statement]) -> Block:
    """Statements in sequence, nested lists and blocks flattened."""
    flat: list[Statement] = []
    for part in parts:
        if isinstance(part, Block):
            flat.extend(part.statements)
        elif isinstance(part, (Let, Store, Allocate, For, If)) or not isinstance(part, Sequence):
            flat.append(part)  # type: ignore[arg-type]
        else:
            flat.extend(block(*part).statements)
    return Block(tuple(flat))


def order_by(axes: Sequence[Var], offset: Expr) -> tuple[Var, ...]:
    """Axes outermost first: by falling stride in `offset`; what the offset does not know stays in front."""
    from tilewright.ir.expr import coefficient

    def stride(axis: Var) -> float:
        value = coefficient(offset, axis)
        return float("inf") if not value else -abs(value) * -1

    return tuple(sorted(axes, key=lambda axis: -stride(axis)))
