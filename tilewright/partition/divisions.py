"""The best division of partially ordered regions into segments, over all orders of them.

A division can run if its segments, each taken as one, depend on each other without a cycle: then some order of the regions has each segment's regions
one after another. What precedes a segment in such an order is closed under dependence (an ideal of the partial order). Dynamic programming over
ideals, each of which is extended by a segment at a time, therefore finds the best division over all orders, as Tarnawski et al. ("Efficient
Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020) and IOS (Ding et al., MLSys 2021) do for other divisions. A path has as many
ideals as regions; branches that meet again have the product of their own. Where they are many, only the best are extended, and those that are the
beginning of the given order, so that nothing found in that order is missed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce

Place = tuple[int, ...]
"""A segment: the numbers of its regions, ascending."""
Worth = tuple[int, float]
"""What a segment is worth: the merges that are required, and the seconds that are gained."""
Step = tuple[int, int, Worth, Place]
"""By which an ideal is extended: the regions of a segment and those that it depends on, as bits, what it is worth, and the segment."""

MOST, LEAST = 256, 16
"""Maximum ideals of one size that are extended, of few regions and of any number."""
EXTENDED = 16384
"""Maximum ideals of all sizes that are extended, unless this leaves fewer than LEAST of a size: the time is to grow with the number of regions."""


def bits(place: Iterable[int]) -> int:
    """The numbers as a set of bits."""
    return reduce(lambda found, number: found | 1 << number, place, 0)


def needed(place: Place, before: Sequence[int]) -> int:
    """What a segment depends on, as bits. before: for each region the bits of all that it depends on, directly or not."""
    return reduce(lambda found, number: found | before[number], place, 0) & ~bits(place)


def best_division(before: Sequence[int], worth: Mapping[Place, Worth], most: int | None = None) -> list[Place]:
    """The division of regions 0, 1, ... into single regions, which are worth nothing, and some of the segments that is worth most of those that can
    run; of equals one of shorter segments. before: for each region, in an order in which it comes after these, the bits of all that it depends on.
    most: the maximum ideals of one size that are extended, otherwise by the number of regions."""
    inside = sorted({number for place in worth for number in place})  # all others are single
    most = most or max(LEAST, min(MOST, EXTENDED // max(1, len(inside))))
    number_of = {number: own for own, number in enumerate(inside)}
    own_before = [bits(number_of[other] for other in inside if before[number] >> other & 1) for number in inside]
    steps: list[list[Step]] = [[(1 << own, own_before[own], (0, 0.0), (number,))] for own, number in enumerate(inside)]  # by their first region
    for place, its in worth.items():
        numbers = tuple(number_of[number] for number in place)
        steps[numbers[0]].append((bits(numbers), needed(numbers, own_before), its, place))
    best: dict[int, tuple[int, float, int]] = {0: (0, 0.0, 0)}  # of each ideal what it is worth; how long its last segment is, negated
    last: dict[int, tuple[int, Place]] = {}  # and that segment, with the ideal before it
    sizes: list[list[int]] = [[0], *([] for _ in inside)]
    for size, ideals in enumerate(sizes):
        for ideal in _kept(ideals, best, size, most):
            required, gained, _ = best[ideal]
            # what a segment's first region depends on is outside of the segment, and so before it
            ready = (own for own in range(len(inside)) if not ideal >> own & 1 and not own_before[own] & ~ideal)
            for regions, before_them, (more, seconds), place in (step for own in ready for step in steps[own]):
                if regions & ideal or before_them & ~ideal:
                    continue
                value, following = (required + more, gained + seconds, -len(place)), ideal | regions
                if following not in best:
                    sizes[size + len(place)].append(following)
                if following not in best or value > best[following]:
                    best[following], last[following] = value, (ideal, place)
    found: list[Place] = [(number,) for number in range(len(before)) if number not in number_of]
    ideal = (1 << len(inside)) - 1
    while ideal:
        ideal, place = last[ideal]
        found.append(place)
    return sorted(found, key=lambda place: place[-1])


def _kept(ideals: Collection[int], best: Mapping[int, tuple[int, float, int]], size: int, most: int) -> Iterable[int]:
    """The ideals of one size that are extended: all, or the best and the beginning of the order."""
    if len(ideals) <= most:
        return ideals
    beginning = (1 << size) - 1
    kept = sorted(ideals, key=lambda ideal: (best[ideal], -ideal), reverse=True)[:most]
    return kept if beginning in kept else [*kept[:-1], beginning]


def can_run(places: Iterable[Place], before: Sequence[int]) -> bool:
    """Whether segments are disjoint, and depend on each other without a cycle."""
    waiting = [(bits(place), needed(place, before)) for place in places]
    merged = reduce(lambda found, segment: found | segment[0], waiting, 0)
    if merged.bit_count() != sum(regions.bit_count() for regions, _ in waiting):
        return False
    while waiting:
        ready = [(regions, before_it) for regions, before_it in waiting if not before_it & merged]
        if not ready:
            return False
        merged &= ~reduce(lambda found, segment: found | segment[0], ready, 0)
        waiting = [segment for segment in waiting if segment not in ready]
    return True
