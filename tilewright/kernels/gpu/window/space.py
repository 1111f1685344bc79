"""Schedules of the `window` schema on a GPU: each thread reduces small windows serially for a tile of its output elements."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, product_of, reject, vector_widths
from tilewright.kernels.gpu.counts import WORD

UNROLLED_WINDOW = 64
"""Maximum elements of a window that is fully unrolled, which makes its loads independent."""
MOST_UNROLLED = 320
"""Maximum elements in the windows of a thread's tile: more code would not fit into the instruction cache."""
MOST_ACCUMULATORS = 64
"""Maximum scalars that a thread accumulates: with the loads for them, about half of its registers."""
MOST_UNDER_WAY = 96
"""Maximum registers for a thread's loads in flight."""
WARP = 32
BANKS = 32
"""Banks of level 1 and of shared memory, each a word wide."""
ADDRESS_REGISTERS = 28
UNCAPPED = 255
LARGE_WINDOW = 16
"""Elements of a window above which a tile that does not divide the extents uses all registers of a thread: everything is loaded ahead."""


@dataclass(frozen=True)
class TiledLoad:
    """The loads of a tile of windows for one load of the expression: `fixed` times those along its rows and along its items.

    `rows` and `items` are (step, reach): windows of `reach` elements start `step` apart, so n of them cover (n - 1) * min(step, reach) + reach."""

    fixed: int = 1
    rows: tuple[int, int] = (1, 1)
    items: tuple[int, int] = (1, 1)

    def along(self, axis: str, count: np.ndarray) -> np.ndarray:
        """Elements of `count` windows along "rows" or "items"."""
        step, reach = self.rows if axis == "rows" else self.items
        return (count - 1) * min(step, reach) + reach

    def count(self, rows: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Loads for a tile. For the input of a 3x3 convolution with stride 1 and a tile of 2 x 4: (2 + 2) * (4 + 2) = 24."""
        loads: np.ndarray = self.fixed * self.along("rows", rows) * self.along("items", items)
        return loads

    @property
    def repeats_rows(self) -> bool:
        """Whether adjacent rows share some loads."""
        return self.rows[0] < self.rows[1] or self.rows[0] == 0


@dataclass(frozen=True)
class WindowFacts:
    """Facts that the cost of a tile of windows depends on.

    `points` counts scalar elements of the output, `vector_width` is the widest vector that every access allows, `flops` is per element. Bytes are
    distinct bytes. `row_extent` and `item_extent`: extents of the two axes of a tile, 1 if there is none; `inner`: extent of the axis inside both.
    `extents`: those of all output axes in the order of storage; `strides`: for each of `loads` the elements from one index of these axes to the
    next, 0 where the address is no such sum. `element_bytes`: of the narrowest floats in memory."""

    points: int
    vector_width: int
    bytes_read: int
    bytes_written: int
    flops: float
    reduced: int
    loads: tuple[TiledLoad, ...]
    row_extent: int
    item_extent: int
    inner: int
    extents: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    element_bytes: int = WORD


@dataclass(frozen=True)
class WindowSchedule:
    """A thread computes `items` adjacent positions along the axis just outside the fastest one, times `rows` along the axis outside that. Elements
    that their windows share are loaded once."""

    threads: int
    items: int
    vector_width: int
    rows: int = 1

    def __str__(self) -> str:
        return f"window threads={self.threads} tile={self.rows}x{self.items} vector_width={self.vector_width}"


def window_space(facts: WindowFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns threads, items, vector_width, rows; and the number rejected for each reason."""
    widths = vector_widths(facts.vector_width)
    candidates = product_of({"threads": (32, 64, 128, 256, 512), "items": (1, 2, 3, 4, 7, 8), "vector_width": widths, "rows": (1, 2, 3, 4, 7)})
    tile = candidates["rows"] * candidates["items"]
    repeated = any(load.repeats_rows for load in facts.loads)
    return reject(
        candidates,
        [
            ("threads exceed a block", candidates["threads"] > machine.threads_per_block),
            ("accesses are not adjacent or aligned for vectors this wide", candidates["vector_width"] > facts.vector_width),
            ("a tile exceeds an extent", (candidates["rows"] > facts.row_extent) | (candidates["items"] > facts.item_extent)),
            ("rows have no load in common", (candidates["rows"] > 1) & (not repeated)),
            ("unrolled windows exceed the instruction cache", (tile > 1) & (tile * facts.reduced > MOST_UNROLLED)),
            ("accumulators exceed the registers", tile * candidates["vector_width"] > MOST_ACCUMULATORS),
            ("registers exceed a processor's", registers_of(facts, candidates) * candidates["threads"] > machine.registers_per_processor),
            ("tiles leave more than half of the processors idle", (tile > 1) & (2 * blocks_of(facts, candidates) < machine.processors)),
        ],
    )


def tiles_of(facts: WindowFacts, candidates: Columns) -> np.ndarray:
    """Threads that have a tile, including partial tiles at the edge."""
    along = -(-facts.row_extent // candidates["rows"]) * -(-facts.item_extent // candidates["items"])
    tiles: np.ndarray = -(-facts.points * along // (facts.row_extent * facts.item_extent * candidates["vector_width"]))
    return tiles


def blocks_of(facts: WindowFacts, candidates: Columns) -> np.ndarray:
    """Blocks of the grid."""
    blocks: np.ndarray = np.maximum(1, -(-tiles_of(facts, candidates) // candidates["threads"]))
    return blocks


def loads_of(facts: WindowFacts, candidates: Columns) -> np.ndarray:
    """Distinct loads of a thread's tile."""
    return sum((load.count(candidates["rows"], candidates["items"]) for load in facts.loads), np.zeros_like(candidates["items"]))


def conflicts_of(facts: WindowFacts, strides: tuple[int, ...], candidates: Columns) -> np.ndarray:
    """Cycles of level 1, or of shared memory, that a warp's load with these strides takes beyond those without bank conflicts. Both have 32 banks of
    a word; different words of one bank are read one after another. A load of vectors of v words serves the threads in v groups. Counted for the
    first warp.

    Adjacent channels lie in different banks. If a tile has one of 16 channels, 32 adjacent pixels share two banks: 15 cycles more."""
    rows, items, lanes = (candidates[name] for name in ("rows", "items", "vector_width"))
    _, first, places = np.unique((rows * 64 + items) * 64 + lanes, return_index=True, return_inverse=True)
    shapes = zip(rows[first].tolist(), items[first].tolist(), lanes[first].tolist(), strict=True)
    return np.array([_conflicts(facts.extents, strides, *shape, facts.element_bytes) for shape in shapes], np.float64)[places.reshape(-1)]


@lru_cache(maxsize=4096)
def _conflicts(extents: tuple[int, ...], strides: tuple[int, ...], rows: int, items: int, lanes: int, element_bytes: int) -> int:
    """`conflicts_of` for one shape of tiles."""
    if not extents or not any(strides):
        return 0
    steps = ((1,) * len(extents) + (rows, items, lanes))[-len(extents) :] if len(extents) > 1 else (items * lanes,)
    rest, first = np.arange(WARP), np.zeros(WARP, np.int64)
    for extent, stride, step in zip(reversed(extents), reversed(strides), reversed(steps), strict=True):
        count = -(-extent // step)
        first += rest % count * (step * stride)
        rest = rest // count
    width = lanes if strides[-1] == 1 else 1
    words = (first[rest == 0, None] + np.arange(width)) * element_bytes // WORD
    served = min(WARP, WARP * WORD // (width * element_bytes))
    groups = (np.unique(words[at : at + served]) for at in range(0, len(words), served))
    return sum(int(np.bincount(group % BANKS).max()) - 1 for group in groups)


def registers_of(facts: WindowFacts, candidates: Columns) -> np.ndarray:
    """32-bit registers to allow per thread, for accumulators, loads in flight and addresses."""
    under_way = np.minimum(loads_of(facts, candidates) * candidates["vector_width"], MOST_UNDER_WAY)
    needed = ADDRESS_REGISTERS + candidates["vector_width"] * candidates["rows"] * candidates["items"] + under_way
    return np.where(is_guarded(facts, candidates) & (facts.reduced > LARGE_WINDOW), UNCAPPED, needed)


def is_guarded(facts: WindowFacts, candidates: Columns) -> np.ndarray:
    """Whether the tiles do not divide the extents, so that parts of them are guarded."""
    last_rows, last_items = guarded_places(facts, candidates)
    return (last_rows > 0) | (last_items > 0)


def guarded_places(facts: WindowFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """The number of rows, and of items, of the last tile that are beyond the extent."""
    return -facts.row_extent % candidates["rows"], -facts.item_extent % candidates["items"]


def blocks_to_ask_for(schedule: WindowSchedule, facts: WindowFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler: by default it allocates so few registers per thread that loads are serialised."""
    estimate = registers_of(facts, {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)})
    blocks = machine.registers_per_processor // (schedule.threads * min(int(estimate[0]), machine.registers_per_thread_max))
    return max(1, min(blocks, machine.blocks_per_processor, machine.threads_per_processor // schedule.threads))
