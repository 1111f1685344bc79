"""Nodes that run through PyTorch: operator `torch`, with the ATen operator's name and how its arguments are made.

Operators are found by name in `torch.ops.aten` and nowhere else, so that a saved executable can name nothing but tensor
functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from tilewright.errors import InvalidArtifact
from tilewright.ir.graph import Node
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion
from tilewright.runtime.packing import unpack, write

TARGET = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
REFUSED = frozenset({"from_file"})
"""Functional operators of ATen that reach beyond tensors."""


@cache
def resolve_operator(target: str) -> Callable[..., Any]:
    """The ATen operator of a name such as "aten.sort.default".

    Raises:
        InvalidArtifact: for a name outside ATen, an operator that this PyTorch does not have, or one that changes its
        arguments.
    """
    match = TARGET.fullmatch(target)
    if match is None or match[1] in REFUSED:
        raise InvalidArtifact(f"{target!r} is no ATen operator that may run through PyTorch", "compile the model again")
    packet = getattr(torch.ops.aten, match[1], None)
    overload = getattr(packet, match[2], None) if packet is not None and match[2] in packet.overloads() else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise InvalidArtifact(
            f"PyTorch {torch.__version__} has no operator {target}", "use the release that saved the executable"
        )
    if overload._schema.is_mutable:
        raise InvalidArtifact(f"operator {target} changes its arguments", "compile the model again")
    return overload


def make_argument(form: Any, inputs: Sequence[torch.Tensor], device: torch.device) -> Any:
    """The argument that a nested form stands for: ("input", i), ("value", literal), ("list", forms...)."""
    kind, *rest = form
    if kind == "input":
        return inputs[rest[0]]
    if kind == "value":
        return device if isinstance(rest[0], torch.device) else rest[0]
    if kind in ("list", "tuple"):
        items = rest[0] if len(rest) == 1 and _is_sequence_of_forms(rest[0]) else rest
        made = [make_argument(item, inputs, device) for item in items]
        return made if kind == "list" else tuple(made)
    raise InvalidArtifact(f"an argument of the unknown form {kind!r}", "compile the model again")


def _is_sequence_of_forms(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, tuple) for item in value)


def run_node(node: Node, inputs: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The results of a node of operator `torch`."""
    operator = resolve_operator(node.attributes["target"])
    args, kwargs = split_call(node.attributes["call"])
    with torch.no_grad():
        result = operator(
            *(make_argument(form, inputs, device) for form in args),
            **{name: make_argument(form, inputs, device) for name, form in kwargs},
        )
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def split_call(call: Any) -> tuple[Sequence[Any], Sequence[tuple[str, Any]]]:
    """Positional forms and named forms of a `call` attribute: a tuple of forms, in which ("keyword", name, form) is a
    named one."""
    args = [form for form in call if form[0] != "keyword"]
    kwargs = [(form[1], form[2]) for form in call if form[0] == "keyword"]
    return args, kwargs


def check_nodes(program: LoadableProgram) -> None:
    """Raises InvalidArtifact where a PyTorch region holds a node that cannot run through PyTorch."""
    for region in program.regions:
        if region.kind == "torch":
            for name in region.nodes:
                node = program.nodes[name]
                if node.operator != "torch":
                    raise InvalidArtifact(
                        f"node {name} of operator {node.operator} stands in a PyTorch region", "compile the model again"
                    )
                resolve_operator(node.attributes["target"])


def run_region(
    region: LoadableRegion,
    buffers: Buffers,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    constants: Mapping[str, torch.Tensor],
) -> None:
    """Run the nodes of a PyTorch region over the executable's storage. `constants` are those of the graph, on the
    device."""
    program = buffers.program
    local: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name in local:
            return local[name]
        if buffers.is_stored(name):
            return buffers.value(name, inputs, outputs)
        return constants[name]

    for node_name in region.nodes:
        node = program.nodes[node_name]
        results = run_node(node, [read(name) for name in node.inputs], buffers.device)
        local.update(zip(node.outputs, results, strict=False))
    for name in region.outputs:
        if buffers.is_stored(name):
            storage = program.storage.get(name)
            flat = buffers.flat(name, inputs, outputs)
            if storage is None:
                unpack(flat, program.storage[program.root(name)].layout).copy_(local[name])
            else:
                write(flat, storage.layout, local[name])
