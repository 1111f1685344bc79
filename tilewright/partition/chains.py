"""Chains: which successive regions of a CPU's plan become one kernel that works through them in strips (`partition.chain_kernel`).

DeepCuts (Jung et al., PLDI 2021, algorithm 1) merges neighbouring parts of a graph as long as a gain is predicted. Here the regions that may be
merged form paths, in which each is the only reader of the one before. For a path the best partition is found exactly, by dynamic programming over its
segments, also where pairs gain nothing but longer segments do. The time of a segment is that of its best strips: the models rank the candidates of
each of its regions for a strip, on one thread. Layouts are known by then, and schedules are chosen for strips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod

from tilewright.errors import contained
from tilewright.graph.contraction import anchor
from tilewright.hardware.calibration import CpuChains, cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph, Value
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable
from tilewright.kernels.cpu.rates import reread_bandwidth
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import canonical, named
from tilewright.partition.chain_kernel import Chain, lower_chain
from tilewright.partition.layouts import LaidOut
from tilewright.partition.strips import Cut, cut
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice

KINDS = frozenset({"contraction", "window", "map", "row reduction"})
"""Kinds of region that a chain may contain."""
LONGEST = 3
"""Maximum regions of a chain."""
ROWS = (1, 2, 4, 5, 7, 8, 14, 16, 28, 32)
"""Rows of strips that are considered."""
LEAST_GAIN = 0.01
"""Share of the time that a chain must gain by prediction: its kernel takes longer to compile."""
TILE_SHARE = 0.5
"""Maximum part of the second-level cache for tiles: filters and what is read and stored go through it too."""

NEAR = 0.5
"""Share of a thread's second-level cache that a result may fill to be read from there by the next kernel."""
FAR = frozenset({"memory", "dispatch", "scattered results", "shared lines", "read again"})
"""Terms of estimates that a strip does not have, since its data are in the second-level cache and its code is in a kernel with others."""


Predict = Callable[[Region, bool], float]
"""Predicted seconds of a region by itself, with or without Winograd's algorithm, whose kernels need memory of their own and are not in chains."""


@dataclass(frozen=True)
class Parts:
    """What the time of a chain is composed of, in seconds: `work` is what the strips of the regions take with the costs of separate kernels; the
    others are costs that only separate kernels have, each at the full rate of the machine: `stored` for results in between that leave the
    second-level caches, `crossing` for those that threads read from one another's, `calls` for parallel regions."""

    work: float
    stored: float = 0.0
    crossing: float = 0.0
    calls: float = 0.0

    def seconds(self, constants: CpuChains) -> float:
        """The predicted seconds of the chain."""
        return self.work - constants.stored * self.stored - constants.crossing * self.crossing - constants.calls * self.calls


@dataclass(frozen=True)
class Strips:
    """How a chain is cut: strips of `rows` rows along dimension `dim` of its result, `workers` at a time; the predicted seconds, and how they are
    composed."""

    dim: int
    rows: int
    workers: int
    seconds: float
    parts: Parts


@dataclass(frozen=True)
class Merge:
    """A segment that was considered: the results of its regions, predicted seconds apart and in one kernel (None: it is not possible, for a
    reason), and whether it was taken."""

    results: tuple[str, ...]
    apart: float
    strips: Strips | None
    reason: str = ""
    taken: bool = False

    def __str__(self) -> str:
        if self.strips is None:
            return f"{' -> '.join(self.results)} cannot be one kernel: {self.reason}"
        return f"{' -> '.join(self.results)} predicted {_us(self.strips.seconds)} in strips of {self.strips.rows} rows, {_us(self.apart)} apart"


@dataclass
class Judge:
    """Predicts chains for one machine and number of threads; remembers what it predicted. `numerics`: allowed rounding."""

    machine: Machine
    threads: int
    numerics: Numerics
    near_seconds: dict[object, float] = field(default_factory=dict)
    strips: dict[object, Strips | str] = field(default_factory=dict)
    kernels: dict[object, Lowered | str] = field(default_factory=dict)

    def best(self, problem: Problem, alone: Sequence[float]) -> Strips | str:
        """The best strips of a canonical chain, whose regions take the seconds `alone` as separate kernels without
        Winograd's algorithm; or why there are none."""
        key = key_of(problem)
        if key not in self.strips:
            self.strips[key] = self._best(problem, alone)
        return self.strips[key]

    def lowered(self, problem: Problem, strips: Strips) -> Lowered | str:
        """The kernel of a canonical chain, or why it cannot be lowered."""
        key = key_of(problem)
        if key not in self.kernels:
            try:
                kernel = lower_chain(chain_of(problem, strips.dim), strips.rows, strips.workers, self._strip)
                self.kernels[key] = replace(kernel, predicted_seconds=strips.seconds)
            except Unsuitable as reason:
                self.kernels[key] = str(reason)
        return self.kernels[key]

    def _strip(self, strip: Problem) -> Lowered:
        """The kernel of a strip of one region."""
        same = canonical(strip)
        lowered = lower(same.problem, self.near(same.problem).schedule, self.machine)
        return named(lowered, strip.region, {short: name for name, short in same.names.items()})

    def _best(self, problem: Problem, alone: Sequence[float]) -> Strips | str:
        refusals: list[str] = []
        for dim in dims_of(problem):
            try:
                chain = chain_of(problem, dim)
                keys = [key_of(canonical(part.strip(1, problem)).problem) for part in chain.cuts]
                found = [self._predicted(chain, dim, rows, alone, keys) for rows in self._heights(chain)]
            except Unsuitable as reason:
                refusals.append(str(reason))
            else:
                return min(found, key=lambda strips: strips.seconds) if found else "the tiles of one row do not fit into the second-level cache"
        return "; ".join(dict.fromkeys(refusals)) or "its result has one row"

    def _heights(self, chain: Chain) -> list[int]:
        """The rows of strips whose tiles fit; only those that divide the image, if there are some."""
        level_2 = self.machine.cache(2)
        room = TILE_SHARE * level_2.bytes if level_2 is not None else inf
        fit = [rows for rows in (*(rows for rows in ROWS if rows < chain.height), chain.height) if chain.tile_bytes(rows) <= room]
        dividing = [rows for rows in fit if chain.height % rows == 0]
        return dividing if len(dividing) > 2 else fit

    def _predicted(self, chain: Chain, dim: int, rows: int, alone: Sequence[float], keys: Sequence[object]) -> Strips:
        """Strips of that many rows: what the kernels take separately, changed as the arithmetic of the slowest worker's strips compares with that of
        the whole, plus constants that each strip reads again, minus what is saved (`Parts`)."""
        strips, images = -(-chain.height // rows), prod(chain.outer)
        workers = min(self.threads, images * strips)
        own = max(images / workers, 1.0)  # images of which a worker has strips
        each = min(-(-images * strips // workers), images * chain.height / rows)  # an image's last strip may be shorter
        edges = min(2 * own, each)  # strips whose rows are computed one by one
        total = 0.0
        for seconds, frame, part, key, extent in zip(alone, chain.frames(rows), chain.cuts, keys, map(chain.extent, range(len(keys))), strict=True):
            near: Callable[[int], float] = partial(self._near_seconds, chain.problem, part, key)
            if not near(extent):  # a copy has no arithmetic: its rows count alike
                near = float
            if strips == 1:
                work = each * near(extent)
            elif frame.kept or frame.outside:
                work = (each - edges) * near(frame.fresh) + (edges * frame.fresh + own * frame.kept) * near(1)
            else:
                work = each * near(frame.rows)
            again = sum(chain.problem.values[name].bytes for name in part.region.inputs if name in chain.problem.constants)
            total += seconds * work * self.threads / (images * near(extent))
            total += (each - 1) * again * self.machine.processors / self.machine.cache_bandwidth(2)
        parts = self._parts(chain, total, chain.tile_bytes(rows))
        return Strips(dim, rows, workers, parts.seconds(cpu_calibration(self.machine).chains), parts)

    def _parts(self, chain: Chain, work: float, tiles: int) -> Parts:
        """The costs that only separate kernels have, if the strips take `work` seconds and their tiles that many bytes."""
        level_2, stored, crossing = self.machine.cache(2), 0.0, 0.0
        near = NEAR * level_2.bytes if level_2 is not None else inf
        for part in chain.cuts[:-1]:
            size = chain.problem.values[part.result].bytes
            passing = size / reread_bandwidth(self.machine, size, self.threads)
            if size / self.threads > near:
                stored += 2 * passing
            else:
                crossing += passing * (self.threads - 1) / self.threads
        free = 1 - tiles / level_2.bytes if level_2 is not None else 1.0
        calls = (len(chain.cuts) - 1) * self.machine.dispatch_seconds if self.threads > 1 else 0.0
        return Parts(work, free * stored, crossing, calls)

    def _near_seconds(self, problem: Problem, part: Cut, key: object, count: int) -> float:
        """Predicted seconds of `count` rows of a region, on one thread, whose data are in the second-level cache."""
        if (key, count) not in self.near_seconds:
            self.near_seconds[key, count] = self.near(canonical(part.strip(count, problem)).problem).seconds
        return self.near_seconds[key, count]

    def near(self, problem: Problem) -> Choice:
        """The choice for a canonical problem on one thread if its data are in the second-level cache, or cannot be there."""
        numerics, level_2 = replace(self.numerics, winograd=False), self.machine.cache(2)
        if problem.region.kind == "contraction" and anchor(problem.region.steps, problem.constants) is None:
            raise Unsuitable("one row of a sum of products is none")
        if level_2 is not None and sum(problem.values[name].bytes for name in problem.constants) > NEAR * level_2.bytes:
            return choose(problem, self.machine, 1, numerics)
        return rank(problem, self.machine, 1, numerics, learned=False).without(FAR).first()


def key_of(problem: Problem) -> object:
    """What equal canonical problems have in common."""
    stored = ((name, layout, problem.values[name].dtype, name in problem.constants) for name, layout in problem.layouts.items())
    return (problem.region.kind, tuple(stage.kind for stage in problem.region.stages), problem.region.steps, *stored)


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
    stages = problem.region.stages
    inside = frozenset(stage.outputs[0] for stage in stages[:-1])
    (output,) = problem.region.outputs
    outer = [0] if dim and problem.values[output].shape[0] > 1 else []
    cuts = [cut(stages[-1], dim, outer, problem, inside)]
    for stage in stages[-2::-1]:
        reader = cuts[0]
        name = stage.outputs[0]
        dims = [found for found in reader.images[name] if found is not None]
        cuts.insert(0, cut(stage, reader.rows[name].dim, dims, problem, inside))
    extents = tuple(problem.layouts[output].shape[other] for other in outer)
    return Chain(problem, tuple(cuts), extents, problem.layouts[output].shape[dim])


def with_chains(graph: Graph, laid_out: LaidOut, predict: Predict, judge: Judge) -> tuple[LaidOut, tuple[Merge, ...]]:
    """The regions with chains where these are predicted faster, and what was considered."""
    considered: list[Merge] = []
    taken: dict[str, tuple[Region, ...]] = {}
    for path in paths(graph, laid_out):
        chosen = _partitioned(path, graph, laid_out, predict, judge, considered)
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
    path: Sequence[Region], graph: Graph, laid_out: LaidOut, predict: Predict, judge: Judge, considered: list[Merge]
) -> list[tuple[Region, ...]]:
    """The fastest partition of a path into segments. A segment whose kernel turns out to be impossible is refused, and the others decided again."""
    alone, summed = [predict(region, True) for region in path], [predict(region, False) for region in path]
    merges: dict[tuple[int, int], Merge] = {}
    problems: dict[tuple[int, int], Problem] = {}
    for end in range(2, len(path) + 1):
        for begin in range(max(0, end - LONGEST), end - 1):
            segment = path[begin:end]
            problem = canonical(Problem(joined(segment), laid_out.layouts, laid_out.values, frozenset(graph.constants))).problem
            strips = contained(_described(segment), "is not merged", partial(judge.best, problem, summed[begin:end]), _fault)
            results, reason = tuple(region.outputs[0] for region in segment), strips if isinstance(strips, str) else ""
            merges[begin, end] = Merge(results, sum(alone[begin:end]), None if isinstance(strips, str) else strips, reason)
            problems[begin, end] = problem
    while True:
        places = _fastest(alone, merges)
        for place in places:
            chosen = merges[place].strips if place in merges else None
            if chosen is not None:
                lowered = contained(_described(path[slice(*place)]), "is not merged", partial(judge.lowered, problems[place], chosen), _fault)
                if isinstance(lowered, str):
                    merges[place] = replace(merges[place], strips=None, reason=lowered)
                    break
        else:
            considered += (replace(merge, taken=place in places) for place, merge in merges.items())
            return [tuple(path[begin:end]) for begin, end in places]


def _fastest(alone: Sequence[float], merges: Mapping[tuple[int, int], Merge]) -> list[tuple[int, int]]:
    """The partition of a path into single regions and merges, as places (begin, end), that takes least time by prediction."""
    best: list[tuple[float, int]] = [(0.0, 0)]  # for each prefix its seconds, and where its last segment begins
    for end, seconds in enumerate(alone, 1):
        ways = [(best[end - 1][0] + seconds, end - 1)]
        for begin in range(max(0, end - LONGEST), end - 1):
            merge = merges[begin, end]
            if merge.strips is not None and merge.strips.seconds < (1 - LEAST_GAIN) * merge.apart:
                ways.append((best[begin][0] + merge.strips.seconds, begin))
        best.append(min(ways))
    places: list[tuple[int, int]] = []
    end = len(alone)
    while end:
        places.insert(0, (best[end][1], end))
        end = best[end][1]
    return places


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
    made = {region.outputs[0]: region for region in laid_out.regions if len(region.outputs) == 1 and _may_be_cut(region, laid_out.values)}
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


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} us"

