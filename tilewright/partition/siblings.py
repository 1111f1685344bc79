"""Products that share their first factor, merged into one: Q, K and V of attention, the 1x1 heads of an Inception module.

Siblings are linear layers, or convolutions of equal windows, of one value with different constant weights. Together with the element-by-element
operators that follow each of them alike, they become one product with the weights' rows one after the other, whose result the readers take slices of:
one kernel and one reading of the input. DeepCuts (Jung et al., PLDI 2021) names this horizontal fusion as future work. Whether it is done is decided
by prediction (`merge_siblings`): the regions that a merge changes, before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from tilewright.graph.passes import rebuilt
from tilewright.graph.table import OPERATORS, STRUCTURAL, computation
from tilewright.ir.expr import Const, Expr, Load, loads, rewrite, variables
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import MergeDecision, Region
from tilewright.partition.layouts import in_graph
from tilewright.partition.merges import BY_MERGES, Policy, Timed, compared

TOGETHER, PART = ".together", ".part"
"""Suffixes of what a merge adds to the graph: merged nodes, and slices of their results."""
SIBLINGS = "siblings"
"""The kind of these merges."""
LONGEST = 4
"""Maximum operators after each sibling that are merged with it."""


@dataclass(frozen=True)
class Siblings:
    """Two or more chains of nodes, each a product and what follows it alike; all have the same length. `axis`: the dimension, counted from the last,
    in which their results are put side by side."""

    chains: tuple[tuple[Node, ...], ...]
    axis: int

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(chain[-1].outputs[0] for chain in self.chains)

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(node.name for chain in self.chains for node in chain)

    def without(self, results: frozenset[str]) -> Siblings | None:
        """The siblings whose results are not among these, if there are still two."""
        chains = tuple(chain for chain in self.chains if chain[-1].outputs[0] not in results)
        return replace(self, chains=chains) if len(chains) > 1 else None


@dataclass(frozen=True)
class Merged:
    """A rewritten graph, and the decisions by the node whose region they concern."""

    graph: Graph
    decisions: Mapping[str, MergeDecision] = field(default_factory=lambda: MappingProxyType({}))


Predict = Callable[[Graph, Callable[[Region], bool]], Sequence[Timed]]
"""Predicts the regions of a graph for which the function says true."""


def merge_siblings(
    graph: Graph, predict: Predict, kept: MutableMapping[tuple[str, ...], frozenset[str]] | None = None, policy: Policy = BY_MERGES
) -> Merged:
    """Merges the siblings of a graph wherever the regions concerned are predicted, or were measured, to be faster: those that compute the siblings or
    read their results. A second way leaves out the siblings whose results are concatenated: these can be stored in place, slices of a merged product
    are copied. Graphs without siblings cost nothing. `kept`: by the results of each group those that are merged for another size of the model, which
    decide without any prediction if they decide about all groups about which the `policy` says nothing; otherwise what is decided here is added."""
    groups = find_siblings(graph)
    if not groups:
        return Merged(graph)
    kept = {} if kept is None else kept
    following = policy.as_kept(SIBLINGS, (group.results for group in groups), kept)
    if len(following) == len(groups):
        return _as_before(graph, groups, kept)
    concatenated = frozenset(name for node in graph.nodes if node.operator == "concatenate" for name in node.inputs)
    fewer = [group.without(concatenated) if concatenated.intersection(group.results) else None for group in groups]
    ways: list[list[Siblings | None]] = [list(groups), fewer]
    before = predict(graph, partial(_concerns, _union(groups, lambda group: group.nodes), _union(groups, lambda group: group.results)))
    predictions = []
    predicted: list[tuple[list[Siblings], Graph]] = [([], graph)]
    for way in ways:
        some = [group for group in way if group is not None]
        if some:
            predicted.append((some, _with(graph, some)))
            predictions.append((way, predict(predicted[-1][1], partial(_concerns, _union(some, _names), frozenset()))))
    chosen: list[Siblings] = []
    decisions: dict[str, MergeDecision] = {}
    for number, group in enumerate(groups):
        if group.results in following:
            merged, decision = _earlier(group, kept)
            chosen += [merged] if merged is not None else []
            decisions |= decision
            continue
        apart = _concerned(before, group.nodes, frozenset(group.results))
        ways_of_group = [
            ([*_concerned(after, _names(merged), frozenset()), *_rest(before, group, merged)], merged)
            for way, after in predictions
            if (merged := way[number]) is not None
        ]
        together, best = min(ways_of_group, key=lambda entry: sum(timed.seconds for timed in entry[0]))
        both = compared(together, apart, policy.about(SIBLINGS, group.results), policy.predicted)
        told = f"{', '.join(chain[0].name for chain in best.chains)} read the same value"
        times = both.text("in one product", "apart")
        kept[group.results] = frozenset(best.results) if both.taken else frozenset()
        if both.taken:
            chosen.append(best)
            decisions[best.chains[0][0].name + TOGETHER] = MergeDecision(group.results, True, f"{told}: {times}", SIBLINGS, both.ways)
        else:
            decisions[group.chains[0][0].name] = MergeDecision(group.results, False, f"{told}, but stay apart: {times}", SIBLINGS, both.ways)
    known = next((merged for groups, merged in predicted if groups == chosen), None)
    return Merged(known or _with(graph, chosen), MappingProxyType(decisions))


def _as_before(graph: Graph, groups: Sequence[Siblings], kept: Mapping[tuple[str, ...], frozenset[str]]) -> Merged:
    """The graph with the siblings merged that are so for another size."""
    found = [_earlier(group, kept) for group in groups]
    chosen = [merged for merged, _ in found if merged is not None]
    decisions = {node: decision for _, own in found for node, decision in own.items()}
    return Merged(_with(graph, chosen) if chosen else graph, MappingProxyType(decisions))


def _earlier(group: Siblings, kept: Mapping[tuple[str, ...], frozenset[str]]) -> tuple[Siblings | None, dict[str, MergeDecision]]:
    """The siblings of a group that are merged for another size, if any, and that decision by the node whose region it concerns."""
    merged = group.without(frozenset(group.results) - kept[group.results])
    told = f"{', '.join(chain[0].name for chain in (merged or group).chains)} read the same value"
    if merged is None:
        return None, {group.chains[0][0].name: MergeDecision(group.results, False, f"{told}, but stay apart, as for another size", SIBLINGS)}
    return merged, {merged.chains[0][0].name + TOGETHER: MergeDecision(merged.results, True, f"{told}: one product, as for another size", SIBLINGS)}


def _names(group: Siblings) -> frozenset[str]:
    """The nodes that the merge of a group adds."""
    return frozenset((*(node.name + TOGETHER for node in group.chains[0]), *(name + PART for name in group.results)))


def _concerned(regions: Sequence[Timed], nodes: frozenset[str], values: frozenset[str]) -> list[Timed]:
    """The regions with one of the nodes, or that read one of the values."""
    return [timed for timed in regions if _concerns(nodes, values, timed.region)]


def _concerns(nodes: frozenset[str], values: frozenset[str], region: Region) -> bool:
    return not nodes.isdisjoint(node.name for node in region.nodes) or not values.isdisjoint(map(in_graph, region.inputs))


def _union(groups: Sequence[Siblings], names: Callable[[Siblings], Iterable[str]]) -> frozenset[str]:
    return frozenset(name for group in groups for name in names(group))


def _rest(before: Sequence[Timed], group: Siblings, merged: Siblings) -> list[Timed]:
    """The regions of siblings that a smaller merge leaves apart."""
    mine = _concerned(before, merged.nodes, frozenset(merged.results))
    return [timed for timed in _concerned(before, group.nodes, frozenset(group.results)) if timed not in mine]


def find_siblings(graph: Graph) -> list[Siblings]:
    """The groups of siblings, in graph order."""
    consumers = graph.consumers()
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.operator not in ("linear", "convolution") or node.inputs[0] in graph.constants or node.inputs[1] not in graph.constants:
            continue
        if node.attributes.get("groups", 1) != 1:
            continue
        weight = graph.values[node.inputs[1]]
        alike.setdefault((node.operator, node.inputs[0], weight.shape[1:], weight.dtype, *sorted(node.attributes.items())), []).append(node)
    found = []
    for nodes in alike.values():
        if len(nodes) < 2 or len({node.inputs[1] for node in nodes}) < len(nodes):
            continue
        rank = len(graph.values[nodes[0].outputs[0]].shape)
        axis = 1 if nodes[0].operator == "linear" else rank - 1
        chains: list[tuple[Node, ...]] = [(node,) for node in nodes]
        while len(chains[0]) <= LONGEST and (longer := _longer(graph, chains, axis, consumers)) is not None:
            chains = longer
        group = Siblings(tuple(chains), axis)
        if not any(name.startswith(added) for name in graph.values for added in _names(group)):  # names of ONNX files may be any
            found.append(group)
    return found


def _longer(graph: Graph, chains: Sequence[tuple[Node, ...]], axis: int, consumers: Mapping[str, Sequence[Node]]) -> list[tuple[Node, ...]] | None:
    """The chains with the next node of each, if these can be merged too."""
    following = []
    for chain in chains:
        end = chain[-1].outputs[0]
        readers = consumers[end]
        if end in graph.outputs or len(readers) != 1:
            return None
        following.append(readers[0])
    first = following[0]
    place = [node.inputs.index(chain[-1].outputs[0]) for node, chain in zip(following, chains, strict=True)]
    if len(set(place)) > 1 or any(
        (node.operator, dict(node.attributes), len(node.inputs)) != (first.operator, dict(first.attributes), len(first.inputs)) for node in following
    ):
        return None
    for chain, node in zip(chains, following, strict=True):
        if not _is_elementwise(graph, node, chain[-1].outputs[0]):
            return None
    for number in range(len(first.inputs)):
        if number != place[0] and _side_by_side(graph, [node.inputs[number] for node in following], chains, axis) is None:
            return None
    return [(*chain, node) for chain, node in zip(chains, following, strict=True)]


def _is_elementwise(graph: Graph, node: Node, value: str) -> bool:
    """Whether the node is a map of the value, element by element, and of constants, that is the same at every place of the value."""
    if node.operator in STRUCTURAL or OPERATORS[node.operator].view or len(node.outputs) != 1:
        return False
    if any(name != value and name not in graph.constants for name in node.inputs) or node.inputs.count(value) != 1:
        return False
    steps = computation(node, graph.values).steps
    if len(steps) != 1 or steps[0].kind != "map" or graph.values[node.outputs[0]].shape != graph.values[value].shape:
        return False
    step = steps[0]
    extents = graph.values[value].shape
    if any(
        position != axis and extent != 1
        for load in loads(*step.bodies)
        if load.buffer == value
        for position, axis, extent in zip(load.index, step.axes, extents, strict=True)
    ):
        return False

    def without_place(expr: Expr) -> Expr:
        plain = isinstance(expr, Load) and all(isinstance(position, Const) or position in step.axes for position in expr.index)
        return Const(0.0, expr.dtype) if plain else expr

    # what is left of the axes depends on the place, such as the mask of a triangle: another one in a merged value
    return not any(variables(rewrite(body, without_place)) & {*step.axes} for body in step.bodies)


def _side_by_side(graph: Graph, names: Sequence[str], chains: Sequence[tuple[Node, ...]], axis: int) -> torch.Tensor | None:
    """The constants that the chains read as one: one after the other along the axis if they vary along it; None if they do not fit together."""
    tensors: list[torch.Tensor] = [graph.constants[name] for name in names]
    first = tensors[0]
    if any(tensor.dim() != first.dim() or tensor.dtype != first.dtype for tensor in tensors):
        return None
    if first.dim() < axis or all(tensor.shape[-axis] == 1 for tensor in tensors):
        return first if all(torch.equal(tensor, first) for tensor in tensors) else None
    extents = [graph.values[chain[0].outputs[0]].shape[-axis] for chain in chains]
    rests = {(*tensor.shape[:-axis], *tensor.shape[tensor.dim() - axis + 1 :]) for tensor in tensors}
    if len(rests) > 1 or [tensor.shape[-axis] for tensor in tensors] != extents:
        return None
    return torch.cat(tensors, first.dim() - axis)


def _with(graph: Graph, groups: Sequence[Siblings]) -> Graph:
    """The graph with each group as one chain, followed by a slice for each sibling's result."""
    values, constants = dict(graph.values), dict(graph.constants)
    instead: dict[str, list[Node]] = {}
    dropped: set[str] = set()
    for group in groups:
        dropped |= group.nodes
        instead[group.chains[0][0].name] = _chain(group, graph, values, constants)
    nodes = []
    for node in graph.nodes:
        nodes += instead.get(node.name, [] if node.name in dropped else [node])
    return rebuilt(graph, nodes, values, constants)


def _chain(group: Siblings, graph: Graph, values: dict[str, Value], constants: dict[str, Any]) -> list[Node]:
    """The nodes that replace a group; their values and constants are added to the others."""
    axis, chains = group.axis, group.chains
    extents = [graph.values[name].shape[-axis] for name in group.results]
    nodes: list[Node] = []

    def constant(name: str, tensor: torch.Tensor, dtype: str) -> str:
        constants[name] = tensor
        values[name] = Value(name, tuple(tensor.shape), dtype)
        return name

    for step, alike in enumerate(zip(*chains, strict=True)):
        first = alike[0]
        name = first.name + TOGETHER
        inputs = list(first.inputs)
        for number, one in enumerate(first.inputs):
            if step == 0 and number == 0:
                continue
            if step and one == chains[0][step - 1].outputs[0]:
                inputs[number] = nodes[-1].outputs[0]
                continue
            names = [node.inputs[number] for node in alike]
            together = torch.cat([graph.constants[own] for own in names], 0) if step == 0 else _side_by_side(graph, names, chains, axis)
            assert together is not None
            inputs[number] = constant(f"{name}.{number}", together, graph.values[one].dtype)
        shape = list(graph.values[first.outputs[0]].shape)
        shape[-axis] = sum(extents)
        values[name] = Value(name, tuple(shape), graph.values[first.outputs[0]].dtype)
        nodes.append(replace(first, name=name, inputs=tuple(inputs), outputs=(name,)))
    whole, start = nodes[-1].outputs[0], 0
    for chain, extent in zip(chains, extents, strict=True):
        result = chain[-1].outputs[0]
        dim = len(graph.values[result].shape) - axis
        attributes = MappingProxyType({"axis": dim, "start": start, "length": extent, "step": 1})
        nodes.append(Node(result + PART, "slice", (whole,), (result,), attributes, chain[-1].place))
        start += extent
    return nodes
