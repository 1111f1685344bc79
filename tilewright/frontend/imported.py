"""The result of a front end: a graph and the calling convention of the model around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedOperator, warn_not_compiled
from tilewright.graph import onnx_call
from tilewright.ir.graph import Graph


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer that became the constant `value`. `source` is a weak reference to the tensor, or None if the model came from a file."""

    name: str
    value: str
    source: weakref.ReferenceType[Any] | None


@dataclass(frozen=True)
class Output:
    """One leaf of what the model returns: a tensor after the ATen view calls in `calls` (`frontend.torch_views`), so that it shares its memory.

    The tensor is by kind "value": graph output number `index`, each of which has memory of its own; "input": the caller's tensor at input leaf
    `index`; "parameter", "state": the module's parameter, or the buffer that the model changes, called `value`. "constant" is the Python object
    `value`. Leaves are one tensor if they are equal; `twin` tells others apart that are made alike. `apart` is the value of the graph with the
    elements of a leaf after calls. "tail": result number `index` of the tail."""

    kind: str
    index: int = -1
    value: Any = None
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    twin: int = 0
    apart: str = ""


@dataclass(frozen=True)
class State:
    """A buffer that the model changes: graph input `input` holds its value before a call, graph output `output` the value after it."""

    name: str
    input: int
    output: int
    source: weakref.ReferenceType[Any] | None
    initial: Any


@dataclass(frozen=True)
class UnsupportedNode:
    """A node that our kernels do not compute: the operator of ATen or ONNX, the shapes of its results, its place in the user's model, and why."""

    node: str
    target: str
    place: str
    reason: str
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def identity(self) -> tuple[str, str]:
        """What the node has in common with itself in a graph for other sizes: names of nodes and reasons may differ."""
        return self.target, self.place or self.node

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        made = f" of {shapes}" if shapes else ""
        return f"{self.target}{made} at {self.place or 'an unknown place'}: {self.reason}"


@dataclass(frozen=True)
class Tail:
    """What runs through ONNX's runtimes after the program, because its results have shapes that depend on data: a `model` (`graph.onnx_call`) that
    reads the graph outputs `inputs`. `nodes` are those at which it begins."""

    model: str
    inputs: tuple[int, ...]
    nodes: tuple[UnsupportedNode, ...] = ()

    def results(self, output: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """What it makes of the graph outputs, which are given by their numbers."""
        return onnx_call.run_model([output(number) for number in self.inputs], self.model)


@dataclass(frozen=True)
class Imported:
    """A model read by a front end. `leaves` are flattened (args, kwargs): for each, the number of its graph input, or None if it was specialised to
    the Python value or the tensor in `literals`. `mutations` pairs (input leaf, graph output whose value is copied back into it). `strides` has for
    leaves on whose strides the model depends those that calls have to repeat, and the storage offset if it depends on that too."""

    graph: Graph
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    leaves: tuple[int | None, ...]
    literals: tuple[Any, ...]
    outputs: tuple[Output, ...]
    mutations: tuple[tuple[int, int], ...] = ()
    states: tuple[State, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    strides: Mapping[int, tuple[tuple[int, ...], int | None]] = field(default_factory=lambda: MappingProxyType({}))
    tail: Tail | None = None

    @property
    def updates(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a graph input and the graph output that replaces it after a call: the mutations and the states."""
        pairs = [(self.leaves[leaf], output) for leaf, output in self.mutations] + [(state.input, state.output) for state in self.states]
        return tuple((given, output) for given, output in pairs if given is not None)

    def with_results_apart(self) -> Imported:
        """A model that changes nothing, with results that share memory as outputs of their own."""
        positions: dict[Output, int] = {}
        names: list[str] = []
        outputs = []
        for output in self.outputs:
            if output.kind == "value":
                if output not in positions:
                    positions[output] = len(names)
                    names.append(output.apart or self.graph.outputs[output.index])
                output = Output("value", positions[output])
            outputs.append(output)
        return replace(self, graph=replace(self.graph, outputs=tuple(names)), outputs=tuple(outputs))


def through(nodes: Sequence[UnsupportedNode]) -> str:
    """What runs these nodes: "through PyTorch", "through ONNX's runtimes", or both."""
    kinds = {node.target.startswith(onnx_call.PREFIX): None for node in nodes}
    return "through " + " and ".join("ONNX's runtimes" if onnx else "PyTorch" for onnx in sorted(kinds))


def unsupported(graph: Graph) -> tuple[UnsupportedNode, ...]:
    """Every node that runs through PyTorch or ONNX's runtimes, including those in loop bodies."""
    found: list[UnsupportedNode] = []
    for node in graph.nodes:
        if node.operator == "torch":
            shapes = tuple(graph.values[name].shape for name in node.outputs if name in graph.values)
            found.append(UnsupportedNode(node.name, node.attributes["target"], node.place, node.attributes.get("reason", ""), shapes))
        elif node.operator == "scan":
            found.extend(unsupported(node.attributes["body"]))
    return tuple(found)


def report_unsupported(nodes: Sequence[UnsupportedNode], action: str) -> None:
    """Lists the nodes, if there are any: in a warning, or, if `action` is "error", in an UnsupportedOperator that is raised."""
    if not nodes:
        return
    listing = "\n".join(f"  {node}" for node in nodes)
    one = len(nodes) == 1
    if action == "error":
        covered = "1 operator is" if one else f"{len(nodes)} operators are"
        raise UnsupportedOperator(f"{covered} not covered:\n{listing}", f'use unsupported="warn" to run them {through(nodes)}')
    remedy = 'results are right; for speed use operators that have kernels, or add these (docs/kernels.md); unsupported="error" refuses them'
    warn_not_compiled(f"{'1 operator runs' if one else f'{len(nodes)} operators run'} {through(nodes)}:\n{listing}\n{remedy}")
