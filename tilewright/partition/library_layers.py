"""Recurrent layers by a library's operator: a loop, the product of its input before it, and for both directions two of each, as one region.

No model predicts a library's time, and a layer is several regions, which trials measure by themselves. So it is the whole network that decides: a
`Policy` may take layers, and among the partitions that trials compare is one with all of them (`tuning.partitions`). In the graph a layer that is
taken is a loop of one step, whose body has the nodes of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.graph.passes import remove_dead_nodes
from tilewright.ir.expr import Var
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.library import LibraryCall, View
from tilewright.ir.region import Lowered, MergeDecision, Region, Ways
from tilewright.kernels.library.recurrent import Layer, layer_in, layers_of
from tilewright.kernels.library.views import linear_address, view_of
from tilewright.partition.context import Context
from tilewright.partition.merges import LIBRARY, WHOLE, Policy
from tilewright.partition.siblings import Merged
from tilewright.text import seconds_text

BEFORE, WHOLE_LAYER = ".before", ".layer"
"""Suffixes of what a layer adds to the graph: the states that its body reads, and the loop with its result."""
Predict = Callable[[Graph, Collection[str]], float]
"""Predicted seconds of the regions of a graph that have some nodes of these names."""


def take_layers(graph: Graph, predict: Predict, policy: Policy) -> Merged:
    """The graph with the layers that the policy takes, and what was decided about each."""
    decisions: dict[str, MergeDecision] = {}
    for layer in layers_of(graph, graph.constants):
        taken = policy.about(LIBRARY, _results(layer)) is True
        apart = predict(graph, _nodes(graph, layer))
        text = f"{_described(graph, layer)}: {seconds_text(apart)} predicted by kernels, not predicted by a library"
        text += f"; {WHOLE}" if taken else ", which only the time of the whole network chooses"
        concerned = layer.result + WHOLE_LAYER if taken else layer.directions[0].loop.name
        decisions[concerned] = MergeDecision(_results(layer), taken, text, LIBRARY, Ways((math.inf, apart)))
    for layer in layers_of(graph, graph.constants):
        if layer.result + WHOLE_LAYER in decisions:
            graph = with_layer(graph, layer)
    return Merged(graph, MappingProxyType(decisions))


def _results(layer: Layer) -> tuple[str, ...]:
    return layer.result, *layer.finals


def _described(graph: Graph, layer: Layer) -> str:
    steps, sequences, inputs = graph.values[layer.x].shape
    units = graph.values[layer.finals[0]].shape[1]
    both = ", both directions" if layer.operator.bidirectional else ""
    return f"{layer.result} is a layer {layer.operator.name} ({steps} steps, {sequences} x {inputs} to {units}{both})"


def _nodes(graph: Graph, layer: Layer) -> frozenset[str]:
    """Names of the nodes that compute the layer of its inputs."""
    made, names = graph.producers(), {layer.join.name} if layer.join is not None else set[str]()
    waiting = [name for direction in layer.directions for name in (direction.result, *direction.finals)]
    while waiting:
        name = waiting.pop()
        if name not in layer.inputs and made[name].name not in names:
            names.add(made[name].name)
            waiting += made[name].inputs
    return frozenset(names)


def with_layer(graph: Graph, layer: Layer) -> Graph:
    """The graph with the layer as a loop of one step: (states, input, weights) -> (states, h of all steps and directions)."""
    states = [name for direction in layer.directions for name in direction.states]
    before = [f"{name}{BEFORE}{number}" for number, name in enumerate(states)]  # those that are equal have one name outside
    x = _unstacked(graph, layer.x)
    others = tuple(dict.fromkeys((layer.x if x is None else x.inputs[0], *(name for direction in layer.directions for name in direction.weights))))
    given = iter(before)
    loops = {
        direction.loop.name: replace(
            direction.loop, inputs=(*(next(given) for _ in direction.states), *direction.loop.inputs[len(direction.states) :])
        )
        for direction in layer.directions
    }
    names = _nodes(graph, layer)
    inside = [*([] if x is None else [x]), *(loops.get(node.name, node) for node in graph.nodes if node.name in names)]
    one = graph.values[layer.directions[0].result]
    units = one.shape[-1]
    result = Value(layer.result, (*one.shape[:-1], units * len(layer.directions)), one.dtype)
    if layer.result not in graph.values:
        results = tuple(direction.result for direction in layer.directions)
        inside.append(Node(layer.result, "concatenate", results, (layer.result,), MappingProxyType({"axis": 2})))
    read = {name for node in inside for name in (*node.inputs, *node.outputs)} & graph.values.keys()
    values = {name: graph.values[name] for name in graph.values if name in read} | {result.name: result}
    values |= {new: replace(graph.values[name], name=new) for new, name in zip(before, states, strict=True)}
    body = Graph(tuple(inside), (*before, *others), (*layer.finals, layer.result), MappingProxyType(values))
    stacked = Value(layer.result + WHOLE_LAYER, (1, *result.shape), result.dtype)
    attributes = {"body": body, "states": len(states), "sequences": 0, "length": 1, "reverse": (False,)}
    place = layer.directions[0].loop.place
    loop = Node(stacked.name, "scan", (*states, *others), (*layer.finals, stacked.name), MappingProxyType(attributes), place)
    unstacked = Node(layer.result, "reshape", (stacked.name,), (layer.result,), MappingProxyType({"shape": result.shape}), place)
    parts = [
        Node(direction.result, "slice", (result.name,), (direction.result,), MappingProxyType(_part(number * units, units)), place)
        for number, direction in enumerate(layer.directions)
        if direction.result != layer.result
    ]
    gone = {*loops, *([layer.join.name] if layer.join is not None else [])}
    later = {name for direction in layer.directions for name in graph.dependents(direction.loop)}
    places = [number for number, node in enumerate(graph.nodes) if node.name in gone]
    between = [node for node in graph.nodes[places[0] : places[-1]] if node.name not in gone]
    nodes = (
        *graph.nodes[: places[0]],
        *(node for node in between if node.name not in later),
        loop,
        unstacked,
        *parts,
        *(node for node in between if node.name in later),
        *graph.nodes[places[-1] + 1 :],
    )
    values = {**graph.values, stacked.name: stacked, result.name: result}
    return remove_dead_nodes(replace(graph, nodes=nodes, values=MappingProxyType(values)))


def _part(start: int, length: int) -> dict[str, int]:
    """Attributes of a slice of innermost elements."""
    return {"axis": 2, "start": start, "length": length, "step": 1}


def _unstacked(graph: Graph, name: str) -> Node | None:
    """The node that makes the value by leaving out an outermost dimension of 1, such as the result of another layer; None if none does. The operator
    reads the value where that is stored."""
    node = graph.producers().get(name)
    is_part = node is not None and node.operator == "reshape" and graph.values[node.inputs[0]].shape == (1, *graph.values[name].shape)
    return node if is_part else None


def lower_layer(region: Region, context: Context, regions: Sequence[Region]) -> Lowered | None:
    """The library's call for a region whose node is a layer; None for other nodes. States after the last step are stored if one of the regions, or
    who calls the model, reads one.

    Raises:
        ValueError: if the operator does not take the values as they are stored.
    """
    node = region.nodes[0]
    layer = layer_in(node, context.graph.constants)
    if layer is None:
        return None
    body: Graph = node.attributes["body"]
    outer = dict(zip((*body.inputs, *body.outputs), (*node.inputs, *node.outputs), strict=True))
    if (x := _unstacked(body, layer.x)) is not None:
        outer[layer.x] = outer[x.inputs[0]]

    def view(name: str, shape: tuple[int, ...]) -> View:
        axes = tuple(Var(f"i{dim}", extent) for dim, extent in enumerate(shape))
        layout = context.layouts[name]
        address = linear_address(name, layout.offset((*(0,) * (len(layout.shape) - len(shape)), *axes)))
        return view_of(address, shape, [address.stride(axis) for axis in axes])

    wanted = {*context.graph.outputs, *(name for other in regions for name in other.inputs)}
    stored = (layer.result, *(layer.finals if not wanted.isdisjoint(node.outputs[:-1]) else ()))
    inputs, outs = (tuple(view(outer[name], body.values[name].shape) for name in names) for names in (layer.inputs, stored))
    call = LibraryCall(layer.operator, inputs, outs)
    call.check()
    call.check_types(*(context.values[one.name].dtype for one in inputs))
    outputs = tuple(one.name for one in outs)
    return Lowered(replace(region, kind="loop", outputs=outputs), f"library {layer.operator.name}", (), (), library=call)
