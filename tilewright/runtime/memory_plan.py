"""The location of every buffer of a program: one arena with reuse, planned before the first call.

A value lives from its first to its last use, counted in calls (in regions if a region is repeated). Buffers are placed in order of decreasing size,
each in the smallest gap between the buffers that are live at the same time (greedy by size, best fit: Pisarchyk and Lee, "Efficient memory management
for deep neural net inference", 2020).

Where calls may run concurrently, a buffer in the place of another one would have to wait for the calls that use that, although it needs nothing of
them: two directions of a recurrent layer, or branches of a module, would follow each other. So there two buffers
share a place only if all uses of the one precede all uses of the other by what calls read and write (`Order`), unless that takes much more memory.

A buffer with a halo or with rounding must find those elements zero at every call, and kernels write only its interior. So it shares its place only
with buffers of identical layout and dtype, whose interior is completely overwritten by each writer: the zeros of the initial clearing are then
preserved. Such a place is never used for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall
from tilewright.ir.region import Call
from tilewright.runtime.accesses import EDGES_UP_TO, SEGMENTS, Extent, accesses, ancestors, dependencies
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion
from tilewright.text import number_of

CPU_ALIGNMENT = 64
GPU_ALIGNMENT = 256
MORE_MEMORY = 1.25
"""How much larger an arena beyond the level-2 cache may be in which calls can run concurrently. Inception-v3 takes 1.02 times the memory."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer that needs a place, live through `first`..`last`, both included. `zeroed`: (layout, dtype) if halo or rounding must stay zero, else
    None."""

    name: str
    bytes: int
    first: int
    last: int
    zeroed: tuple[Layout, str] | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Byte offsets into one arena of `bytes`; `unshared_bytes` is the total size of the buffers without reuse."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    bytes: int
    unshared_bytes: int

    def __str__(self) -> str:
        return f"{number_of(len(self.offsets), 'buffer')} in {self.bytes:,} B of arena ({self.unshared_bytes:,} B without reuse)"


@dataclass(frozen=True)
class Places:
    """The storage class of each root value of a program: the caller's inputs, fresh outputs, constants, or the arena. Buffers that report indices out
    of range belong to none of these: see `buffers`."""

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    constants: tuple[str, ...]
    arena: tuple[str, ...]


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def used_buffers(program: LoadableProgram) -> list[str]:
    """Root buffers that calls and PyTorch nodes use, in the order of first use."""
    seen: dict[str, None] = {}
    for region in program.regions:
        for name in _region_buffers(program, region):
            seen.setdefault(name)
    return list(seen)


def _region_buffers(program: LoadableProgram, region: LoadableRegion) -> Iterable[str]:
    if region.library is not None:
        yield from (program.root(view.name) for view in region.library.views)
    for call in region.calls:
        yield from (program.root(name) for name in call.arguments)
    if region.kind == "torch":
        yield from (program.root(name) for name in _torch_buffers(program, region))


def _torch_buffers(program: LoadableProgram, region: LoadableRegion) -> list[str]:
    """The buffers that a PyTorch region reads and writes: its nodes may read a value of which its kernels read a copy."""
    read = (name for node in region.nodes for name in program.nodes[node].inputs)
    names = dict.fromkeys((*region.inputs, *read, *region.outputs))
    return [name for name in names if program.root(name) in program.storage]


def assign_places(program: LoadableProgram) -> Places:
    """The storage class of each root buffer. An output that is (an alias of) an input or a constant has no storage of its own."""
    inputs = {name: i for i, name in enumerate(program.graph.inputs)}
    outputs: dict[str, int] = {}
    for name in program.graph.outputs:
        root = program.root(name)
        if root not in inputs and program.storage.get(root) is not None and program.constant_source(root) is None:
            outputs.setdefault(root, len(outputs))
    constants: list[str] = []
    arena: list[str] = []
    used = used_buffers(program)
    extra = [program.root(name) for name in program.graph.outputs]
    for name in dict.fromkeys([*used, *extra]):
        if name in inputs or name in outputs or name in program.faults:
            continue
        (constants if program.constant_source(name) is not None else arena).append(name)
    return Places(MappingProxyType(inputs), MappingProxyType(outputs), tuple(constants), tuple(arena))


def lifetimes(program: LoadableProgram, names: Iterable[str]) -> list[Lifetime]:
    """The lifetimes of the named root buffers."""
    wanted = set(names)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    position = 0
    for region in program.regions:
        if region.kind == "torch":
            uses = [(position, name) for name in _torch_buffers(program, region)]
            end = position + 1
        else:
            groups = [[view.name for view in region.library.views]] if region.library is not None else []
            groups += [list(call.arguments) for call in region.calls]
            uses = [(position + i, name) for i, names in enumerate(groups) for name in names]
            end = position + len(groups)
            if region.repeat > 1:  # a later repetition may read what an earlier one wrote
                uses = [(at, name) for _, name in uses for at in (position, end - 1)]
        for at, name in uses:
            root = program.root(name)
            if root in wanted:
                first[root] = min(at, first.get(root, at))
                last[root] = max(at, last.get(root, at))
        position = end
    result = []
    for name in first:
        storage = program.storage[name]
        zeroed = (storage.layout, storage.value.dtype) if storage.layout.is_padded else None
        result.append(Lifetime(name, program.bytes_of(name), first[name], last[name], zeroed))
    return result


class Order:
    """Which uses of buffers precede others."""

    def __init__(self, uses: Mapping[str, Sequence[int]], before: Sequence[int]) -> None:
        """`uses`: the calls that use each buffer; `before`: the calls that precede each call, as bits (`accesses.ancestors`)."""
        self.rows = {name: row for row, name in enumerate(uses)}
        self._uses = [np.array(calls) for calls in uses.values()]
        self._all, self._starts = np.concatenate(self._uses), np.cumsum([0, *map(len, self._uses)])[:-1]
        bits = [np.frombuffer(mask.to_bytes(len(before) // 8 + 1, "little"), np.uint8) for mask in before]
        precedes = np.unpackbits(np.stack(bits), axis=1, bitorder="little")[:, : len(before)].astype(bool)
        # [call, buffer]: whether the call precedes all uses of the buffer
        self._before = np.stack([precedes[calls].all(axis=0) for calls in self._uses], axis=1)

    def separate(self, name: str) -> np.ndarray:
        """For each buffer in the order of `rows`, whether all uses of the named one precede all of its uses, or follow them."""
        row = self.rows[name]
        precedes = self._before[self._uses[row]].all(axis=0)
        follows = np.logical_and.reduceat(self._before[self._all, row], self._starts)
        result: np.ndarray = precedes | follows
        return result


def order_by_data(program: LoadableProgram) -> Order:
    """The order that what calls read and write gives. A region that is repeated, or of PyTorch, counts as one call; the latter waits for all calls
    before it, and all calls behind it wait for it."""
    found: list[tuple[list[Extent], list[Extent]]] = []
    names: list[list[str]] = []
    waiting = [SEGMENTS] if any(region.kind == "torch" for region in program.regions) else []

    def extent(name: str) -> Extent:
        return Extent(program.root(name), 0, 1, program.root(name), program.box(name))

    for region in program.regions:
        if region.kind == "torch":
            touched = _torch_buffers(program, region)
            found.append(([extent(name) for name in touched], [SEGMENTS, *map(extent, touched)]))
            names.append([program.root(name) for name in touched])
            continue
        calls: list[Call | LibraryCall] = [*([region.library] if region.library is not None else []), *region.calls]
        own = accesses(program, calls, extent)
        used = [[view.name for view in call.views] if isinstance(call, LibraryCall) else list(call.arguments) for call in calls]
        if region.repeat > 1:
            own = [([each for reads, _ in own for each in reads], [each for _, writes in own for each in writes])]
            used = [[name for each in used for name in each]]
        found += [([*waiting, *reads], writes) for reads, writes in own]
        names += [[program.root(name) for name in each] for each in used]
    uses: dict[str, dict[int, None]] = {}
    for number, used_now in enumerate(names):
        for name in used_now:
            uses.setdefault(name, {})[number] = None
    return Order({name: list(calls) for name, calls in uses.items()}, ancestors(dependencies(found)))


def _slots(buffers: Iterable[Lifetime], order: Order | None) -> list[list[Lifetime]]:
    """Groups of buffers that may share a place one after another, each in the first that is free; without an order there are as few as buffers live
    at one time."""
    slots: list[list[Lifetime]] = []
    for buffer in sorted(buffers, key=lambda b: b.first):
        if order is None:
            free = [slot for slot in slots if slot[-1].last < buffer.first]
        else:
            separate = order.separate(buffer.name)
            free = [slot for slot in slots if separate[order.rows[slot[-1].name]]]
        if free:
            free[0].append(buffer)
        else:
            slots.append([buffer])
    return slots


class _Arena:
    """The placed buffers. Each search is a few passes over columns sorted by offset: thousands of buffers take a second. With an order, those that
    live from 0 to the horizon are in use throughout."""

    def __init__(self, alignment: int, order: Order | None, horizon: int) -> None:
        self._alignment, self._order, self._horizon = alignment, order, horizon
        self._placed = np.empty((4, 0), np.int64)  # rows: offset, aligned end, first use, last use
        self._rows = np.empty(0, np.int64)  # those of the order

    def _meets(self, buffer: Lifetime) -> np.ndarray:
        """Which of the placed buffers are live at the same time."""
        _, _, first, last = self._placed
        meets: np.ndarray = (first <= buffer.last) & (last >= buffer.first)
        if self._order is not None and (buffer.first, buffer.last) != (0, self._horizon):
            throughout = (first == 0) & (last == self._horizon)
            meets = throughout | ~self._order.separate(buffer.name)[self._rows]
        return meets

    def place(self, buffer: Lifetime) -> int:
        """Offset of the smallest gap among the buffers that are live at the same time, or just above them all."""
        starts, ends, _, _ = self._placed
        meets = self._meets(buffer)
        starts, ends = starts[meets], np.maximum.accumulate(ends[meets])
        floors = np.concatenate(([0], ends))
        gaps = starts - floors[:-1]
        holds = np.flatnonzero(gaps >= buffer.bytes)
        offset = int(floors[holds[gaps[holds].argmin()]] if holds.size else floors[-1])
        column = (offset, _align(offset + buffer.bytes, self._alignment), buffer.first, buffer.last)
        at = int(self._placed[0].searchsorted(offset, "right"))
        self._placed = np.insert(self._placed, at, column, axis=1)
        self._rows = np.insert(self._rows, at, self._order.rows[buffer.name] if self._order is not None else 0)
        return offset

    @property
    def bytes(self) -> int:
        return int(self._placed[1].max(initial=0))


def place(buffers: Sequence[Lifetime], alignment: int = CPU_ALIGNMENT, order: Order | None = None) -> MemoryPlan:
    """Offsets at which buffers that are live at the same time do not overlap, and zeroed elements stay zero. With an order, what does not precede
    or follow by it is live at the same time."""
    offsets = {buffer.name: 0 for buffer in buffers if buffer.bytes == 0}
    horizon = max((b.last for b in buffers), default=0)
    items = [(buffer, [buffer]) for buffer in buffers if buffer.bytes and buffer.zeroed is None]
    alike: dict[tuple[Layout, str], list[Lifetime]] = {}
    for buffer in buffers:
        if buffer.bytes and buffer.zeroed is not None:
            alike.setdefault(buffer.zeroed, []).append(buffer)
    for slot in chain.from_iterable(_slots(group, order) for group in alike.values()):  # the place belongs to these buffers throughout
        items.append((replace(slot[0], first=0, last=horizon), slot))
    arena = _Arena(alignment, order, horizon)
    for item, members in sorted(items, key=lambda entry: (-entry[0].bytes, entry[0].first, entry[0].name)):
        offsets.update(dict.fromkeys((buffer.name for buffer in members), arena.place(item)))
    sizes = {buffer.name: buffer.bytes for buffer in buffers}
    unshared = sum(_align(buffer.bytes, alignment) for buffer in buffers)
    return MemoryPlan(MappingProxyType(offsets), MappingProxyType(sizes), arena.bytes, unshared)


def plan_memory(program: LoadableProgram, alignment: int = CPU_ALIGNMENT, cache_bytes: int = 0) -> MemoryPlan:
    """Plans the arena of a program: every buffer that is neither an input, an output nor a constant. With a cache of `cache_bytes`, calls that do not
    need one another may run concurrently, unless that takes more than the cache and `MORE_MEMORY`."""
    buffers = lifetimes(program, assign_places(program).arena)
    in_turn = place(buffers, alignment)
    if not buffers or not cache_bytes or sum(region.repeat * len(region.calls) for region in program.regions) > EDGES_UP_TO:
        return in_turn
    concurrent = place(buffers, alignment, order_by_data(program))
    return concurrent if concurrent.bytes <= max(cache_bytes, MORE_MEMORY * in_turn.bytes) else in_turn
