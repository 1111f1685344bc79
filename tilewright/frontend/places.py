"""Places in the user's model, for messages."""

from __future__ import annotations

import re

import torch

from tilewright.frontend.reading import printable


def place_of(node: torch.fx.Node) -> str:
    """A node's origin in the user's model: module path, file and line, as far as the export kept them."""
    modules = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(modules.values())) if entry and entry[0]), "")
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return printable(" ".join(part for part in (path, f"({lines[-1][0]}:{lines[-1][1]})" if lines else "") if part))
