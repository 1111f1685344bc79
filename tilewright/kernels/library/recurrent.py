"""Recurrent layers that a library's operator computes: a loop with the body of one, and the product of its input before it; of both directions if
two such loops read one value.

A layer is found by comparing the graph before a loop with that which the front end makes of a layer of these sizes, whatever its values are called.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from tilewright.frontend.aten_recurrent import Cell, gru_step, lstm_step, one_direction, simple_step
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.passes import simplify
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.graph import Graph, Node
from tilewright.ir.library import RECURRENCES, Recurrent

CELLS: Mapping[str, Cell] = MappingProxyType({"lstm": lstm_step, "gru": gru_step, "rnn_tanh": simple_step("tanh"), "rnn_relu": simple_step("relu")})
"""What a step of each operator does."""

BOTH = ".both"
"""Suffix of the name of what both directions make, where the graph does not have it."""


@dataclass(frozen=True)
class Direction:
    """A loop that makes one direction of a layer, with the value that all its steps read, and its weights in the order of `ir.library.Recurrent`."""

    operator: str
    loop: Node
    x: str
    weights: tuple[str, ...]

    @property
    def states(self) -> tuple[str, ...]:
        """The states before the first step."""
        return self.loop.inputs[: self.loop.attributes["states"]]

    @property
    def finals(self) -> tuple[str, ...]:
        """The states after the last step."""
        return self.loop.outputs[: self.loop.attributes["states"]]

    @property
    def result(self) -> str:
        """h of all steps."""
        return self.loop.outputs[-1]

    @property
    def is_backwards(self) -> bool:
        return any(self.loop.attributes["reverse"])


@dataclass(frozen=True)
class Layer:
    """A recurrent layer in a graph. `join`: the node that puts the results of both directions side by side, if there is one."""

    directions: tuple[Direction, ...]
    join: Node | None = None

    @property
    def result(self) -> str:
        """The value with h of all steps and directions, which the graph does not have where nothing joins both directions."""
        if self.join is not None:
            return self.join.outputs[0]
        return self.directions[0].result + (BOTH if len(self.directions) == 2 else "")

    @property
    def operator(self) -> Recurrent:
        return Recurrent(self.directions[0].operator, len(self.directions) == 2)

    @property
    def x(self) -> str:
        """What all steps read."""
        return self.directions[0].x

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the operator reads, in its order."""
        states = (name for direction in self.directions for name in direction.states)
        return self.x, *states, *(name for direction in self.directions for name in direction.weights)

    @property
    def finals(self) -> tuple[str, ...]:
        return tuple(name for direction in self.directions for name in direction.finals)


def layers_of(graph: Graph, constants: Container[str]) -> list[Layer]:
    """The layers of a graph whose weights are among the constants, in the order of their results. A loop that runs backwards is one direction of a
    layer, never a layer by itself, which no operator computes."""
    directions = [found for node in graph.nodes if node.operator == "scan" and (found := _direction(graph, node, constants)) is not None]
    joins = {node.inputs: node for node in graph.nodes if node.operator == "concatenate" and len(node.inputs) == 2 and node.attributes["axis"] == 2}
    ahead_of = {back: ahead for ahead, back in joins}
    backwards = [direction for direction in directions if direction.is_backwards]
    layers: list[Layer] = []
    for ahead in directions:
        if ahead.is_backwards:
            continue
        fitting = (one for one in backwards if ahead_of.get(one.result, ahead.result) == ahead.result and _is_pair(graph, ahead, one))
        back = next(fitting, None)
        if back is not None:
            backwards.remove(back)
        layers.append(Layer((ahead,)) if back is None else Layer((ahead, back), joins.get((ahead.result, back.result))))
    return layers


def _is_pair(graph: Graph, ahead: Direction, back: Direction) -> bool:
    """Whether the loops, the second of which runs backwards, are the directions of one layer."""
    alike = (ahead.operator, ahead.x, len(ahead.weights)) == (back.operator, back.x, len(back.weights))
    same_sizes = graph.values[ahead.result] == replace(graph.values[back.result], name=ahead.result)
    return alike and same_sizes and back.loop.name not in graph.dependents(ahead.loop) and ahead.loop.name not in graph.dependents(back.loop)


def layer_in(node: Node, constants: Container[str]) -> Layer | None:
    """The layer that a loop of one step is, in its body; None if the node is no such loop. `constants`: those of the node's graph."""
    if node.operator != "scan" or node.attributes["length"] != 1 or node.attributes["sequences"]:
        return None
    body: Graph = node.attributes["body"]
    found = layers_of(body, [inner for inner, outer in zip(body.inputs, node.inputs, strict=True) if outer in constants])
    return found[0] if len(found) == 1 and body.outputs == (*found[0].finals, found[0].result) else None


def _direction(graph: Graph, loop: Node, constants: Container[str]) -> Direction | None:
    """The loop as a direction of a layer; None if it is none."""
    states, sequences, length = (loop.attributes[name] for name in ("states", "sequences", "length"))
    shape = graph.values[loop.inputs[0]].shape if states else ()
    if sequences != 1 or len(loop.outputs) != states + 1 or len(shape) != 2 or length < 1:
        return None
    rows = graph.values[loop.inputs[states]].shape[-1]
    for name, kind in RECURRENCES.items():
        if kind.states != states or rows != kind.gates * shape[1]:
            continue
        for width in _widths(graph, loop.inputs[states]):
            for is_biased in (True, False):
                found = _as_layer(graph, loop, name, width, is_biased, constants)
                if found is not None:
                    return found
    return None


def _widths(graph: Graph, name: str) -> list[int]:
    """Innermost extents of what the value is computed of by at most two nodes."""
    made, near, widths = graph.producers(), {name}, dict[int, None]()
    for _ in range(2):
        near = {read for value in near if value in made for read in made[value].inputs}
        widths |= dict.fromkeys(graph.values[read].shape[-1] for read in sorted(near) if len(graph.values[read].shape) == 3)
    return list(widths)


def _as_layer(graph: Graph, loop: Node, name: str, width: int, is_biased: bool, constants: Container[str]) -> Direction | None:
    kind, (sequences, units) = RECURRENCES[name], graph.values[loop.inputs[0]].shape
    dtype, builder = graph.values[loop.inputs[0]].dtype, GraphBuilder()

    def weight(*sizes: int) -> str:
        """A constant other than those before, as equal ones become one."""
        element = torch.full((), 0.5 + len(builder.constants), dtype=getattr(torch, ELEMENT_TYPES[dtype].torch))
        return builder.constant(element.expand(sizes)).name

    x = builder.input("x", (loop.attributes["length"], sequences, width), dtype)
    states = [builder.input("state", (sequences, units), dtype) for _ in range(kind.states)]
    rows = kind.gates * units
    names = [weight(rows, width), weight(rows, units), *(weight(rows) for _ in range(2 * is_biased))]
    parameters = [builder.values[name] for name in names]
    results = one_direction(builder, CELLS[name], x, states, parameters, bool(loop.attributes["reverse"][0]), kind.biases == 2)
    pattern = simplify(builder.finish(results))[0]
    found = bound(pattern, graph, dict(zip(pattern.outputs, loop.outputs, strict=True)), constants)
    if found is None or any(found.get(state.name) != own for state, own in zip(states, loop.inputs, strict=False)):
        return None
    # where the operator has one bias, it is the sum of both, which is a constant of its own
    biases = names[2:] if kind.biases == 2 else [name for name in pattern.constants if name not in names]
    return Direction(name, loop, found[x.name], tuple(found[name] for name in (*names[:2], *biases)))


def bound(pattern: Graph, graph: Graph, results: Mapping[str, str], constants: Container[str]) -> dict[str, str] | None:
    """By each value of the pattern that of the graph which is computed alike, where its `results` are values of the graph: the same operators with
    the same attributes, of what inputs of the pattern may be, and of any constants of equal shapes. None if there are none."""
    made, own = pattern.producers(), graph.producers()
    found: dict[str, str] = {}
    waiting = list(results.items())
    while waiting:
        one, other = waiting.pop()
        if one in found:
            if found[one] != other:
                return None
            continue
        value, its = pattern.values[one], graph.values[other]
        if (value.shape, value.dtype) != (its.shape, its.dtype):
            return None
        found[one] = other
        if one in pattern.constants:
            if other not in constants:
                return None
        elif one not in pattern.inputs:
            node, node_of = made[one], own.get(other)
            if node_of is None or not _alike(node, node_of) or node.outputs.index(one) != node_of.outputs.index(other):
                return None
            waiting += zip(node.inputs, node_of.inputs, strict=True)
    return found


def _alike(one: Node, other: Node) -> bool:
    """Whether the nodes differ in names only."""
    if one.operator != other.operator or len(one.inputs) != len(other.inputs) or len(one.outputs) != len(other.outputs):
        return False
    if one.attributes.keys() != other.attributes.keys():
        return False
    return all(_same(attribute, other.attributes[key]) for key, attribute in one.attributes.items())


def _same(one: object, other: object) -> bool:
    """Whether attributes are the same: of bodies those that compute the same of inputs in the same order, without constants of their own."""
    if not isinstance(one, Graph) or not isinstance(other, Graph):
        return one == other
    if len(one.inputs) != len(other.inputs) or len(one.outputs) != len(other.outputs) or one.constants or other.constants:
        return False
    found = bound(one, other, dict(zip(one.outputs, other.outputs, strict=True)), ())
    inputs = zip(one.inputs, other.inputs, strict=True)
    return found is not None and all(found.get(own, its) == its for own, its in inputs)
