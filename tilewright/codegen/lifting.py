"""Checked indices moved out of the loops that do not change them: an embedding's row is checked once, not once an element.

    for c: out[c] = table[checked(index[r]) * 768 + c]   ->   row = checked(index[r]); for c: out[c] = table[row * 768 + c]

A compiler cannot do it, as a check may store its fault, nor make vectors of a loop that holds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.codegen.sharing import certainly_evaluated
from tilewright.ir.expr import Apply, Expr, Var, checks, loads, range_of, rewrite, variables
from tilewright.ir.kernel import (
    Allocate,
    AtomicAdd,
    Block,
    Copy,
    For,
    If,
    Let,
    Statement,
    Store,
    TileStore,
    WithTiles,
    expressions,
    map_expressions,
    statements,
)


def lift_checks(root: Statement) -> Statement:
    """The statement with every checked index before the outermost loop that neither changes it nor might leave it out. A parallel loop keeps
    what is inside: threads would have to share it, and loops are divided among them together where nothing stands between."""
    if not checks(*expressions(root)):
        return root
    return Lifter().lifted(root)


class Lifter:
    def __init__(self) -> None:
        self.count = 0

    def lifted(self, root: Statement) -> Statement:
        if isinstance(root, Block):
            return Block(tuple(part for child in root.statements for part in self._parts(child)))
        if isinstance(root, WithTiles):
            return replace(root, body=self.lifted(root.body))
        if isinstance(root, If):
            return replace(root, then=self.lifted(root.then), otherwise=None if root.otherwise is None else self.lifted(root.otherwise))
        parts = self._parts(root)
        return parts[0] if len(parts) == 1 else Block(tuple(parts))

    def _parts(self, root: Statement) -> list[Statement]:
        """The statement, after what was moved out of it."""
        if not isinstance(root, For):
            return [self.lifted(root) if isinstance(root, (Block, WithTiles, If)) else root]
        body = self.lifted(root.body)
        if root.kind == "parallel" or range_of(root.extent)[0] < 1:
            return [replace(root, body=body)]
        before: list[Statement] = []
        changed = _changed_by(root)
        for check in dict.fromkeys(_certain(body)):
            if _is_fixed(check, changed):
                row = Var(f"row{self.count}", int(range_of(check)[1]) + 1)
                self.count += 1
                before.append(Let(row, check))
                body = map_expressions(body, lambda expr, check=check, row=row: _replaced(expr, check, row))  # type: ignore[misc]
        return [*before, replace(root, body=_without_names(body))]


def _certain(root: Statement) -> Iterator[Apply]:
    """Checked indices that the statement evaluates whatever conditions hold."""
    for statement in root.statements if isinstance(root, Block) else (root,):
        if isinstance(statement, Block):
            yield from _certain(statement)
            continue
        roots: Sequence[Expr] = ()
        if isinstance(statement, Let):
            roots = (statement.value,)
        elif isinstance(statement, (Store, AtomicAdd)):
            roots = (statement.offset, statement.value)
        if roots and checks(*roots):
            certain = certainly_evaluated(roots)
            yield from (check for check in checks(*roots) if id(check) in certain)


def _changed_by(loop: For) -> tuple[set[Var], set[str]]:
    """Variables and buffers that are not the same in every iteration."""
    names, buffers = {loop.variable}, set[str]()
    for statement in statements(loop.body):
        if isinstance(statement, Let):
            names.add(statement.variable)
        elif isinstance(statement, For):
            names.add(statement.variable)
        elif isinstance(statement, (Store, AtomicAdd, Copy, TileStore)):
            buffers.add(statement.buffer)
        elif isinstance(statement, Allocate):
            buffers.add(statement.buffer.name)
    return names, buffers


def _is_fixed(check: Apply, changed: tuple[set[Var], set[str]]) -> bool:
    names, buffers = changed
    return names.isdisjoint(variables(check)) and buffers.isdisjoint(load.buffer for load in loads(check))


def _replaced(expr: Expr, check: Apply, row: Var) -> Expr:
    return rewrite(expr, lambda node: row if node == check else node)


def _without_names(root: Statement) -> Statement:
    """Without variables that stand for nothing but another one, which is used instead."""
    if not isinstance(root, Block):
        return root
    names: dict[Var, Var] = {}
    for s in root.statements:
        if isinstance(s, Let) and isinstance(s.value, Var):
            names[s.variable] = names.get(s.value, s.value)
    if not names:
        return root
    rest = Block(tuple(s for s in root.statements if not (isinstance(s, Let) and s.variable in names)))
    return map_expressions(rest, lambda expr: rewrite(expr, lambda node: names.get(node, node) if isinstance(node, Var) else node))
