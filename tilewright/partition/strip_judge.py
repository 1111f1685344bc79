"""What a chain takes on a CPU, worked through in strips (`partition.chain_kernel`): its time is that of its best strips. The models rank the
candidates of each of its regions for a strip, on one thread; layouts are known by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from tilewright.errors import contained
from tilewright.graph.contraction import anchor
from tilewright.hardware.calibration import CpuChains, cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Value
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.cpu.rates import reread_bandwidth
from tilewright.kernels.images import lowered_for_images
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import canonical, key_of, named
from tilewright.partition.chain_kernel import Chain, Frame, StripSchedule, chain_of, lower_chain, strip
from tilewright.partition.merges import KEPT, Memory, Merge
from tilewright.partition.reuse import lowered_once
from tilewright.partition.strips import Cut, computes_all_rows, dims_of
from tilewright.selection.bounds import ARITHMETIC, NO_BOUNDS, arithmetic_seconds
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice

ROWS = (1, 2, 4, 5, 7, 8, 14, 16, 28, 32)
"""Rows of strips that are considered."""
TILE_SHARE = 0.5
"""Maximum part of the second-level cache for tiles: filters and what is read and stored go through it too."""
NEAR = 0.5
"""Share of a thread's second-level cache, or of level 3, that a result may fill to be read from there by the next kernel."""
MOVES = 3
"""Times that a byte which moves within a tile crosses between levels 1 and 2: it is read, its new place is fetched, and written back."""
FAR = frozenset({"memory", "dispatch", "scattered results", "shared lines", "read again"})
"""Terms of estimates that a strip does not have, since its data are in the second-level cache and its code is in a kernel with others."""


@dataclass(frozen=True)
class Parts:
    """What the time of a chain is composed of, in seconds: `work` is what strips take with the costs of separate kernels. The others are costs that
    only separate kernels have: `stored` to store and read back results in between that leave the second-level caches, at the full rate of the
    machine, and `starts`, a clock cycle for each kernel that is not started."""

    work: float
    stored: float = 0.0
    starts: float = 0.0

    def seconds(self, constants: CpuChains) -> float:
        """The predicted seconds of the chain."""
        return sum(self.terms(constants).values())

    def terms(self, constants: CpuChains) -> Mapping[str, float]:
        """The named seconds of which the predicted ones are the sum; those that are saved are negative."""
        return MappingProxyType(
            {"strips": self.work, "results in between": -constants.stored * self.stored, "starts": -constants.start_cycles * self.starts}
        )


@dataclass(frozen=True)
class Strips:
    """How a chain is cut, the predicted seconds, and how they are composed."""

    schedule: StripSchedule
    seconds: float
    parts: Parts
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


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

    def decides(self, regions: Sequence[Region], values: Mapping[str, Value], constants: frozenset[str], apart: float) -> bool:
        """Predictions take chains on every CPU."""
        return True

    @property
    def _direct(self) -> Numerics:
        """Without Winograd's algorithm."""
        return replace(self.numerics, winograd=False)

    def best(self, problem: Problem, alone: Sequence[float], most: float, before: Any = None) -> Strips | str:
        """The best strips of a canonical chain, whose regions take the seconds `alone` as separate kernels without Winograd's algorithm, or those
        `before` if they are predicted nearly as fast; or why there are none. That they take at most so many seconds is not required."""
        key = key_of(problem)
        if key not in self.strips:
            found = self.ranked(problem, alone)
            close = [] if isinstance(found, str) else [strips for strips in found if strips.seconds <= (1 + KEPT) * found[0].seconds]
            self.strips[key] = found if isinstance(found, str) else next((strips for strips in close if strips.schedule == before), found[0])
        return self.strips[key]

    def least(self, problem: Problem, alone: Sequence[float]) -> float:
        """Seconds that no strips of a chain, canonical or not, are predicted to beat: those of its regions without all that only separate kernels
        cost. Strips add work, except where they leave out rows that no region reads; of such chains nothing is known, and this is 0."""
        if not computes_all_rows(problem):
            return 0.0
        return replace(self._saved(problem), work=sum(alone)).seconds(cpu_calibration(self.machine).chains)

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
        lower = partial(lowered_for_images, problem, partial(self._lowered, schedule=schedule))
        lowered = lowered_once(self.memory, problem, schedule, lower)
        bounds = partial(strip_bounds, problem, schedule, self.machine)
        return replace(lowered, bounds=contained("a chain in strips", "no bounds are stated", bounds, lambda _: NO_BOUNDS))

    def _lowered(self, problem: Problem, schedule: StripSchedule) -> Lowered:
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
        return named(self.memory.strips[key], strip.region, same.actual)

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
        """Strips of that many rows: what the kernels take separately for the rows of the worker with most to do, plus arithmetic that strips add and
        rows that move to the front of a tile, minus what is saved (`Parts`). The arithmetic contains that strips read constants from level 2."""
        strips, images = -(-chain.height // rows), prod(chain.outer)
        workers = min(self.threads, images * strips)
        each = -(-images * strips // workers)
        sizes = [chain.problem.values[part.result].bytes for part in chain.cuts]
        work = 0.0
        for number, (seconds, frame, part, key) in enumerate(zip(alone, chain.frames(rows), chain.cuts, keys, strict=True)):
            near: Callable[[int], float] = partial(self._near_seconds, chain.problem, part, key)
            extent = chain.extent(number)
            most, own = _most(chain, rows, each, frame, extent, near)
            fixed = min(self.machine.dispatch_seconds, seconds)
            share = fixed + (seconds - fixed) * most * self.threads / (images * extent)
            work += max(share + own - most * near(extent) / extent, share)  # kernels by themselves could gain by fewer rows at a time too
            moved = sizes[number] / (images * extent) * frame.kept * (each - -(-each // strips))
            if number in chain.tiled and part.result in chain.problem.region.outputs:  # copied from the tile
                moved += sizes[number] / (images * strips) * each
            work += MOVES * moved * self.machine.processors / self.machine.cache_bandwidth(2)
        level_2 = self.machine.cache(2)
        free = 1 - chain.tile_bytes(rows) / level_2.bytes if level_2 is not None else 1.0
        saved = self._saved(chain.problem)
        parts = Parts(work, free * saved.stored, saved.starts)
        constants = cpu_calibration(self.machine).chains
        return Strips(StripSchedule(rows, workers, dim), parts.seconds(constants), parts, parts.terms(constants))

    def _saved(self, problem: Problem) -> Parts:
        """What a chain, canonical or not, saves if its tiles take no room of the second-level cache, without its work."""
        region, values = problem.region, problem.values
        sizes = [values[stage.outputs[0]].bytes for stage in region.stages]
        stored = 0.0
        for stage, size in zip(region.stages, sizes, strict=True):
            if readers := region.readers_of(stage.outputs[0]):
                read = sum(values[name].bytes for name in stage.inputs if name not in problem.constants)
                passes = len(readers) + (stage.outputs[0] not in region.outputs)
                stored += between_kernels(size, max(read, *(sizes[at] for at in readers)), self.machine, self.threads, passes)
        return Parts(0.0, stored, (len(sizes) - 1) / self.machine.clock_hz)

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


def between_kernels(size: int, beside: int, machine: Machine, threads: int, passes: int = 2) -> float:
    """Seconds to store a result of `size` bytes and read it back for the next kernel, at the full rate of the machine, or to do so as often as
    `passes` says; 0 if it stays in the second-level caches. `beside`: bytes that are read while it is stored, or stored while it is read: with them
    it stays in level 3, or does not."""
    level_2 = machine.cache(2)
    if level_2 is not None and size / threads <= NEAR * level_2.bytes:
        return 0.0
    return passes * size / reread_bandwidth(machine, (size + beside) / NEAR, threads)


def _most(chain: Chain, rows: int, each: int, frame: Frame, extent: int, near: Callable[[int], float]) -> tuple[float, float]:
    """The most rows of a region in a worker, and the most seconds, if workers have `each` strips and `near` gives the seconds of some rows together.
    A strip computes its rows one by one if it is the first of a worker or an image, or if rows of it do not exist; those are not computed."""
    if rows >= chain.height:
        return each * extent, each * near(extent)
    exist, single = _computed(chain, rows, each, frame, extent)
    seconds = exist * np.where(single, near(1), near(frame.fresh) / frame.fresh)
    starts = np.arange(0, len(exist), each)
    return float(np.add.reduceat(exist, starts).max()), float(np.add.reduceat(seconds, starts).max())


def _computed(chain: Chain, rows: int, each: int, frame: Frame, extent: int) -> tuple[np.ndarray, np.ndarray]:
    """For each strip of `rows` rows, of which workers have `each`, the rows of a region that it computes, and whether one by one."""
    count = -(-chain.height // rows)
    task = np.arange(prod(chain.outer) * count)
    strip = task % count
    begins = (strip == 0) | (task % each == 0)
    short = np.where(strip == count - 1, rows * count - chain.height, 0) * frame.scale
    first = frame.advance * strip + frame.offset
    begin, end = first + np.where(begins, 0, frame.kept), first + frame.rows - short
    exist = np.maximum(np.minimum(end, extent) - np.maximum(begin, 0), 0)
    return exist, (begins | (exist < end - begin)) & (frame.kept > 0 or frame.outside)


def strip_bounds(problem: Problem, schedule: StripSchedule, machine: Machine) -> Mapping[str, float]:
    """Seconds that no kernel of a canonical chain in these strips can beat: the arithmetic of the worker with most to do, rows included that another
    worker computes too, at the peak of a thread."""
    narrow = "bf16" in problem.dtypes.values()
    if schedule.dim not in dims_of(problem):  # of several images each is a strip, and here is one
        return MappingProxyType({ARITHMETIC: arithmetic_seconds(float(problem.region.flops()), machine, 1, narrow)})
    chain = chain_of(problem, schedule.dim)
    strips = prod(chain.outer) * -(-chain.height // schedule.rows)
    each = -(-strips // schedule.workers)
    starts = np.arange(0, strips, each)
    flops = np.zeros(len(starts))
    for number, (part, frame) in enumerate(zip(chain.cuts, chain.frames(schedule.rows), strict=True)):
        extent = chain.extent(number)
        rows, _ = _computed(chain, schedule.rows, each, frame, extent)
        flops += np.add.reduceat(rows, starts) * (part.region.flops() / (prod(chain.outer) * extent))
    return MappingProxyType({ARITHMETIC: arithmetic_seconds(float(flops.max()), machine, 1, narrow)})
