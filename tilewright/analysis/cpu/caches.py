"""Cache misses of a CPU kernel: data movement bottom up over its loop tree, for each level of cache (Tuna, algorithm 2).

At every node and for every buffer: the *footprint* (distinct lines) and the *movement* (lines that come into the cache if it is cold before the
node). An access and straight-line code move their footprint. For a loop of N iterations

    movement = N * movement of one iteration - sum over what is reused of (lines reused * fraction kept)

where the lines reused follow from footprints: N times that of one iteration, less that of the whole loop. A line is kept if the cache still
holds it when it is touched again, which depends on the *reuse distance*, the footprint of what runs in between. Where consecutive iterations share
lines, that is the end of one and the beginning of the next, for a line in the middle: together an iteration, and both tiles of what differs between
the two but is read throughout. Where the iteration is itself a loop that touches the same lines every time, it is the last of its iterations and the
first of the next. Where iterations k apart share lines, it is k iterations. A sequence is treated alike: what a part shares with earlier parts is
kept or not by the footprint of what lies between.

So, where one iteration fits, a loop moves its footprint, and where it does not, N times the movement of an iteration: the paper's rule. The paper
tracks a reuse status, true or false, for each tensor; here it is the fraction kept. A set of an associative cache keeps a line if at most as many
lines as it has ways fall into it in between. How the lines of each buffer spread over the sets is known (`footprints.lines_by_set`), where
the buffers lie is not: so the fraction is that of all relative positions of the buffers, each independent. That is the margin that
associativity takes from capacity, exact for strides that fall into few sets. Without associativity the whole capacity counts, as in the paper.

Every level is taken to see all accesses. Worked example, the paper's two products: `tests/test_analysis_caches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from tilewright.analysis.cpu.footprints import Strided, distinct_lines, line_intervals, lines_by_set
from tilewright.analysis.cpu.loop_tree import Leaf, Loop, LoopTree, Node, Sequence, loop_tree, touched
from tilewright.hardware.machine import Cache, Machine
from tilewright.ir.kernel import Kernel

HOPELESS = 4
"""A reuse distance of so many capacities keeps nothing, whatever the sets."""

Ranges = tuple[tuple[int, int, int], ...]
"""Loops by their number, each with its first value and a count: what differs from all of a node's loops running from 0 to their ends."""
Window = tuple[tuple[Node, Ranges], ...]
"""What runs between two touches of a line."""


@dataclass(frozen=True)
class Reuse:
    """Lines of a buffer that are touched again, `lag` iterations of a loop later or (lag 0) by a later part of a sequence; how many lines of all
    buffers are touched in between; which fraction the cache keeps. `lines` counts over one run of the loop or the sequence."""

    buffer: str
    loop: str
    lag: int
    lines: float
    distance: float
    kept: float


@dataclass(frozen=True)
class LevelMisses:
    """Of one level: by buffer the lines that come in, and the distinct lines, both of the whole kernel; `reuses` innermost first."""

    level: int
    line_bytes: int
    misses: Mapping[str, float]
    footprint: Mapping[str, float]
    reuses: tuple[Reuse, ...]

    @property
    def total(self) -> float:
        """Lines that come in."""
        return sum(self.misses.values())

    @property
    def bytes_moved(self) -> float:
        return self.total * self.line_bytes


@dataclass(frozen=True)
class CacheMisses:
    """Predicted misses of one thread in one call of a kernel, with caches cold before it."""

    kernel: str
    levels: tuple[LevelMisses, ...]

    def level(self, level: int) -> LevelMisses:
        """Raises KeyError where the machine has no such cache."""
        for found in self.levels:
            if found.level == level:
                return found
        raise KeyError(f"no level-{level} cache")

    def __str__(self) -> str:
        lines = []
        for level in self.levels:
            lines.append(f"L{level.level}: {level.total:,.0f} lines of {level.line_bytes} B")
            for name, count in level.misses.items():
                lines.append(f"  {name}: {count:,.0f} lines, {count / max(level.footprint[name], 1):.1f} times its {level.footprint[name]:,.0f}")
                lost = [r for r in level.reuses if r.buffer == name and r.kept < 1 and r.loop]
                lines += [f"    loop {r.loop} keeps {r.kept:.0%} of {r.lines:,.0f} lines a run, touched {r.distance:,.0f} lines later" for r in lost]
        return "\n".join(lines)


def cache_misses(kernel: Kernel, machine: Machine, threads: int = 1) -> CacheMisses:
    """Misses at each level of the machine's caches, of the first of so many threads. A cache that processors share is theirs in equal parts."""
    caches = tuple(replace(cache, bytes=cache.bytes // min(max(cache.shared_by, 1), threads)) for cache in machine.caches)
    return CacheMisses(kernel.name, misses_of_levels(loop_tree(kernel, threads), caches))


def misses_of_levels(tree: LoopTree, caches: tuple[Cache, ...]) -> tuple[LevelMisses, ...]:
    """Misses at each cache (its capacity, line and ways; 0 ways: fully associative)."""
    footprints = {line_bytes: _Footprints(tree, line_bytes) for line_bytes in {cache.line_bytes for cache in caches}}
    return tuple(_misses_of_level(footprints[cache.line_bytes], cache) for cache in caches)


def _misses_of_level(footprints: _Footprints, cache: Cache) -> LevelMisses:
    root = footprints.tree.root
    if root is None:
        return LevelMisses(cache.level, cache.line_bytes, {}, {}, ())
    model = _Level(footprints, cache)
    movement = model.movement(root)
    footprint = {name: model.lines(((root, ()),), name) for name in movement}
    return LevelMisses(cache.level, cache.line_bytes, movement, footprint, tuple(model.reuses))


class _Footprints:
    """What windows of one tree touch, in lines of one size."""

    def __init__(self, tree: LoopTree, line_bytes: int) -> None:
        self.tree = tree
        self.line_bytes = line_bytes
        self._groups: dict[tuple[Window, str], list[tuple[int, list[Strided]]]] = {}
        self._lines: dict[tuple[Window, str], float] = {}
        self._intervals: dict[tuple[Window, str], tuple[np.ndarray, np.ndarray]] = {}

    def line(self, buffer: str) -> int:
        """Elements in a line."""
        return max(self.line_bytes // self.tree.element_bytes[buffer], 1)

    def groups(self, window: Window, buffer: str) -> list[tuple[int, list[Strided]]]:
        """What the window touches of the buffer. Sets of one group move together, with the loops that may stand elsewhere, by multiples of so many
        elements (0: not at all)."""
        key = (window, buffer)
        if key in self._groups:
            return self._groups[key]
        result: dict[tuple[tuple[int, int], ...], list[Strided]] = {}
        unknown = 0
        for node, changed in window:
            ranges = {**node.ranges, **{number: (begin, count) for number, begin, count in changed}}
            moving = {number for number, _, _ in changed}
            for access in node.accesses.get(buffer, ()):
                outside = tuple(entry for entry in access.steps if entry[0] in moving or entry[0] not in ranges)
                found = touched(access, ranges, self.tree.sizes[buffer], self.line(buffer))
                if access.rest is not None and not found.places:  # it may be anywhere, and is taken to share nothing
                    found = replace(found, start=unknown)
                    unknown += found.elements
                result.setdefault(outside, []).append(found)
        self._groups[key] = [(gcd(*(step for _, step in outside)) if outside else 0, sets) for outside, sets in result.items()]
        return self._groups[key]

    def lines(self, window: Window, buffer: str) -> float:
        """Distinct lines of the buffer that the window touches, the mean over the positions that loops outside give it."""
        key = (window, buffer)
        if key not in self._lines:
            line = self.line(buffer)
            total = sum(distinct_lines(sets, line, phase) for phase, sets in self.groups(window, buffer))
            self._lines[key] = min(total, self.tree.sizes[buffer] // line + 1)
        return self._lines[key]

    def intervals(self, window: Window, buffer: str) -> tuple[np.ndarray, np.ndarray]:
        """These lines, as disjoint intervals, while the loops outside stand at 0."""
        key = (window, buffer)
        if key not in self._intervals:
            sets = [found for _, group in self.groups(window, buffer) for found in group]
            self._intervals[key] = line_intervals(sets, self.line(buffer))
        return self._intervals[key]


class _Level:
    """Algorithm 2 for one cache, with what it has found so far."""

    def __init__(self, footprints: _Footprints, cache: Cache) -> None:
        self.footprints = footprints
        self.lines = footprints.lines
        self.capacity = cache.bytes // cache.line_bytes
        self.ways = cache.ways or self.capacity
        self.sets = self.capacity // self.ways
        self.reuses: list[Reuse] = []
        self._spread: dict[tuple[Window, str], np.ndarray] = {}

    def spread(self, window: Window, buffer: str) -> np.ndarray:
        """The fraction of the cache's sets into which 0, 1, ... ways, and (last) more lines of the buffer fall."""
        key = (window, buffer)
        if key not in self._spread:
            counts = np.minimum(lines_by_set(self.footprints.intervals(window, buffer), self.sets), self.ways + 1)
            self._spread[key] = np.bincount(counts, minlength=self.ways + 2) / self.sets
        return self._spread[key]

    # --- reuse ---

    def kept(self, buffer: str, window: Window) -> tuple[float, float]:
        """Fraction of the buffer's lines that are in the cache after the window, which touches them, ran; and the lines that it touches."""
        touched_buffers = {name for node, _ in window for name in node.accesses}
        lines = {name: self.lines(window, name) for name in touched_buffers}
        distance = sum(lines.values())
        if self.sets == 1:
            return float(distance <= self.capacity), distance
        if distance > HOPELESS * self.capacity or lines[buffer] > HOPELESS * self.capacity:
            return 0.0, distance
        if distance <= self.ways:
            return 1.0, distance
        others = np.zeros(self.ways + 2)
        others[0] = 1
        for name in sorted(touched_buffers - {buffer}):
            sums = np.convolve(others, self.spread(window, name))
            others = np.append(sums[: self.ways + 1], sums[self.ways + 1 :].sum())
        own = self.spread(window, buffer)
        weights = np.arange(self.ways + 2) * own
        at_most = np.cumsum(others)
        fits = sum(weights[count] * at_most[self.ways - count] for count in range(1, self.ways + 1))
        return float(min(fits / weights.sum(), 1.0)), distance

    def tail(self, node: Node, buffer: str, fixed: Ranges = ()) -> Window:
        """What runs in the node after the last touch of a line of the buffer, for a line in the middle of what the node touches."""
        if isinstance(node, Loop):
            if not node.moves(buffer):
                return self.tail(node.body, buffer, (*fixed, (node.number, node.count - 1, 1)))
            last = self.middle(node, buffer)[1]
            return ((node, (*fixed, (node.number, last, node.count - last))),)
        if isinstance(node, Sequence):
            at = self.place(node, buffer, last=True)
            return (*self.tail(node.parts[at], buffer, fixed), *((part, fixed) for part in node.parts[at + 1 :]))
        return ((node, fixed),)

    def head(self, node: Node, buffer: str, fixed: Ranges = ()) -> Window:
        """What runs in the node before the first touch of that line."""
        if isinstance(node, Loop):
            if not node.moves(buffer):
                return self.head(node.body, buffer, (*fixed, (node.number, 0, 1)))
            first = self.middle(node, buffer)[0]
            return ((node, (*fixed, (node.number, 0, first))),) if first else ()
        if isinstance(node, Sequence):
            at = self.place(node, buffer, last=False)
            return (*((part, fixed) for part in node.parts[:at]), *self.head(node.parts[at], buffer, fixed))
        return ()

    def middle(self, loop: Loop, buffer: str) -> tuple[int, int]:
        """The first and the last iteration that touch a line in the middle of what the loop touches: several, where a line holds several steps."""
        step = min(abs(stride) for access in loop.accesses[buffer] for number, stride in access.steps if number == loop.number)
        several = min(max(self.footprints.line(buffer) // max(step, 1), 1), loop.count)
        first = (loop.count - several + 1) // 2
        return first, first + several - 1

    def place(self, node: Sequence, buffer: str, last: bool) -> int:
        """The part of a sequence that is the last (or the first) to touch most lines of the buffer."""
        using = [number for number, part in enumerate(node.parts) if buffer in part.accesses]
        lines = {number: self.lines(((node.parts[number], ()),), buffer) for number in using}
        most = max(lines.values()) * (1 - 1e-9)
        return [number for number in using if lines[number] >= most][-1 if last else 0]

    def between(self, loop: Loop, buffer: str, lag: int) -> Window:
        """What runs between the touches of a line of the buffer in one iteration of the loop and `lag` iterations later."""
        if lag > 1:
            return ((loop, ((loop.number, 0, lag),)),)
        return _together(self.tail(loop.body, buffer, ((loop.number, 0, 1),)), self.head(loop.body, buffer, ((loop.number, 1, 1),)))

    # --- movement ---

    def movement(self, node: Node) -> dict[str, float]:
        """Lines of each buffer that come in while the node runs once, from a cold cache."""
        if isinstance(node, Leaf):
            return {name: self.lines(((node, ()),), name) for name in node.accesses}
        if isinstance(node, Loop):
            inside = self.movement(node.body)
            return {name: self.loop_movement(node, name, moved) for name, moved in inside.items()}
        moved = [self.movement(part) for part in node.parts]
        return {name: self.sequence_movement(node, name, [m.get(name, 0.0) for m in moved]) for name in node.accesses}

    def loop_movement(self, loop: Loop, buffer: str, moved: float) -> float:
        """The equation of the module's docstring. Reuse at each distance is scaled so that, all kept, the loop's own footprint is left."""
        count = loop.count
        single = self.lines(((loop.body, ()),), buffer)
        reused = count * single - self.lines(((loop, ()),), buffer)
        if reused <= 0:  # a mean over positions may be a little less than what this loop meets
            return count * moved - reused
        lags = self.lags(loop, buffer)
        total = sum(lags.values())
        result = count * moved
        for lag, share in lags.items():
            kept, distance = self.kept(buffer, self.between(loop, buffer, lag))
            lines = reused * share / total
            self.reuses.append(Reuse(buffer, loop.variable, lag, lines, distance, kept))
            result -= lines * kept
        return result

    def lags(self, loop: Loop, buffer: str) -> dict[int, float]:
        """Lines that an iteration touches and that one `lag` before it was the last to touch, times the iterations that have such a one. From
        the footprint u(k) of k iterations: n(k) = u(k + 1) - u(k) is new after k, and n(k - 1) - n(k) was last touched k before."""
        if not loop.moves(buffer):
            return {1: 1.0}
        count = loop.count
        points = [0, *(k for k in (1, 2, 3, 4, 6, 8) if k < count)]
        while points[-1] * 2 < count:
            points.append(points[-1] * 2)
        points.append(count)
        footprint = [0.0, *(self.lines(((loop, ((loop.number, 0, k),)),), buffer) for k in points[1:])]
        slopes = [(b - a) / (k - j) for a, b, j, k in zip(footprint, footprint[1:], points, points[1:], strict=False)]
        found = {k: (count - k) * (before - after) for k, before, after in zip(points[1:], slopes, slopes[1:], strict=False)}
        found = {k: lines for k, lines in found.items() if lines > 1e-9 * count}
        return found or {1: 1.0}

    def sequence_movement(self, node: Sequence, buffer: str, moved: list[float]) -> float:
        """The parts' movement less what they keep from earlier ones, the latest first."""
        result = sum(moved)
        using = [number for number, part in enumerate(node.parts) if buffer in part.accesses]
        for position, number in enumerate(using):
            part = (node.parts[number], ())
            new = self.lines((part,), buffer)
            earlier: Window = ()
            for before in reversed(using[:position]):
                earlier = ((node.parts[before], ()), *earlier)
                remaining = self.lines((*earlier, part), buffer) - self.lines(earlier, buffer)
                reused = new - remaining
                if reused > 1e-9 * new:
                    middle = tuple((other, ()) for other in node.parts[before + 1 : number])
                    window = _together(self.tail(node.parts[before], buffer), middle, self.head(node.parts[number], buffer))
                    kept, distance = self.kept(buffer, window)
                    self.reuses.append(Reuse(buffer, "", 0, reused, distance, kept))
                    result -= reused * kept
                else:
                    result -= min(reused, 0.0)
                new = remaining
        return result


def _together(*windows: Window) -> Window:
    return tuple(dict.fromkeys(entry for window in windows for entry in window))
