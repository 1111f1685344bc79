"""Chains: which successive regions become one kernel, on a CPU one that works through them in strips (`partition.strip_judge`), on a GPU one whose
blocks compute tiles (`partition.tile_judge`).

DeepCuts (Jung et al., PLDI 2021, algorithm 1) merges neighbouring parts of a graph as long as a gain is predicted. Here the regions that may be
merged form sections (`partition.paths`), of which a connected convex segment may be one kernel: it stores what others need too. The best partition
of a section is found by dynamic programming over all orders of its regions (`partition.divisions`), also where pairs gain nothing but longer segments
do.
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
from tilewright.partition.canonical import canonical, key_of, with_names
from tilewright.partition.divisions import Place, Worth, best_division, can_run
from tilewright.partition.layouts import LaidOut
from tilewright.partition.merges import BY_MERGES, CHAIN, KEPT, LEAST_GAIN, MEASURED_LOSS, Judging, Measured, Memory, Merge, Policy
from tilewright.partition.paths import Section, Uses, sections, sorted_regions
from tilewright.partition.reuse import kernels_of_images

LONGEST = 3
"""Maximum regions of a chain."""
OTHERS, AS_BEFORE = "merges that exclude it gain more", "the merges are those of another size"
"""Why a merge that gains is not taken."""

Ready = Callable[[Sequence[Kernel]], object]
"""Is called with kernels that may be compiled now."""
Predict = Callable[[Region, bool], float]
"""Predicted seconds of a region by itself, with or without Winograd's algorithm, whose kernels need memory of their own and are not in chains."""
Library = Callable[[Region], float | None]
"""Measured seconds of the library's kernel that would compute a region by itself; None if one of ours would, whose time is predicted."""
FindMeasured = Callable[[Problem], Measured | None]
"""What trials found of a canonical chain; None if they did not measure both it and its regions apart."""


@dataclass
class Search:
    """Decides which regions of a graph become chains. predict, library: seconds of a region by itself. judge, measured: ways of chains; None: nothing
    was measured, and chains that cannot be predicted to gain are not judged. memory: the chains of another size are kept if they are predicted nearly
    as fast (`KEPT`), as far as the policy says nothing. every: predictions decide about all chains, not only about those of which they may by default
    (`Judging.decides`). ready: is called with the kernels of chains that are taken. as_before: sections that the memory knows are divided as there
    without a prediction. policy: chains about which no time decides. considered: the merges that were judged so far."""

    graph: Graph
    laid_out: LaidOut
    predict: Predict
    judge: Judging
    measured: FindMeasured | None
    library: Library
    memory: Memory
    every: bool = False
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
        for section in sections(self.uses, LONGEST):
            taken |= {segment[-1].name: segment for segment in self.partitioned(section) if len(segment) > 1}
        dropped = {region.name for segment in taken.values() for region in segment}
        regions: list[Region] = []
        for region in self.laid_out.regions:
            if region.name in taken:
                segment = taken[region.name]
                results = tuple(part.outputs[0] for part in segment)
                said = tuple(str(merge) for merge in self.considered if merge.results == results)
                regions.append(self.uses.chain(segment, said))
            elif region.name not in dropped:
                pairs = [merge for merge in self.considered if merge.results[-1] == region.outputs[0] and len(merge.results) == 2]
                regions.append(replace(region, reasons=(*region.reasons, *(f"stays separate: {merge}" for merge in pairs))))
        return replace(self.laid_out, regions=tuple(sorted_regions(regions, self.uses)))

    def partitioned(self, section: Section) -> list[tuple[Region, ...]]:
        """The fastest partition of a section into segments. Those whose kernel turns out to be impossible are refused, the others decided again."""
        if self.as_before and (known := self._remembered(section)):
            return known
        problems, merges = self._merges(section)
        total = sum(self.predict(region, True) for region in section.regions)
        while True:
            places, before, instead = _fastest(section, merges), self._as_before(section, merges), OTHERS
            if before and not self.policy.predicted and total - _saved(before, merges) <= (1 + KEPT) * (total - _saved(places, merges)):
                places, instead = before, AS_BEFORE
            refused, kernels = self._kernels(section, [place for place in places if place in merges], problems, merges)
            if refused is None:
                break
            merges[refused[0]] = replace(merges[refused[0]], way=None, reason=refused[1])
        self.ready(kernels)
        self.considered += (replace(merge, taken=place in places, instead=instead) for place, merge in merges.items())
        self.memory.chains.update((section.regions[place[-1]].outputs[0], _results(section.of(place))) for place in places)
        self.memory.schedules.update((merges[place].results, merges[place].schedule) for place in places if place in merges)
        return [section.of(place) for place in places]

    def seconds(self, names: frozenset[str]) -> float:
        """Predicted seconds of the named regions, as the fastest partitions of the sections that they make up; no kernel is made."""
        total = sum(self.predict(region, True) for region in self.laid_out.regions if region.name in names)
        for section in sections(self.uses, LONGEST):
            if section.regions[0].name in names:
                _, merges = self._merges(section)
                total -= _saved(_fastest(section, merges), merges)
        return total

    @cached_property
    def constants(self) -> frozenset[str]:
        return frozenset(self.graph.constants)

    def _chain(self, segment: Sequence[Region]) -> Problem:
        """The chain of a segment."""
        return Problem(self.uses.chain(segment), self.laid_out.layouts, self.laid_out.values, self.constants)

    def _merges(self, section: Section) -> tuple[dict[Place, Problem], dict[Place, Merge]]:
        """The canonical chain of each segment of a section that is considered, and what is known of it."""
        alone = [self.predict(region, True) for region in section.regions]
        scaled = [self.predict(region, False) for region in section.regions] if self.judge.scales else alone
        by_library = [self.library(region) for region in section.regions]
        problems: dict[Place, Problem] = {}
        merges: dict[Place, Merge] = {}
        for place in section.segments:
            segment, its = section.of(place), [scaled[number] for number in place]
            results, stored, apart = _results(segment), self.uses.stored(segment), sum(alone[number] for number in place)
            decides = self.every or self.judge.decides(segment, self.laid_out.values, self.constants, apart)
            if not decides and self.measured is None:
                continue
            chain, measure = self._chain(segment), self.measured or (lambda problem: None)
            asked = results in self.memory.schedules or self.policy.about(CHAIN, results)
            most = (1 - LEAST_GAIN if self.measured is None and not asked else 1 + MEASURED_LOSS) * apart
            if not asked and (least := self.judge.least(chain, its)) >= most:
                merges[place] = Merge(results, apart, None, stored=stored, least=least)
                continue
            same = canonical(chain)
            problem = same.problem
            if not decides and measure(problem) is None:
                continue
            judged = partial(self.judge.best, problem, its, most, self.memory.schedules.get(results))
            way = contained(_described(segment), "is not merged", judged, _fault)
            problems[place] = problem
            if isinstance(way, (str, float)):
                said, beaten = (with_names(way, same.actual), None) if isinstance(way, str) else ("", way)
                merges[place] = Merge(results, apart, None, said, stored=stored, least=beaten)
                continue
            known = measure(problem) if way.seconds < (1 + MEASURED_LOSS) * apart else None
            found = [by_library[number] for number in place]
            apart = sum(seconds if its is None else its for seconds, its in zip((alone[number] for number in place), found, strict=True))
            merges[place] = Merge(
                results, apart, way, measured=known, by_library=any(its is not None for its in found), stored=stored,
                decided=self.policy.about(CHAIN, results), by_prediction=self.policy.predicted,
            )  # fmt: skip
        return problems, merges

    def _kernels(
        self, section: Section, places: Sequence[Place], problems: Mapping[Place, Problem], merges: Mapping[Place, Merge]
    ) -> tuple[tuple[Place, str] | None, list[Kernel]]:
        """The first of some merges whose kernel is impossible, with the reason, or None; and the kernels of those before it."""
        kernels: list[Kernel] = []
        for place in places:
            made = partial(self.judge.lowered, problems[place], merges[place])
            lowered = contained(_described(section.of(place)), "is not merged", made, _fault)
            if isinstance(lowered, str):
                return (place, with_names(lowered, canonical(self._chain(section.of(place))).actual)), kernels
            kernels += lowered.kernels
        return None, kernels

    def _as_before(self, section: Section, merges: Mapping[Place, Merge]) -> list[Place]:
        """The partition of a section that the memory has, with the chains that the policy has; empty if there is none, or it is not possible."""
        places = self._known_places(section)
        merged = [place for place in places if len(place) > 1]
        if not places or not all(place in merges and merges[place].way is not None for place in merged):
            return []
        required = [place for place in _fastest(section, merges) if place in merges and merges[place].is_required]
        return _with_required([place for place in merged if merges[place].decided is None], required, section)

    def _known_places(self, section: Section) -> list[Place]:
        """The segments of a section in the memory; empty if it does not know them all, or they are none of this section's."""
        number_of = {region.outputs[0]: number for number, region in enumerate(section.regions)}
        places: list[Place] = []
        inside: set[int] = set()
        for number in range(len(section.regions) - 1, -1, -1):
            if number in inside:
                continue
            results = self.memory.chains.get(section.regions[number].outputs[0], ())
            place = tuple(number_of.get(name, -1) for name in results)
            if place != (number,) and place not in section.segments:
                return []
            places.insert(0, place)
            inside.update(place)
        return places if can_run(places, section.before) else []

    def _remembered(self, section: Section) -> list[tuple[Region, ...]]:
        """The section divided as in the memory, with its schedules; empty if it does not know all of it, or a kernel is not possible for these
        sizes."""
        kernels: list[Kernel] = []
        segments = [section.of(place) for place in self._known_places(section)]
        for segment in segments:
            if len(segment) == 1:
                continue
            schedule = self.memory.schedules[_results(segment)]
            problem = canonical(self._chain(segment)).problem
            try:
                lowered = kernels_of_images(self.memory, problem) or self.judge.lower(problem, schedule)
            except Unsuitable:
                return []
            self.judge.kernels[key_of(problem)] = lowered
            kernels += lowered.kernels
        self.ready(kernels)
        return segments


def with_sections(graph: Graph, ways: Sequence[LaidOut], names: frozenset[str]) -> frozenset[str]:
    """The names of regions, with those of all regions that are in a section with one of them in any of several partitions."""
    found = [frozenset(region.name for region in section.regions) for way in ways for section in sections(Uses(graph, way), LONGEST)]
    while True:
        more = names.union(*(section for section in found if section & names))
        if more == names:
            return names
        names = more


def _fastest(section: Section, merges: Mapping[Place, Merge]) -> list[Place]:
    """The partition of a section into single regions and merges that gains most of those with most of the merges that are required."""
    return best_division(section.before, {place: _worth(merge) for place, merge in merges.items() if merge.gain or merge.is_required})


def _worth(merge: Merge) -> Worth:
    return merge.is_required, merge.saved if merge.is_required else merge.gain


def _with_required(places: Sequence[Place], required: Sequence[Place], section: Section) -> list[Place]:
    """The partition of a section into the required segments, those of `places` that can run beside them, and single regions."""
    taken = [*required]
    for place in places:
        taken += [place] if can_run([*taken, place], section.before) else []
    inside = {number for place in taken for number in place}
    return sorted((*taken, *((number,) for number in range(len(section.regions)) if number not in inside)), key=lambda place: place[-1])


def _results(segment: Sequence[Region]) -> tuple[str, ...]:
    return tuple(region.outputs[0] for region in segment)


def _saved(places: Sequence[Place], merges: Mapping[Place, Merge]) -> float:
    """Seconds that the merges of a partition save."""
    return sum(merges[place].saved for place in places if place in merges)


def _described(regions: Sequence[Region]) -> str:
    return ", ".join(node.described for region in regions for node in region.nodes)


def _fault(why: str) -> str:
    return f"a fault inside Tilewright: {why}"
