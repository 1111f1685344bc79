"""Cache misses of a CPU kernel: data movement, bottom up over its loop tree, for each cache level (Tuna, algorithm 2).

For every node and buffer: the *footprint* (distinct lines) and the *movement* (lines that are loaded into the cache if it is cold before the node).
For an access or straight-line code, movement equals footprint. For a loop of N iterations

    movement = N * movement of one iteration - sum over reuses of (lines reused * fraction kept)

The number of reused lines follows from footprints: N times that of one iteration, minus that of the whole loop. A line is kept if it is still in the
cache when it is accessed again. That depends on the *reuse distance*, the footprint of what runs in between:

- Consecutive iterations share lines: for a line in the middle of an iteration's footprint, the end of one iteration and the beginning of the next.
  Together these make up one iteration, plus, for buffers that differ between the two iterations but are read throughout each, the tiles of both.
- The iteration is itself a loop that accesses the same lines every time: its last iteration, and the first one of the next outer iteration.
- Iterations k apart share lines: k iterations.

A sequence is treated alike: the lines that a part shares with earlier parts are kept or not, depending on the footprint of what runs in between.

So a loop moves its footprint if one iteration fits in the cache, and otherwise N times the movement of an iteration: the paper's rule. Where the
paper tracks a reuse status, true or false, for each tensor, this model uses the fraction kept. A set of an associative cache keeps a line if the
lines that fall into the set in between are no more than its ways. The distribution of each buffer's lines over the sets is known
(`footprints.lines_by_set`), but the buffers' addresses are not, so the fraction is an average over all relative positions of the buffers, taken as
independent. This models the capacity lost to limited associativity, and is exact for strides that fall into few sets. Without associativity the full
capacity counts, as in the paper.

Every level is assumed to see all accesses. Worked example, the paper's two products: `tests/test_analysis_caches.py`.
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
"""A reuse distance above this multiple of the capacity keeps nothing, whatever the sets."""

Ranges = tuple[tuple[int, int, int], ...]
"""(loop number, first value, count) for the loops that do not run over their full range, 0 to their ends."""
Window = tuple[tuple[Node, Ranges], ...]
"""What runs between two accesses to a line: nodes, each with its restricted loops."""


@dataclass(frozen=True)
class Reuse:
    """Lines of a buffer that are accessed again, `lag` iterations of a loop later or (lag 0) by a later part of a sequence. `lines` counts them over
    one run of the loop or the sequence; `distance` is the number of lines of all buffers accessed in between; `kept` is the fraction that stays in
    the cache."""

    buffer: str
    loop: str
    lag: int
    lines: float
    distance: float
    kept: float


@dataclass(frozen=True)
class LevelMisses:
    """Misses of one level: by buffer, the lines that are loaded and the distinct lines, both for the whole kernel; `reuses` starts with the
    innermost."""

    level: int
    line_bytes: int
    misses: Mapping[str, float]
    footprint: Mapping[str, float]
    reuses: tuple[Reuse, ...]

    @property
    def total(self) -> float:
        """Number of lines loaded."""
        return sum(self.misses.values())

    @property
    def bytes_moved(self) -> float:
        return self.total * self.line_bytes


@dataclass(frozen=True)
class CacheMisses:
    """Predicted misses of one thread in one call of a kernel that starts with cold caches."""

    kernel: str
    levels: tuple[LevelMisses, ...]

    def level(self, level: int) -> LevelMisses:
        """The misses of one level. Raises KeyError if the machine has no such cache."""
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
    """Misses at each level of the machine's caches for the first of `threads` threads. A cache shared by processors is divided equally between
    them."""
    caches = tuple(replace(cache, bytes=cache.bytes // min(max(cache.shared_by, 1), threads)) for cache in machine.caches)
    return CacheMisses(kernel.name, misses_of_levels(loop_tree(kernel, threads), caches))


def misses_of_levels(tree: LoopTree, caches: tuple[Cache, ...]) -> tuple[LevelMisses, ...]:
    """Misses at each cache (given by capacity, line and ways; 0 ways: fully associative)."""
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
    """Footprints of the windows of one tree, for one line size."""

    def __init__(self, tree: LoopTree, line_bytes: int) -> None:
        self.tree = tree
        self.line_bytes = line_bytes
        self._groups: dict[tuple[Window, str], list[tuple[int, list[Strided]]]] = {}
        self._lines: dict[tuple[Window, str], float] = {}
        self._intervals: dict[tuple[Window, str], tuple[np.ndarray, np.ndarray]] = {}

    def line(self, buffer: str) -> int:
        """Elements per line."""
        return max(self.line_bytes // self.tree.element_bytes[buffer], 1)

    def groups(self, window: Window, buffer: str) -> list[tuple[int, list[Strided]]]:
        """What the window accesses in the buffer, as groups (step, sets). The loops that are not part of the window shift all sets of a group
        together, by multiples of `step` elements (0: no shift)."""
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
                if access.rest is not None and not found.places:  # its position is unknown, and it is assumed to share no lines
                    found = replace(found, start=unknown)
                    unknown += found.elements
                result.setdefault(outside, []).append(found)
        self._groups[key] = [(gcd(*(step for _, step in outside)) if outside else 0, sets) for outside, sets in result.items()]
        return self._groups[key]

    def lines(self, window: Window, buffer: str) -> float:
        """Distinct lines of the buffer that the window accesses, averaged over the positions given by the loops outside."""
        key = (window, buffer)
        if key not in self._lines:
            line = self.line(buffer)
            total = sum(distinct_lines(sets, line, phase) for phase, sets in self.groups(window, buffer))
            self._lines[key] = min(total, self.tree.sizes[buffer] // line + 1)
        return self._lines[key]

    def intervals(self, window: Window, buffer: str) -> tuple[np.ndarray, np.ndarray]:
        """These lines as disjoint intervals, with the loops outside at 0."""
        key = (window, buffer)
        if key not in self._intervals:
            sets = [found for _, group in self.groups(window, buffer) for found in group]
            self._intervals[key] = line_intervals(sets, self.line(buffer))
        return self._intervals[key]


class _Level:
    """Algorithm 2 for one cache, with intermediate results."""

    def __init__(self, footprints: _Footprints, cache: Cache) -> None:
        self.footprints = footprints
        self.lines = footprints.lines
        self.capacity = cache.bytes // cache.line_bytes
        self.ways = cache.ways or self.capacity
        self.sets = self.capacity // self.ways
        self.reuses: list[Reuse] = []
        self._spread: dict[tuple[Window, str], np.ndarray] = {}

    def spread(self, window: Window, buffer: str) -> np.ndarray:
        """Fractions of the cache's sets into which 0, 1, ..., `ways`, and (last) more than `ways` lines of the buffer fall."""
        key = (window, buffer)
        if key not in self._spread:
            counts = np.minimum(lines_by_set(self.footprints.intervals(window, buffer), self.sets), self.ways + 1)
            self._spread[key] = np.bincount(counts, minlength=self.ways + 2) / self.sets
        return self._spread[key]

    # --- reuse ---

    def kept(self, buffer: str, window: Window) -> tuple[float, float]:
        """The fraction of the buffer's lines, accessed in the window, that are in the cache after it; and the number of lines of all buffers that the
        window accesses."""
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
        """What runs in the node after the last access to a line of the buffer, for a line in the middle of the node's footprint."""
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
        """What runs in the node before the first access to that line."""
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
        """The first and the last iteration that access a line in the middle of the loop's footprint; they differ if a line holds several steps."""
        step = min(abs(stride) for access in loop.accesses[buffer] for number, stride in access.steps if number == loop.number)
        several = min(max(self.footprints.line(buffer) // max(step, 1), 1), loop.count)
        first = (loop.count - several + 1) // 2
        return first, first + several - 1

    def place(self, node: Sequence, buffer: str, last: bool) -> int:
        """The last (or first) part of a sequence that accesses the most lines of the buffer."""
        using = [number for number, part in enumerate(node.parts) if buffer in part.accesses]
        lines = {number: self.lines(((node.parts[number], ()),), buffer) for number in using}
        most = max(lines.values()) * (1 - 1e-9)
        return [number for number in using if lines[number] >= most][-1 if last else 0]

    def between(self, loop: Loop, buffer: str, lag: int) -> Window:
        """What runs between the accesses to a line of the buffer in one iteration of the loop and `lag` iterations later."""
        if lag > 1:
            return ((loop, ((loop.number, 0, lag),)),)
        return _together(self.tail(loop.body, buffer, ((loop.number, 0, 1),)), self.head(loop.body, buffer, ((loop.number, 1, 1),)))

    # --- movement ---

    def movement(self, node: Node) -> dict[str, float]:
        """Lines of each buffer that are loaded while the node runs once, from a cold cache."""
        if isinstance(node, Leaf):
            return {name: self.lines(((node, ()),), name) for name in node.accesses}
        if isinstance(node, Loop):
            inside = self.movement(node.body)
            return {name: self.loop_movement(node, name, moved) for name, moved in inside.items()}
        moved = [self.movement(part) for part in node.parts]
        return {name: self.sequence_movement(node, name, [m.get(name, 0.0) for m in moved]) for name in node.accesses}

    def loop_movement(self, loop: Loop, buffer: str, moved: float) -> float:
        """The equation in the module docstring. Reuses are scaled so that the movement is the loop's footprint if all of them are kept."""
        count = loop.count
        single = self.lines(((loop.body, ()),), buffer)
        reused = count * single - self.lines(((loop, ()),), buffer)
        if reused <= 0:  # an average over positions may be slightly below the footprint of this loop
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
        """By lag k, the number of lines that an iteration accesses and that were last accessed k iterations before, summed over iterations. With the
        footprint u(k) of k iterations, n(k) = u(k + 1) - u(k) lines are new after k iterations, and n(k - 1) - n(k) were last accessed k iterations
        before."""
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
        """The movement of all parts minus what each keeps from earlier parts, latest first."""
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
