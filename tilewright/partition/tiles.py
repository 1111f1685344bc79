"""Tiles of a chain on a GPU: which rows of each region's result a block computes for its tile of the last one, and where they are stored.

A tile of the last result has `sizes` rows along the axes of the chain, which divide its extents. What it needs of an inner result is a window along
each axis. Windows are moved into the image, so that all tiles compute equally many rows and none that do not exist; the rows outside the image that a
border tile reads are filled once in the halo of its storage. Adjacent tiles compute the rows that both need twice (overlapped tiling, `strips`).

Worked example: a 3x3 convolution with padding 1 after another layer, 8 rows in tiles of 4. The first tile needs rows -1 to 4 of the layer, the second
rows 3 to 8. Both windows have 6 rows: 0 to 5 and 2 to 7. The storage has one more row on either side: the first tile's begins at row -1, which is
filled, the second tile's ends at row 8, which is filled too.

If the blocks of a cluster exchange rows, each computes 4 of them, 0 to 3 and 4 to 7, and the storage has one more on either side again: row 4 of the
first tile's, and row 3 of the second tile's, are copied from the other block (`tile_exchange`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from math import gcd, prod

from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import ZERO, Expr, binary, index_const
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.partition.strips import Cut, Rows, readers_in


@dataclass(frozen=True)
class Window:
    """Rows of a region's result along one axis that each tile computes: `count` of `extent`. A result that no region of the chain reads has its tiles
    as windows, `tiles` in number. Those of others follow from the windows of its `readers`, each with the rows that it reads, and hold what all of
    them need. From one tile to the next neither the first row nor its distance from the wanted one decreases. exchanged: windows do not overlap, and
    the rows in the halo are those of the tiles beside it."""

    count: int
    extent: int
    tiles: int
    readers: tuple[tuple[Window, Rows], ...] = ()
    exchanged: bool = False

    @staticmethod
    @lru_cache(maxsize=4096)
    def of_readers(readers: tuple[tuple[Window, Rows], ...], extent: int, exchanged: bool = False) -> Window:
        """The window of an inner result of that extent. `exchanged`: of rows that several tiles need each is computed by one, for one reader.

        Raises:
            Unsuitable: if tiles need rows of others than those beside them.
        """
        (reader, rows), *others = readers
        whole = Window(extent, extent, reader.tiles, readers)
        needed = max(whole.end(tile) - whole.wanted(tile) for tile in whole.bounds)
        if not exchanged or not others and rows.first >= 0 and rows.first + needed <= rows.stride * reader.count:
            return replace(whole, count=min(needed, extent))
        window = Window(rows.stride * reader.count, extent, reader.tiles, readers, True)
        if others or window.count * reader.tiles != extent or max(window.halo) > window.count:
            raise Unsuitable(f"{reader.tiles} tiles do not exchange all that they need of {extent} rows")
        return window

    @property
    def bounds(self) -> Iterable[int]:
        """The tiles that bound all others: with one reader the first and the last one."""
        return range(self.tiles) if len(self.readers) > 1 else (0, self.tiles - 1)

    def wanted(self, tile: int) -> int:
        """The first row that a tile's readers read, which may not exist."""
        return min((_begin(reader, rows, tile) for reader, rows in self.readers), default=tile * self.count)

    def end(self, tile: int) -> int:
        """The row after the last one that a tile's readers read."""
        return max((_begin(reader, rows, tile) + rows.needed(reader.count) for reader, rows in self.readers), default=(tile + 1) * self.count)

    def first(self, tile: int) -> int:
        """The first row of a tile's window."""
        if self.exchanged:
            return tile * self.count
        return max(0, min(self.wanted(tile), self.extent - self.count))

    def first_of(self, tile: Expr) -> Expr:
        """`first` of a tile that is known at run time."""
        if self.tiles == 1:
            return index_const(self.first(0))
        if self.exchanged or not self.readers:
            return tile * self.count
        each = list(dict.fromkeys(_begin_of(reader, rows, tile) for reader, rows in self.readers))
        wanted = reduce(partial(binary, "min"), each)
        if self.wanted(self.tiles - 1) > self.extent - self.count:
            wanted = binary("min", wanted, index_const(self.extent - self.count))
        return binary("max", wanted, ZERO) if self.wanted(0) < 0 else wanted

    def skipped(self, tile: int, number: int = 0) -> int:
        """Rows of the storage, halo included, before the first that one of a tile's readers reads."""
        return _begin(*self.readers[number], tile) - self.first(tile) + self.halo[0]

    def skipped_of(self, tile: Expr, number: int = 0) -> Expr:
        """`skipped` of a tile that is known at run time."""
        if self.tiles == 1:
            return index_const(self.skipped(0, number))
        return _begin_of(*self.readers[number], tile) - self.first_of(tile) + self.halo[0]

    @cached_property
    def halo(self) -> tuple[int, int]:
        """Filled rows before and after those that are computed."""
        if not self.readers:
            return 0, 0
        before = max(self.first(tile) - self.wanted(tile) for tile in self.bounds)
        return max(0, before), max(0, max(self.end(tile) - self.first(tile) for tile in self.bounds) - self.count)


def _begin(reader: Window, rows: Rows, tile: int) -> int:
    """The first row that a reader's tile needs."""
    return rows.stride * reader.first(tile) + rows.first


def _begin_of(reader: Window, rows: Rows, tile: Expr) -> Expr:
    return reader.first_of(tile) * rows.stride + rows.first


@dataclass(frozen=True)
class Shift:
    """How far the address of a part moves with the tile: `offset` elements, of which each tile's is a multiple of `step` (0: none moves)."""

    offset: Expr
    step: int


@dataclass(frozen=True)
class Tiling:
    """A chain cut into tiles of `sizes` rows along its axes. `problem` is that of the chain, `cuts` its regions in order. The layout of a value in
    `problem` is that which it would have in memory.

    chunked: a tile sums over the last axis in chunks of the last size, one after another: the regions from `inside` on are computed for each chunk,
    and the last one adds to its sums. So what lies between them takes the room of a chunk, however many channels it has. exchanged: an axis along
    which the tiles are computed by the blocks of a cluster, which exchange the rows that several of them need."""

    problem: Problem
    cuts: tuple[Cut, ...]
    sizes: tuple[int, ...]
    chunked: bool = False
    exchanged: int | None = None

    @cached_property
    def windows(self) -> tuple[tuple[Window | None, ...], ...]:
        """For each region and axis the window of its result; None where it is not cut."""
        along = (windows_along(self.cuts, axis, size, self.problem, axis == self.exchanged) for axis, size in enumerate(self.sizes))
        return tuple(zip(*along, strict=True))

    @property
    def tiles(self) -> tuple[int, ...]:
        """The number of tiles along each axis, and of chunks along the last if the tiles are chunked."""
        return tuple(window.tiles for window in self.windows[-1] if window is not None)

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of tiles along each axis."""
        return self.tiles[:-1] if self.chunked else self.tiles

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 1 if self.exchanged is None else self.tiles[self.exchanged]

    def borders(self, number: int) -> tuple[int, int]:
        """Rows before and after a tile's own of a region's result that other blocks of the cluster compute."""
        window = None if self.exchanged is None else self.windows[number][self.exchanged]
        return window.halo if window is not None and window.exchanged else (0, 0)

    def slab(self, number: int) -> int:
        """Elements of the storage of a region's result for each row along the axis of the cluster."""
        assert self.exchanged is not None
        rows = self.cuts[number].spans[self.cuts[number].result][self.exchanged]
        assert rows is not None
        layout = self.storage[self.cuts[number].result]
        return layout.size // (layout.shape[rows.dim] + sum(layout.halo[rows.dim]))

    @property
    def exchanges(self) -> tuple[int, ...]:
        """The regions of whose results blocks exchange rows."""
        return tuple(number for number in range(len(self.cuts)) if any(self.borders(number)))

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that a block offers to others, for each part of the regions."""
        dtypes = [self.problem.values[part.result].dtype for part in self.cuts]
        return sum(-(-sum(self.borders(number)) * self.slab(number) * size_of(dtypes[number]) // 16) * 16 for number in self.exchanges)

    @cached_property
    def inside(self) -> int:
        """The first region that is computed for each chunk."""
        return next(number for number, windows in enumerate(self.windows) if not self.chunked or windows[-1] is not None)

    @property
    def repeats(self) -> tuple[int, ...]:
        """How often a tile computes a part of each region."""
        return tuple(self.tiles[-1] if self.chunked and number >= self.inside else 1 for number in range(len(self.cuts)))

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each region those that read its result."""
        return readers_in(self.cuts)

    @cached_property
    def storage(self) -> Mapping[str, Layout]:
        """The layout of the storage of each result that regions of the chain read: in the order that it would have in memory."""
        return {part.result: self._stored(number) for number, part in enumerate(self.cuts) if self.readers[number]}

    def last_of(self, number: int) -> list[int]:
        """The regions whose results are read by a region last."""
        return [at for at, readers in enumerate(self.readers) if readers and readers[-1] == number]

    def _stored(self, number: int) -> Layout:
        name = self.cuts[number].result
        layout = self.problem.layouts[name]
        shape, halo = list(layout.shape), list(layout.halo)
        for rows, window in zip(self.cuts[number].spans[name], self.windows[number], strict=True):
            if rows is not None and window is not None:
                shape[rows.dim], halo[rows.dim] = window.count, window.halo
        return Layout(tuple(shape), layout.order, tuple(halo))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the storage that is in use at once (`in_use`)."""
        sizes = [self._bytes(part.result, self.storage[part.result]) if self.readers[at] else 0 for at, part in enumerate(self.cuts)]
        return max(sum(sizes[at] for at in live) for live in in_use(self.readers, self.inside))

    def _bytes(self, name: str, layout: Layout) -> int:
        return -(-layout.size * size_of(self.problem.values[name].dtype) // 16) * 16

    def part(self, number: int) -> Problem:
        """The problem of a tile of a region. Its layouts are those of a tile that begins as close to the start of the storage as keeps the alignment
        of all tiles."""
        if number not in self._parts:
            self._parts[number] = self._part(number)
        return self._parts[number]

    @cached_property
    def _parts(self) -> dict[int, Problem]:
        """The problems that were asked for, by region: their forms are kept with them (`Problem.found`)."""
        return {}

    def _part(self, number: int) -> Problem:
        part = self.cuts[number]
        counts = [window.count if window is not None else 1 for window in self.windows[number]]
        problem = part.tile(counts, self.problem, {**self.problem.layouts, **self.storage})
        layouts = dict(problem.layouts)
        for name in layouts:
            for rows, begins in self._begins(number, name):
                step = gcd(*begins)
                if name not in self.problem.constants:
                    before, after = layouts[name].outside(rows.dim)
                    around = [layouts[name].outside(dim) for dim in range(len(layouts[name].shape))]
                    around[rows.dim] = before + step, after - step
                    layouts[name] = replace(layouts[name], around=tuple(around))
        return replace(problem, layouts=layouts)

    def shift(self, number: int, name: str, tiles: Sequence[Expr]) -> Shift:
        """How far what a region reads or stores of a value lies from where the tile of `part` does."""
        layout = self.storage.get(name) or self.problem.layouts[name]
        strides, offset, step = layout.dense_strides() or (), ZERO, 0
        for (rows, begins), begin in zip(self._begins(number, name), self._begin_of(number, name, tiles), strict=True):
            skipped = 0 if name in self.problem.constants else gcd(*begins)
            offset = offset + (begin - skipped) * strides[rows.dim]
            step = gcd(step, *((each - skipped) * strides[rows.dim] for each in begins))
        return Shift(offset, step)

    def _axes(self, number: int, name: str) -> list[tuple[int, Rows, Window]]:
        """The axes along which a value is cut, the rows that a region needs, and the region's window."""
        spans = self.cuts[number].spans.get(name, ())
        pairs = enumerate(zip(spans, self.windows[number], strict=False))
        return [(axis, rows, window) for axis, (rows, window) in pairs if rows is not None and window is not None]

    def _begins(self, number: int, name: str) -> list[tuple[Rows, list[int]]]:
        """For each dimension along which a value is cut where in its storage each tile begins."""
        found = []
        for axis, rows, window in self._axes(number, name):
            if name in self.storage:
                kept, at = self._kept(name, number, axis)
                found.append((rows, [kept.skipped(tile, at) for tile in range(window.tiles)] if kept is not None else [window.halo[0]]))
            else:
                first = rows.first + self._margin(name, rows.dim)
                found.append((rows, [rows.stride * window.first(tile) + first for tile in range(window.tiles)]))
        return found

    def _begin_of(self, number: int, name: str, tiles: Sequence[Expr]) -> list[Expr]:
        """`_begins` of the tile with these numbers."""
        found: list[Expr] = []
        for axis, rows, window in self._axes(number, name):
            if name in self.storage:
                kept, at = self._kept(name, number, axis)
                found.append(kept.skipped_of(tiles[axis], at) if kept is not None else index_const(window.halo[0]))
            else:
                found.append(window.first_of(tiles[axis]) * rows.stride + (rows.first + self._margin(name, rows.dim)))
        return found

    def _kept(self, name: str, number: int, axis: int) -> tuple[Window | None, int]:
        """The window of an inner result that a region reads, and which of its readers the region is; None if the region computes it."""
        producer = next(at for at, part in enumerate(self.cuts) if part.result == name)
        return (None, 0) if producer == number else (self.windows[producer][axis], self.readers[producer].index(number))

    def _margin(self, name: str, dim: int) -> int:
        layout = self.problem.layouts[name]
        return layout.halo[dim][0] + layout.outside(dim)[0]

    def slices(self, number: int, name: str) -> list[tuple[int, int, int]]:
        """Of a constant that a region reads, for each axis along which it is cut: the axis, the elements from one tile's part to the next in
        row-major order, and those before the first.

        Raises:
            Unsuitable: if the parts have no regular distance.
        """
        strides = row_major(self.problem.values[name].shape).dense_strides() or ()
        found = []
        for axis, rows, window in self._axes(number, name):
            firsts = [window.first(tile) for tile in range(window.tiles)]
            distance = firsts[1] - firsts[0] if window.tiles > 1 else 0
            if firsts != [firsts[0] + tile * distance for tile in range(window.tiles)]:
                raise Unsuitable(f"the parts of {name} that tiles need have no regular distance")
            found.append((axis, distance * rows.stride * strides[rows.dim], (firsts[0] * rows.stride + rows.first) * strides[rows.dim]))
        return found


def in_use(readers: Sequence[Sequence[int]], inside: int = 0) -> list[list[int]]:
    """For each region of a chain those whose results have a place in shared memory while it is computed: all that are read by then or later, since
    places are kept from the beginning on; of chunks, which regions from `inside` on are computed for, also what all chunks read."""
    last = [max(own, default=-1) for own in readers]
    return [
        [at for at in range(len(readers)) if (at < inside) == (number < inside) and last[at] >= number or at == inside - 1 and number >= inside]
        for number in range(len(readers))
    ]


def windows_along(cuts: Sequence[Cut], axis: int, size: int, problem: Problem, exchanged: bool = False) -> tuple[Window | None, ...]:
    """For each region of a chain the window of its result along an axis, of tiles of `size` rows (`Window.of_readers`); None where it is not cut."""
    last, own = cuts[-1].span(cuts[-1].result, axis), cuts[-1].axes[axis]
    extent = problem.values[cuts[-1].result].shape[last.dim] if last is not None else own.extent if own is not None else None
    assert extent is not None
    tiles = Window(size, extent, extent // size)
    found: dict[int, Window | None] = {}
    for number, readers in reversed([*enumerate(readers_in(cuts))]):
        pairs = [(found[at], cuts[at].span(cuts[number].result, axis)) for at in readers]
        known = tuple((window, rows) for window, rows in pairs if window is not None and rows is not None)
        if not readers:
            found[number] = tiles
        elif len(known) < len(pairs):
            found[number] = None
        else:
            found[number] = Window.of_readers(known, problem.values[cuts[number].result].shape[known[0][1].dim], exchanged)
    return tuple(found[number] for number in range(len(cuts)))
