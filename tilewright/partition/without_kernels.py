"""Programs of which some regions run through PyTorch, or by their operators' definitions, instead of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import Lowered, Program, Region
from tilewright.partition.layouts import in_graph


def without_kernels(program: Program, failures: Mapping[str, str]) -> Program:
    """The program with every region that calls a failed kernel run by PyTorch or by its operators' definitions; `failures` maps kernels to reasons.
    If a part of a loop failed, the whole loop is replaced; a copy that only lowering needed becomes a node of the graph."""
    lost: dict[int, list[str]] = {}
    for index, lowered in enumerate(program.regions):
        why = [f"kernel failed: {failures[kernel.name]}" for kernel in lowered.kernels if kernel.name in failures]
        if why:
            lost[index] = why
    return through_torch(program, lost)


def through_torch(program: Program, positions: Mapping[int, Sequence[str]]) -> Program:
    """The program with the regions at some positions run by PyTorch or by their operators' definitions, for the reasons given."""
    graph = program.graph
    lost = {index: list(why) for index, why in positions.items()}
    loops = {index: _loop_parts(program, lowered.region) for index, lowered in enumerate(program.regions) if lowered.region.kind == "loop"}
    skipped: set[int] = set()
    for index, parts in loops.items():
        why = list(dict.fromkeys(reason for part in parts for reason in lost.pop(part, [])))
        if why:
            lost[index] = why
            skipped |= parts - {index}
    for index in lost:
        region = program.regions[index].region
        if not region.nodes:
            graph = _with_copy(graph, region)
    made = graph.producers()

    def outputs_of(index: int) -> tuple[str, ...]:
        """The region's results; a part of a concatenation is stored with all of it, as everything else in it is stored before."""
        return tuple(name if name in made else program.aliases.get(name, name) for name in program.regions[index].region.outputs)

    # a part of an operator (the sum of a softmax) is not a value of the graph: its readers compute the whole operator
    for index, lowered in enumerate(program.regions):
        if index not in skipped and index in lost and not any(name in made for name in outputs_of(index)):
            skipped.add(index)
            for reader, other in enumerate(program.regions):
                if set(other.region.inputs) & set(lowered.region.outputs):
                    lost.setdefault(reader, []).extend(why for why in lost[index] if why not in lost.get(reader, ()))
    regions = []
    for index, lowered in enumerate(program.regions):
        if index in skipped:
            continue
        if index in lost:
            region = lowered.region
            outputs = outputs_of(index)
            if index in loops:
                written = {name for part in loops[index] for name in program.regions[part].region.outputs}
                outputs = tuple(name for name in region.nodes[0].outputs if name in written)
            # a concatenation of which a chain stores a part is not complete before
            stored = frozenset(program.storage).difference(outputs, (whole for _, whole in region.wholes))
            nodes = _sufficient(graph, made, outputs, stored)
            own = {name for node in nodes for name in node.outputs}
            inputs = tuple(dict.fromkeys(name for node in nodes for name in node.inputs if name not in own))
            region = replace(region, kind="torch", nodes=nodes, inputs=inputs, outputs=outputs, reasons=(*region.reasons, *lost[index]))
            lowered = Lowered(region, "PyTorch", (), ())
        regions.append(lowered)
    return replace(program, graph=graph, regions=tuple(regions))


def _loop_parts(program: Program, loop: Region) -> frozenset[int]:
    """Positions of the regions of a loop: the loop itself, and regions that write or read its states' histories."""
    histories = {f"{loop.nodes[0].name}.state{i}" for i in range(loop.nodes[0].attributes["states"])}
    return frozenset(
        index
        for index, lowered in enumerate(program.regions)
        if lowered.region is loop or histories.intersection((*lowered.region.inputs, *lowered.region.outputs))
    )


def _with_copy(graph: Graph, region: Region) -> Graph:
    """The graph with a node for a region that has none, which copies its only input into another layout; not for a result of the model, which is
    copied from what the graph does not know, and computed again. Other copies of that are of the result."""
    (source,), (target,) = region.inputs, region.outputs
    if target in graph.values:
        return graph
    source = in_graph(source)
    value = graph.values[source]
    values = MappingProxyType({**graph.values, target: Value(target, value.shape, value.dtype)})
    return replace(graph, nodes=(*graph.nodes, Node(target, "copy", (source,), (target,))), values=values)


def _sufficient(graph: Graph, made: Mapping[str, Node], outputs: Sequence[str], stored: frozenset[str]) -> tuple[Node, ...]:
    """The nodes that compute the outputs from stored values and constants, in graph order."""
    needed: set[str] = set()
    waiting = list(outputs)
    while waiting:
        node = made.get(waiting.pop())
        if node is None or node.name in needed:
            continue
        needed.add(node.name)
        waiting += [name for name in node.inputs if name not in stored]
    return tuple(node for node in graph.nodes if node.name in needed)
