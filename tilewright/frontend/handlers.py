"""Registration of handlers of ATen operators. A handler is a function of the builder and of the operator's arguments in the order of its ATen schema
(defaults filled in, tensors as `Value`). It adds nodes and returns the result, or a tuple of results with None for those that are never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tilewright.graph.builder import GraphBuilder, Operand
from tilewright.ir.dtypes import ELEMENT_TYPES, of_torch
from tilewright.ir.graph import Value

Handler = Callable[..., Any]
Registered = TypeVar("Registered", bound=Handler)


class Unsupported(Exception):
    """A handler's reason for leaving this use of an operator to PyTorch."""


class Handlers:
    """Handlers of one family, filled while its module is imported."""

    def __init__(self) -> None:
        self.table: dict[str, Handler] = {}

    def handles(self, *targets: str) -> Callable[[Registered], Registered]:
        """Decorator: the handler serves these ATen operators ("conv2d.default")."""

        def register(handler: Registered) -> Registered:
            self.table.update((target, handler) for target in targets)
            return handler

        return register


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, ELEMENT_TYPES[name].torch)
    return dtype


def result_type(*operands: Operand) -> str:
    """PyTorch's type promotion of values and Python numbers."""

    def stand_in(operand: Operand) -> Any:
        if isinstance(operand, Value):
            return torch.empty((1,) * len(operand.shape), dtype=torch_dtype(operand.dtype), device="meta")
        return operand

    stand_ins = [stand_in(o) for o in operands]
    if len(stand_ins) == 1:
        return of_torch(stand_ins[0].dtype)
    return of_torch(torch.result_type(*stand_ins[:2]))


def axes_of(axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dimensions, sorted and non-negative; None and an empty list mean all."""
    if axes is None:
        return tuple(range(rank))
    listed = [axes] if isinstance(axes, int) else list(axes)
    return tuple(sorted({a % max(rank, 1) for a in listed})) if listed and rank else tuple(range(rank))


def expanded(values: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions."""
    listed = [values] if isinstance(values, int) else list(values)
    return tuple(listed * count if len(listed) == 1 else listed)


def simple(operator: str) -> Handler:
    """A handler for an elementwise ATen operator that takes exactly the table operator's operands."""

    def handler(g: GraphBuilder, *operands: Operand) -> Value:
        return elementwise(g, operator, *operands)

    return handler


def elementwise(g: GraphBuilder, operator: str, *operands: Operand) -> Value:
    """A pointwise node that computes in the expected result's type, or for a boolean result in the operands' common type."""
    kind = g.expected[0][1] if g.expected else result_type(*operands)
    if kind == "bool":
        kind = result_type(*operands)
    return g.pointwise(operator, *operands, dtype=kind)
