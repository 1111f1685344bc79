"""Traffic of a GPU kernel beyond its processors: sectors that it requests from level 2, and the part that comes from memory.

Every global address is a sum of parts that depend on the block (and terms that involve its number), on the loops, and on the thread. Distinct values
of each part are evaluated for all blocks and added up, so that a tile's sectors are known exactly without enumerating its accesses.

    level 1     serves what a block reads again, as far as the footprints of the blocks that a processor holds fit into what shared memory
                leaves of it; asynchronous copies of 16 bytes go past it
    waves       blocks start in the order of their numbers; as many run together as all processors hold (occupancy). What blocks of a wave
                have in common comes from memory once: the union of their footprints
    level 2     keeps a sector until the footprints of the waves since then exceed its size; it is cold when the kernel starts

Source: the waves and the L2 hits of a wave's union as in Y. Tuna (2021), algorithm 2 applied to the grid; how memory asks: CUDA C++ Programming
Guide, "Asynchronous Data Copies" and "Memory hierarchy". Compared with counters by `bench.gpu_analysis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.analysis.gpu.warps import SECTOR_BYTES, Access, KernelWalk, accesses, chosen_blocks
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, linear
from tilewright.ir.kernel import Kernel

MOST_ADDRESSES = 1 << 23
"""Maximum number of addresses that are evaluated one by one; a buffer whose accesses have more counts as touched entirely."""
SAMPLED_BLOCKS = 8
"""Number of blocks whose individual footprints are counted."""


@dataclass(frozen=True)
class Places:
    """The byte addresses of one access: all sums of one value of `blocks` [blocks or 1, values] and one of `others` [values].
    `width`: bytes of one lane."""

    buffer: str
    kind: str
    width: int
    blocks: np.ndarray
    others: np.ndarray

    @property
    def addresses(self) -> int:
        """The number of addresses of all blocks."""
        return self.blocks.size * self.others.size

    def sectors(self, which: slice | np.ndarray, last: int) -> np.ndarray:
        """Numbers from 0 to `last`, with repetitions, of the sectors that the blocks `which` touch."""
        rows = self.blocks[which] if len(self.blocks) > 1 else self.blocks
        found = ((rows.reshape(-1, 1) + self.others) // SECTOR_BYTES).ravel()
        # accesses that a guard leaves out at the edges are outside, or touched by a neighbour
        touched: np.ndarray = found[(found >= 0) & (found <= last)]
        return touched


@dataclass(frozen=True)
class Traffic:
    """Sectors of one launch. `asked`: read by warps, through level 1 or past it; `level_2`: reads that reach level 2; `memory`: level-2 misses;
    `written`: distinct sectors that are stored."""

    asked: float
    level_2: float
    memory: float
    written: float

    @property
    def hits(self) -> float:
        """The hit rate of level 2."""
        return 1 - self.memory / self.level_2 if self.level_2 else 1.0


class PlacesWalk(KernelWalk):
    """Collects the global addresses of a kernel, access by access."""

    def __init__(self, kernel: Kernel, chosen: np.ndarray) -> None:
        self.places: list[Places] = []
        super().__init__(kernel, chosen)

    def touch(self, name: str, offset: Expr, lanes: int, kind: str, mask: np.ndarray, target: np.ndarray | None = None) -> None:
        """Collects an access instead of counting its transactions."""
        buffer = self.buffers[name]
        if buffer.space == "global" and mask.any():
            size = size_of(buffer.dtype)
            blocks, parts = self.parts(offset)
            others = np.zeros(1, np.int64)
            for part in parts:
                others = np.unique(others[:, None] + part)
            self.places.append(Places(name, kind, size * lanes, blocks * size, others * size))

    def parts(self, offset: Expr) -> tuple[np.ndarray, list[np.ndarray]]:
        """An offset as a sum: the part that depends on the block [blocks or 1, values], and the values of each other part."""
        form = linear(offset)
        groups: list[tuple[set[int], np.ndarray]] = []
        for atom, coefficient in form.terms:
            value = self.evaluated(atom) * coefficient
            axes = {axis - value.ndim for axis, length in enumerate(value.shape) if length > 1}
            for other in [group for group in groups if group[0] & axes]:
                groups.remove(other)
                axes, value = axes | other[0], value + other[1]
            groups.append((axes, value))
        blocks, others = np.full((1, 1), form.constant, np.int64), []
        for axes, value in groups:
            if -3 in axes:
                first = np.moveaxis(value, -3, 0)
                blocks = blocks + first.reshape(len(first), -1)
            elif axes:
                others.append(np.unique(value))
            else:
                blocks = blocks + value.reshape(1, 1)
        return blocks, others


def traffic_of(kernel: Kernel, machine: Machine, resident: int, shared_bytes: int, found: Sequence[Access] | None = None) -> Traffic:
    """The traffic of one launch with a cold level 2. `resident`: resident blocks per processor; `shared_bytes`: shared memory per block; `found`: the
    kernel's `accesses`, if already known.

    Raises:
        NotStatic: if an address depends on loaded data.
    """
    asked, level_2 = level_2_sectors(kernel, machine, resident, shared_bytes, found)
    read, written = memory_sectors(kernel, machine, resident)
    return Traffic(asked, max(level_2, read), read, written)


def level_2_sectors(kernel: Kernel, machine: Machine, resident: int, shared_bytes: int, found: Sequence[Access] | None = None) -> tuple[float, float]:
    """(sectors that warps read, those that level 1 does not serve). Parameters and errors as for `traffic_of`.

    A block's reads of a buffer come from level 2 once per sector if all footprints of the resident blocks fit level 1, every time if nothing fits,
    and in between according to the fraction that fits."""
    assert kernel.launch is not None
    cache = machine.cache(1)
    assert cache is not None
    blocks = prod(kernel.launch.grid)
    chosen = chosen_blocks(blocks, SAMPLED_BLOCKS)
    own: dict[str, float] = {}
    walk = PlacesWalk(kernel, chosen)
    cached = [place for place in walk.places if by_level_1(place.kind, place.width)]
    for name in dict.fromkeys(place.buffer for place in cached):
        last = (walk.buffers[name].size * size_of(walk.buffers[name].dtype) - 1) // SECTOR_BYTES
        same = [place for place in cached if place.buffer == name]
        each = (sum_of_distinct([place.sectors(np.array([at]), last) for place in same]) for at in range(len(chosen)))
        own[name] = sum(each) / len(chosen)
    reads = [access for access in found or accesses(kernel) if access.space == "global" and access.kind in ("load", "copy")]
    left = cache.bytes - resident * (shared_bytes + machine.shared_reserved_bytes)
    kept = min(1.0, max(0.0, left / max(1.0, resident * SECTOR_BYTES * sum(own.values()))))
    total = float(sum(access.transactions for access in reads))
    level_2 = sum(access.transactions for access in reads if not by_level_1(access.kind, access.bytes))
    for name, distinct in own.items():
        asked = sum(access.transactions for access in reads if access.buffer == name and by_level_1(access.kind, access.bytes))
        level_2 += min(asked, blocks * distinct) * kept + asked * (1 - kept)
    return total, float(level_2)


def by_level_1(kind: str, width: int) -> bool:
    """Whether an access may hit in level 1."""
    return kind == "load" or kind == "copy" and width < 16


def sum_of_distinct(numbers: Sequence[np.ndarray]) -> int:
    return len(np.unique(np.concatenate(numbers)))


def memory_sectors(kernel: Kernel, machine: Machine, resident: int) -> tuple[float, float]:
    """(sectors that come from memory, distinct sectors that are stored). Parameters and errors as for `traffic_of`."""
    assert kernel.launch is not None
    blocks = prod(kernel.launch.grid)
    cache = machine.cache(2)
    assert cache is not None
    places = PlacesWalk(kernel, np.arange(blocks)).places
    sizes = {buffer.name: buffer.size * size_of(buffer.dtype) for buffer in kernel.parameters}
    touched = {place.buffer for place in places}
    fits = sum(sizes[name] for name in touched) <= cache.bytes
    wave = blocks if fits else min(blocks, resident * machine.processors)
    waves = -(-blocks // wave)
    kept = cache.bytes // SECTOR_BYTES
    # the wave that last touched a sector, and the number of sectors touched by all waves up to each
    last_wave = {name: np.full(-(-sizes[name] // SECTOR_BYTES), -1) for name in touched}
    passed = np.zeros(waves + 1)
    read = written = 0.0
    whole = {place.buffer for place in places if place.addresses > MOST_ADDRESSES}
    for number in range(waves):
        which = slice(number * wave, min(blocks, (number + 1) * wave))
        fresh = {}
        for name, before in last_wave.items():
            marked = np.zeros(len(before), bool)
            if name in whole:
                marked[:] = True
            else:
                for place in places:
                    if place.buffer == name:
                        marked[place.sectors(which, len(before) - 1)] = True
            fresh[name] = marked
        passed[number + 1] = passed[number] + sum(int(marked.sum()) for marked in fresh.values())
        for name, marked in fresh.items():
            before = last_wave[name]
            gone = marked & ((before < 0) | (passed[number] - passed[before] > kept))
            if any(place.buffer == name and place.kind in ("load", "copy") for place in places):
                read += int(gone.sum())
            if any(place.buffer == name and place.kind in ("store", "atomic") for place in places):
                written += int((marked & (before < 0)).sum())
            before[marked] = number
    return read, written
