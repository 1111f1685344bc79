"""The representation of an ATen call in a `torch` node: data from which the runtime builds the arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.ir.graph import Value


def call_recipe(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Value], tuple[Any, ...]]:
    """The node's inputs, each tensor once, and its attribute `call`: (positional, (name, keyword)...), where an argument is ("input", position
    among the inputs), ("list", arguments), ("dtype", name), ("device", None: where the node runs) or ("value", literal). Arguments about the memory
    layout of results are left to PyTorch."""
    inputs: list[Value] = []

    def recipe(argument: Any) -> tuple[str, Any]:
        if isinstance(argument, Value):
            if argument not in inputs:
                inputs.append(argument)
            return "input", inputs.index(argument)
        if isinstance(argument, (list, tuple)):
            return "list", tuple(recipe(a) for a in argument)
        if isinstance(argument, torch.dtype):
            return "dtype", str(argument).removeprefix("torch.")
        if isinstance(argument, torch.device):
            return "device", None
        if isinstance(argument, (torch.layout, torch.memory_format)):
            return "value", None
        return "value", argument

    call = (tuple(recipe(a) for a in arguments), tuple((key, recipe(a)) for key, a in keywords.items()))
    return inputs, call
