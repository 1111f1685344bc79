"""Divisions of partially ordered regions into segments, compared with all that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.partition.divisions import Place, Worth, best_division, bits, can_run


def closed(edges: Sequence[Sequence[bool]]) -> list[int]:
    """For each region what it depends on; edges[n][m]: whether region n + 1 reads region m."""
    before = [0]
    for row in edges:
        before.append(sum(1 << m for m, read in enumerate(row) if read))
        for m in range(len(before) - 1):
            before[-1] |= before[m] if before[-1] >> m & 1 else 0
    return before


partial_orders = (
    st.integers(2, 7).flatmap(lambda count: st.tuples(*(st.lists(st.booleans(), min_size=n, max_size=n) for n in range(1, count)))).map(closed)
)


def runs_in_some_order(places: Sequence[Place], before: Sequence[int]) -> bool:
    """Whether the segments, and the single regions beside them, can run one after another in any order."""
    single = [(number,) for number in range(len(before)) if not any(number in place for place in places)]
    for order in permutations([*places, *single]):
        known = 0
        for place in order:
            if any(before[number] & ~(known | bits(place)) for number in place):
                break
            known |= bits(place)
        else:
            return True
    return False


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[int], dict[Place, Worth]]:
    before = draw(partial_orders)
    segments = [place for size in (2, 3) for place in combinations(range(len(before)), size) if runs_in_some_order([place], before)]
    chosen = draw(st.lists(st.sampled_from(segments), max_size=7, unique=True)) if segments else []
    return before, {place: (draw(st.sampled_from([0, 0, 0, 1])), float(draw(st.integers(-3, 9)))) for place in chosen}


def total(places: Sequence[Place], worth: Mapping[Place, Worth]) -> tuple[int, float]:
    return sum(worth[place][0] for place in places if place in worth), sum(worth[place][1] for place in places if place in worth)


@settings(max_examples=60, deadline=None)
@given(divided())
def test_the_best_of_all_divisions_that_can_run_is_found(drawn: tuple[list[int], dict[Place, Worth]]) -> None:
    before, worth = drawn
    found = best_division(before, worth)
    assert sorted(number for place in found for number in place) == list(range(len(before)))
    assert can_run(found, before)
    ways = [
        places
        for count in range(len(worth) + 1)
        for places in combinations(worth, count)
        if len({number for place in places for number in place}) == sum(map(len, places)) and runs_in_some_order(places, before)
    ]
    assert total(found, worth) == max(total(places, worth) for places in ways)


@settings(max_examples=60, deadline=None)
@given(divided())
def test_what_can_run_is_what_runs_in_some_order(drawn: tuple[list[int], dict[Place, Worth]]) -> None:
    before, worth = drawn
    for places in combinations(worth, 2):
        assert can_run(places, before) == (not {*places[0]} & {*places[1]} and runs_in_some_order(places, before))


@settings(max_examples=60, deadline=None)
@given(divided(), st.integers(1, 2))
def test_few_ideals_do_not_miss_what_one_order_has(drawn: tuple[list[int], dict[Place, Worth]], most: int) -> None:
    before, worth = drawn
    inside = sorted({number for place in worth for number in place})
    consecutive = {
        place: value
        for place, value in worth.items()
        if [inside.index(number) for number in place] == list(range(inside.index(place[0]), inside.index(place[0]) + len(place)))
    }
    line = [(1 << number) - 1 for number in range(len(before))]  # the regions depend on each other as they are given
    found = best_division(before, worth, most)
    assert can_run(found, before)
    assert total(found, worth) >= total(best_division(line, consecutive), worth)


def test_segments_that_wait_for_each_other_are_not_both_taken() -> None:
    """Of two paths, 0 -> 3 and 1 -> 2, each segment has the beginning of one and the end of the other."""
    before = [0, 0, 1 << 1, 1 << 0]
    assert not can_run([(0, 2), (1, 3)], before)
    assert best_division(before, {(0, 2): (0, 1.0), (1, 3): (0, 2.0)}) == [(0,), (2,), (1, 3)]
    assert best_division(before, {(0, 3): (0, 1.0), (1, 2): (0, 2.0)}) == [(1, 2), (0, 3)]


def test_many_branches_have_too_many_ideals_to_extend_all() -> None:
    """Ten paths of four regions, whose ideals are 5 ** 10."""
    before = [bits(range(number - number % 4, number)) for number in range(40)]
    worth: dict[Place, Worth] = {(first, first + 1): (0, 1.0) for first in range(40) if first % 4 < 3}
    found = best_division(before, worth)
    assert can_run(found, before) and sum(len(place) == 2 for place in found) == 20
