"""Predicts chains on a GPU: which tiles are fastest, with which schedules of their regions, and in what time (`partition.tile_kernel`).

    seconds = launch + max(rounds * (sum over the regions of (work * time of the region's part + turn) + exchange + stored), memory)

The time of a part is what the region's schema predicts for it on a processor of which the block has a share: one of r resident blocks has 1/r of the
throughput of every unit, at the same latencies, and runs the blocks of the region's kernel one after another. Its data come from level 2, or, if the
chain holds them, from shared memory: they pass at the rate at which all bytes of the part pass one after another. rounds = ceil(blocks / (processors
* r)): waves, with the tail. memory: the bytes that the chain reads and writes at least once, so that what it saves on inner results counts; rows that
adjacent tiles both compute are in the parts, and so are the parts of all chunks of channels (`Tiling.chunked`). r follows from the shared memory and
registers of all parts together. exchange, if the blocks of a cluster exchange rows: barriers of the cluster, and the rows' bytes through shared
memory; clusters reach fewer processors then. stored: bytes of results that other regions need too, copied to memory at the rate of level 2. `work`
and `turn` are fitted (`hardware.calibration.GpuChains`). Where chains of 16-bit values were measured, a learned model corrects their time
(`tile_features`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf, isfinite
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from tilewright.errors import contained
from tilewright.hardware.calibration import ASSUMED_RECURRENCE, UNFITTED_CHAINS, GpuChains, gpu_calibration, gpu_chains, gpu_recurrence, in_use
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import is_float, size_of
from tilewright.ir.expr import loads, variables
from tilewright.ir.graph import Value
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable
from tilewright.kernels.gpu.early import beginning_early
from tilewright.kernels.gpu.rates import bandwidth
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import key_of
from tilewright.partition.merges import Merge
from tilewright.partition.strips import Cut, computes_all_rows, is_path
from tilewright.partition.tile_bounds import tile_bounds
from tilewright.partition.tile_cuts import CLUSTERS, axis_of, cut_along, dims_cut, exchanging, extents_of, in_chunks, overlapping, summed
from tilewright.partition.tile_features import chain_model, corrections, features, sizes_of
from tilewright.partition.tile_kernel import TileSchedule, lower_tiles
from tilewright.partition.tile_schedules import THREADS, PartSchedules, seconds_of, shared_processor
from tilewright.partition.tile_work import product_seconds, tile_work
from tilewright.partition.tiles import Tiling
from tilewright.selection.bounds import NO_BOUNDS
from tilewright.selection.learned.forest import Forest
from tilewright.selection.ranking import Choice

SIZES = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 128)
"""Rows of tiles along an axis that are considered if they divide it, besides all of them."""
SHARES = (1, 2, 4)
"""Resident blocks per processor that are considered."""
CHUNKS = tuple(range(16, 257, 8))
"""Channels of a chunk that are considered if they divide those over which the last region sums, and are fewer."""
RANKED = 3
"""Tiles whose parts are ranked: those with the least work (`tile_work`), as many in chunks, and as many of each that exchange rows."""
LOWERED = 6
"""Predictions of a chain, from the fastest on, whose kernels are tried."""
MOST_SUMS = 1 << 14
"""Sums of a tile in chunks beyond which no block keeps them in registers."""
NO_ROOM = "no tile with schedules of one block size fits into shared memory"
"""Why a chain has no tiles."""


Least = tuple[float, float]
"""Seconds that the parts of a region in a tile take at least with a processor of their own: those that grow with the number of blocks which share it,
and those that do not."""


@dataclass(frozen=True)
class TileParts:
    """What the time of a chain is composed of: `launch` and `memory` in seconds; `parts`, the seconds of all rounds of the parts as their schemas
    predict them, and `turns`, the number of parts in these rounds; `exchange`, the seconds of rows that blocks of a cluster exchange; `stored`, those
    in which results are copied from shared memory that other regions need too."""

    launch: float
    memory: float
    parts: float
    turns: int
    exchange: float = 0.0
    stored: float = 0.0

    def seconds(self, constants: GpuChains, clock_hz: float) -> float:
        """The predicted seconds of the chain."""
        blocks = constants.work * self.parts + constants.turn * self.turns / clock_hz + self.exchange + self.stored
        return self.launch + max(blocks, self.memory)

    def terms(self, constants: GpuChains, clock_hz: float) -> Mapping[str, float]:
        """The named seconds of which the predicted ones are composed; those of `memory` overlap the others but the launch."""
        terms = {"launch": self.launch, "memory": self.memory, "parts": constants.work * self.parts}
        terms |= {"turns": constants.turn * self.turns / clock_hz, "exchange": self.exchange}
        return MappingProxyType(terms | ({"stored": self.stored} if self.stored else {}))


@dataclass(frozen=True)
class Tiles:
    """How a chain is cut, the predicted seconds, and how they are composed."""

    schedule: TileSchedule
    seconds: float
    parts: TileParts
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def corrected(self, ratio: float) -> Tiles:
        """The prediction times what a learned model says of it."""
        more = self.seconds * (ratio - 1)
        return replace(self, seconds=self.seconds + more, terms=MappingProxyType({**self.terms, "learned correction": more}))


@dataclass(frozen=True)
class _Open:
    """Tiles with a number of resident blocks per processor. least: for each region, and each of THREADS, the seconds that its parts in a tile take at
    least. left: the regions whose parts are not ranked yet; the last is the next. unit: the time if these parts took one second together."""

    tiling: Tiling
    share: int
    unit: TileParts
    least: tuple[tuple[float, ...], ...]
    left: tuple[int, ...]

    def parts(self, seconds: float) -> TileParts:
        """The time if the parts of a tile take so long together."""
        return replace(self.unit, parts=self.unit.parts * seconds)


@dataclass
class TileJudge:
    """Predicts chains for a GPU (`chains.Judging`); remembers what it predicted. `counted` is called with numbers of candidates that were ranked."""

    machine: Machine
    numerics: Numerics
    counted: Callable[[int], object] = lambda count: None
    tiles: dict[object, tuple[float, list[Tiles] | str]] = field(default_factory=dict)
    kernels: dict[object, Lowered | str] = field(default_factory=dict)

    scales: ClassVar[bool] = False

    @cached_property
    def schedules(self) -> PartSchedules:
        """Of the regions' parts, which it remembers."""
        return PartSchedules(self.machine, self.numerics, self.counted)

    @cached_property
    def _measured(self) -> Mapping[bool, GpuChains | None]:
        """The machine's constants for chains of 16-bit values, and for others."""
        return {half: gpu_chains(self.machine, half) for half in (False, True)}

    def constants(self, problem: Problem) -> GpuChains:
        """The machine's constants for a chain: if none were measured of its type, those of float32; of the formulas alone if there are none, or if a
        learned model corrects these."""
        return self._judging(problem)[0]

    def _judging(self, problem: Problem) -> tuple[GpuChains, Forest | None]:
        """The constants for a chain, and the learned model that corrects its time, if there is one."""
        half = _is_half(problem.region.stages, problem.values)
        if half and self._model is not None:
            return UNFITTED_CHAINS, self._model
        return self._measured[half] or self._measured[False] or UNFITTED_CHAINS, None

    @cached_property
    def _model(self) -> Forest | None:
        """The learned correction of chains of 16-bit values; none where a user's calibration is in use, of whose formulas it knows nothing."""
        return chain_model(self.machine.measured_as) if in_use(self.machine) is None else None

    @property
    def _longest(self) -> float:
        """Seconds apart below which predictions may take a chain of 16-bit values."""
        known = self._measured[True]
        return known.longest if known is not None else 0.0

    def decides(self, regions: Sequence[Region], values: Mapping[str, Value], constants: frozenset[str], apart: float) -> bool:
        """Whether predictions may take a chain of these regions, which take `apart` seconds as separate kernels, without a measurement: only if a
        learned model knows such chains, of which some gained (`GpuChains.longest`)."""
        half = _is_half(regions, values)
        return half and self._model is not None and apart < self._longest and all(_is_convolution(region, constants) for region in regions)

    def least(self, problem: Problem, alone: Sequence[float]) -> float:
        """Seconds that no tiles of a chain, canonical or not, are predicted to beat: those of its products divided among all processors, or of its
        memory. Tiles add work, except where they leave out rows that no region reads; then only the memory counts."""
        products = sum(product_seconds(stage, problem, self.machine, self.numerics) for stage in problem.region.stages)
        whole = products if computes_all_rows(problem) else 0.0
        return TileParts(self.machine.launch_seconds, self._memory(problem), whole, 0).seconds(self.constants(problem), self.machine.clock_hz)

    def best(self, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Tiles | float | str:
        """The best tiles of a canonical chain; the seconds `most` if it is certain that all take longer; or why there are none."""
        found = self._known(problem, most, 1)
        return found if isinstance(found, str) else found[0] if found else most

    def ranked(self, problem: Problem, alone: Sequence[float]) -> list[Tiles] | str:
        """Tiles of a canonical chain, fastest first, also of one that is slower than its regions alone; see `best`."""
        return self._known(problem, inf)

    def _known(self, problem: Problem, limit: float, count: int | None = None) -> list[Tiles] | str:
        key = key_of(problem)
        known, found = self.tiles.get(key, (-inf, []))
        if known < limit and (found == [] or limit == inf):
            try:
                found = self.predicted(problem, limit, count)
            except Unsuitable as reason:
                found = str(reason)
            self.tiles[key] = limit, found
        return found

    def lowered(self, problem: Problem, merge: Merge) -> Lowered | str:
        """The kernel of a canonical chain with the tiles that were measured fastest, or else with those predicted best, or with the next best if
        these turn out to be impossible; or why there is none."""
        key = key_of(problem)
        if key not in self.kernels:
            refusals: list[str] = []
            for way in self._ways(problem, merge):
                schedule = way.schedule
                assert isinstance(schedule, TileSchedule)
                try:
                    self.kernels[key] = way.with_times(self.lower(problem, schedule), "tiles")
                    return self.kernels[key]
                except Unsuitable as reason:
                    refusals.append(str(reason))
            self.kernels[key] = "; ".join(dict.fromkeys(refusals))
        return self.kernels[key]

    def _ways(self, problem: Problem, merge: Merge) -> Iterator[Merge]:
        """The merge with the tiles that were measured fastest, or with those predicted best, one after another. The first are known; what follows is
        predicted if it is asked for."""
        if merge.measured is not None:
            yield merge
            return
        limit, ranked = self.tiles[key_of(problem)]
        assert ranked and not isinstance(ranked, str)
        yield replace(merge, way=ranked[0])
        yield from (replace(merge, way=way) for way in self.predicted(problem, limit, LOWERED)[1:LOWERED])

    def lower(self, problem: Problem, schedule: TileSchedule) -> Lowered:
        """The kernel of a canonical chain.

        Raises:
            Unsuitable: like `lower_tiles`, and if it cannot be cut so, or no schedules of its regions are possible.
        """
        tiling = self.tiling(problem, schedule)
        choices = self.schedules.of(tiling, schedule)
        parts = [lower(tiling.part(number), choice.schedule, self.machine) for number, choice in enumerate(choices)]
        lowered = beginning_early(lower_tiles(tiling, parts, schedule, self.machine), problem, self.machine)
        bounds = partial(tile_bounds, tiling, choices, lowered.kernels[0], shared_processor(self.machine, 1, 0.0), self.machine)
        return replace(lowered, bounds=contained("a chain in tiles", "no bounds are stated", bounds, lambda _: NO_BOUNDS))

    def tiling(self, problem: Problem, schedule: TileSchedule) -> Tiling:
        """The tiles of a canonical chain by a schedule.

        Raises:
            Unsuitable: if it cannot be cut so.
        """
        cuts = cut_along(problem)
        extents = extents_of(problem, cuts)
        if len(extents) != len(schedule.sizes) or any(size < 1 or extent % size for extent, size in zip(extents, schedule.sizes, strict=True)):
            raise Unsuitable(f"tiles of {schedule.sizes} do not divide the {extents} rows of its result")
        if schedule.threads not in THREADS or schedule.resident not in SHARES:
            raise Unsuitable(f"no tiles have {schedule.threads} threads, {schedule.resident} blocks at a time")
        tiling = Tiling(problem, cuts, schedule.sizes)
        if schedule.chunk:
            cuts = in_chunks(problem, cuts)
            if summed(cuts) % schedule.chunk:
                raise Unsuitable(f"chunks of {schedule.chunk} do not divide the {summed(cuts)} channels that are summed")
            tiling = Tiling(problem, cuts, (*schedule.sizes, schedule.chunk), chunked=True)
        if schedule.exchanged:
            tiling = replace(tiling, exchanged=axis_of(cuts, schedule.exchanged))
            if not is_path(problem.region):
                raise Unsuitable("tiles exchange rows only if each result is read by the next region alone")
            if self.machine.compute_capability < (9, 0) or tiling.cluster not in CLUSTERS:
                raise Unsuitable(f"{self.machine.name} has no clusters of {tiling.cluster} blocks that exchange rows")
        return tiling

    def features_of(self, problem: Problem, schedule: TileSchedule) -> np.ndarray:
        """What a learned model is told of a schedule of a canonical chain (`tile_features.NAMES`).

        Raises:
            Unsuitable: as `lower`.
        """
        tiling, share = self.tiling(problem, schedule), schedule.resident
        choices = self.schedules.of(tiling, schedule)
        parts = self._parts(tiling, seconds_of(tiling, choices), share)
        formulas = _formulas(parts.seconds(UNFITTED_CHAINS, self.machine.clock_hz), parts)
        return features(tiling, sizes_of(tiling), choices, schedule.threads, share, self._places(tiling, share), formulas)

    def predicted(self, problem: Problem, limit: float = inf, count: int | None = None) -> list[Tiles]:
        """Tiles of a canonical chain by predicted time, without those certain to take longer than `limit` seconds, or than the first `count`. Those
        with the least bound are the next whose parts are ranked (best-first branch and bound: Land and Doig, Econometrica 1960).

        Raises:
            Unsuitable: if it cannot be cut, or nothing fits into shared memory.
        """
        open_ones = [one for tiling, least in self.tilings(problem) for one in self._opened(tiling, least)]
        waiting = [(self._bound(one), number, one) for number, one in enumerate(open_ones)]
        heapq.heapify(waiting)
        found: list[tuple[float, int, Tiles]] = []
        refusals: list[str] = []
        slow, most = False, limit
        while waiting and not slow:
            bound, number, one = heapq.heappop(waiting)
            slow = most < bound < inf
            if slow:
                break
            if not isfinite(bound):
                refusals.append(NO_ROOM)
            elif one.left:
                try:
                    further = self._with_next(one)
                except Unsuitable as reason:  # such as a part that is no sum of products any more
                    refusals.append(str(reason))
                else:
                    heapq.heappush(waiting, (self._bound(further), number, further))
            else:
                found = sorted([*found, *((tiles.seconds, number, tiles) for tiles in self._possible(one))], key=lambda entry: entry[:2])
                most = min(limit, found[count - 1][0]) if count is not None and len(found) >= count else limit
        if not found and not slow:
            raise Unsuitable("; ".join(dict.fromkeys(refusals)) or NO_ROOM)
        # a bound below the limit does not say that the time is
        return [tiles for _, _, tiles in found if tiles.seconds <= limit]

    def tilings(self, problem: Problem) -> list[tuple[Tiling, Sequence[Least]]]:
        """The tiles with the least work that fit into shared memory, and those in chunks, each with the seconds that the parts of its regions take at
        least (`TileWork.least`, `latencies`).

        Raises:
            Unsuitable: if the chain cannot be cut.
        """
        cuts = cut_along(problem)
        axes = [[size for size in dict.fromkeys((*SIZES, extent)) if extent % size == 0] for extent in extents_of(problem, cuts)]
        ways = [(cuts, axes, False)]
        with suppress(Unsuitable):
            cuts = in_chunks(problem, cuts)
            if chunks := [chunk for chunk in CHUNKS if chunk < summed(cuts) and summed(cuts) % chunk == 0]:
                ways.append((cuts, [*axes, chunks], True))
        found = []
        for cuts, sizes, chunked in ways:
            found += self._with_least_work(problem, cuts, sizes, chunked)
            axis = overlapping(problem, cuts) if self.machine.compute_capability >= (9, 0) else None
            if axis is not None and (along := exchanging(problem, cuts, axis, sizes[axis])):
                found += self._with_least_work(problem, cuts, [*sizes[:axis], along, *sizes[axis + 1 :]], chunked, axis)
        return found

    def _with_least_work(
        self, problem: Problem, cuts: tuple[Cut, ...], axes: Sequence[Sequence[int]], chunked: bool, exchanged: int | None = None
    ) -> list[tuple[Tiling, Sequence[Least]]]:
        """The tilings of these sizes along each axis with the least work that fit into shared memory, and whose sums a block can keep."""
        work = tile_work(problem, cuts, axes, self.machine, chunked, exchanged, self.numerics)
        fits = work.shared_bytes < self.machine.shared_bytes_per_block
        if chunked:
            fits &= work.results <= MOST_SUMS
        fit = np.flatnonzero(fits)
        _, first = np.unique(work.seconds[fit].round(12), return_index=True)  # of tiles with the same work, such as 4 x 7 and 7 x 4, the first
        chosen = fit[first[:RANKED]]
        return [
            (
                Tiling(problem, cuts, tuple(map(int, work.sizes[row])), chunked, exchanged),
                [*zip(work.least[row].tolist(), work.latencies[row].tolist(), strict=True)],
            )
            for row in chosen
        ]

    def _opened(self, tiling: Tiling, least: Sequence[Least]) -> Iterator[_Open]:
        """The tiles with each number of resident blocks for which there are enough. `least`: what the parts of each region take at least. Those of
        which nothing is known are ranked first, then those with most operations."""
        order = sorted(range(len(least)), key=lambda number: (not any(least[number]), tiling.cuts[number].region.flops()))
        for share in SHARES:
            if share == 1 or tiling.blocks > (share - 1) * self.machine.processors:
                each = tuple((share * seconds + latency,) * len(THREADS) for seconds, latency in least)
                yield _Open(tiling, share, self._parts(tiling, 1.0, share), each, tuple(order))

    def _bound(self, tiles: _Open) -> float:
        """Seconds that the tiles take at least; infinite if no schedules of the regions that are ranked fit."""
        seconds = min(map(sum, zip(*tiles.least, strict=True)))
        return tiles.parts(seconds).seconds(self.constants(tiles.tiling.problem), self.machine.clock_hz) if isfinite(seconds) else inf

    def _with_next(self, tiles: _Open) -> _Open:
        """The tiles, with the times of one more region's part by its fastest schedules.

        Raises:
            Unsuitable: if it has none.
        """
        *left, number = tiles.left
        times = self.schedules.fastest(tiles.tiling, number, tiles.share)
        return replace(tiles, least=(*tiles.least[:number], times, *tiles.least[number + 1 :]), left=tuple(left))

    def _possible(self, tiles: _Open) -> Iterator[Tiles]:
        """The tiles with each number of threads for which schedules of all regions fit, all of whose parts are ranked."""
        known = {threads: self.schedules.choices(tiles.tiling, threads, tiles.share) for threads in THREADS}
        yield from self._judged(tiles.tiling, tiles.share, {threads: choices for threads, choices in known.items() if choices is not None})

    def _judged(self, tiling: Tiling, share: int, known: Mapping[int, Sequence[Choice]]) -> list[Tiles]:
        """The tiles with schedules of their regions for each number of threads."""
        (constants, model), clock = self._judging(tiling.problem), self.machine.clock_hz
        rows, chunk = (tiling.sizes[:-1], tiling.sizes[-1]) if tiling.chunked else (tiling.sizes, 0)
        exchanged = 0 if tiling.exchanged is None else dims_cut(tiling.cuts)[tiling.exchanged]
        found = []
        for threads, choices in known.items():
            parts = self._parts(tiling, seconds_of(tiling, choices), share)
            schedule = TileSchedule(rows, threads, share, chunk, exchanged)
            found.append(Tiles(schedule, parts.seconds(constants, clock), parts, parts.terms(constants, clock)))
        if model is None or not found:
            return found
        sizes, places = sizes_of(tiling), self._places(tiling, share)
        told = [
            features(tiling, sizes, choices, threads, share, places, _formulas(tiles.seconds, tiles.parts))
            for (threads, choices), tiles in zip(known.items(), found, strict=True)
        ]
        return [*map(Tiles.corrected, found, corrections(model, np.stack(told)))]

    def _parts(self, tiling: Tiling, seconds: float, share: int) -> TileParts:
        machine, problem = self.machine, tiling.problem
        rounds = ceil(tiling.blocks / self._places(tiling, share))
        exchange = rounds * self._exchange(tiling, share) if tiling.exchanges else 0.0
        level_2 = machine.cache(2)
        assert level_2 is not None
        copied = sum(tiling.storage[name].size * size_of(problem.values[name].dtype) for name in problem.region.outputs if name in tiling.storage)
        stored = rounds * share * copied / (level_2.bandwidth * machine.clock_hz)
        return TileParts(machine.launch_seconds, self._memory(problem), rounds * seconds, rounds * sum(tiling.repeats), exchange, stored)

    def _places(self, tiling: Tiling, share: int) -> float:
        """Blocks that run at once."""
        return self.machine.processors * self._reached(tiling.cluster) * share

    def _memory(self, problem: Problem) -> float:
        """Seconds of what a chain reads and stores at least once."""
        return sum(problem.values[name].bytes for name in (*problem.region.inputs, *problem.region.outputs)) / bandwidth(self.machine)

    def _reached(self, cluster: int) -> float:
        """The share of the processors that clusters of that many blocks reach."""
        fitted = gpu_calibration(self.machine).steps
        return {2: fitted.clustered_share_2, 4: fitted.clustered_share_4, 8: fitted.clustered_share_8}.get(cluster, 1.0)

    def _exchange(self, tiling: Tiling, share: int) -> float:
        """Seconds of the exchanges of a tile: barriers of the cluster, and bytes that are read and written twice, of all blocks of a processor."""
        barrier = (gpu_recurrence(self.machine) or ASSUMED_RECURRENCE).cluster_barrier_seconds
        met, size = 1, 0
        for number in tiling.exchanges:
            repeats = tiling.repeats[number]
            met += repeats * (2 if repeats > 1 else 1)  # another after each chunk
            size += repeats * sum(tiling.borders(number)) * tiling.slab(number) * size_of(tiling.problem.values[tiling.cuts[number].result].dtype)
        return met * barrier + 4 * size * share / (self.machine.shared_bytes_per_cycle * self.machine.clock_hz)


def _formulas(seconds: float, parts: TileParts) -> Mapping[str, float]:
    """What a learned model is told of the formulas: seconds of the chain, and of its parts."""
    return {"chain": seconds, "memory": parts.memory, "exchange": parts.exchange}


def _is_half(regions: Sequence[Region], values: Mapping[str, Value]) -> bool:
    """Whether all values that the regions of a chain compute are floats of 16 bits."""
    computed = (values[name].dtype for region in regions for name in region.outputs)
    return all(is_float(dtype) and size_of(dtype) == 2 for dtype in computed)


def _is_convolution(region: Region, constants: frozenset[str]) -> bool:
    """Whether a region sums products with a constant filter, as all regions of the chains do to which constants are fitted (`bench.gpu_chains`). A
    factor of a pooled map is constant too, but the same for all terms of a sum."""

    def filters(step: Step) -> bool:
        summed = frozenset(step.reduction)
        return step.combiner == "sum" and any(load.buffer in constants and summed & variables(*load.index) for load in loads(*step.bodies))

    sums = [step for step in region.steps if step.combiner is not None]
    return region.kind in ("contraction", "window") and len(sums) > 0 and all(map(filters, sums))
