"""The model between front end and partition: immutable nodes over typed values.

Grammar::

    Graph = nodes in topological order, input values, output names, constants
    Node  = operator name, input names, output names, attributes, place (where in the user's model)
    Value = name, shape, dtype

An attribute is a number, string, bool, None, a tuple of these, or (operator `scan`) a body `Graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from tilewright.ir.dtypes import size_of


@dataclass(frozen=True)
class Value:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * size_of(self.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Node:
    """One operator application. A `torch` node runs through PyTorch: attribute `target` names the ATen operator, `call` holds its arguments."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    place: str = ""

    @property
    def operator_name(self) -> str:
        """The operator; of a node that runs through PyTorch the ATen operator."""
        return str(self.attributes["target"]) if self.operator == "torch" else self.operator

    @property
    def described(self) -> str:
        """Description for error messages: the operator, and where it is in the user's model."""
        return f"{self.operator_name} {self.name}" + (f" at {place_text(self.place)}" if self.place else "")


def place_text(place: str) -> str:
    """A node's place without the line of PyTorch source that called the operator: the module's name is more helpful."""
    module, _, line = place.rpartition("(")
    return module.rstrip() if "/torch/nn/" in line else place


def short_place(place: str) -> str:
    """The module that a node is in; the file's name and the line if it is in none that has a name; empty for a line of PyTorch's source."""
    module, _, line = place_text(place).rpartition("(")
    return module.rstrip() or (f"({line.replace(chr(92), '/').rpartition('/')[2]}" if line.endswith(")") else line)


@dataclass(frozen=True)
class Graph:
    """`values` holds every value by name, constants included; `constants` maps names to torch tensors (detached copies, on the CPU)."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def producers(self) -> dict[str, Node]:
        return {output: node for node in self.nodes for output in node.outputs}

    def consumers(self) -> dict[str, list[Node]]:
        """Nodes that read each value (each node once, however often it reads the value); values without readers map to an empty list."""
        result: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                result[name].append(node)
        return result

    def dependents(self, node: Node) -> set[str]:
        """Names of the nodes that need a result of this one."""
        made, names = set(node.outputs), set[str]()
        for other in self.nodes:
            if not made.isdisjoint(other.inputs):
                made |= set(other.outputs)
                names.add(other.name)
        return names

    def with_nodes(self, nodes: Iterable[Node], **changes: Any) -> Graph:
        return replace(self, nodes=tuple(nodes), **changes)

    def __str__(self) -> str:
        lines = [f"graph({', '.join(str(self.values[name]) for name in self.inputs)})"]
        for node in self.nodes:
            attributes = ", ".join(f"{k}={v}" for k, v in node.attributes.items() if not isinstance(v, Graph))
            outputs = ", ".join(str(self.values[name]) for name in node.outputs)
            lines.append(f"  {outputs} = {node.operator}({', '.join(node.inputs)}{'; ' + attributes if attributes else ''})")
        lines.append(f"  return {', '.join(self.outputs)}")
        return "\n".join(lines)
