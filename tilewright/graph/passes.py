"""Passes that simplify a graph: each a pure function from graph to graph; `simplify` runs them to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tilewright.errors import IndexOutOfRange
from tilewright.graph import table
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.divisors import check_divisor
from tilewright.graph.index_checks import invalid
from tilewright.graph.reference import evaluate_node, to_numpy
from tilewright.ir.dtypes import ELEMENT_TYPES, NARROW_FLOATS, computed_in, is_float, of_torch
from tilewright.ir.graph import Graph, Node, Value

FOLDED_ELEMENTS = 1 << 24  # elements of a folded constant, unless it is no larger than its operands
REFERENCE_POINTS = 1 << 26  # maximum iteration points that folding evaluates for one node

Pass = Callable[[Graph], Graph]


@dataclass(frozen=True)
class Applied:
    """One application of a pass: its name and the number of nodes before and after."""

    name: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after} nodes"


def simplify(graph: Graph) -> tuple[Graph, tuple[Applied, ...]]:
    """Runs every pass in order until nothing changes. Returns the graph and a log of the passes that changed it."""
    log: list[Applied] = []
    while True:
        changed = False
        for one in PASSES:
            result = one(graph)
            if result is not graph:
                log.append(Applied(one.__name__, len(graph.nodes), len(result.nodes)))
                graph, changed = result, True
        if not changed:
            return graph, tuple(log)


def rebuilt(graph: Graph, nodes: list[Node], values: Mapping[str, Value] | None = None, constants: Mapping[str, Any] | None = None) -> Graph:
    """The graph with other nodes; values and constants that nothing refers to are dropped."""
    values = graph.values if values is None else values
    constants = graph.constants if constants is None else constants
    used = {*graph.inputs, *graph.outputs, *(n for node in nodes for n in (*node.inputs, *node.outputs))}
    return replace(
        graph,
        nodes=tuple(nodes),
        values=MappingProxyType({n: v for n, v in values.items() if n in used}),
        constants=MappingProxyType({n: t for n, t in constants.items() if n in used}),
    )


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if not any(n in names for n in node.inputs):
        return node
    return replace(node, inputs=tuple(names.get(n, n) for n in node.inputs))


def remove_dead_nodes(graph: Graph) -> Graph:
    """Drops nodes whose results are all unused."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    dropped = len(kept) != len(graph.nodes) or any(n not in needed for n in graph.constants)
    return rebuilt(graph, kept[::-1]) if dropped else graph


def fold_constants(graph: Graph) -> Graph:
    """*f(constants)* -> *constant*, evaluated by the reference evaluator, in float64 for float32 and then rounded.

    Nodes that produce graph outputs stay (an output is always computed by a node), as do nodes that only enlarge a constant, loops, and calls through
    PyTorch.

    Raises:
        InvalidModel: if a constant is an index out of range, or an integer divisor that holds 0.
    """
    constants = dict(graph.constants)
    outputs = set(graph.outputs)
    nodes: list[Node] = []
    for node in graph.nodes:
        check_divisor(graph, node, constants)
        foldable = node.operator not in table.STRUCTURAL and all(n in constants for n in node.inputs) and not outputs.intersection(node.outputs)
        if not foldable or not _worth_folding(graph, node):
            nodes.append(node)
            continue
        results = _evaluate_exactly(graph, node, [constants[n] for n in node.inputs])
        constants.update(zip(node.outputs, results, strict=True))
    return graph if len(nodes) == len(graph.nodes) else rebuilt(graph, nodes, constants=constants)


def _worth_folding(graph: Graph, node: Node) -> bool:
    produced = sum(graph.values[n].elements for n in node.outputs)
    consumed = sum(graph.values[n].elements for n in node.inputs)
    if produced > max(consumed, 4096) and (node.operator in ("expand", "repeat", "full") or produced > FOLDED_ELEMENTS):
        return False
    steps = table.computation(node, graph.values).steps
    points = 0
    for step in steps:
        count = 1
        for axis in (*step.axes, *step.reduction):
            count *= axis.extent or 0
        points += count
    return points <= REFERENCE_POINTS


def _evaluate_exactly(graph: Graph, node: Node, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The node's results; arithmetic in floating point is done in float64 and rounded once."""
    names = (*node.inputs, *node.outputs)
    wide = {n: replace(value, dtype=_exact(value.dtype)) for n, value in zip(names, (graph.values[n] for n in names), strict=True)}
    attributes = {k: _exact(v) if k == "dtype" and isinstance(v, str) else v for k, v in node.attributes.items()}
    arrays = [to_numpy(t) for t in inputs]
    try:
        if node.operator == "bit_cast":  # which has the bits of the type that it reads
            results = evaluate_node(graph, node, arrays)
        else:
            arrays = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]
            results = evaluate_node(replace(graph, values=wide), replace(node, attributes=MappingProxyType(attributes)), arrays)
    except IndexOutOfRange as error:
        raise invalid(error) from error
    made = [torch.from_numpy(np.ascontiguousarray(r).reshape(r.shape).copy()) for r in results]
    return [tensor.to(_torch_type(graph, name)) for tensor, name in zip(made, node.outputs, strict=True)]


def _exact(dtype: str) -> str:
    return "f64" if is_float(dtype) else dtype


def split_batch_norm(graph: Graph) -> Graph:
    """*batch_norm(x, constants)* that cannot be folded into the node before it -> *x * scale + shift* with constant scale and shift."""
    nodes: list[Node] = []
    values, constants = dict(graph.values), dict(graph.constants)
    for node in graph.nodes:
        if node.operator != "batch_norm" or not all(n in constants for n in node.inputs[1:]):
            nodes.append(node)
            continue
        x = graph.values[node.inputs[0]]
        scale, shift = _scale_and_shift(graph, node)
        parts = []
        for label, tensor in (("scale", scale), ("shift", shift)):
            name = f"{node.name}_{label}"
            constants[name] = tensor.to(_folded_type(x)).reshape(-1, *(1,) * (len(x.shape) - 2))
            values[name] = Value(name, tuple(constants[name].shape), of_torch(constants[name].dtype))
            parts.append(name)
        scaled = f"{node.name}_scaled"
        values[scaled] = Value(scaled, x.shape, x.dtype)
        attributes = MappingProxyType({"dtype": computed_in(x.dtype)})
        nodes.append(Node(scaled, "mul", (x.name, parts[0]), (scaled,), attributes, node.place))
        nodes.append(Node(node.name, "add", (scaled, parts[1]), node.outputs, attributes, node.place))
    return graph if len(nodes) == len(graph.nodes) else rebuilt(graph, nodes, values, constants)


def _torch_type(graph: Graph, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, ELEMENT_TYPES[graph.values[name].dtype].torch)
    return dtype


def _folded_type(x: Value) -> torch.dtype:
    """The type of constants that are folded into a normalisation of `x`: rounding them to 16 bits would add to the rounding of the results."""
    dtype: torch.dtype = getattr(torch, ELEMENT_TYPES[computed_in(x.dtype)].torch)
    return dtype


def _scale_and_shift(graph: Graph, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x scale + shift of an inference batch norm, in float64."""
    mean, variance, *parameters = (graph.constants[n].double() for n in node.inputs[1:])
    scale = torch.rsqrt(variance + node.attributes["epsilon"])
    scale = scale * parameters[0] if parameters else scale
    shift = -mean * scale
    return scale, shift + parameters[1] if len(parameters) > 1 else shift


_OUTPUT_AXIS = {"convolution": 0, "transposed_convolution": 1, "linear": 0}


def fold_batch_norm(graph: Graph) -> Graph:
    """*batch_norm(convolution(x, w) [+ bias])* -> *convolution(x, w scale) + (bias scale + shift)*, if the inner results have no other reader.
    Weights are scaled in float64 and rounded once. 16-bit weights stay as they are, since scaled ones would be rounded again or be larger:
    -> *convolution(x, w) scale + (bias scale + shift)*."""
    producers, consumers = graph.producers(), graph.consumers()
    values, constants = dict(graph.values), dict(graph.constants)
    replaced: dict[str, list[Node]] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        if node.operator != "batch_norm" or not all(n in constants for n in node.inputs[1:]):
            continue
        inner = producers.get(node.inputs[0])
        bias: torch.Tensor | None = None
        added: Node | None = None
        if inner is not None and inner.operator == "add" and len(inner.inputs) == 2 and _private(graph, inner, consumers):
            bias = _channel_bias(graph, inner.inputs[1], values[inner.outputs[0]])
            added, inner = inner, producers.get(inner.inputs[0]) if bias is not None else None
        if inner is None or inner.operator not in _OUTPUT_AXIS or not _private(graph, inner, consumers):
            continue
        if inner.inputs[1] not in constants or (inner.operator == "linear" and len(values[inner.outputs[0]].shape) != 2):
            continue
        scale, shift = _scale_and_shift(graph, node)
        weight = constants[inner.inputs[1]]
        groups = inner.attributes.get("groups", 1)
        x = values[inner.outputs[0]]
        name_w, along = inner.inputs[1], (-1, *(1,) * (len(x.shape) - 2))
        added_constants = {f"{node.name}_bias": (shift if bias is None else bias.double() * scale + shift).reshape(along)}
        results = [f"{node.name}_{inner.operator}"]
        if values[name_w].dtype in NARROW_FLOATS:
            added_constants[f"{node.name}_scale"] = scale.reshape(along)
            results.append(f"{node.name}_scaled")
        else:
            name_w = f"{node.name}_weight"
            added_constants[name_w] = _scaled(weight.double(), scale, inner.operator, groups)
        for name, tensor in added_constants.items():
            constants[name] = tensor.to(_folded_type(x))
            values[name] = Value(name, tuple(tensor.shape), of_torch(constants[name].dtype))
        values |= {name: Value(name, x.shape, x.dtype) for name in results}
        computed = MappingProxyType({"dtype": computed_in(x.dtype)})
        replaced[node.name] = [
            Node(results[0], inner.operator, (inner.inputs[0], name_w), (results[0],), inner.attributes, inner.place),
            *(Node(name, "mul", (results[0], f"{node.name}_scale"), (name,), computed, node.place) for name in results[1:]),
            Node(node.name, "add", (results[-1], f"{node.name}_bias"), node.outputs, computed, node.place),
        ]
        gone.update(n.name for n in (inner, added) if n is not None)
    if not replaced:
        return graph
    nodes = [new for node in graph.nodes if node.name not in gone for new in replaced.get(node.name, [node])]
    return rebuilt(graph, nodes, values, constants)


def _private(graph: Graph, node: Node, consumers: Mapping[str, list[Node]]) -> bool:
    """Whether a node's only result is read by exactly one node and is not a graph output."""
    return len(node.outputs) == 1 and len(consumers[node.outputs[0]]) == 1 and node.outputs[0] not in graph.outputs


def _channel_bias(graph: Graph, name: str, result: Value) -> torch.Tensor | None:
    """A constant added along dimension 1, as a vector, or None."""
    tensor = graph.constants.get(name)
    if tensor is None or len(result.shape) < 2 or tensor.ndim > len(result.shape):
        return None
    full = (1,) * (len(result.shape) - tensor.ndim) + tuple(tensor.shape)
    wanted = (1, result.shape[1], *(1,) * (len(result.shape) - 2))
    return tensor.reshape(-1) if full == wanted else None


def _scaled(weight: torch.Tensor, scale: torch.Tensor, operator: str, groups: int) -> torch.Tensor:
    """Weights multiplied by one scale per output channel, all in float64."""
    if operator != "transposed_convolution":
        return weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    by_group = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    scaled = by_group * scale.reshape(groups, 1, weight.shape[1], *(1,) * (weight.ndim - 2))
    return scaled.reshape(weight.shape)


def split_transposed_convolution(graph: Graph) -> Graph:
    """*transposed_convolution* of stride s -> *interleave* of one ordinary convolution for each of the s**rank phases.

    With O = o + padding, output O = i s + t takes taps t = (O mod s) + s j only, j = 0, 1, ..., from inputs i = O // s - j: so the outputs of
    one phase O mod s are a convolution of stride 1 with every s-th tap in reverse order, and no product with an inserted zero is computed.
    If the filter is dilated and the stride is not 1, the node stays."""
    if not any(_has_phases(node) for node in graph.nodes):
        return graph
    builder = GraphBuilder.resume(graph)
    names: dict[str, str] = {}
    for original in graph.nodes:
        node = _renamed(original, names)
        if _has_phases(node):
            with builder.at(f"{node.name}_phase", node.place):
                names[node.outputs[0]] = _phases(builder, node).name
        else:
            builder.nodes.append(node)
    renamed = replace(graph, outputs=tuple(names.get(n, n) for n in graph.outputs))
    return rebuilt(renamed, builder.nodes, builder.values, builder.constants)


def _has_phases(node: Node) -> bool:
    if node.operator != "transposed_convolution":
        return False
    return all(s == 1 or d == 1 for s, d in zip(node.attributes["stride"], node.attributes["dilation"], strict=True))


def _phases(b: GraphBuilder, node: Node) -> Value:
    x, w, result = (b.values[n] for n in (*node.inputs, node.outputs[0]))
    stride, padding, groups = node.attributes["stride"], node.attributes["padding"], node.attributes.get("groups", 1)
    dilation = node.attributes["dilation"]
    rank, outputs = len(stride), result.shape[2:]
    bases = [p // s for p, s in zip(padding, stride, strict=True)]  # the first phase element that any output needs
    counts = [(p + o - 1) // s - base + 1 for p, o, s, base in zip(padding, outputs, stride, bases, strict=True)]
    parts = []
    for phase in product(*(range(s) for s in stride)):
        taps = [len(range(r, f, s)) for r, f, s in zip(phase, w.shape[2:], stride, strict=True)]
        if not all(taps):
            parts.append(b.full((*result.shape[:2], *counts), 0, x.dtype))
            continue
        filters, data, pairs = w, x, []
        for axis in range(rank):
            reach = dilation[axis] * (taps[axis] - 1)
            filters = b.slice(filters, 2 + axis, phase[axis], w.shape[2 + axis], stride[axis])
            before = reach - bases[axis]
            after = counts[axis] + reach - x.shape[2 + axis] - before
            data = b.slice(data, 2 + axis, max(-before, 0), x.shape[2 + axis] - max(-after, 0))
            pairs.append((max(before, 0), max(after, 0)))
        parts.append(
            b.op("convolution", data, _forward(b, filters, groups), stride=(1,) * rank, padding=tuple(pairs), dilation=dilation, groups=groups)
        )
    if len(parts) == 1:
        return parts[0]
    starts = tuple(p - base * s for p, base, s in zip(padding, bases, stride, strict=True))
    return b.op("interleave", *parts, strides=stride, starts=starts, extents=outputs)


def _forward(b: GraphBuilder, w: Value, groups: int) -> Value:
    """Weights [C, K / groups, taps...] of a transposed convolution as [K, C / groups, taps in reverse...]."""
    channels, group_outputs, *taps = w.shape
    if any(t > 1 for t in taps):
        w = b.op("flip", w, axes=tuple(range(2, 2 + len(taps))))
    grouped = b.reshape(w, (groups, channels // groups, group_outputs, *taps))
    swapped = b.permute(grouped, (0, 2, 1, *range(3, 3 + len(taps))))
    return b.reshape(swapped, (groups * group_outputs, channels // groups, *taps))


def merge_views(graph: Graph) -> Graph:
    """*reshape(reshape(x))* -> *reshape(x)*, *permute(permute(x))* -> *permute(x)*, and views that change nothing -> *x*. A permute that
    moves only dimensions of extent 1 becomes a reshape."""
    outputs = set(graph.outputs)
    names: dict[str, str] = {}
    nodes: list[Node] = []
    changed = False
    current: dict[str, Node] = {}
    for original in graph.nodes:
        node = _renamed(original, names)
        if node.operator in ("reshape", "permute", "expand", "copy", "cast", "slice", "repeat"):
            node = _merged(graph, node, current)
            source, result = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
            if _is_identity(node, source, result) and result.name not in outputs:
                names[result.name] = source.name
                changed = True
                continue
        changed |= node is not original
        nodes.append(node)
        current.update((o, node) for o in node.outputs)
    return rebuilt(graph, nodes) if changed else graph


def _merged(graph: Graph, node: Node, current: Mapping[str, Node]) -> Node:
    inner = current.get(node.inputs[0])
    if node.operator == "permute":
        axes, shape = node.attributes["axes"], graph.values[node.inputs[0]].shape
        moved = [a for a in axes if shape[a] != 1]
        if moved == sorted(moved):
            result = graph.values[node.outputs[0]]
            node = replace(node, operator="reshape", attributes=MappingProxyType({"shape": result.shape}))
    if inner is None or inner.operator != node.operator:
        return node
    if node.operator == "reshape":
        return replace(node, inputs=inner.inputs)
    if node.operator == "permute":
        axes = tuple(inner.attributes["axes"][a] for a in node.attributes["axes"])
        return replace(node, inputs=inner.inputs, attributes=MappingProxyType({"axes": axes}))
    return node


def _is_identity(node: Node, source: Value, result: Value) -> bool:
    if node.operator == "permute":
        axes: tuple[int, ...] = node.attributes["axes"]
        return axes == tuple(range(len(source.shape)))
    if node.operator in ("reshape", "expand", "copy", "repeat"):
        return source.shape == result.shape
    if node.operator == "slice":
        return source.shape == result.shape and node.attributes["step"] == 1
    return source.dtype == result.dtype


def _bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, from a copy: a tensor expanded from one element counts as contiguous but has a stride of zero."""
    plain = tensor.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def eliminate_common_subexpressions(graph: Graph) -> Graph:
    """Computes equal operators with equal inputs and attributes once and stores equal constants once. Calls through PyTorch may be
    random and stay."""
    names: dict[str, str] = {}
    seen: dict[Any, Node] = {}
    outputs = set(graph.outputs)
    nodes: list[Node] = []
    tensors: dict[Any, str] = {}
    key: Any
    for name, tensor in graph.constants.items():
        if tensor.numel() <= 4096:
            key = (tuple(tensor.shape), tensor.dtype, _bytes(tensor))
            if tensors.setdefault(key, name) != name and name not in outputs:
                names[name] = tensors[key]
    changed = bool(names)
    for original in graph.nodes:
        node = _renamed(original, names)
        if node.operator not in table.STRUCTURAL:
            key = (node.operator, node.inputs, len(node.outputs), repr(sorted(node.attributes.items())))
            first = seen.setdefault(key, node)
            if first is not node and not outputs.intersection(node.outputs):
                names.update(zip(node.outputs, first.outputs, strict=True))
                changed = True
                continue
        nodes.append(node)
    return rebuilt(graph, nodes) if changed else graph


def simplify_loops(graph: Graph) -> Graph:
    """Runs `simplify` on the bodies of loops."""
    nodes = []
    changed = False
    for node in graph.nodes:
        if node.operator == "scan":
            body, log = simplify(node.attributes["body"])
            if log:
                changed = True
                node = replace(node, attributes=MappingProxyType({**node.attributes, "body": body}))
        nodes.append(node)
    return graph.with_nodes(nodes) if changed else graph


def lift_loop_constants(graph: Graph) -> Graph:
    """Makes the constants of loops' bodies constants of the graph, which the bodies read as inputs: all that a step reads is stored outside of it."""
    nodes: list[Node] = []
    values, constants = dict(graph.values), dict(graph.constants)
    for node in graph.nodes:
        body: Graph | None = node.attributes.get("body") if node.operator == "scan" else None
        if body is not None and body.constants:
            names = {name: f"{node.name}.{name}" for name in body.constants}
            assert not values.keys() & names.values()  # results are the node's name with numbers, and operators have names of identifiers
            values.update((outer, replace(body.values[name], name=outer)) for name, outer in names.items())
            constants.update((outer, body.constants[name]) for name, outer in names.items())
            body = replace(body, inputs=(*body.inputs, *names), constants=MappingProxyType({}))
            node = replace(node, inputs=(*node.inputs, *names.values()), attributes=MappingProxyType({**node.attributes, "body": body}))
        nodes.append(node)
    return rebuilt(graph, nodes, values, constants) if len(constants) > len(graph.constants) else graph


PASSES: tuple[Pass, ...] = (
    remove_dead_nodes,
    fold_constants,
    fold_batch_norm,
    split_batch_norm,
    split_transposed_convolution,
    merge_views,
    eliminate_common_subexpressions,
    simplify_loops,
    lift_loop_constants,
    remove_dead_nodes,
)
