"""The conditions under which each part of an expression is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tilewright.ir.expr import Apply, Expr, children, walk

Guard: TypeAlias = tuple[tuple[Expr, bool], ...]
"""Conditions, each with the outcome that leads to a node, outermost first; empty if the node is always evaluated."""

_MOST_GUARDS = 4


def guards(roots: Sequence[Expr]) -> dict[int, tuple[Guard, ...]]:
    """For each node (by identity), the guards under which it is reached; an empty tuple means there were too many to track."""
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


def _conditions(node: Expr) -> tuple[tuple[Expr, bool] | None, ...]:
    """For each child, the condition under which the node evaluates it."""
    kids = children(node)
    if isinstance(node, Apply) and node.args[0].lanes == 1:
        first = node.args[0]
        if node.operation == "select":
            return None, (first, True), (first, False)
        if node.operation in ("and", "or") and node.lanes == 1:
            return None, (first, node.operation == "and")
    return (None,) * len(kids)
