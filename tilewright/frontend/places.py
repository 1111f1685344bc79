"""Names of a program's nodes, and their places in the user's model, for messages."""

from __future__ import annotations

import re

import torch

from tilewright.frontend.reading import printable
from tilewright.frontend.sizes import is_symbolic

_LAST_LINE = re.compile(r'.*File "([^"]+)", line (\d+)', re.DOTALL)


def place_of(node: torch.fx.Node) -> str:
    """A node's origin in the user's model: module path, file and line, as far as the export kept them."""
    modules = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(modules.values())) if entry and entry[0]), "")
    line = _LAST_LINE.match(node.meta.get("stack_trace") or "")
    return printable(" ".join(part for part in (path, f"({line[1]}:{line[2]})" if line is not None else "") if part))


def described(node: torch.fx.Node) -> str:
    """A node's operator and its origin."""
    return f"{node.target} at {place_of(node) or 'an unknown place'}"


def names_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """Names of a program's nodes, those of tensors as if none computed sizes: programs of a model with free and with fixed sizes then name what they
    share alike."""
    sizes = {node for node in graph.nodes if is_symbolic(node.meta.get("val"))}
    if not sizes:
        return {node: node.name for node in graph.nodes}
    numbered = torch.fx.Graph()  # which numbers equal names in their order
    names: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in sizes:
            names[node] = numbered.create_node(node.op, node.target, name=re.sub(r"(?<=.)_\d+$", "", node.name)).name
        elif node.op == "placeholder":
            names[node] = numbered.placeholder(node.name).name
        else:
            names[node] = node.name
    return names
