"""Paths of regions that may be chained, and the chain of a part of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilewright.ir.graph import Graph, Value
from tilewright.ir.region import Region
from tilewright.partition.layouts import LaidOut

KINDS = frozenset({"contraction", "window", "map", "row reduction"})
"""Kinds of region that a chain may contain."""


def joined(segment: Sequence[Region], reasons: tuple[str, ...] = ()) -> Region:
    """The chain of some regions."""
    made = {region.outputs[0] for region in segment[:-1]}
    inputs = tuple(dict.fromkeys(name for region in segment for name in region.inputs if name not in made))
    nodes = tuple({node.name: node for region in segment for node in region.nodes}.values())
    steps = tuple(step for region in segment for step in region.steps)
    said = tuple(dict.fromkeys(reason for region in segment for reason in region.reasons))
    last = segment[-1]
    return Region(last.name, "chain", nodes, steps, inputs, last.outputs, (*said, *reasons), stages=tuple(segment))


def readers_of(regions: Iterable[Region]) -> dict[str, list[Region]]:
    """The regions that read each value, in order."""
    readers: dict[str, list[Region]] = {}
    for region in regions:
        for name in dict.fromkeys(region.inputs):
            readers.setdefault(name, []).append(region)
    return readers


def paths(graph: Graph, laid_out: LaidOut) -> list[list[Region]]:
    """The regions that may be chained, as maximal paths of two or more: each is the only reader of the one before, whose result is needed nowhere
    else. Of several before a region the one whose result its first step reads comes first."""
    readers = readers_of(laid_out.regions)
    shared = {*graph.outputs, *laid_out.slices, *(place.buffer for place in laid_out.slices.values())}
    values = laid_out.values
    in_place = {name for name, place in laid_out.slices.items() if values[name].shape == values[place.buffer].shape}  # partition.updates
    made = {
        region.outputs[0]: region
        for region in laid_out.regions
        if len(region.outputs) == 1 and _may_be_cut(region, values) and region.outputs[0] not in in_place
    }
    before: dict[str, Region] = {}
    for region in made.values():
        only = [made[name] for name in region.inputs if name in made and name not in shared and len(readers[name]) == 1]
        if only:
            before[region.name] = only[0]
    after = {producer.name: made_by for made_by, producer in before.items()}
    by_name = {region.name: region for region in made.values()}
    result = []
    for region in made.values():
        if region.name in before:
            continue
        path = [region]
        while path[-1].name in after:
            path.append(by_name[after[path[-1].name]])
        if len(path) > 1:
            result.append(path)
    return result


def _may_be_cut(region: Region, values: Mapping[str, Value]) -> bool:
    computes = all(values[name].elements for name in (*region.inputs, *region.outputs))
    return region.kind in KINDS and not region.checks and bool(region.nodes) and computes
