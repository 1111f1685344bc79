"""What a chain takes on a CPU, worked through in strips (`partition.chain_kernel`): its time is that of its best strips. The models rank the
candidates of each of its regions for a strip, on one thread; layouts are known by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any, ClassVar

import numpy as np

from tilewright.graph.contraction import anchor
from tilewright.hardware.calibration import CpuChains, cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.cpu.rates import reread_bandwidth
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import canonical, key_of, named
from tilewright.partition.chain_kernel import Chain, Frame, StripSchedule, chain_of, lower_chain, strip
from tilewright.partition.merges import KEPT, Memory, Merge
from tilewright.partition.strips import Cut, dims_of
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice

ROWS = (1, 2, 4, 5, 7, 8, 14, 16, 28, 32)
"""Rows of strips that are considered."""
TILE_SHARE = 0.5
"""Maximum part of the second-level cache for tiles: filters and what is read and stored go through it too."""
NEAR = 0.5
"""Share of a thread's second-level cache that a result may fill to be read from there by the next kernel."""
FAR = frozenset({"memory", "dispatch", "scattered results", "shared lines", "read again"})
"""Terms of estimates that a strip does not have, since its data are in the second-level cache and its code is in a kernel with others."""


@dataclass(frozen=True)
class Parts:
    """What the time of a chain is composed of, in seconds: `work` is what the strips of the regions take with the costs of separate kernels; the
    others are costs that only separate kernels have, each at the full rate of the machine: `stored` for results in between that leave the
    second-level caches, `crossing` for those that threads read from one another's, `calls` for parallel regions of several threads, `single` for
    those of one thread."""

    work: float
    stored: float = 0.0
    crossing: float = 0.0
    calls: float = 0.0
    single: float = 0.0

    def seconds(self, constants: CpuChains) -> float:
        """The predicted seconds of the chain."""
        saved = constants.stored * self.stored + constants.crossing * self.crossing + constants.calls * self.calls + constants.single * self.single
        return self.work - saved


@dataclass(frozen=True)
class Strips:
    """How a chain is cut, the predicted seconds, and how they are composed."""

    schedule: StripSchedule
    seconds: float
    parts: Parts


@dataclass
class StripJudge:
    """Predicts chains for one machine and number of threads; remembers what it predicted. `numerics`: allowed rounding. `counted` is called with
    numbers of candidates that were ranked."""

    machine: Machine
    threads: int
    numerics: Numerics
    counted: Callable[[int], object] = lambda count: None
    memory: Memory = field(default_factory=Memory)
    strips: dict[object, Strips | str] = field(default_factory=dict)
    kernels: dict[object, Lowered | str] = field(default_factory=dict)
    scales: ClassVar[bool] = True

    @property
    def _direct(self) -> Numerics:
        """Without Winograd's algorithm."""
        return replace(self.numerics, winograd=False)

    def best(self, problem: Problem, alone: Sequence[float], before: Any = None) -> Strips | str:
        """The best strips of a canonical chain, whose regions take the seconds `alone` as separate kernels without Winograd's algorithm, or those
        `before` if they are predicted nearly as fast; or why there are none."""
        key = key_of(problem)
        if key not in self.strips:
            found = self.ranked(problem, alone)
            close = [] if isinstance(found, str) else [strips for strips in found if strips.seconds <= (1 + KEPT) * found[0].seconds]
            self.strips[key] = found if isinstance(found, str) else next((strips for strips in close if strips.schedule == before), found[0])
        return self.strips[key]

    def lowered(self, problem: Problem, merge: Merge) -> Lowered | str:
        """The kernel of a canonical chain, or why it cannot be lowered."""
        key = key_of(problem)
        if key not in self.kernels:
            schedule = merge.schedule
            assert isinstance(schedule, StripSchedule)
            try:
                self.kernels[key] = merge.with_times(self.lower(problem, schedule), "strips")
            except Unsuitable as reason:
                self.kernels[key] = str(reason)
        return self.kernels[key]

    def lower(self, problem: Problem, schedule: StripSchedule) -> Lowered:
        """The kernel of a canonical chain.

        Raises:
            Unsuitable: if it cannot be cut so, or one of its regions needs kernels or memory of its own.
        """
        if schedule.dim not in dims_of(problem):
            raise Unsuitable(f"its result cannot be cut along dimension {schedule.dim}")
        chain = chain_of(problem, schedule.dim)
        if not 0 < schedule.rows <= chain.height or chain.tile_bytes(schedule.rows) > self._room:
            raise Unsuitable(f"there are no strips of {schedule.rows} rows, or their tiles do not fit")
        return lower_chain(chain, schedule, self._strip)

    def _strip(self, strip: Problem, whole: bool) -> Lowered:
        """The kernel of a strip of one region: of a whole image the one that it would be by itself on one thread."""
        same = canonical(strip)
        key = (key_of(same.problem), whole)
        if key not in self.memory.strips:
            choice = choose(same.problem, self.machine, 1, self._direct) if whole else self.near(same.problem)
            self.memory.strips[key] = registry.lower(same.problem, choice.schedule, self.machine)
        return named(self.memory.strips[key], strip.region, {short: name for name, short in same.names.items()})

    def ranked(self, problem: Problem, alone: Sequence[float]) -> list[Strips] | str:
        """All strips of a canonical chain, fastest first; see `best`."""
        refusals: list[str] = []
        for dim in dims_of(problem):
            try:
                chain = chain_of(problem, dim)
                keys = [key_of(canonical(strip(part, 1, problem)).problem) for part in chain.cuts]
                found = [self._predicted(chain, dim, rows, alone, keys) for rows in self._heights(chain)]
            except Unsuitable as reason:
                refusals.append(str(reason))
            else:
                return sorted(found, key=lambda strips: strips.seconds) or "the tiles of one row do not fit into the second-level cache"
        return "; ".join(dict.fromkeys(refusals)) or "its result has one row"

    @property
    def _room(self) -> float:
        """Bytes that the tiles of a worker may take."""
        level_2 = self.machine.cache(2)
        return TILE_SHARE * level_2.bytes if level_2 is not None else inf

    def _heights(self, chain: Chain) -> list[int]:
        """The rows of strips whose tiles fit; only those that divide the image, if there are some."""
        fit = [rows for rows in (*(rows for rows in ROWS if rows < chain.height), chain.height) if chain.tile_bytes(rows) <= self._room]
        dividing = [rows for rows in fit if chain.height % rows == 0]
        return dividing if len(dividing) > 2 else fit

    def _predicted(self, chain: Chain, dim: int, rows: int, alone: Sequence[float], keys: Sequence[object]) -> Strips:
        """Strips of that many rows: what the kernels take separately, changed as the arithmetic of the slowest worker's strips compares with that of
        the whole, plus constants that each strip reads again, minus what is saved (`Parts`)."""
        strips, images = -(-chain.height // rows), prod(chain.outer)
        workers = min(self.threads, images * strips)
        each = -(-images * strips // workers)
        work = 0.0
        for number, (seconds, frame, part, key) in enumerate(zip(alone, chain.frames(rows), chain.cuts, keys, strict=True)):
            near: Callable[[int], float] = partial(self._near_seconds, chain.problem, part, key)
            extent = chain.extent(number)
            if not near(extent):  # a copy has no arithmetic: its rows count alike
                near = float
            own = near(extent) * each if strips == 1 else _slowest(chain, rows, each, frame, extent, near)
            share = own * self.threads / (images * near(extent))
            again = sum(chain.problem.values[name].bytes for name in part.region.inputs if name in chain.problem.constants)
            fixed = min(self.machine.dispatch_seconds, seconds)
            work += fixed + (seconds - fixed) * share + (each - 1) * again * self.machine.processors / self.machine.cache_bandwidth(2)
        sizes = [chain.problem.values[part.result].bytes for part in chain.cuts[:-1]]
        level_2, between = self.machine.cache(2), between_kernels(sizes, self.machine, self.threads)
        free = 1 - chain.tile_bytes(rows) / level_2.bytes if level_2 is not None else 1.0
        last = self.machine.dispatch_seconds if workers == 1 else 0.0  # the chain has no parallel region either
        calls, single = (between.calls, between.single + last) if self.threads == 1 else (between.calls + last, 0.0)
        parts = replace(between, work=work, stored=free * between.stored, calls=calls, single=single)
        return Strips(StripSchedule(rows, workers, dim), parts.seconds(cpu_calibration(self.machine).chains), parts)

    def _near_seconds(self, problem: Problem, part: Cut, key: object, count: int) -> float:
        """Predicted seconds of `count` rows of a region, on one thread, whose data are in the second-level cache."""
        known = self.memory.near_seconds
        if (key, count) not in known:
            known[key, count] = self.near(canonical(strip(part, count, problem)).problem).seconds
        return known[key, count]

    def near(self, problem: Problem) -> Choice:
        """The choice for a canonical problem on one thread if its data are in the second-level cache, or cannot be there."""
        numerics, level_2 = self._direct, self.machine.cache(2)
        if problem.region.kind == "contraction" and anchor(problem.region.steps, problem.constants) is None:
            raise Unsuitable("one row of a sum of products is none")
        if level_2 is not None and sum(problem.values[name].bytes for name in problem.constants) > NEAR * level_2.bytes:
            choice = choose(problem, self.machine, 1, numerics)
        else:
            choice = rank(problem, self.machine, 1, numerics, learned=False).without(FAR).first()
        self.counted(choice.space.generated)
        return choice


def between_kernels(sizes: Sequence[int], machine: Machine, threads: int) -> Parts:
    """The costs of results of these bytes that each of several kernels leaves for the next, without any work."""
    level_2, stored, crossing = machine.cache(2), 0.0, 0.0
    near = NEAR * level_2.bytes if level_2 is not None else inf
    for size in sizes:
        passing = size / reread_bandwidth(machine, size, threads)
        if size / threads > near:
            stored += 2 * passing
        else:
            crossing += passing * (threads - 1) / threads
    calls = len(sizes) * machine.dispatch_seconds
    return Parts(0.0, stored, crossing, calls, 0.0) if threads > 1 else Parts(0.0, stored, crossing, 0.0, calls)


def _slowest(chain: Chain, rows: int, each: int, frame: Frame, extent: int, near: Callable[[int], float]) -> float:
    """Seconds of a region in the worker with most to do, if workers have `each` strips and `near` gives the seconds of some rows together. A strip
    computes its rows one by one if it is the first of a worker or an image, or if rows of it do not exist; those are not computed."""
    count = -(-chain.height // rows)
    task = np.arange(prod(chain.outer) * count)
    strip = task % count
    begins = (strip == 0) | (task % each == 0)
    short = np.where(strip == count - 1, rows * count - chain.height, 0) * frame.scale
    first = frame.advance * strip + frame.offset
    begin, end = first + np.where(begins, 0, frame.kept), first + frame.rows - short
    exist = np.maximum(np.minimum(end, extent) - np.maximum(begin, 0), 0)
    single = (begins | (exist < end - begin)) & (frame.kept > 0 or frame.outside)
    seconds = exist * np.where(single, near(1), near(frame.fresh) / frame.fresh)
    return float(np.add.reduceat(seconds, task[::each]).max())
