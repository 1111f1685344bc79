"""Hoists checked indices out of the loops that do not change them: an embedding's row is checked once, not once per element.

    for c: out[c] = table[checked(index[r]) * 768 + c]   ->   row = checked(index[r]); for c: out[c] = table[row * 768 + c]

If an inner loop changes the index and the outer one does not, its positions are stored (on a CPU, whose compiler then vectorises the outer loop):

    for c: for r: sum[c] += table[checked(index[r]) * 64 + c]   ->   for r: rows[r] = checked(index[r]);
                                                                     for c: for r: sum[c] += table[rows[r] * 64 + c]

A compiler can do neither, as a check may store a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from tilewright.codegen.sharing import certainly_evaluated
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, checks, index_const, loads, range_of, rewrite, variables
from tilewright.ir.kernel import (
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Let,
    Statement,
    Store,
    With,
    expressions,
    map_expressions,
    statements,
    written_by,
)

MOST_KEPT = 512
"""Maximum number of positions stored for one loop: 4 KiB of a thread's stack."""


def lift_checks(root: Statement, keep: bool) -> Statement:
    """The statement with every checked index moved before the outermost loop that neither changes it nor might skip it; with `keep`, also those that
    change in loops inside that one. Nothing is moved out of a parallel loop: threads would share it, and nested parallel loops stay perfectly
    nested."""
    return _Lifter(keep).lifted(root) if checks(*expressions(root)) else root


class _Lifter:
    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.count = 0

    def lifted(self, root: Statement) -> Statement:
        if isinstance(root, Block):
            return Block(tuple(part for child in root.statements for part in self._parts(child)))
        if isinstance(root, With):
            return replace(root, body=self.lifted(root.body))
        if isinstance(root, If):
            return replace(root, then=self.lifted(root.then), otherwise=None if root.otherwise is None else self.lifted(root.otherwise))
        parts = self._parts(root)
        return parts[0] if len(parts) == 1 else Block(tuple(parts))

    def _parts(self, root: Statement) -> list[Statement]:
        """The statements moved out of a statement, then what is left of it."""
        if not isinstance(root, For):
            return [self.lifted(root) if isinstance(root, (Block, With, If)) else root]
        body = self.lifted(root.body)
        if root.kind == "parallel" or range_of(root.extent)[0] < 1:
            return [replace(root, body=body)]
        before: list[Statement] = []
        changed = _changed_by(replace(root, body=body))
        for check, inner in {check: inner for check, inner in _certain(body) if _is_fixed(check, inner, changed)}.items():
            if inner and not (self.keep and prod(_extent(loop) for loop in inner) <= MOST_KEPT):
                continue
            position: Expr
            if inner:
                rows = Buffer(f"checked_rows{self.count}", INDEX, prod(_extent(loop) for loop in inner), "register")
                position = Load(rows.name, (_flat(inner),), INDEX)
                fill: Statement = Store(rows.name, _flat(inner), check)
                for loop in reversed(inner):
                    fill = For(loop.variable, loop.extent, fill)
                before += [Allocate(rows), fill]
            else:
                position = Var(f"checked_row{self.count}", int(range_of(check)[1]) + 1)
                before.append(Let(position, check))
            self.count += 1
            body = map_expressions(body, lambda expr, check=check, position=position: _replaced(expr, check, position))  # type: ignore[misc]
        return [*before, replace(root, body=_without_names(body))]


def _certain(root: Statement, inner: tuple[For, ...] = ()) -> Iterator[tuple[Apply, tuple[For, ...]]]:
    """Checked indices that the statement always evaluates, each with the inner loops that change it."""
    for statement in root.statements if isinstance(root, Block) else (root,):
        roots: Sequence[Expr] = ()
        if isinstance(statement, Block):
            yield from _certain(statement, inner)
        elif isinstance(statement, For) and isinstance(statement.extent, Const) and statement.extent.value and statement.kind != "parallel":
            yield from _certain(statement.body, (*inner, statement))
        elif isinstance(statement, Let):
            roots = (statement.value,)
        elif isinstance(statement, (Store, AtomicAdd)):
            roots = (statement.offset, statement.value)
        if roots and checks(*roots):
            certain = certainly_evaluated(roots)
            for check in checks(*roots):
                if id(check) in certain:
                    yield check, tuple(loop for loop in inner if loop.variable in variables(check))


def _changed_by(loop: For) -> tuple[set[Var], set[str]]:
    """Variables and buffers that may differ between iterations."""
    names, buffers = {loop.variable}, set[str]()
    for statement in statements(loop.body):
        if isinstance(statement, (Let, For)):
            names.add(statement.variable)
        elif isinstance(statement, Allocate):
            buffers.add(statement.buffer.name)
        buffers.update(written_by(statement))
    return names, buffers


def _is_fixed(check: Apply, inner: Sequence[For], changed: tuple[set[Var], set[str]]) -> bool:
    names = changed[0] - {loop.variable for loop in inner}
    return names.isdisjoint(variables(check)) and changed[1].isdisjoint(load.buffer for load in loads(check))


def _extent(loop: For) -> int:
    assert isinstance(loop.extent, Const)
    return int(loop.extent.value)


def _flat(loops: Sequence[For]) -> Expr:
    position: Expr = index_const(0)
    for loop in loops:
        position = position * _extent(loop) + loop.variable
    return position


def _replaced(expr: Expr, check: Apply, position: Expr) -> Expr:
    return rewrite(expr, lambda node: position if node == check else node)


def _without_names(root: Statement) -> Statement:
    """The statement with aliases removed: a variable whose value is just another variable is replaced by that one."""
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
