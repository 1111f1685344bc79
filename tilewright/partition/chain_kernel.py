"""One CPU kernel of several regions, by strips: what a strip stores for the next region stays in a tile of the thread's second-level cache.

    for each worker:                                                  (in parallel)
        for each strip of its share, for each region in order:
            for each row that later regions need for the strip:       (all at once, if all exist and none is there already)
                tile[row] = region                                    (a row outside the image is filled instead)

Rows that the strip before computed too move to the front of the tile first. A result that is needed outside of the chain too is copied from the tile,
each row by the strip that computes it first; where no strip needs rows of another, it has no tile, and is read where it is stored. So a region may
read a concatenation of which another one stores a part: both are in one buffer, and of the part a strip reads what it has stored there itself.

The code of each region is its schema's, for the problem of a strip (`partition.strips`), with addresses moved by where the strip begins. A worker's
strips are adjacent, so that only its first computes rows that another worker computes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType

from tilewright.codegen.access import divide_linear
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.trips import defined
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import ZERO, Apply, Expr, Load, Var, compare, floordiv, index_const, logical_and
from tilewright.ir.graph import Value
from tilewright.ir.kernel import TRIPS, Block, For, If, Let, Statement, Store
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.ir.stage import tile_of
from tilewright.partition.embedding import embedded
from tilewright.partition.strips import Cut, Rows, cuts_of, fill_of, readers_in

WORKER, SHARE, TASK, PART, SLOT, ROW = "chain_worker", "chain_share", "chain_task", "chain_part", "chain_slot", "chain_row"
COPIED = "chain_copied"
"""Variables of a chain's own loops. They occur in the addresses of embedded kernels, so no schema may bind these names."""
LowerStrip = Callable[[Problem, bool], Lowered]
"""Lowers the problem of a strip for one thread, and may use that it is a whole image; the results' values keep their names."""


@dataclass(frozen=True)
class StripSchedule:
    """How a chain is cut: strips of `rows` rows along dimension `dim` of its result, `workers` at a time. The schedules of its regions follow."""

    rows: int
    workers: int
    dim: int = 0

    def __str__(self) -> str:
        return f"strips of {self.rows} rows, {self.workers} at a time"

    @property
    def described(self) -> str:
        return f"in strips of {self.rows} rows"


@dataclass(frozen=True)
class Frame:
    """The rows of a region's result in its tile during a strip: `rows`, of which the first `kept` are there from the strip before; a strip begins
    `advance` rows after the one before. Slot 0 is row `scale * start + offset` of the image, where `start` is the strip's first row of the last
    result. outside: whether some strip needs rows that do not exist."""

    rows: int
    kept: int
    advance: int
    scale: int
    offset: int
    outside: bool

    @property
    def fresh(self) -> int:
        """Rows that a strip adds to those that are there."""
        return self.rows - self.kept

    def first(self, start: Expr) -> Expr:
        """The row in slot 0."""
        return start * self.scale + self.offset


@dataclass(frozen=True)
class Chain:
    """Regions cut into strips, in order, each of which stores what later ones read or what is a result of the chain. Their first axis is that of
    rows, the others are cut to one image; `outer` are the extents of the images, `height` the rows of the first result. `problem` is that of the
    whole chain; its layouts of inner results are those that they would have in memory."""

    problem: Problem
    cuts: tuple[Cut, ...]
    outer: tuple[int, ...]
    height: int

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each region those that read its result."""
        return readers_in(self.cuts)

    def frames(self, rows: int) -> tuple[Frame, ...]:
        """The frame of each region for strips of `rows` rows: all that one of its readers needs."""
        found: dict[int, Frame] = {}
        last: dict[int, int] = {}
        for number in range(len(self.cuts) - 1, -1, -1):
            name, read = self.cuts[number].result, [(rows_of(self.cuts[at], self.cuts[number].result), at) for at in self.readers[number]]
            if not read:
                found[number], last[number] = Frame(rows, 0, rows, 1, 0, False), self.height - 1
                continue
            rates = {(found[at].advance * each.stride, found[at].scale * each.stride) for each, at in read}
            if len(rates) > 1:
                raise Unsuitable(f"{name} is read at several rates")
            ((advance, scale),) = rates
            offset = min(found[at].offset * each.stride + each.first for each, at in read)
            needed = max(found[at].offset * each.stride + each.first + each.needed(found[at].rows) for each, at in read) - offset
            last[number] = max(each.stride * last[at] + each.first + each.span - 1 for each, at in read)
            outside = offset < 0 or last[number] >= self.extent(number)
            found[number] = Frame(needed, max(needed - advance, 0), advance, scale, offset, outside)
        return tuple(found[number] for number in range(len(self.cuts)))

    @cached_property
    def tiled(self) -> frozenset[int]:
        """The regions whose results are in tiles: those that others read, without results of the chain of which no strip needs rows of another.

        Raises:
            Unsuitable: if strips do not compute all rows of a result, or need rows of one another of a part of a concatenation.
        """
        found = set()
        for number, (frame, part, readers) in enumerate(zip(self.frames(1), self.cuts, self.readers, strict=True)):
            if part.result not in self.problem.region.outputs:
                found.add(number)
            elif readers:
                end = frame.offset + frame.scale * (self.height - 1) + frame.rows
                if frame.rows < frame.advance or frame.offset > 0 or end < self.extent(number):
                    raise Unsuitable(f"its strips do not compute all rows of {part.result}")
                if frame.kept or frame.outside:
                    if (whole := self.problem.region.memory_of(part.result)) != part.result:
                        raise Unsuitable(f"its strips need rows of one another of {part.result}, which is read in {whole}")
                    found.add(number)
        return frozenset(found)

    def tile(self, number: int, rows: int) -> Layout:
        """The layout of a region's result in a tile of `rows` rows: rows outermost, otherwise as in memory."""
        producer = self.cuts[number]
        own, *images = producer.spans[producer.result]
        assert own is not None
        layout = self.problem.layouts[producer.result]
        shape, halo = list(layout.shape), list(layout.halo)
        shape[own.dim], halo[own.dim] = rows, (0, 0)
        for image in images:
            if image is not None:
                shape[image.dim], halo[image.dim] = 1, (0, 0)
        order = ((own.dim, 0), *(entry for entry in layout.order if entry[0] != own.dim))
        return Layout(tuple(shape), order, tuple(halo))

    def layouts(self, rows: int) -> dict[str, Layout]:
        """The layouts of the storage that holds the strips of what regions read and store."""
        frames, result = self.frames(rows), dict(self.problem.layouts)
        return result | {self.cuts[number].result: self.tile(number, frames[number].rows) for number in self.tiled}

    def strip(self, number: int, rows: int, count: int) -> Problem:
        """The problem of `count` rows of a region, in the tiles of strips of `rows` rows."""
        return strip(self.cuts[number], count, self.problem, self.layouts(rows))

    def extent(self, number: int) -> int:
        """Rows of an image of a region's result."""
        part = self.cuts[number]
        return self.problem.values[part.result].shape[rows_of(part, part.result).dim]

    def tile_bytes(self, rows: int) -> int:
        """Bytes of a worker's tiles, and of what else a strip stores and reads."""
        inner = [(number, frame) for number, frame in enumerate(self.frames(rows)) if self.readers[number]]
        return sum(self.tile(number, frame.rows).size * size_of(self.problem.values[self.cuts[number].result].dtype) for number, frame in inner)


def chain_of(problem: Problem, dim: int) -> Chain:
    """A canonical chain cut along a dimension of its first result, and along its first dimension into images.

    Raises:
        Unsuitable: if one of its regions cannot be cut, or if strips do not compute all of its results.
    """
    output = problem.region.outputs[0]
    outer = [0] if dim and problem.values[output].shape[0] > 1 else []
    cuts = cuts_of(problem, (dim, *outer))
    for part in cuts:
        _require_strips(part, problem)
    extents = tuple(problem.layouts[output].shape[other] for other in outer)
    chain = Chain(problem, cuts, extents, problem.layouts[output].shape[dim])
    for number, part in enumerate(cuts):
        images = tuple(problem.values[part.result].shape[image.dim] for image in part.spans[part.result][1:] if image is not None)
        if part.result in problem.region.outputs and images != extents:
            raise Unsuitable(f"{part.result} has other images than {output}")
        fill_of(cuts, number)
    return chain


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


def rows_of(part: Cut, name: str) -> Rows:
    """The rows of a value inside the chain that a row of a region needs."""
    rows = part.span(name, 0)
    assert rows is not None
    return rows


def strip(part: Cut, count: int, problem: Problem, layouts: Mapping[str, Layout] | None = None) -> Problem:
    """The problem of `count` rows of one image (`Cut.tile`)."""
    return part.tile((count, *(1 for _ in part.axes[1:])), problem, layouts)


def lower_chain(chain: Chain, schedule: StripSchedule, lower: LowerStrip) -> Lowered:
    """One kernel for a chain that is cut along the schedule's dimension.

    Raises:
        Unsuitable: if a region needs more than one kernel, or memory of its own.
    """
    rows, workers = schedule.rows, schedule.workers
    emitter = _Emitter(chain, rows, workers, lower)
    full, rest = divmod(chain.height, rows)
    count = full + bool(rest)
    tasks = prod(chain.outer) * count
    each = -(-tasks // workers)
    growths = _growths(chain, schedule)
    trips = chain.outer[0] if chain.outer else chain.height
    all_tasks, share = TRIPS * (tasks // trips) if growths else index_const(tasks), Var(SHARE)
    # of any number of images there may be more tasks than of these
    worker, number, task = Var(WORKER, workers), Var(TASK, None if growths else each), Var(PART, None if growths else tasks)
    *images, strip = divide_linear(task, [*chain.outer, count])
    first = compare("eq", strip, ZERO)
    begins = Begins(first, _or(compare("eq", number, ZERO), first)) if count > 1 else None
    inside: Statement = emitter.strip(rows, strip * rows, images, begins)
    if rest:
        last = emitter.strip(rest, index_const(full * rows), images, begins)
        inside = If(compare("lt", strip, index_const(full)), inside, last) if full else last
    part = worker * share + number
    inside = block(Let(task, part), inside)
    if workers > 1:
        inside = If(compare("lt", part, all_tasks), inside)
    loops = For(worker, index_const(workers), For(number, share, inside), "parallel" if workers > 1 else "serial")
    body = block(Let(share, floordiv(all_tasks + (workers - 1), index_const(workers))), loops)
    if growths:
        body = defined(body, trips)
    problem = chain.problem.with_storage(emitter.storage)
    said = f"{schedule}: " + "; ".join(emitter.schedules)
    region = chain.problem.region
    written = dict.fromkeys((*emitter.tiles, *map(region.memory_of, region.outputs)))
    header = f"{described(problem)}\n{said}"
    roles = {name: "tile" for name in emitter.tiles}
    kernel, arguments = assemble("chain", body, problem, tuple(written), header=header, roles=roles, growths=growths)
    call = Call.of(kernel, arguments)
    within = tuple(emitter.within[number] for number in range(len(chain.cuts)))
    return Lowered(chain.problem.region, said, (kernel,), (call,), MappingProxyType(emitter.storage), within=within)


def _growths(chain: Chain, schedule: StripSchedule) -> dict[str, int]:
    """The scalars between two images of each value that is cut into images, as it also is where strips are single images; empty if there are none, or
    if that is not the same for all regions."""
    if not chain.outer and (schedule.dim or schedule.rows > 1):
        return {}
    found: dict[str, set[int]] = {}
    for part in chain.cuts:
        for name, (rows, *others) in part.spans.items():
            strides, images = chain.problem.layouts[name].dense_strides() or (), others if chain.outer else [rows]
            if any(image is not None and image != Rows(image.dim) for image in images):
                return {}
            found.setdefault(name, set()).update(0 if image is None else strides[image.dim] for image in images)
    return {name: stride for name, (stride,) in found.items()} if all(len(strides) == 1 for strides in found.values()) else {}


@dataclass(frozen=True)
class Begins:
    """Whether a strip is the first of an image, and whether no rows of its tiles are there: also if it is the first of a worker."""

    image: Expr
    tiles: Expr


class _Emitter:
    """Emits the code of strips, and collects the tiles and packed constants that it needs."""

    def __init__(self, chain: Chain, rows: int, workers: int, lower: LowerStrip) -> None:
        self.chain, self.workers, self.lower = chain, workers, lower
        self.full = chain.frames(rows)
        self.storage: dict[str, Storage] = {}
        self.tiles: tuple[str, ...] = ()
        self.schedules: list[str] = []
        self.within: dict[int, str] = {}

    def strip(self, rows: int, start: Expr, images: Sequence[Expr], begins: Begins | None) -> Block:
        """A strip of `rows` rows from row `start` on. begins: None for a strip that is a whole image."""
        frames = self.chain.frames(rows)
        self._require_tiles(rows)
        parts: list[Statement] = []
        moves = [self._moved(number, frame, full, start) for number, (frame, full) in enumerate(zip(frames, self.full, strict=True)) if frame.kept]
        if begins is not None and moves:
            parts.append(If(Apply("not", (begins.tiles,), "bool"), block(moves)))
        for number, frame in enumerate(frames):
            if begins is None:
                parts.append(self._image(number, rows, frame, images))
            elif frame.kept or frame.outside:
                parts.append(self._fresh(number, rows, frame, start, images, begins.tiles))
            else:
                parts.append(self._code(number, rows, frame.rows)(frame.first(start), ZERO, images))
            if number in self.chain.tiled and self.chain.cuts[number].result in self.chain.problem.region.outputs:
                parts.append(self._copied(number, frame, start, images, begins))
        return block(parts)

    def _image(self, number: int, rows: int, frame: Frame, images: Sequence[Expr]) -> Statement:
        """All rows of an image at once."""
        begin, end = max(-frame.offset, 0), min(self.chain.extent(number) - frame.offset, frame.rows)
        outside = [index_const(slot) for slot in (*range(begin), *range(end, frame.rows))]
        code = self._code(number, rows, end - begin)(index_const(frame.offset + begin), index_const(begin), images)
        return block([filled for slot in outside if (filled := self._filled(number, slot)) is not None], code)

    def _fresh(self, number: int, rows: int, frame: Frame, start: Expr, images: Sequence[Expr], begins: Expr) -> Statement:
        """The rows that are not there yet: together if all exist, otherwise one after another."""
        slot, row = Var(SLOT, frame.rows), Var(ROW, None)
        inside: Statement = self._code(number, rows, 1)(row, slot, images)
        if frame.outside:
            inside = If(self._exists(number, row), inside, self._filled(number, slot))
        inside = block(Let(row, frame.first(start) + slot), inside)
        if frame.kept:
            inside = If(_or(begins, compare("ge", slot, index_const(frame.kept))), inside)
        one_by_one = For(slot, index_const(frame.rows), inside)
        if frame.fresh == 1:
            return one_by_one
        first = frame.first(start) + frame.kept
        exist = logical_and(compare("ge", first, ZERO), compare("le", first + frame.fresh, index_const(self.chain.extent(number))))
        if frame.kept:
            exist = logical_and(Apply("not", (begins,), "bool"), exist)
        return If(exist, self._code(number, rows, frame.fresh)(first, index_const(frame.kept), images), one_by_one)

    def _require_tiles(self, rows: int) -> None:
        """Adds the tiles, which must hold the longest strip, emitted first."""
        if self.tiles:
            return
        for number in sorted(self.chain.tiled):
            part = self.chain.cuts[number]
            tile, value = self.chain.tile(number, self.chain.frames(rows)[number].rows), self.chain.problem.values[part.result]
            shape = (self.workers, *tile.shape)
            order = ((0, 0), *((dim + 1, factor) for dim, factor in tile.order))
            name = tile_of(part.result)
            self.storage[name] = Storage(Value(name, shape, value.dtype), Layout(shape, order, ((0, 0), *tile.halo)))
            self.tiles = (*self.tiles, name)

    def _code(self, number: int, rows: int, count: int) -> Callable[[Expr, Expr, Sequence[Expr]], Statement]:
        """The code for `count` rows of a region, as a function of its first row, that row's slot in its tile, and the image."""
        part = self.chain.cuts[number]
        strip = self.chain.strip(number, rows, count)
        lowered = self.lower(strip, rows == self.chain.height)
        if len(lowered.kernels) != 1 or len(lowered.calls) != 1 or any(entry.source is None for entry in lowered.storage.values()):
            raise Unsuitable(f"{part.result} takes {len(lowered.kernels)} kernels or memory of its own under {lowered.schedule}")
        (kernel,), (call,) = lowered.kernels, lowered.calls
        if kernel.scalars or len(kernel.parameters) != len(call.arguments):
            raise Unsuitable(f"the kernel of {part.result} is not that of a strip")
        packed = {name: self._stored(name, entry) for name, entry in lowered.storage.items()}
        if (said := f"{part.region.kind} ({lowered.schedule})") not in self.schedules:
            self.schedules.append(said)
        self.within[number] = lowered.within[0]

        def emit(row: Expr, slot: Expr, images: Sequence[Expr]) -> Statement:
            places = {}
            for parameter, name in zip(kernel.parameters, call.arguments, strict=True):
                buffer, offset = self._place(packed.get(name, name), number, row, slot, images)
                # a strip's kernel receives the base of a slice; here that lies inside of the concatenation
                base = strip.layouts[name].base if name in strip.layouts else 0
                places[parameter.name] = self.chain.problem.region.memory_of(buffer), offset + base
            return embedded(kernel, places)

        return emit

    def _stored(self, name: str, entry: Storage) -> str:
        """The name under which a packed constant is stored: another one if tiles of other widths need it packed otherwise."""
        names = (name, *(f"{name}.{number}" for number in range(1, len(self.storage) + 2)))
        entries = [replace(entry, value=replace(entry.value, name=other)) for other in names]
        own = next(each for each in entries if self.storage.get(each.value.name, each) == each)
        self.storage[own.value.name] = own
        return own.value.name

    def _place(self, name: str, number: int, row: Expr, slot: Expr, images: Sequence[Expr]) -> tuple[str, Expr]:
        """The buffer that holds a value that a region reads or stores, and the offset in it of what the strip of a row reads."""
        part = self.chain.cuts[number]
        tile = tile_of(name)
        if tile in self.storage:
            layout = self.storage[tile].layout
            strides = layout.dense_strides() or ()
            rows, skipped = rows_of(part, name), 0
            if name != part.result:  # rows of the tile before the first that this region reads
                producer = next(at for at, other in enumerate(self.chain.cuts) if other.result == name)
                skipped = self.full[number].offset * rows.stride + rows.first - self.full[producer].offset
            return tile, Var(WORKER, self.workers) * strides[0] + (slot * rows.stride + skipped) * strides[1 + rows.dim]
        if name not in self.chain.problem.layouts:  # packed for the region
            return name, ZERO
        layout, offset = self.chain.problem.layouts[name], ZERO
        strides = layout.dense_strides() or ()

        def begins(dim: int) -> int:
            return layout.halo[dim][0] + layout.outside(dim)[0]

        for place, found in zip((row, *images), part.spans.get(name, ()), strict=False):
            if found is not None:
                offset = offset + (place * found.stride + (found.first + begins(found.dim))) * strides[found.dim]
        return name, offset

    def _row_of(self, number: int) -> tuple[str, int, Expr]:
        """A region's tile, the elements of its rows, and the offset of the worker's part."""
        part = self.chain.cuts[number]
        name = tile_of(part.result)
        strides = self.storage[name].layout.dense_strides() or ()
        return name, strides[1 + rows_of(part, part.result).dim], Var(WORKER, self.workers) * strides[0]

    def _exists(self, number: int, row: Expr) -> Expr:
        """Whether a row of a region's result is in the image."""
        return logical_and(compare("ge", row, ZERO), compare("lt", row, index_const(self.chain.extent(number))))

    def _filled(self, number: int, slot: Expr) -> Statement | None:
        """Fills a row that does not exist with what its reader takes instead; None if only rows of the reader need it that do not exist either."""
        name, size, base = self._row_of(number)
        value = fill_of(self.chain.cuts, number)
        if value is None:
            return None
        row, layout = base + slot * size, self.storage[name].layout
        if value.value and layout.is_padded:  # the halo beside the row stays zero
            own, strides = rows_of(self.chain.cuts[number], self.chain.cuts[number].result).dim, layout.dense_strides()
            if strides is None:
                raise Unsuitable(f"{name} is stored in blocks")
            inside = [(dim, Var(f"{COPIED}{dim}", extent)) for dim, extent in enumerate(layout.shape[1:]) if dim != own and extent > 1]
            for dim, (before, _) in enumerate(layout.halo[1:]):
                row = row + (dict(inside).get(dim, ZERO) + before) * strides[dim + 1]
            return _over(inside, strides[1:], Store(name, row, value))
        element = Var("element", size)
        return For(element, index_const(size), Store(name, row + element, value), "simd")

    def _moved(self, number: int, frame: Frame, before: Frame, start: Expr) -> Statement:
        """Moves the rows that the strip before computed and this one needs too to the front; not those that do not exist and were not filled."""
        name, size, base = self._row_of(number)
        slot, element = Var(SLOT, frame.kept), Var("element", size)
        to = base + slot * size + element
        dtype = self.storage[name].value.dtype
        copy = Store(name, to, Load(name, (to + before.advance * size,), dtype))
        move: Statement = For(element, index_const(size), copy, "simd")
        if frame.outside and fill_of(self.chain.cuts, number) is None:
            move = If(self._exists(number, frame.first(start) + slot), move)
        return For(slot, index_const(frame.kept), move)

    def _copied(self, number: int, frame: Frame, start: Expr, images: Sequence[Expr], begins: Begins | None) -> Statement:
        """Copies a strip's own rows of a region's result, those that no strip of the image before it computes, from the tile to memory."""
        part, slot, row = self.chain.cuts[number], Var(SLOT, frame.rows), Var(ROW, None)
        tile, layout = self.storage[tile_of(part.result)], self.chain.problem.layouts[part.result]
        source, target = tile.layout.dense_strides(), layout.dense_strides()
        if source is None or target is None:
            raise Unsuitable(f"{part.result} is stored in blocks")
        cut = [rows.dim for rows in part.spans[part.result] if rows is not None]
        inner = [(dim, Var(f"{COPIED}{dim}", extent)) for dim, extent in enumerate(layout.shape) if dim not in cut and extent > 1]
        at: Expr = Var(WORKER, self.workers) * source[0] + slot * source[1 + cut[0]]
        to: Expr = ZERO
        for dim in range(len(layout.shape)):
            place = dict([*zip(cut, (row, *images), strict=True), *inner]).get(dim, ZERO)
            to = to + (place + (layout.halo[dim][0] + layout.outside(dim)[0])) * target[dim]
            at = at + ((ZERO if dim in cut else place) + tile.layout.halo[dim + 1][0]) * source[dim + 1]
        copy: Statement = Store(part.result, to, Load(tile_of(part.result), (at,), tile.value.dtype))
        copy = _over(inner, target, copy)
        if frame.outside or begins is None:
            copy = If(self._exists(number, row), copy)
        if begins is not None and frame.kept:
            copy = If(_or(begins.image, compare("ge", slot, index_const(frame.kept))), copy)
        return For(slot, index_const(frame.rows), block(Let(row, frame.first(start) + slot), copy))


def _over(inner: Sequence[tuple[int, Var]], strides: Sequence[int], body: Statement) -> Statement:
    """Loops over dimensions, that with adjacent elements innermost."""
    for depth, (_, axis) in enumerate(sorted(inner, key=lambda each: strides[each[0]])):
        body = For(axis, index_const(axis.extent or 1), body, "serial" if depth else "simd")
    return body


def _or(a: Expr, b: Expr) -> Expr:
    return Apply("or", (a, b), "bool")
