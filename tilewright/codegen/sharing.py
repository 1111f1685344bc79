"""The conditions under which each part of an expression is evaluated: what a printer may compute early, and behind which guard.

An expression is a graph in which a node may have several users. Printed as a tree, a chain of d operations that use their operand twice would have
2^d leaves, so such nodes get names. But a load behind a condition must not be executed if the condition fails, nor an index be checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.dtypes import is_float
from tilewright.ir.expr import Apply, Const, Expr, Load, variables
from tilewright.ir.guards import guards
from tilewright.ir.kernel import Statement, expressions


def certainly_evaluated(roots: Sequence[Expr]) -> set[int]:
    """Identities of the nodes that are always evaluated."""
    return {key for key, paths in guards(roots).items() if () in paths}


def is_risky(node: Expr) -> bool:
    """Whether the node itself must stay behind its guard: loads, checked indices, and integer division by a possible zero."""
    if isinstance(node, Load) or isinstance(node, Apply) and node.operation == "checked":
        return True
    divides = isinstance(node, Apply) and node.operation in ("floordiv", "mod", "truncdiv", "fmod") and not is_float(node.dtype)
    return divides and not (isinstance(node, Apply) and isinstance(node.args[1], Const) and node.args[1].value != 0)


def used_variables(root: Statement) -> frozenset[str]:
    """Names of the variables that occur in a statement."""
    return frozenset(variable.name for variable in variables(*expressions(root)))
