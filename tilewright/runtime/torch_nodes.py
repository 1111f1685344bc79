"""Nodes that run through PyTorch: operator `torch`, with the ATen operator's name and recipes for its arguments.

Nodes of the operator table may appear here too, if a kernel did not compile: they are evaluated by their definition. `frontend/torch_operators.py`
says which operators a node may name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import InvalidArtifact, KernelFailed
from tilewright.frontend.torch_operators import resolve_operator
from tilewright.graph.operator_arguments import checked_call
from tilewright.graph.reference import evaluate_node, to_numpy
from tilewright.graph.table import OPERATORS
from tilewright.ir.graph import Graph, Node
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion
from tilewright.runtime.packing import torch_dtype, unpack, write
from tilewright.system.autocast import autocast, autocast_types


def make_argument(recipe: tuple[str, Any], inputs: Sequence[torch.Tensor], device: torch.device) -> Any:
    """The argument that a recipe describes: ("input", i), ("value", literal), ("list", recipes), ("dtype", name) or
    ("device", _).

    Raises:
        InvalidArtifact: for another kind, or a dtype that PyTorch lacks.
    """
    kind, value = recipe
    if kind == "input":
        return inputs[value]
    if kind == "value":
        return value
    if kind == "list":
        return [make_argument(item, inputs, device) for item in value]
    if kind == "device":
        return device
    found = getattr(torch, value, None) if kind in ("dtype", "layout", "memory_format") and isinstance(value, str) else None
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise InvalidArtifact(f"an argument {recipe!r} of an unknown kind", "compile the model again")
    return found


def run_node(node: Node, inputs: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tensors that a `torch` node returns. Where autocast casts, its graph says so itself."""
    operator = resolve_operator(node.attributes["target"])
    arguments, keywords = node.attributes["call"]
    with torch.no_grad(), autocast(autocast_types(), False):
        results = checked_call(
            operator,
            [make_argument(recipe, inputs, device) for recipe in arguments],
            {name: make_argument(recipe, inputs, device) for name, recipe in keywords},
        )
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(result for result in results if isinstance(result, torch.Tensor))


def _checked_node(graph: Graph, node: Node, inputs: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tensors that a `torch` node returns, checked against the graph. Exceptions from PyTorch are passed on with a note.

    Raises:
        KernelFailed: if PyTorch returns different tensors; the message names the node.
    """
    try:
        results = run_node(node, inputs, device)
    except Exception as error:
        error.add_note(f"in {node.described}, which none of our kernels computes")
        raise
    if len(results) < len(node.outputs):
        raise KernelFailed(f"{node.described} made {len(results)} tensors, and not {len(node.outputs)}", "compile the model again")
    for name, result in zip(node.outputs, results, strict=False):
        value = graph.values[name]
        if tuple(result.shape) != tuple(value.shape) or result.dtype != torch_dtype(value.dtype):
            wanted = f"{tuple(value.shape)} of {value.dtype}"
            raise KernelFailed(f"{node.described} made {tuple(result.shape)} of {result.dtype}, and not {wanted}", "compile the model again")
    return results


def check_nodes(program: LoadableProgram) -> None:
    """Raises InvalidArtifact if a node cannot run through PyTorch, or a PyTorch region's nodes do not produce its outputs."""
    _check_targets(program.graph)
    for region in program.regions:
        if region.kind == "torch":
            made = {name for node in region.nodes for name in program.nodes[node].outputs}
            missing = sorted(set(region.outputs) - made)
            if missing:
                raise InvalidArtifact(
                    f"region {region.name} is to run through PyTorch, and no node of it makes {', '.join(missing)}",
                    "report this model",
                )


def _check_targets(graph: Graph) -> None:
    for node in graph.nodes:
        if node.operator == "torch":
            resolve_operator(node.attributes["target"])
        elif node.operator == "scan":
            _check_targets(node.attributes["body"])
        elif node.operator not in OPERATORS:
            raise InvalidArtifact(f"node {node.name} has the unknown operator {node.operator!r}", "compile the model again")


def _evaluate(graph: Graph, node: Node, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluates a node of the operator table by its definition, with NumPy: for a kernel that the compiler rejected."""
    results = evaluate_node(graph, node, [to_numpy(tensor) for tensor in inputs])
    made = zip(node.outputs, results, strict=True)
    return tuple(torch.from_numpy(array).to(torch_dtype(graph.values[name].dtype)) for name, array in made)


def run_region(
    region: LoadableRegion,
    buffers: Buffers,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    constants: Mapping[str, torch.Tensor],
) -> None:
    """Runs the nodes of a PyTorch region over the executable's storage. `constants` are those of the graph, on the device."""
    program = buffers.program
    local: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name in local:
            return local[name]
        if buffers.is_stored(name):
            value = program.graph.values.get(name)
            stored = buffers.value(name, inputs, outputs)
            return stored.to(torch_dtype(value.dtype)) if value is not None else stored  # the buffer may have a narrower type than the graph
        return constants[name]

    for node_name in region.nodes:
        node = program.nodes[node_name]
        arguments = [read(name) for name in node.inputs]
        if node.operator == "torch":
            results = _checked_node(program.graph, node, arguments, buffers.device)
        else:
            results = _evaluate(program.graph, node, arguments)
        local.update(zip(node.outputs, results, strict=False))
    for name in region.outputs:
        if buffers.is_stored(name):
            storage = program.storage.get(name)
            flat = buffers.flat(name, inputs, outputs)
            if storage is None:
                unpack(flat, program.storage[program.root(name)].layout).copy_(local[name])
            else:
                write(flat, storage.layout, local[name])
