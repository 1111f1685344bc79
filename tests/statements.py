"""Kernels without some of their statements, for tests of what the interpreter reports then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.ir.kernel import Block, For, If, Statement


def without(root: Statement, left_out: Callable[[Statement], bool]) -> Statement:
    """The statement without those inside it for which the function says true."""
    if left_out(root):
        return Block(())
    if isinstance(root, Block):
        return Block(tuple(without(member, left_out) for member in root.statements))
    if isinstance(root, For):
        return replace(root, body=without(root.body, left_out))
    if isinstance(root, If):
        otherwise = None if root.otherwise is None else without(root.otherwise, left_out)
        return replace(root, then=without(root.then, left_out), otherwise=otherwise)
    return root
