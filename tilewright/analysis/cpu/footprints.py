"""Footprints: the distinct elements, and the distinct cache lines, that affine accesses touch while loops run.

An access under loops touches {start + sum(stride * i), 0 <= i < count}. The terms, in order of ascending stride, become *levels* whose sums are all
different, so that counts are products. If a term's stride is a multiple q of the stride of the level below it, and q <= that level's count, the term
widens that level (y * s + r over Y and R has (Y - 1) * s + R values if s <= R: a convolution's window). If its stride exceeds the span of all levels
below, it becomes a level of its own. Otherwise (2 x + 3 y) the levels involved are replaced by all multiples of the greatest common divisor of their
strides within the same range, which is never fewer: the set is then not `exact`.

Counted in lines, gaps shorter than a line disappear, so a set becomes runs of adjacent lines at the sums of its outer levels; the number of lines in
a run depends on its start within a line. Unions are merged runs. (Tuna, section III.A.2, leaves all of this to the integer set library.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

MOST_RUNS = 1 << 20
"""Sets of more runs are approximated from above by fewer, longer ones."""


@dataclass(frozen=True)
class Strided:
    """start + all sums of one multiple (0 to count - 1) of each level's stride, in elements. The levels (stride, count) ascend, and no two sums are
    equal. `exact`: the set is exactly what the access touches. If there are `places`, the set is repeated at each of them: these are offsets that no
    strides describe."""

    start: int
    levels: tuple[tuple[int, int], ...]
    exact: bool = True
    places: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Distinct elements at one place."""
        return prod(count for _, count in self.levels)

    @property
    def span(self) -> int:
        """Distance from the first to the last element."""
        return sum(stride * (count - 1) for stride, count in self.levels)


def strided(start: int, terms: Iterable[tuple[int, int]], places: tuple[int, ...] = ()) -> Strided:
    """The set {start + sum(stride * i), 0 <= i < count} for (stride, count) terms in any order, with strides of any sign, at each of `places`."""
    levels: list[tuple[int, int]] = []
    exact = True
    span = 0
    for stride, count in sorted((abs(stride), count) for stride, count in terms if stride and count > 1):
        if levels and stride % levels[-1][0] == 0 and stride // levels[-1][0] <= levels[-1][1]:
            below, held = levels[-1]
            levels[-1] = (below, stride // below * (count - 1) + held)
        elif stride > span:
            levels.append((stride, count))
        else:
            exact = False
            while levels:  # merge levels until the sums of those below stay under the common divisor
                common = gcd(stride, levels[-1][0])
                stride, count = common, (stride * (count - 1) + levels[-1][0] * (levels[-1][1] - 1)) // common + 1
                levels.pop()
                if _span(levels) < common:
                    break
            levels.append((stride, count))
        if len(levels) > 1 and levels[-1][0] == levels[-2][0] * levels[-2][1]:
            (inner, held), (_, repeated) = levels[-2:]
            levels[-2:] = [(inner, held * repeated)]
        span = _span(levels)
    below_start = sum(stride * (count - 1) for stride, count in terms if stride < 0)
    return Strided(start + below_start, tuple(levels), exact, places)


def _span(levels: Sequence[tuple[int, int]]) -> int:
    return sum(stride * (count - 1) for stride, count in levels)


@dataclass(frozen=True)
class Runs:
    """Runs of `length` adjacent elements (with gaps shorter than a line filled in) at start + the sums of the outer levels."""

    start: int
    length: int
    outer: tuple[tuple[int, int], ...]
    places: tuple[int, ...] = ()

    def starts(self) -> np.ndarray:
        """The first element of each run."""
        result = np.array(self.places or (0,)) + self.start
        for stride, count in self.outer:
            result = (result[None, :] + stride * np.arange(count)[:, None]).ravel()
        return result


def runs_of(touched: Strided, line: int) -> Runs:
    """The set as runs that touch the same lines of `line` elements, or more lines if there are too many runs to list."""
    length = 1
    outer: list[tuple[int, int]] = []
    for stride, count in touched.levels:
        if not outer and stride - length < line:  # no whole line fits in the gap
            length += stride * (count - 1)
        else:
            outer.append((stride, count))
    while outer and prod(count for _, count in outer) * max(len(touched.places), 1) > MOST_RUNS:
        stride, count = outer.pop(0)
        length += stride * (count - 1)
    return Runs(touched.start, length, tuple(outer), touched.places)


def distinct_lines(sets: Sequence[Strided], line: int, phase: int = 0) -> float:
    """Lines of `line` elements in the union of sets of one buffer: in closed form for one separable set, else by merging runs.

    `phase`: all starts are shifted by an unknown common multiple of `phase` elements (0: not shifted), as by loops outside; the mean over these
    shifts is returned.
    """
    distinct = tuple(dict.fromkeys(replace(touched, exact=True) for touched in sets))
    if len(distinct) == 1 and (lines := _closed_form(distinct[0], line, phase)) is not None:
        return lines
    shifts = _phases(phase, line)
    total = 0
    for shift in shifts:
        first, last = line_intervals(distinct, line, shift)
        total += int((last - first + 1).sum())
    return total / len(shifts)


def _closed_form(touched: Strided, line: int, phase: int) -> float | None:
    """The mean number of lines of one set; None if two runs may share a line."""
    if touched.places:
        return None
    runs = runs_of(touched, line)
    reached = runs.length
    for stride, count in runs.outer:
        if stride < reached + line - 1:
            return None
        reached += stride * (count - 1)
    # number of runs that begin at each position in a line
    begins = np.zeros(line)
    begins[_phases(phase, line)] = 1
    begins = np.roll(begins / begins.sum(), runs.start % line)
    for stride, count in runs.outer:
        if stride % line:
            shifts = np.bincount(stride * np.arange(count) % line, minlength=line)
            begins = sum((shift * np.roll(begins, at) for at, shift in enumerate(shifts) if shift), np.zeros(line))
        else:
            begins = begins * count
    return float(begins @ ((np.arange(line) + runs.length + line - 1) // line))


def _phases(phase: int, line: int) -> list[int]:
    step = gcd(phase, line) if phase else line
    return list(range(0, line, step))


def line_intervals(sets: Sequence[Strided], line: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The union of the sets, shifted by `shift` elements, as disjoint ascending intervals of lines: the first and the last line of each."""
    firsts, lasts = [], []
    for touched in sets:
        runs = runs_of(touched, line)
        starts = runs.starts() + shift
        firsts.append(starts // line)
        lasts.append((starts + runs.length - 1) // line)
    first, last = np.concatenate(firsts), np.concatenate(lasts)
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order])
    begins = np.ones(len(first), dtype=bool)
    begins[1:] = first[1:] > last[:-1] + 1
    where = np.flatnonzero(begins)
    return first[where], last[np.append(where[1:] - 1, len(first) - 1)]


def lines_by_set(intervals: tuple[np.ndarray, np.ndarray], cache_sets: int) -> np.ndarray:
    """Number of lines of disjoint intervals (`line_intervals`) that fall into each set of a cache, [cache_sets]; line 0 falls into the first set."""
    first, last = intervals
    lengths = last - first + 1
    begin, rest = first % cache_sets, lengths % cache_sets
    changes = np.bincount(begin, minlength=2 * cache_sets) - np.bincount(begin + rest, minlength=2 * cache_sets)
    counts = np.cumsum(changes)
    return counts[:cache_sets] + counts[cache_sets:] + int((lengths // cache_sets).sum())
