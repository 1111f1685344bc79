"""The symbolic sizes of a graph captured by Dynamo: which of its inputs are free, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True)
class FreeInputs:
    """By position among the graph's inputs: `dims`: the free dimensions of tensors. `numbers`: Python numbers that differ from call to call.
    `derived`: numbers that are sizes, (position of a tensor, its dimension), which Dynamo passes beside the tensors. `unread`: numbers that nothing
    reads. `fractions`: tensors of one element in which Dynamo passes Python floats, such as a module's epsilon; a compiled graph holds their values.
    """

    dims: Mapping[int, tuple[int, ...]]
    numbers: frozenset[int]
    derived: Mapping[int, tuple[int, int]]
    unread: frozenset[int]
    fractions: frozenset[int]

    @property
    def omitted(self) -> frozenset[int]:
        """What a caller of the compiled graph need not pass."""
        return self.unread | self.fractions | self.derived.keys()

    def is_empty(self, inputs: Sequence[Any]) -> bool:
        """Whether a free size of a call is 0."""
        return any(inputs[position].shape[dim] == 0 for position, dims in self.dims.items() for dim in dims)

    def total(self, inputs: Sequence[Any]) -> int:
        """The elements of a call's tensors with free sizes, and its free numbers, added up: a measure of its work."""
        return int(sum(inputs[i].numel() for i in self.dims) + sum(max(inputs[i], 0) for i in self.numbers))

    def dynamic(self, positions: tuple[int, ...]) -> list[list[Any]] | None:
        """The argument `dynamic` of `compile` for a module that takes the inputs at these positions as its only, variadic parameter; None if none of
        them is free."""
        free: Any = torch.export.Dim.DYNAMIC
        entries = [free if i in self.numbers else dict.fromkeys(self.dims[i], free) if i in self.dims else None for i in positions]
        return [entries] if any(entries) else None


def free_inputs(graph_module: torch.fx.GraphModule) -> FreeInputs:
    """The free inputs of a captured graph."""
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    examples = [node.meta.get("example_value") for node in nodes]
    dims: dict[int, tuple[int, ...]] = {}
    places: dict[Any, tuple[int, int]] = {}
    for position, example in enumerate(examples):
        if isinstance(example, torch.Tensor):
            free = {dim: expression for dim, size in enumerate(example.shape) if (expression := _expression(size)) is not None}
            dims.update({position: tuple(free)} if free else {})
            for dim, expression in free.items():
                places.setdefault(expression, (position, dim))
    symbolic = {i: example for i, example in enumerate(examples) if isinstance(example, (torch.SymInt, int))}
    unread = frozenset(i for i in symbolic if not nodes[i].users)
    derived = {i: places[_expression(symbolic[i])] for i in symbolic if i not in unread and _expression(symbolic[i]) in places}
    numbers = frozenset(i for i, example in symbolic.items() if i not in unread and i not in derived and _expression(example) is not None)
    fractions = frozenset(i for i, (node, example) in enumerate(zip(nodes, examples, strict=True)) if _is_fraction(node, example))
    return FreeInputs(MappingProxyType(dims), numbers, MappingProxyType(derived), unread, fractions)


def _is_fraction(node: torch.fx.Node, example: Any) -> bool:
    scalar = isinstance(example, torch.Tensor) and example.dtype is torch.float64 and not example.shape
    return scalar and bool(node.users) and all(user.op == "call_method" and user.target == "item" for user in node.users)


def _expression(size: Any) -> Any:
    """The expression of a symbolic size that Dynamo has not found to be one number; None for others."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if expression is not None and expression.free_symbols else None
