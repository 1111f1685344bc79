"""Which cases the usual run of the tests takes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import is_in_turn, left_for_later, spread


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_each_value_of_each_axis_has_a_turn(sizes: list[int]) -> None:
    longest, *others = sorted(sizes, reverse=True)
    taken = [
        (position, *rest)
        for position, *rest in product(range(longest), *map(range, others))
        if is_in_turn(position, list(zip(rest, others, strict=True)), longest)
    ]
    assert [position for position, *_ in taken] == list(range(longest))
    for axis, size in enumerate((longest, *others)):
        assert {each[axis] for each in taken} == set(range(size))


def test_pairs_of_two_short_axes_all_have_turns() -> None:
    taken = [pair for at in range(9) for pair in product(range(2), repeat=2) if is_in_turn(at, [(each, 2) for each in pair], 9)]
    assert len(taken) == 9 and set(taken) == set(product(range(2), repeat=2))


@pytest.mark.parametrize(("name", "number"), [("one", 1), ("two", 2), ("three", 2)])
@pytest.mark.parametrize("flag", [False, True])
def test_parameters_of_one_decorator_are_one_axis(request: pytest.FixtureRequest, name: str, number: int, flag: bool) -> None:
    own = [item for item in request.session.items if getattr(item, "originalname", None) == "test_parameters_of_one_decorator_are_one_axis"]
    if len(own) < 6:
        pytest.skip("not all of them are collected")
    later = list(left_for_later(own))
    taken = [item.callspec.params for item in own if item not in later]  # type: ignore[attr-defined]
    assert sorted((each["name"], each["number"], each["flag"]) for each in taken) == [("one", 1, False), ("three", 2, False), ("two", 2, True)]


@given(st.integers(1, 40), st.integers(1, 45))
def test_positions_are_spread_from_the_first_to_the_last(length: int, most: int) -> None:
    taken = spread(length, most)
    assert list(taken.values()) == list(range(min(length, most))) and list(taken) == sorted(taken) and min(taken) == 0
    assert max(taken) == length - 1 or most == 1
    assert list(spread(length)) == list(range(length))


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.in_turns(3)
def test_some_values_of_the_longest_axis_have_turns(request: pytest.FixtureRequest, number: int, flag: bool) -> None:
    own = [item for item in request.session.items if getattr(item, "originalname", None) == "test_some_values_of_the_longest_axis_have_turns"]
    if request.node.get_closest_marker("slow") is None:
        assert (number, flag) in {(0, False), (4, True), (8, False)}
    assert all(item.get_closest_marker("slow") is not None for item in left_for_later(own) if len(own) == 18)
