"""How many of a test's cases the usual run takes, of which `make test-slow` takes all: random cases, and combinations of parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

import pytest
from hypothesis import settings

THOROUGH = "thorough"
SHARE = 0.15
IN_THIRDS = pytest.mark.parametrize("third", [0, *(pytest.param(third, marks=pytest.mark.slow) for third in (1, 2))])
"""For cases that a test compiles together: the usual run takes `cases[0::3]`, the slow tests also `cases[1::3]` and `cases[2::3]`."""


def draws(number: int) -> int:
    """Of `number` random cases, each of which plans or compiles something, those that this run draws: all under hypothesis's profile `thorough`,
    otherwise a share, and at least two. The profile is chosen before tests are imported (`pytest --hypothesis-profile=thorough`)."""
    return number if settings.get_current_profile_name() == THOROUGH else max(2, ceil(SHARE * number))


def left_for_later(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests over combinations of parameters, those in which no value is new: each value of the longest axis is tested once, with the values of the
    other axes in turn. The parameters of one decorator are one axis. `in_turns(n)`: of the longest axis n values, the first, the last and some between
    them at equal distances."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.split("[")[0]].append(item)
    for members in tests.values():
        axes = [positions_on(marker.args[0], members) for marker in members[0].iter_markers("parametrize")]
        longest, *others = sorted(axes, key=max, reverse=True)
        marker = members[0].get_closest_marker("in_turns")
        taken = spread(max(longest) + 1, *(marker.args if marker else ()))
        for place, item in enumerate(members):
            turn = taken.get(longest[place])
            if turn is None or not is_in_turn(turn, [(axis[place], max(axis) + 1) for axis in others], len(taken)):
                yield item


def spread(length: int, most: int | None = None) -> dict[int, int]:
    """At most so many positions of `length`, at equal distances from the first to the last, and the place of each among them."""
    count = length if most is None else min(most, length)
    return {round(place * (length - 1) / max(count - 1, 1)): place for place in range(count)}


def positions_on(names: str | Sequence[str], members: Sequence[pytest.Item]) -> list[int]:
    """For each item, where its values of these parameters come among those of all items, in order of appearance."""
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    values = [tuple(id(member.callspec.params[name]) for name in wanted) for member in members]  # type: ignore[attr-defined]
    order = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return [order[value] for value in values]


def is_in_turn(position: int, others: Iterable[tuple[int, int]], length: int) -> bool:
    """Whether a combination is that of its value on the longest axis, of `length` values, where it has `position`. `others`: positions and lengths on
    the other axes, whose combinations follow one another like the digits of a number, as far as the longest axis suffices."""
    step = 1
    for own, size in others:
        if step * (size - 1) >= length:
            step = 1
        if own != position // step % size:
            return False
        step *= size
    return True
