"""Joint loops: two independent recurrences of equal shapes as one loop, such as both directions of a layer.

In each step the joint loop makes one of each: its body has the states, the sequences and the results of both, and each sequence keeps its direction.
In one kernel every thread or block then owns units of both, and all of them meet once for two steps instead of twice; what one loop waits for
overlaps with the work of the other. Against that stand twice the weights that a thread or a block keeps: they may exceed level 2, or not fit on a GPU
at all. Whether it is done is decided by prediction (`join_loops`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from tilewright.graph.passes import rebuilt
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import MergeDecision, Ways
from tilewright.partition.merges import BY_MERGES, Policy, Timed, compared
from tilewright.partition.siblings import Merged

T = TypeVar("T")
JOINT = "joint loops"
"""The kind of these merges."""


@dataclass(frozen=True)
class TimedLoop:
    """A loop as it is best lowered. `one`: whether its steps are one kernel, otherwise `reason` says why not. `alone`: whether another loop has to
    wait for it."""

    timed: Timed
    one: bool
    reason: str
    alone: bool


Predict = Callable[[Graph, Collection[str]], Mapping[str, TimedLoop]]
"""Predicts the loops of a graph with these names."""


def join_loops(graph: Graph, predict: Predict, kept: MutableMapping[tuple[str, ...], bool] | None = None, policy: Policy = BY_MERGES) -> Merged:
    """Joins pairs of loops where one kernel for both is predicted, or was measured, to be faster. Graphs without such pairs cost nothing. `kept`: by
    the results of each pair whether it was joined for another size of the model, which decides without a prediction if it is about all pairs about
    which the `policy` says nothing; otherwise what is decided here is added."""
    pairs = find_pairs(graph)
    if not pairs:
        return Merged(graph)
    kept = {} if kept is None else kept
    following = policy.as_kept(JOINT, map(_results, pairs), kept)
    chosen = [pair for pair in pairs if _results(pair) in following and kept[_results(pair)]]
    asked = [pair for pair in pairs if _results(pair) not in following]
    decisions = dict(_decision(pair, pair in chosen, "as for another size") for pair in pairs if pair not in asked)
    if not asked:
        return Merged(_with(graph, chosen), MappingProxyType(decisions))
    every = _with(graph, asked)
    before = predict(graph, [node.name for pair in asked for node in pair])
    after = predict(every, [_name(pair) for pair in asked])
    for pair in asked:
        results, joint = _results(pair), after[_name(pair)]
        kept[results] = False
        if not joint.one:
            decisions |= [_decision(pair, False, joint.reason)]
            continue
        both = compared([joint.timed], _apart([before[node.name] for node in pair]), policy.about(JOINT, results), policy.predicted)
        kept[results] = both.taken
        decisions |= [_decision(pair, both.taken, both.text("as one", "apart"), both.ways)]
        if both.taken:
            chosen.append(pair)
    return Merged(_with(graph, chosen), MappingProxyType(decisions))


def _decision(pair: tuple[Node, Node], taken: bool, why: str, ways: Ways | None = None) -> tuple[str, MergeDecision]:
    """The node whose region it concerns, and what was decided about the pair."""
    text = f"{pair[0].name} and {pair[1].name} are independent loops{': one kernel for both' if taken else ', but stay apart'}: {why}"
    return _name(pair) if taken else pair[0].name, MergeDecision(_results(pair), taken, text, JOINT, ways)


def decided(graph: Graph, taken: bool) -> Policy:
    """The policy that joins all pairs of the graph, or none."""
    keys = frozenset((JOINT, _results(pair)) for pair in find_pairs(graph))
    return Policy(taken=keys) if taken else Policy(refused=keys)


def _apart(loops: Sequence[TimedLoop]) -> list[Timed]:
    """The loops whose seconds count: all, unless their kernels can run at the same time, when it is the longest."""
    if any(loop.alone for loop in loops):
        return [loop.timed for loop in loops]
    return [max((loop.timed for loop in loops), key=lambda timed: timed.predicted)]


def find_pairs(graph: Graph) -> list[tuple[Node, Node]]:
    """Pairs of independent loops of the same number of steps, with states and results of one shape and type: each loop with the next that fits, and
    that is independent of it where the pairs before are one loop each."""
    loops = [node for node in graph.nodes if node.operator == "scan" and node.attributes["length"] > 1]
    found: list[tuple[Node, Node]] = []
    paired: set[str] = set()
    joined = graph
    for number, first in enumerate(loops):
        if first.name in paired or len(shapes := _shapes(first)) != 1:
            continue
        later = joined.dependents(first)
        for second in loops[number + 1 :]:
            free = second.name not in paired and second.name not in later and first.name not in joined.dependents(second)
            if not free or second.attributes["length"] != first.attributes["length"] or _shapes(second) != shapes:
                continue
            if any(name.startswith(_name((first, second))) for name in graph.values):  # names of ONNX files may be any
                continue
            found.append((first, second))
            paired |= {first.name, second.name}
            joined = _with(joined, [found[-1]])
            break
    return found


def _shapes(loop: Node) -> set[tuple[tuple[int, ...], str]]:
    """The shapes and types of what a step makes."""
    body: Graph = loop.attributes["body"]
    return {(body.values[name].shape, body.values[name].dtype) for name in body.outputs}


def _name(pair: tuple[Node, Node]) -> str:
    """The name of the loop that a pair becomes."""
    return "+".join(node.name for node in pair)


def _results(pair: tuple[Node, Node]) -> tuple[str, ...]:
    return tuple(name for node in pair for name in node.outputs)


def _with(graph: Graph, pairs: Sequence[tuple[Node, Node]]) -> Graph:
    """The graph with each pair as one loop in the place of the later one; readers of the earlier one come after that."""
    nodes = list(graph.nodes)
    for pair in pairs:
        start, end = sorted(map(nodes.index, pair))
        later = graph.with_nodes(nodes).dependents(nodes[start])
        between = nodes[start + 1 : end]
        waiting = [node for node in between if node.name in later]
        nodes[start : end + 1] = [*(node for node in between if node.name not in later), joint(*pair), *waiting]
    return rebuilt(graph, nodes) if pairs else graph


def joint(first: Node, second: Node) -> Node:
    """Both loops as one."""
    parts = [_Parts.of(node, number) for number, node in enumerate((first, second))]
    bodies = [part.body for part in parts]
    inner = Graph(
        tuple(node for body in bodies for node in body.nodes),
        _by_role([part.roles(part.body.inputs) for part in parts]),
        _by_role([part.results(part.body.outputs) for part in parts]),
        MappingProxyType({name: value for body in bodies for name, value in body.values.items()}),
        MappingProxyType({name: tensor for body in bodies for name, tensor in body.constants.items()}),
    )
    attributes = {
        "body": inner,
        "states": sum(part.states for part in parts),
        "sequences": sum(part.sequences for part in parts),
        "length": first.attributes["length"],
        "reverse": _by_role([(part.reverse[: part.sequences], part.reverse[part.sequences :]) for part in parts]),
    }
    inputs = _by_role([part.roles(part.node.inputs) for part in parts])
    outputs = _by_role([part.results(part.node.outputs) for part in parts])
    return Node(_name((first, second)), "scan", inputs, outputs, MappingProxyType(attributes), first.place)


@dataclass(frozen=True)
class _Parts:
    """A loop and its body, in which every value and node has a name of its own."""

    node: Node
    body: Graph

    @classmethod
    def of(cls, node: Node, number: int) -> _Parts:
        body: Graph = node.attributes["body"]

        def named(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(f"{name}.{number}" for name in names)

        def value(old: Value) -> Value:
            return replace(old, name=f"{old.name}.{number}")

        nodes = (replace(one, name=f"{one.name}.{number}", inputs=named(one.inputs), outputs=named(one.outputs)) for one in body.nodes)
        values = {f"{name}.{number}": value(old) for name, old in body.values.items()}
        constants = {f"{name}.{number}": tensor for name, tensor in body.constants.items()}
        return cls(node, Graph(tuple(nodes), named(body.inputs), named(body.outputs), values, constants))

    @property
    def states(self) -> int:
        return int(self.node.attributes["states"])

    @property
    def sequences(self) -> int:
        return int(self.node.attributes["sequences"])

    @property
    def reverse(self) -> tuple[bool, ...]:
        return tuple(self.node.attributes["reverse"])

    def roles(self, inputs: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Inputs as states, sequences, and others."""
        end = self.states + self.sequences
        return inputs[: self.states], inputs[self.states : end], inputs[end:]

    def results(self, outputs: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Outputs as states and stacked results."""
        return outputs[: self.states], outputs[self.states :]


def _by_role(parts: Sequence[tuple[tuple[T, ...], ...]]) -> tuple[T, ...]:
    """What all parts have of the first role, then of the second, and so on."""
    return tuple(one for role in zip(*parts, strict=True) for group in role for one in group)
