"""What shares memory in an exported program before it is functional, as the schemas of its operators say; programs of files say it nowhere else."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

Memory = Mapping[torch.fx.Node, frozenset[torch.fx.Node]]
"""Of each node, those whose results hold the memory of its own."""


def memory_of(graph: torch.fx.Graph) -> Memory:
    memory: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}
    for node in graph.nodes:
        sources: set[torch.fx.Node] = set()
        if node.op == "call_function" and node.target is operator.getitem:
            sources = {node.args[0]}
        elif isinstance(node.target, torch._ops.OpOverload):
            returned = {letter for result in node.target._schema.returns for letter in letters(result)}
            sources = {leaf for argument, value in arguments_of(node) if returned & letters(argument) for leaf in nodes_in(value)}
        memory[node] = frozenset[torch.fx.Node]().union(*(memory[source] for source in sources)) or frozenset([node])
    return memory


def letters(described: Any) -> set[str]:
    """The letters by which a schema relates the memory of an argument to that of results."""
    return set() if described.alias_info is None else set(described.alias_info.before_set)


def writes(argument: Any) -> bool:
    """Whether an operator writes to an argument of its schema."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes to whose results a node writes."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    return [leaf for argument, value in arguments_of(node) if writes(argument) for leaf in nodes_in(value)]


def arguments_of(node: torch.fx.Node) -> list[tuple[Any, Any]]:
    """The arguments of the schema of a node's operator, and what it passes for them."""
    given = node.target._schema.arguments  # type: ignore[union-attr]
    return [(a, node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)) for i, a in enumerate(given)]


def nodes_in(value: Any) -> list[torch.fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.fx.Node)]


def copied_graph(program: ExportedProgram) -> torch.fx.Graph:
    """A copy of the program's graph, whose nodes have the same names. PyTorch's copies rename nodes that are called as one of Python's functions is,
    such as the input of a `Sequential`, whose name is `input`."""
    graph: torch.fx.Graph = deepcopy(program.graph)
    for node, original in zip(graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    return graph


def rebuilt(program: ExportedProgram, graph: torch.fx.Graph) -> ExportedProgram:
    """The program with another graph, whose inputs and outputs have the same names."""
    return ExportedProgram(
        program.graph_module,
        graph,
        program.graph_signature,
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )
