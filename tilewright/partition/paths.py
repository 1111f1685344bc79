"""Which regions may be chained, and the chain of some of them.

A segment is a few regions that may become one: they are joined by what they read of each other, and convex, which means that what one needs of
another comes through none outside of them. Its regions need not be successive in one order of all regions: the pooled shortcut of a block may be
chained with the last layer of the other branch, wherever that stands. Which disjoint segments can become one region each, without waiting for one
another, is decided by `partition.divisions`, in sections of one order that no segment crosses.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from operator import or_
from types import MappingProxyType

from tilewright.graph.windows import pooling_of
from tilewright.ir.expr import loads
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import boxes_overlap, contains
from tilewright.ir.region import Region, readers_of
from tilewright.partition.divisions import Place, bits
from tilewright.partition.layouts import LaidOut

KINDS = frozenset({"contraction", "window", "map", "row reduction"})
"""Kinds of region that a chain may contain."""
NEIGHBOURS = 8
"""Of a region that more read, or that reads more, the nearest in the order that a segment grows by."""


def joined(
    segment: Sequence[Region], stored: Collection[str] = (), reasons: tuple[str, ...] = (), wholes: tuple[tuple[str, str], ...] = ()
) -> Region:
    """The chain of some regions in order. Its first result is the last region's; `stored`: others that are needed outside of it too; `wholes`: as in
    `Region`."""
    made = {region.outputs[0] for region in segment[:-1]}
    inputs = tuple(dict.fromkeys(name for region in segment for name in region.inputs if name not in made))
    nodes = tuple({node.name: node for region in segment for node in region.nodes}.values())
    steps = tuple(step for region in segment for step in region.steps)
    said = tuple(dict.fromkeys(reason for region in segment for reason in region.reasons))
    last = segment[-1]
    outputs = (*last.outputs, *(region.outputs[0] for region in segment[:-1] if region.outputs[0] in stored))
    return Region(last.name, "chain", nodes, steps, inputs, outputs, (*said, *reasons), stages=tuple(segment), wholes=wholes)


@dataclass(frozen=True)
class Uses:
    """Where the results of a graph's regions are needed."""

    graph: Graph
    laid_out: LaidOut

    @cached_property
    def readers(self) -> dict[str, list[Region]]:
        return readers_of(self.laid_out.regions)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Values that are needed besides by the regions that read them under their names: results of the model, and parts of others."""
        slices = self.laid_out.slices
        return frozenset((*self.graph.outputs, *slices, *(place.buffer for place in slices.values())))

    def stored(self, segment: Sequence[Region]) -> frozenset[str]:
        """The results of some regions, without the last one's, that are needed outside of them."""
        inside = {region.outputs[0] for region in segment}
        made = (region.outputs[0] for region in segment[:-1])
        return frozenset(name for name in made if name in self.shared or any(x.outputs[0] not in inside for x in self.readers.get(name, ())))

    @cached_property
    def replaced(self) -> frozenset[str]:
        """Values that are stored in the memory of others, which they replace (`partition.updates`)."""
        values = self.laid_out.values
        return frozenset(name for name, place in self.laid_out.slices.items() if values[name].shape == values[place.buffer].shape)

    def buffer(self, name: str) -> str:
        """The value in whose memory a value is."""
        while name in self.laid_out.slices:
            name = self.laid_out.slices[name].buffer
        return name

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(name for region in self.laid_out.regions for name in region.outputs)

    @cached_property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Of each concatenation that no region stores as a whole, but some read, the results of regions that are stored in it."""
        buffers: dict[str, list[str]] = {}
        for name in self.laid_out.slices:
            buffers.setdefault(self.buffer(name), []).extend([name] if name in self.made else [])
        given = {*self.made, *self.graph.inputs}
        wholes = [name for name in self.readers if name not in given and self.buffer(name) in buffers]
        return {name: tuple(part for part in buffers[self.buffer(name)] if self._overlap(part, name)) for name in wholes}

    def _overlap(self, a: str, b: str) -> bool:
        """Whether two values have memory in common."""
        layouts = self.laid_out.layouts
        return self.buffer(a) == self.buffer(b) and boxes_overlap(layouts[a].box(), layouts[b].box())

    def wholes(self, segment: Sequence[Region]) -> Mapping[str, str] | None:
        """The values of some regions that are in the memory of a concatenation, with that: one region reads it, another stores a part of it. None if
        one buffer does not hold them all, or if strips would read rows of the part that other strips store."""
        made = {region.outputs[0] for region in segment}
        touched = dict.fromkeys(name for region in segment for name in (*region.inputs, *region.outputs))
        read = [name for name in touched if not made.isdisjoint(self.parts.get(name, ()))]
        found: dict[str, str] = {}
        for whole in read:
            inside = [name for name in touched if name != whole and self._overlap(name, whole)]
            layouts, parts = self.laid_out.layouts, [name for name in self.parts[whole] if name in made]
            if any(name in read or not contains(layouts[whole].box(), layouts[name].box()) for name in inside):
                return None
            dims = {
                dim for dim, extent in enumerate(layouts[whole].shape) if extent > 1 and all(layouts[name].shape[dim] == extent for name in parts)
            }
            if not all(dims := dims & _own_rows(region, whole) for region in segment if whole in region.inputs):
                return None
            found |= dict.fromkeys(inside, whole)
        return found

    def chain(self, segment: Sequence[Region], reasons: tuple[str, ...] = ()) -> Region:
        """The chain of some regions that may join, in order."""
        return joined(segment, self.stored(segment), reasons, tuple((self.wholes(segment) or {}).items()))

    def may_join(self, segment: Sequence[Region]) -> bool:
        """Whether regions may be one: if they are connected and convex, and have one place for each value."""
        return connected(segment, self.parts) and self.wholes(segment) is not None and self._convex(segment)

    def _convex(self, segment: Sequence[Region]) -> bool:
        """Whether no region outside depends on one of these and is needed by another one."""
        places = [self.place[region.outputs[0]] for region in segment]
        first = (1 << min(places)) - 1  # what comes before all of them in the order depends on none
        between = reduce(or_, (self.before[place] for place in places)) & ~bits(places) & ~first
        return not any(self.before[place] >> other & 1 for place in _numbers(between) for other in places)

    @cached_property
    def order(self) -> tuple[Region, ...]:
        """All regions in an order in which each comes after those that it depends on, and paths, where each is the only reader of the one before,
        stay together."""
        return tuple(_in_order(self))

    @cached_property
    def place(self) -> Mapping[str, int]:
        """The number of each region in the order, by its first result."""
        return {region.outputs[0]: number for number, region in enumerate(self.order)}

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each region of the order the numbers of all that it depends on, directly or not, as bits."""
        found: list[int] = []
        for direct in _needs(self.order, self):
            found.append(reduce(or_, (found[number] | 1 << number for number in direct), 0))
        return tuple(found)

    @cached_property
    def chainable(self) -> Mapping[str, Region]:
        """The regions that may be in chains, by their results. One that reads what a later region replaces keeps its place before that."""
        values, regions = self.laid_out.values, self.laid_out.regions
        replacing = {self.buffer(name): place for place, region in enumerate(regions) for name in region.outputs if name in self.replaced}
        return {
            region.outputs[0]: region
            for place, region in enumerate(regions)
            if len(region.outputs) == 1
            and _may_be_cut(region, values)
            and region.outputs[0] not in self.replaced
            and all(replacing.get(self.buffer(name), place) <= place for name in region.inputs)
        }


def connected(segment: Sequence[Region], parts: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> bool:
    """Whether regions are joined by what they read of each other, also as `parts` of concatenations."""
    groups: list[set[str]] = []
    for region in segment:
        read = {part for name in region.inputs for part in (name, *parts.get(name, ()))}
        touched = {*read, *region.outputs} & {one.outputs[0] for one in segment}
        groups = [group for group in groups if not group & touched] + [touched.union(*(group for group in groups if group & touched))]
    return len(groups) == 1


@dataclass(frozen=True)
class Section:
    """Regions that may be chained, in order, between two places of the order of all regions that no segment crosses.

    segments: the numbers of the regions of each segment, ascending. before: for each region the numbers of those that it depends on, directly or not,
    through regions that are in no chain too, as bits."""

    regions: tuple[Region, ...]
    segments: tuple[Place, ...]
    before: tuple[int, ...]

    def of(self, place: Place) -> tuple[Region, ...]:
        """The regions of a segment."""
        return tuple(self.regions[number] for number in place)


def sections(uses: Uses, longest: int) -> list[Section]:
    """The regions that may be chained, in sections of two or more, with the segments of at most `longest` regions (see `NEIGHBOURS`)."""
    segments = _segments(uses, longest)
    crossed = {number for segment in segments for number in range(segment[0] + 1, segment[-1] + 1)}
    found: list[Section] = []
    begins = [number for number in range(len(uses.order)) if number not in crossed]
    for begin, end in pairwise((*begins, len(uses.order))):
        places = [number for number in range(begin, end) if uses.order[number].outputs[0] in uses.chainable]
        own = {number: place for place, number in enumerate(places)}
        inside = tuple(tuple(own[number] for number in segment) for segment in segments if begin <= segment[0] < end)
        if inside:
            before = tuple(bits(own[other] for other in _numbers(uses.before[number]) if other in own) for number in places)
            found.append(Section(tuple(uses.order[number] for number in places), inside, before))
    return found


def _segments(uses: Uses, longest: int) -> list[Place]:
    """The segments of at most `longest` regions, as numbers of the order; ascending by their last region."""
    made = uses.chainable
    beside: dict[int, set[int]] = {uses.place[name]: set() for name in made}
    pairs = [(made[name], reader) for name in made for reader in uses.readers.get(name, ())]
    parts = [(part, reader) for whole, parts in uses.parts.items() for part in parts for reader in uses.readers[whole]]
    pairs += [(made[part], reader) for part, reader in parts if part in made and reader.outputs[0] in made and uses.may_join([made[part], reader])]
    for region, reader in pairs:
        if reader.outputs[0] in made:
            number, other = uses.place[region.outputs[0]], uses.place[reader.outputs[0]]
            beside[number].add(other)
            beside[other].add(number)
    # of a region that many read, further ones join with the nearest: else each two of its readers would make a segment with it
    near = {number: sorted(others, key=lambda other: abs(other - number))[:NEIGHBOURS] for number, others in beside.items()}
    found: set[Place] = set()
    grown: set[Place] = {(number,) for number in beside}
    for _ in range(longest - 1):
        grown = {tuple(sorted((*place, other))) for place in grown for number in place for other in near[number] if other not in place}
        found |= {place for place in grown if uses.may_join([uses.order[number] for number in place])}
    return sorted(found, key=lambda place: (place[-1], place))


def _own_rows(region: Region, name: str) -> set[int]:
    """The dimensions of a value along which each row of a region's result reads the row at its own place only."""
    read = [load.index for step in region.steps for load in loads(*step.bodies) if load.buffer == name]
    return {dim for dim, positions in enumerate(zip(*read, strict=True)) if {*positions} <= {*region.steps[-1].axes}}


def _numbers(found: int) -> Iterable[int]:
    """The numbers of the bits that are set."""
    while found:
        least = found & -found
        yield least.bit_length() - 1
        found ^= least


def _in_order(uses: Uses) -> list[Region]:
    """All regions in an order in which paths stay together: each path is where its last region was. What is read inside a path is needed nowhere
    else, so that nothing before its last region depends on it. Of several before a region the one whose result its first step reads comes first."""
    made, readers, shared = uses.chainable, uses.readers, uses.shared
    before: dict[str, Region] = {}
    for region in made.values():
        only = [made[name] for name in region.inputs if name in made and name not in shared and len(readers[name]) == 1]
        if only:
            before[region.name] = only[0]
    continued = {region.name for region in before.values()}
    found: list[Region] = []
    for region in uses.laid_out.regions:
        if region.name in continued:
            continue
        path = [region]
        while path[-1].name in before:
            path.append(before[path[-1].name])
        found += reversed(path)
    return found


def _needs(regions: Sequence[Region], uses: Uses) -> list[set[int]]:
    """For each of some regions, of which some are chains, the numbers of those that it directly depends on."""
    place = {name: number for number, region in enumerate(uses.laid_out.regions) for name in region.outputs}
    writers: dict[str, list[tuple[int, int]]] = {}  # of each buffer: their numbers, and when the parts that write to it were
    for number, region in enumerate(regions):
        for name in (name for part in region.stages or (region,) for name in part.outputs):
            writers.setdefault(uses.buffer(name), []).append((number, place[name]))
    needs: list[set[int]] = []
    for number, region in enumerate(regions):
        reading = [(uses.buffer(name), place[part.outputs[0]]) for part in region.stages or (region,) for name in part.inputs]
        found = {writer for buffer, read in reading for writer, written in writers.get(buffer, ()) if written < read}
        replaced = {uses.buffer(name) for name in region.outputs if name in uses.replaced}  # after those that read what was there
        found.update(other for other in range(number) if replaced and any(uses.buffer(name) in replaced for name in regions[other].inputs))
        needs.append(found - {number})
    return needs


def sorted_regions(regions: Sequence[Region], uses: Uses) -> list[Region]:
    """Regions, some of which are chains, in their order as far as each can come after those that it depends on."""
    needs = _needs(regions, uses)
    followers: list[list[int]] = [[] for _ in regions]
    for number, found in enumerate(needs):
        for other in found:
            followers[other].append(number)
    waiting = [len(found) for found in needs]
    ready = [number for number, count in enumerate(waiting) if not count]
    result: list[Region] = []
    while ready:
        number = heapq.heappop(ready)
        result.append(regions[number])
        for other in followers[number]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    assert len(result) == len(regions), "chains depend on each other"
    return result


def _may_be_cut(region: Region, values: Mapping[str, Value]) -> bool:
    computes = all(values[name].elements for name in (*region.inputs, *region.outputs))
    return region.kind in KINDS and not region.checks and bool(region.nodes) and computes and pooling_of(region.steps) is None
