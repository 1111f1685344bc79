"""Chains: which successive regions become one kernel, on a CPU one that works through them in strips (`partition.strip_judge`), on a GPU one whose
blocks compute tiles (`partition.tile_judge`).

DeepCuts (Jung et al., PLDI 2021, algorithm 1) merges neighbouring parts of a graph as long as a gain is predicted. Here the regions that may be
merged form lines (`partition.paths`), of which a connected segment may be one kernel: it stores what others need too. For a line the best partition
is found exactly, by dynamic programming over its segments, also where pairs gain nothing but longer segments do. Of a graph without branches these
are all partitions; of one with branches those into segments of one order of its regions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from tilewright.errors import contained
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Unsuitable
from tilewright.partition.canonical import canonical, key_of
from tilewright.partition.layouts import LaidOut
from tilewright.partition.merges import BY_MERGES, CHAIN, KEPT, MEASURED_LOSS, Judging, Measured, Memory, Merge, Policy
from tilewright.partition.paths import Uses, joined, lines, sorted_regions

LONGEST = 3
"""Maximum regions of a chain."""

Ready = Callable[[Sequence[Kernel]], object]
"""Is called with kernels that may be compiled now."""
Predict = Callable[[Region, bool], float]
"""Predicted seconds of a region by itself, with or without Winograd's algorithm, whose kernels need memory of their own and are not in chains."""
Library = Callable[[Region], float | None]
"""Measured seconds of the library's kernel that would compute a region by itself; None if one of ours would, whose time is predicted."""
FindMeasured = Callable[[Problem], Measured | None]
"""What trials found of a canonical chain; None if they did not measure both it and its regions apart."""


Place = tuple[int, int]
"""The regions of a line from the first number on, up to the second."""


@dataclass
class Search:
    """Decides which regions of a graph become chains. predict, library: seconds of a region by itself. judge, measured: ways of chains. memory: the
    chains of another size are kept if they are predicted nearly as fast (`KEPT`), as far as the policy says nothing. only_measured: no
    prediction decides. ready: is called with the kernels of chains that are taken. as_before: lines that the memory knows are divided as there
    without a prediction. policy: chains about which no time decides. considered: the merges that were judged so far."""

    graph: Graph
    laid_out: LaidOut
    predict: Predict
    judge: Judging
    measured: FindMeasured
    library: Library
    memory: Memory
    only_measured: bool = False
    ready: Ready = lambda kernels: None
    as_before: bool = False
    policy: Policy = BY_MERGES
    considered: list[Merge] = field(default_factory=list)

    @cached_property
    def uses(self) -> Uses:
        return Uses(self.graph, self.laid_out)

    def chained(self) -> LaidOut:
        """The regions with chains where these were measured to be faster, or are predicted so if records lack them."""
        taken: dict[str, tuple[Region, ...]] = {}
        for line in lines(self.uses, LONGEST):
            taken |= {segment[-1].name: segment for segment in self.partitioned(line) if len(segment) > 1}
        dropped = {region.name for segment in taken.values() for region in segment}
        regions: list[Region] = []
        for region in self.laid_out.regions:
            if region.name in taken:
                segment = taken[region.name]
                results = tuple(part.outputs[0] for part in segment)
                said = tuple(str(merge) for merge in self.considered if merge.results == results)
                regions.append(joined(segment, self.uses.stored(segment), said))
            elif region.name not in dropped:
                pairs = [merge for merge in self.considered if merge.results[-1] == region.outputs[0] and len(merge.results) == 2]
                regions.append(replace(region, reasons=(*region.reasons, *(f"stays separate: {merge}" for merge in pairs))))
        return replace(self.laid_out, regions=tuple(sorted_regions(regions, self.uses)))

    def partitioned(self, line: Sequence[Region]) -> list[tuple[Region, ...]]:
        """The fastest partition of a line into segments. Those whose kernel turns out to be impossible are refused, and the others decided again."""
        if self.as_before and (known := self._remembered(line)):
            return known
        problems, merges = self._merges(line)
        total = sum(self.predict(region, True) for region in line)
        while True:
            places, before = _fastest(len(line), merges), self._as_before(line, merges)
            if before and not self.policy.predicted and total - _saved(before, merges) <= (1 + KEPT) * (total - _saved(places, merges)):
                places = before
            refused, kernels = self._kernels(line, [place for place in places if place in merges], problems, merges)
            if refused is None:
                break
            merges[refused[0]] = replace(merges[refused[0]], way=None, reason=refused[1])
        self.ready(kernels)
        self.considered += (replace(merge, taken=place in places) for place, merge in merges.items())
        self.memory.chains.update((line[end - 1].outputs[0], tuple(region.outputs[0] for region in line[begin:end])) for begin, end in places)
        self.memory.schedules.update((merges[place].results, merges[place].schedule) for place in places if place in merges)
        return [tuple(line[begin:end]) for begin, end in places]

    def seconds(self, names: frozenset[str]) -> float:
        """Predicted seconds of the named regions, as the fastest partitions of the lines that they make up; no kernel is made."""
        total = sum(self.predict(region, True) for region in self.laid_out.regions if region.name in names)
        for line in lines(self.uses, LONGEST):
            if line[0].name in names:
                _, merges = self._merges(line)
                total -= _saved(_fastest(len(line), merges), merges)
        return total

    def _problem(self, segment: Sequence[Region]) -> Problem:
        """The canonical chain of a segment."""
        chain = Problem(joined(segment, self.uses.stored(segment)), self.laid_out.layouts, self.laid_out.values, frozenset(self.graph.constants))
        return canonical(chain).problem

    def _merges(self, line: Sequence[Region]) -> tuple[dict[Place, Problem], dict[Place, Merge]]:
        """The canonical chain of each segment of a line that is considered, and what is known of it."""
        alone = [self.predict(region, True) for region in line]
        scaled = [self.predict(region, False) for region in line] if self.judge.scales else alone
        by_library = [self.library(region) for region in line]
        problems: dict[Place, Problem] = {}
        merges: dict[Place, Merge] = {}
        for begin, end in ((first, last) for last in range(2, len(line) + 1) for first in range(max(0, last - LONGEST), last - 1)):
            segment = line[begin:end]
            if not self.uses.may_join(segment):
                continue
            problem = self._problem(segment)
            if self.only_measured and self.measured(problem) is None:
                continue
            results, stored, apart = tuple(region.outputs[0] for region in segment), self.uses.stored(segment), sum(alone[begin:end])
            judged = partial(self.judge.best, problem, scaled[begin:end], self.memory.schedules.get(results))
            way = contained(_described(segment), "is not merged", judged, _fault)
            problems[begin, end] = problem
            if isinstance(way, str):
                merges[begin, end] = Merge(results, apart, None, way, stored=stored)
                continue
            known = self.measured(problem) if way.seconds < (1 + MEASURED_LOSS) * apart else None
            found = by_library[begin:end]
            apart = sum(seconds if its is None else its for seconds, its in zip(alone[begin:end], found, strict=True))
            merges[begin, end] = Merge(
                results, apart, way, measured=known, by_library=any(its is not None for its in found), stored=stored,
                decided=self.policy.about(CHAIN, results), by_prediction=self.policy.predicted,
            )  # fmt: skip
        return problems, merges

    def _kernels(
        self, line: Sequence[Region], places: Sequence[Place], problems: Mapping[Place, Problem], merges: Mapping[Place, Merge]
    ) -> tuple[tuple[Place, str] | None, list[Kernel]]:
        """The first of some merges whose kernel is impossible, with the reason, or None; and the kernels of those before it."""
        kernels: list[Kernel] = []
        for place in places:
            made = partial(self.judge.lowered, problems[place], merges[place])
            lowered = contained(_described(line[slice(*place)]), "is not merged", made, _fault)
            if isinstance(lowered, str):
                return (place, lowered), kernels
            kernels += lowered.kernels
        return None, kernels

    def _as_before(self, line: Sequence[Region], merges: Mapping[Place, Merge]) -> list[Place]:
        """The partition of a line that the memory has, with the chains that the policy has; empty if there is none, or one that is not possible."""
        places = self._known_places(line)
        merged = [place for place in places if place[1] - place[0] > 1]
        if not places or not all(place in merges and merges[place].way is not None for place in merged):
            return []
        required = [place for place in _fastest(len(line), merges) if place in merges and merges[place].is_required]
        return _with_required([place for place in merged if merges[place].decided is None], required, len(line))

    def _known_places(self, line: Sequence[Region]) -> list[Place]:
        """The segments of a line in the memory; empty if it does not know them all."""
        places: list[Place] = []
        end = len(line)
        while end:
            results = self.memory.chains.get(line[end - 1].outputs[0], ())
            begin = end - len(results)
            if begin < 0 or not results or tuple(region.outputs[0] for region in line[begin:end]) != results:
                return []
            places.insert(0, (begin, end))
            end = begin
        return places

    def _remembered(self, line: Sequence[Region]) -> list[tuple[Region, ...]]:
        """The line divided as in the memory, with its schedules; empty if it does not know all of it, or a kernel is not possible for these sizes."""
        kernels: list[Kernel] = []
        segments = [tuple(line[begin:end]) for begin, end in self._known_places(line)]
        for segment in segments:
            if len(segment) == 1:
                continue
            schedule = self.memory.schedules[tuple(region.outputs[0] for region in segment)]
            problem = self._problem(segment)
            try:
                lowered = self.judge.lower(problem, schedule)
            except Unsuitable:
                return []
            self.judge.kernels[key_of(problem)] = lowered
            kernels += lowered.kernels
        self.ready(kernels)
        return segments


def with_lines(graph: Graph, ways: Sequence[LaidOut], names: frozenset[str]) -> frozenset[str]:
    """The names of regions, with those of all regions that are on a line with one of them in any of several partitions."""
    found = [frozenset(region.name for region in line) for way in ways for line in lines(Uses(graph, way), LONGEST)]
    while True:
        more = names.union(*(line for line in found if line & names))
        if more == names:
            return names
        names = more


def _fastest(count: int, merges: Mapping[Place, Merge]) -> list[Place]:
    """The partition of a line of `count` regions into single regions and merges, as places (begin, end), that gains most of those with most of the
    merges that are required."""
    best: list[tuple[int, float, int]] = [(0, 0.0, 0)]  # for each prefix its required merges, what it gains, and where its last segment begins
    for end in range(1, count + 1):
        ways = [(*best[end - 1][:2], end - 1)]
        for begin in range(max(0, end - LONGEST), end - 1):
            merge = merges.get((begin, end))
            if merge is not None and (merge.gain or merge.is_required):
                required, gained, _ = best[begin]
                ways.append((required + merge.is_required, gained + (merge.saved if merge.is_required else merge.gain), begin))
        best.append(max(ways))
    places: list[Place] = []
    end = count
    while end:
        places.insert(0, (best[end][2], end))
        end = best[end][2]
    return places


def _with_required(places: Sequence[Place], required: Sequence[Place], count: int) -> list[Place]:
    """The partition of a line of `count` regions into the required segments, those of `places` that are disjoint from these, and single regions."""
    kept = [(begin, end) for begin, end in places if all(end <= first or last <= begin for first, last in required)]
    merged = sorted((*kept, *required))
    inside = {number for begin, end in merged for number in range(begin, end)}
    return sorted((*merged, *((number, number + 1) for number in range(count) if number not in inside)))


def _saved(places: Sequence[Place], merges: Mapping[Place, Merge]) -> float:
    """Seconds that the merges of a partition save."""
    return sum(merges[place].saved for place in places if place in merges)


def _described(regions: Sequence[Region]) -> str:
    return ", ".join(node.described for region in regions for node in region.nodes)


def _fault(why: str) -> str:
    return f"a fault inside Tilewright: {why}"
