"""Under which conditions each part of an expression is evaluated: what the printers may compute ahead, and behind which guard.

An expression is a graph in which one node may serve many places. Printed as a tree, a chain of d operations that use their operand twice
would have 2^d leaves; so nodes in several places get a name. But a load that stands behind a condition must not be read where it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tilewright.ir.dtypes import is_float
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, children, walk
from tilewright.ir.kernel import Statement, expressions

Guard: TypeAlias = tuple[tuple[Expr, bool], ...]
"""Conditions with the outcome that leads to a node, outermost first; empty where the node is always evaluated."""

_MOST_GUARDS = 4


def guards(roots: Sequence[Expr]) -> dict[int, tuple[Guard, ...]]:
    """For each node (by identity) the guards under which it is reached; no guard listed means too many to follow."""
    order = list(walk(*roots))
    found: dict[int, dict[tuple[tuple[int, bool], ...], Guard] | None] = {id(node): {} for node in order}
    for root in roots:
        found[id(root)] = {(): ()}
    for node in reversed(order):
        paths = found[id(node)]
        for kid, condition in zip(children(node), _conditions(node), strict=True):
            known = found[id(kid)]
            if known is None:
                continue
            if paths is None:
                found[id(kid)] = None
                continue
            for key, guard in paths.items():
                if condition is not None and (id(condition[0]), condition[1]) not in key:
                    key, guard = (*key, (id(condition[0]), condition[1])), (*guard, condition)
                known[key] = guard
            if () in known:
                found[id(kid)] = {(): ()}
            elif len(known) > _MOST_GUARDS:
                found[id(kid)] = None
    return {key: tuple(value.values()) if value is not None else () for key, value in found.items()}


def certainly_evaluated(roots: Sequence[Expr]) -> set[int]:
    """Identities of nodes that are evaluated whatever conditions hold."""
    return {key for key, paths in guards(roots).items() if () in paths}


def _conditions(node: Expr) -> tuple[tuple[Expr, bool] | None, ...]:
    """For each child the condition under which the node evaluates it."""
    kids = children(node)
    if isinstance(node, Apply) and node.args[0].lanes == 1:
        first = node.args[0]
        if node.operation == "select":
            return None, (first, True), (first, False)
        if node.operation in ("and", "or") and node.lanes == 1:
            return None, (first, node.operation == "and")
    return (None,) * len(kids)


def is_risky(node: Expr) -> bool:
    """Whether evaluating the node itself needs its guard: loads, and integer division by what may be zero."""
    if isinstance(node, Load):
        return True
    divides = isinstance(node, Apply) and node.operation in ("floordiv", "mod", "truncdiv", "fmod") and not is_float(node.dtype)
    return divides and not (isinstance(node, Apply) and isinstance(node.args[1], Const) and node.args[1].value != 0)


def used_variables(root: Statement) -> frozenset[str]:
    """Names of the variables that occur in a statement."""
    return frozenset(node.name for node in walk(*expressions(root)) if isinstance(node, Var))
