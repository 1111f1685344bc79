"""Schedules of the regions of a chain in a block's tiles: of each region's part the fastest that leave room for the others.

A part is a problem of its own, computed by one processor of which the block has a share (`shared_processor`); the blocks of its kernel run one after
another, all with the same number of threads, and the shared memory and registers of the block hold what one of them needs beside the tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.counts import LaunchCounts, TileCounts
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import key_of
from tilewright.partition.tile_kernel import TileSchedule
from tilewright.partition.tiles import Tiling
from tilewright.selection.choice import facts_of, rank
from tilewright.selection.ranking import Choice, Ranking

THREADS = (64, 128, 256, 512)
"""Threads per block that are considered."""
REGISTERS = 16
"""Registers per thread for the addresses of tiles, besides those of the regions' kernels."""


@dataclass(frozen=True)
class _Kept:
    """A choice, with the bytes of shared memory and the registers for sums that its kernel takes."""

    choice: Choice
    shared_bytes: int
    sums: int


@dataclass
class PartSchedules:
    """Ranks the candidates of parts, and remembers them. `counted` is called with numbers of candidates that were ranked."""

    machine: Machine
    numerics: Numerics
    counted: Callable[[int], object] = lambda count: None
    parts: dict[object, Problem] = field(default_factory=dict)
    """Of equal parts one, with its forms."""
    rankings: dict[object, Ranking | str] = field(default_factory=dict)

    def of(self, tiling: Tiling, schedule: TileSchedule) -> list[Choice]:
        """The choices for each region's part by a schedule. Raises Unsuitable if there are none."""
        choices = self.choices(tiling, schedule.threads, schedule.resident)
        if choices is None:
            raise Unsuitable(f"no schedules with {schedule.threads} threads leave room for {schedule.resident} blocks on a processor")
        return choices

    def fastest(self, tiling: Tiling, number: int, share: int) -> tuple[float, ...]:
        """For each of THREADS the seconds of all of a region's parts in a tile by the fastest schedule that fits alone; infinite if none does.

        Raises:
            Unsuitable: if the region has none at all.
        """
        ranking, summing = self.ranking(tiling, number, share), tiling.chunked and number == len(tiling.cuts) - 1
        rooms = (self._room(tiling, threads, share) for threads in THREADS)
        least = (_fitting(ranking, threads, *room, summing).min(initial=inf) for threads, room in zip(THREADS, rooms, strict=True))
        return tuple(tiling.repeats[number] * float(seconds) for seconds in least)

    def _room(self, tiling: Tiling, threads: int, share: int) -> tuple[int, int]:
        """Bytes of shared memory that a block's schedules may use, and registers of a thread."""
        machine = self.machine
        room = min(machine.shared_bytes_per_block, machine.shared_bytes_per_processor // share - machine.shared_reserved_bytes)
        registers = min(machine.registers_per_thread_max, machine.registers_per_processor // (threads * share)) - REGISTERS
        return room - tiling.shared_bytes - tiling.exchanged_bytes, registers

    def choices(self, tiling: Tiling, threads: int, share: int) -> list[Choice] | None:
        """The choice for each region's part with that many threads per block; None if a region has none. In chunks the sums of the last region and
        its shared memory are kept while the others are computed."""
        last, (room, registers) = len(tiling.cuts) - 1, self._room(tiling, threads, share)
        found: dict[int, Choice] = {}
        for number in range(last, -1, -1):
            summing = tiling.chunked and number == last
            kept = _chosen(self.ranking(tiling, number, share), threads, room, registers, summing)
            if kept is None:
                return None
            found[number] = kept.choice
            if summing:
                room, registers = room - kept.shared_bytes, registers - kept.sums
        return [found[number] for number in range(last + 1)]

    def ranking(self, tiling: Tiling, number: int, share: int) -> Ranking:
        """The candidates of a region's part on a share of a processor.

        Raises:
            Unsuitable: if there are none.
        """
        part = tiling.part(number)
        names = (*part.region.inputs, *part.region.outputs)
        near = sum(part.values[name].bytes for name in names if name in tiling.storage) / sum(part.values[name].bytes for name in names)
        key = (same := key_of(part), share, near)
        if key not in self.rankings:
            self.rankings[key] = self._ranked(self.parts.setdefault(same, part), share, near)
        known = self.rankings[key]
        if isinstance(known, str):
            raise Unsuitable(known)
        return known

    def _ranked(self, part: Problem, share: int, near: float) -> Ranking | str:
        """The candidates of a part, once for all with equal facts; or why there are none."""
        processor = shared_processor(self.machine, share, near)
        key = (facts_of(part, processor), share, near)
        if key not in self.rankings:
            try:
                numerics = replace(self.numerics, winograd=False, atomics=False, vendor=False)
                self.rankings[key] = found = rank(part, processor, 1, numerics, learned=False)
                self.counted(found.candidates)
            except Unsuitable as reason:
                return str(reason)
        return self.rankings[key]


def seconds_of(tiling: Tiling, choices: Sequence[Choice]) -> float:
    """Seconds of a tile's parts."""
    return sum(times * choice.seconds for times, choice in zip(tiling.repeats, choices, strict=True))


def _fitting(ranking: Ranking, threads: int, room: int, registers: int, summing: bool) -> np.ndarray:
    """The seconds of all candidates of a part; infinite if one has another number of threads per block, needs more than `room` bytes of shared memory
    or more registers, or splits sums among blocks. `summing`: one block holds all sums in registers."""
    allowed = [np.zeros(0, bool)]
    for part in ranking.parts:
        counts = part.counts
        assert isinstance(counts, LaunchCounts)
        fits = (counts.threads == threads) & (counts.shared_bytes <= room) & (counts.registers <= registers)
        if summing:
            fits &= (counts.blocks == 1) & part.schema.sums
        allowed.append(fits & (part.candidates["split"] == 1) if "split" in part.candidates else fits)
    return np.where(np.concatenate(allowed), ranking.seconds, inf)


def _chosen(ranking: Ranking, threads: int, room: int, registers: int, summing: bool) -> _Kept | None:
    """The fastest candidate of a part that fits (`_fitting`); None if none does."""
    seconds = _fitting(ranking, threads, room, registers, summing)
    best = int(np.argmin(seconds)) if len(seconds) else 0
    if not np.isfinite(seconds[best : best + 1]).any():
        return None
    number, at = ranking.place(best)
    counts = ranking.parts[number].counts
    assert isinstance(counts, LaunchCounts)
    sums = int(np.ravel(counts.accumulators)[at if np.size(counts.accumulators) > 1 else 0]) if isinstance(counts, TileCounts) else 0
    return _Kept(ranking.choice(best), int(counts.shared_bytes[at]), sums)


def shared_processor(machine: Machine, share: int, near: float) -> Machine:
    """One processor of a GPU as one of `share` resident blocks sees it. `near`: the part of the bytes that is in shared memory; the rest is in level
    2."""
    level_2 = machine.cache(2)
    assert level_2 is not None
    rate = 1 / (share * (near / machine.shared_bytes_per_cycle + (1 - near) / level_2.bandwidth))
    part = machine.processors * share
    return replace(
        machine,
        processors=1,
        caches=tuple(replace(cache, bandwidth=rate if cache is level_2 else cache.bandwidth / share) for cache in machine.caches),
        peak_flops={name: peak / part for name, peak in machine.peak_flops.items()},
        sustained_flops={name: reached / part for name, reached in machine.sustained_flops.items()},
        blocks_per_processor=1,
        launch_seconds=0.0,
        memory_latency_cycles=level_2.latency_cycles,
        memory_bandwidth=rate * machine.clock_hz,
        sustained_memory_bandwidth=rate * machine.clock_hz,
        shared_bytes_per_cycle=machine.shared_bytes_per_cycle / share,
        schedulers_per_processor=max(machine.schedulers_per_processor // share, 1),
        fp32_lanes_per_processor=machine.fp32_lanes_per_processor // share,
        special_lanes_per_processor=max(machine.special_lanes_per_processor // share, 1),
    )
