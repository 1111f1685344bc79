"""Chains: which successive regions become one kernel, on a CPU one that works through them in strips (`partition.chain_kernel`), on a GPU one
whose blocks compute tiles (`partition.tile_judge`).

DeepCuts (Jung et al., PLDI 2021, algorithm 1) merges neighbouring parts of a graph as long as a gain is predicted. Here the regions that may be
merged form paths, in which each is the only reader of the one before. For a path the best partition is found exactly, by dynamic programming over its
segments, also where pairs gain nothing but longer segments do. On a CPU the time of a segment is that of its best strips: the models rank the
candidates of each of its regions for a strip, on one thread. Layouts are known by then, and schedules are chosen for strips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any, ClassVar, Protocol

import numpy as np

from tilewright.errors import contained
from tilewright.graph.contraction import anchor
from tilewright.hardware.calibration import CpuChains, cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Var, loads
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable
from tilewright.ir.space import Candidate, Comparison
from tilewright.kernels import registry
from tilewright.kernels.cpu.rates import reread_bandwidth
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import canonical, key_of, named
from tilewright.partition.chain_kernel import Chain, Frame, StripSchedule, lower_chain, strip
from tilewright.partition.layouts import LaidOut
from tilewright.partition.strips import Cut, Rows, cut
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.text import seconds_text

KINDS = frozenset({"contraction", "window", "map", "row reduction"})
"""Kinds of region that a chain may contain."""
LONGEST = 3
"""Maximum regions of a chain."""
ROWS = (1, 2, 4, 5, 7, 8, 14, 16, 28, 32)
"""Rows of strips that are considered."""
LEAST_GAIN = 0.01
"""Share of the time that a chain must gain: its kernel takes longer to compile."""
MEASURED_LOSS = 0.1
"""Share of the time that a chain may lose by prediction and still be measured by trials, or decided by what they measured."""
TILE_SHARE = 0.5
"""Maximum part of the second-level cache for tiles: filters and what is read and stored go through it too."""

NEAR = 0.5
"""Share of a thread's second-level cache that a result may fill to be read from there by the next kernel."""
FAR = frozenset({"memory", "dispatch", "scattered results", "shared lines", "read again"})
"""Terms of estimates that a strip does not have, since its data are in the second-level cache and its code is in a kernel with others."""


Ready = Callable[[Sequence[Kernel]], object]
"""Is called with kernels that may be compiled now."""
Predict = Callable[[Region, bool], float]
"""Predicted seconds of a region by itself, with or without Winograd's algorithm, whose kernels need memory of their own and are not in chains."""


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


class ChainSchedule(Protocol):
    """How a chain is cut (`chain_kernel.StripSchedule`, `tile_kernel.TileSchedule`)."""

    @property
    def described(self) -> str: ...


class Way(Protocol):
    """How a chain is computed (`Strips`, `tile_judge.Tiles`), with the predicted seconds."""

    @property
    def schedule(self) -> ChainSchedule: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class Measured:
    """What trials found: the fastest schedule of a chain with its seconds, and those of the kernels of its regions one after another."""

    schedule: ChainSchedule
    seconds: float
    apart: float


Library = Callable[[Region], float | None]
"""Measured seconds of the library's kernel that would compute a region by itself; None if one of ours would, whose time is predicted."""
FindMeasured = Callable[[Problem], Measured | None]
"""What trials found of a canonical chain; None if they did not measure both it and its regions apart."""


@dataclass(frozen=True)
class Merge:
    """A segment that was considered: the results of its regions, predicted seconds apart and in one kernel (None: it is not possible, for a
    reason), what was measured of both, whether the seconds apart have those measured of a library's kernels, and whether it was taken."""

    results: tuple[str, ...]
    apart: float
    way: Way | None
    reason: str = ""
    measured: Measured | None = None
    by_library: bool = False
    taken: bool = False

    def __str__(self) -> str:
        if self.way is None:
            return f"{' -> '.join(self.results)} cannot be one kernel: {self.reason}"
        said = f"predicted {seconds_text(self.way.seconds)} {self.way.schedule.described}, {seconds_text(self.apart)} apart"
        said += ", with a library's kernel as measured" if self.by_library else ""
        if self.measured is not None:
            found = self.measured
            said += f"; measured {seconds_text(found.seconds)} {found.schedule.described}, {seconds_text(found.apart)} apart"
        return f"{' -> '.join(self.results)} {said}"

    @property
    def schedule(self) -> ChainSchedule:
        """The schedule, measured or predicted."""
        found = self.measured or self.way
        assert found is not None
        return found.schedule

    @property
    def saved(self) -> float:
        """Seconds that one kernel saves, measured or predicted; negative where it is slower."""
        return 0.0 if self.way is None else (self.measured or self).apart - (self.measured or self.way).seconds

    def with_times(self, lowered: Lowered, schema: str) -> Lowered:
        """The kernel of the chain with its predicted and measured seconds, and those of its regions apart. `schema` names the way."""
        assert self.way is not None
        found = self.measured
        apart = Candidate("apart", f"{len(self.results)} kernels", self.apart, measured_seconds=found.apart if found is not None else None)
        seconds = found.seconds if found is not None else None
        return replace(lowered, predicted_seconds=self.way.seconds, measured_seconds=seconds, comparison=Comparison(schema, (apart,)))

    @property
    def gain(self) -> float:
        """Seconds that one kernel saves; 0 where that is too little to be taken."""
        return self.saved if self.saved > LEAST_GAIN * (self.measured or self).apart else 0.0


KEPT = 0.05
"""Share of the time by which what was chosen for another size may be slower than the best and be chosen again, since its kernels may be compiled
already: predictions that differ by less do not order candidates (`tuning.code_choice.CLOSE`)."""


@dataclass(frozen=True)
class Memory:
    """What planning finds out that helps for other sizes of a model, on the same machine with the same options: predicted seconds and kernels of
    strips, which are of one image; the schedule chosen last for the region with some results; and by its last result the results of each region or
    chain of a path."""

    near_seconds: dict[object, float] = field(default_factory=dict)
    strips: dict[object, Lowered] = field(default_factory=dict)
    schedules: dict[tuple[str, ...], Any] = field(default_factory=dict)
    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Judging(Protocol):
    """Predicts chains for one machine (`Judge`, `tile_judge.TileJudge`): the best way of a canonical chain, whose regions take the seconds `alone` as
    separate kernels, and the kernel of one that was decided about; for both the reason if there is none. `before`: the chain's schedule for another
    size. `scales`: whether predictions are made of `alone`, which then is without Winograd's algorithm."""

    @property
    def scales(self) -> bool: ...
    def best(self, problem: Problem, alone: Sequence[float], before: Any = None) -> Way | str: ...
    def lowered(self, problem: Problem, merge: Merge) -> Lowered | str: ...


@dataclass
class Judge:
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


def dims_of(problem: Problem) -> list[int]:
    """The dimensions of the result along which strips are considered, in this order: those of more than one index, the first one last."""
    (output,) = problem.region.outputs
    dims = [dim for dim, extent in enumerate(problem.values[output].shape) if extent > 1]
    return [*(dim for dim in dims if dim), *(dim for dim in dims if not dim)]


def chain_of(problem: Problem, dim: int) -> Chain:
    """A canonical chain cut along a dimension of its result, and along its first dimension into images.

    Raises:
        Unsuitable: if one of its regions cannot be cut.
    """
    (output,) = problem.region.outputs
    outer = [0] if dim and problem.values[output].shape[0] > 1 else []
    cuts = cuts_of(problem, (dim, *outer))
    for part in cuts:
        _require_strips(part, problem)
    extents = tuple(problem.layouts[output].shape[other] for other in outer)
    return Chain(problem, cuts, extents, problem.layouts[output].shape[dim])


def cuts_of(problem: Problem, dims: Sequence[int], chunked: bool = False) -> tuple[Cut, ...]:
    """The regions of a canonical chain cut along dimensions of its result. `chunked`: also, as the last axis, along that over which the last region
    sums the result before.

    Raises:
        Unsuitable: if one of them cannot be cut.
    """
    stages = problem.region.stages
    inside = frozenset(stage.outputs[0] for stage in stages[:-1])
    cuts = [cut(stages[-1], dims, problem, inside, _summed(*stages[-2:]) if chunked else None)]
    for stage in stages[-2::-1]:
        read = cuts[0].spans.get(stage.outputs[0])
        if read is None:
            raise Unsuitable(f"{stage.outputs[0]} is not needed")
        cuts.insert(0, cut(stage, [None if rows is None else rows.dim for rows in read], problem, inside))
    return tuple(cuts)


def _summed(producer: Region, region: Region) -> Var:
    """The longest axis over which a region sums along a dimension of what the region before it stores."""
    first = region.steps[0]
    read = [position for load in loads(*first.bodies) if load.buffer == producer.outputs[0] for position in load.index]
    axes = [position for position in read if isinstance(position, Var) and position in first.reduction]
    if region.kind != "contraction" or not axes:
        raise Unsuitable(f"{region.name} sums over no dimension of {producer.name}")
    return max(axes, key=lambda axis: axis.extent or 0)


def _require_strips(part: Cut, problem: Problem) -> None:
    """Raises Unsuitable unless the region reads rows of one image for each row of an image, and the same constants."""
    stored = {stage.outputs[0] for stage in problem.region.stages}
    for name, (rows, *images) in part.spans.items():
        if name in stored and rows is None:
            raise Unsuitable(f"all rows of {name} are read for each row")
        if any(image is None and name in stored or image is not None and image != Rows(image.dim) for image in images):
            raise Unsuitable(f"{name} is not read image by image")
        if name in problem.constants and any(part.spans[name]):
            raise Unsuitable(f"each row has its own part of {name}")


def parts_of(problem: Problem) -> list[Problem]:
    """The canonical problems of a chain's regions."""
    return [canonical(Problem(stage, problem.layouts, problem.values, problem.constants)).problem for stage in problem.region.stages]


def with_chains(
    graph: Graph,
    laid_out: LaidOut,
    predict: Predict,
    judge: Judging,
    measured: FindMeasured,
    library: Library,
    memory: Memory,
    only_measured: bool = False,
    ready: Ready = lambda kernels: None,
) -> tuple[LaidOut, tuple[Merge, ...]]:
    """The regions with chains where these were measured to be faster, or are predicted so if records lack them, and what was considered. The chains
    that the memory has of another size are kept if they are predicted nearly as fast (`KEPT`). `only_measured`: no prediction decides. `ready`: is
    called with the kernels of chains that are taken."""
    considered: list[Merge] = []
    taken: dict[str, tuple[Region, ...]] = {}
    for path in paths(graph, laid_out):
        chosen = _partitioned(path, graph, laid_out, predict, judge, measured, library, considered, memory, only_measured, ready)
        taken |= {segment[-1].name: segment for segment in chosen if len(segment) > 1}
    dropped = {region.name for segment in taken.values() for region in segment}
    regions = []
    for region in laid_out.regions:
        if region.name in taken:
            segment = taken[region.name]
            results = tuple(part.outputs[0] for part in segment)
            regions.append(joined(segment, tuple(str(merge) for merge in considered if merge.results == results)))
        elif region.name not in dropped:
            said = tuple(f"stays separate: {merge}" for merge in considered if merge.results[-1] == region.outputs[0] and len(merge.results) == 2)
            regions.append(replace(region, reasons=(*region.reasons, *said)))
    return replace(laid_out, regions=tuple(regions)), tuple(considered)


def _partitioned(
    path: Sequence[Region],
    graph: Graph,
    laid_out: LaidOut,
    predict: Predict,
    judge: Judging,
    measured: FindMeasured,
    library: Library,
    considered: list[Merge],
    memory: Memory,
    only_measured: bool,
    ready: Ready,
) -> list[tuple[Region, ...]]:
    """The fastest partition of a path into segments. A segment whose kernel turns out to be impossible is refused, and the others decided again."""
    alone = [predict(region, True) for region in path]
    summed = [predict(region, False) for region in path] if judge.scales else alone
    by_library = [library(region) for region in path]
    merges: dict[tuple[int, int], Merge] = {}
    problems: dict[tuple[int, int], Problem] = {}
    for end in range(2, len(path) + 1):
        for begin in range(max(0, end - LONGEST), end - 1):
            segment = path[begin:end]
            problem = canonical(Problem(joined(segment), laid_out.layouts, laid_out.values, frozenset(graph.constants))).problem
            if only_measured and measured(problem) is None:
                continue
            results, apart = tuple(region.outputs[0] for region in segment), sum(alone[begin:end])
            judged = partial(judge.best, problem, summed[begin:end], memory.schedules.get(results))
            way = contained(_described(segment), "is not merged", judged, _fault)
            if isinstance(way, str):
                merges[begin, end] = Merge(results, apart, None, way)
            else:
                known = measured(problem) if way.seconds < (1 + MEASURED_LOSS) * apart else None
                found = by_library[begin:end]
                apart = sum(seconds if its is None else its for seconds, its in zip(alone[begin:end], found, strict=True))
                merges[begin, end] = Merge(results, apart, way, measured=known, by_library=any(its is not None for its in found))
            problems[begin, end] = problem
    while True:
        places, before = _fastest(len(path), merges), _as_before(path, merges, memory)
        if before and sum(alone) - _saved(before, merges) <= (1 + KEPT) * (sum(alone) - _saved(places, merges)):
            places = before
        kernels: list[Kernel] = []
        for place in places:
            if place in merges:
                lowered = contained(_described(path[slice(*place)]), "is not merged", partial(judge.lowered, problems[place], merges[place]), _fault)
                if isinstance(lowered, str):
                    merges[place] = replace(merges[place], way=None, reason=lowered)
                    break
                kernels += lowered.kernels
        else:
            ready(kernels)
            considered += (replace(merge, taken=place in places) for place, merge in merges.items())
            memory.chains.update((path[end - 1].outputs[0], tuple(region.outputs[0] for region in path[begin:end])) for begin, end in places)
            memory.schedules.update((merges[place].results, merges[place].schedule) for place in places if place in merges)
            return [tuple(path[begin:end]) for begin, end in places]


def _fastest(count: int, merges: Mapping[tuple[int, int], Merge]) -> list[tuple[int, int]]:
    """The partition of a path of `count` regions into single regions and merges, as places (begin, end), that gains most."""
    best: list[tuple[float, int]] = [(0.0, 0)]  # for each prefix what it gains, and where its last segment begins
    for end in range(1, count + 1):
        ways = [(best[end - 1][0], end - 1)]
        for begin in range(max(0, end - LONGEST), end - 1):
            if (begin, end) in merges and (gain := merges[begin, end].gain):
                ways.append((best[begin][0] + gain, begin))
        best.append(max(ways))
    places: list[tuple[int, int]] = []
    end = count
    while end:
        places.insert(0, (best[end][1], end))
        end = best[end][1]
    return places


def _as_before(path: Sequence[Region], merges: Mapping[tuple[int, int], Merge], memory: Memory) -> list[tuple[int, int]]:
    """The partition of a path that the memory has; empty if it has none, or one that is not possible."""
    places: list[tuple[int, int]] = []
    end = len(path)
    while end:
        results = memory.chains.get(path[end - 1].outputs[0], ())
        place = (end - len(results), end)
        if not results or len(results) > 1 and (place not in merges or merges[place].results != results or merges[place].way is None):
            return []
        places.insert(0, place)
        end = place[0]
    return places


def _saved(places: Sequence[tuple[int, int]], merges: Mapping[tuple[int, int], Merge]) -> float:
    """Seconds that the merges of a partition save."""
    return sum(merges[place].saved for place in places if place in merges)


def _described(regions: Sequence[Region]) -> str:
    return ", ".join(node.described for region in regions for node in region.nodes)


def joined(segment: Sequence[Region], reasons: tuple[str, ...] = ()) -> Region:
    """The chain of some regions."""
    made = {region.outputs[0] for region in segment[:-1]}
    inputs = tuple(dict.fromkeys(name for region in segment for name in region.inputs if name not in made))
    nodes = tuple({node.name: node for region in segment for node in region.nodes}.values())
    steps = tuple(step for region in segment for step in region.steps)
    said = tuple(dict.fromkeys(reason for region in segment for reason in region.reasons))
    last = segment[-1]
    return Region(last.name, "chain", nodes, steps, inputs, last.outputs, (*said, *reasons), stages=tuple(segment))


def paths(graph: Graph, laid_out: LaidOut) -> list[list[Region]]:
    """The regions that may be chained, as maximal paths of two or more: each is the only reader of the one before, whose result is needed nowhere
    else. Of several before a region the one whose result its first step reads comes first."""
    readers: dict[str, list[Region]] = {}
    for region in laid_out.regions:
        for name in dict.fromkeys(region.inputs):
            readers.setdefault(name, []).append(region)
    shared = {*graph.outputs, *laid_out.slices, *(place.buffer for place in laid_out.slices.values())}
    values = laid_out.values
    in_place = {name for name, place in laid_out.slices.items() if values[name].shape == values[place.buffer].shape}  # partition.updates
    made = {
        region.outputs[0]: region
        for region in laid_out.regions
        if len(region.outputs) == 1 and _may_be_cut(region, values) and region.outputs[0] not in in_place
    }
    before: dict[str, Region] = {}
    for region in made.values():
        only = [made[name] for name in region.inputs if name in made and name not in shared and len(readers[name]) == 1]
        if only:
            before[region.name] = only[0]
    after = {producer.name: made_by for made_by, producer in before.items()}
    by_name = {region.name: region for region in made.values()}
    result = []
    for region in made.values():
        if region.name in before:
            continue
        path = [region]
        while path[-1].name in after:
            path.append(by_name[after[path[-1].name]])
        if len(path) > 1:
            result.append(path)
    return result


def _may_be_cut(region: Region, values: Mapping[str, Value]) -> bool:
    computes = all(values[name].elements for name in (*region.inputs, *region.outputs))
    return region.kind in KINDS and not region.checks and bool(region.nodes) and computes


def _fault(why: str) -> str:
    return f"a fault inside Tilewright: {why}"

