"""The arguments of ATen calls: in the order of the schema, and as data of a `torch` node, from which the runtime builds them."""

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


def bound(target: torch._ops.OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in, without those that only concern the storage of results."""
    storage = {"device", "pin_memory", "layout", "memory_format", "generator", "non_blocking", "copy"}
    found = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.name in storage and argument.kwarg_only:
            continue
        if i < len(arguments):
            found.append(arguments[i])
        elif argument.name in keywords:
            found.append(keywords[argument.name])
        else:
            found.append(argument.default_value if argument.has_default_value() else None)
    return found
