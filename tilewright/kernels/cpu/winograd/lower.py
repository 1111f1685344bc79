"""CPU lowering of the `winograd` schema: a thread runs all steps on one block of tiles after another.

    for each part:                                           (in parallel)
        for each block of the part's tiles:
            V[point][tile][c] = B^T d                        (d: a tile of the input, vectors along c)
            for each panel of the part's output channels:
                for each point:
                    M[point][tile][k] = sum over c of V[point][tile][c] * U[point][c][k]
                out = epilogue(A^T M)                        (vectors along k)

U, the transformed filters, is packed in panels at compile time. V and M are workspaces with a slice for each part, which stays in the level-2 cache.
The plane of each point is padded by one vector, so that the points of one tile do not fall into the same set of level 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.access import bind_shared, vectorise
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import bytes_touched, decode, extent_of, named
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.prefetch import prefetch
from tilewright.codegen.trips import defined
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    TRUE,
    ZERO,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    as_lanes,
    binary,
    coefficient,
    compare,
    floordiv,
    index_const,
    loads,
    logical_and,
    replace_loads,
    substitute,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import TRIPS, Allocate, Block, Buffer, For, If, Let, Statement, Store, substitute_in
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.kernels.cpu.contraction.lower import LINE_BYTES
from tilewright.kernels.cpu.contraction.second_factor import packed_panels
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts, CpuWinogradSchedule
from tilewright.kernels.transform_pass import SCRATCH, Pass, Values
from tilewright.kernels.winograd_form import WinogradForm, input_index, store_vectors, winograd_form


def cpu_winograd_form(problem: Problem, machine: Machine) -> tuple[WinogradForm, CpuWinogradFacts]:
    """The form, and the facts that the choice of a schedule depends on.

    Raises:
        Unsuitable: as in `winograd_form`, and if channels are not whole vectors.
    """
    form = winograd_form(problem)
    lanes = machine.vector_lanes()
    if form.channels % lanes or form.outputs % lanes:
        raise Unsuitable(f"{form.channels} or {form.outputs} channels are no multiple of {lanes}")
    single, touched = _wide_element(form, lanes) is None, bytes_touched([form.element], form.axes, problem.values)
    extents = extent_of(form.images), form.height, form.width, form.channels, form.outputs
    read, written = (size_of(problem.values[name].dtype) for name in (form.source.buffer, form.output))
    return form, CpuWinogradFacts(*extents, touched, single, size_of(form.dtype), read, written, form.filter_shape)


def _wide_element(form: WinogradForm, lanes: int) -> Expr | None:
    """The stored value of a vector of sums along the output channels; None if results are not contiguous along them or cannot be vectorised."""
    if coefficient(form.offset, form.k) != 1:
        return None
    wide = vectorise(form.element, form.k, lanes, lambda load: load.buffer == form.step.name)
    return None if wide is None else as_lanes(wide, lanes)


def lower_winograd(problem: Problem, form: WinogradForm, facts: CpuWinogradFacts, schedule: CpuWinogradSchedule) -> Lowered:
    """One kernel, workspaces for V and M, and the filters transformed and packed."""
    parts = schedule.tile_parts * schedule.panel_parts
    points, sums, filters = (f"{problem.region.name}#{name}" for name in ("points", "sums", "filters"))
    tiles = schedule.tiles
    new = {
        points: Value(points, (parts, schedule.points, tiles * facts.channels + schedule.lanes), form.dtype),
        sums: Value(sums, (parts, schedule.points, tiles * schedule.panel + schedule.lanes), form.dtype),
        filters: Value(filters, (schedule.points, facts.channels, facts.outputs), form.dtype),
    }
    placed = {name: row_major(value.shape) for name, value in new.items()}
    placed[filters] = packed_panels(new[filters].shape, 1, schedule.panel)
    storage = {name: Storage(new[name], placed[name]) for name in (points, sums)}
    storage[filters] = Storage(new[filters], placed[filters], form.filters, form.view, schedule.transform.filter_matrix)
    stored = problem.with_storage(storage)
    growths = image_growths(form)
    body = _Block(form, facts, schedule, stored.layouts, points, sums, filters, bool(growths)).loops()
    header = f"{described(problem)}\n{schedule}"
    roles = {points: "V", sums: "M", filters: f"U in panels of {schedule.panel}"}
    written = (points, sums, form.output)
    kernel, arguments = assemble("winograd", body, stored, written, header=header, roles=roles, growths=growths)
    return Lowered(problem.region, str(schedule), (kernel,), (Call.of(kernel, arguments),), storage)


def image_growths(form: WinogradForm) -> dict[str, int]:
    """The scalars between two images of each value, of the outermost axis of images; empty if there is one image, or if these are not known."""
    if not form.images:
        return {}
    accesses = [(load.buffer, load.index[0]) for load in (form.read, *loads(form.element)) if load.buffer != form.step.name]
    strides = {(name, coefficient(offset, form.images[0])) for name, offset in (*accesses, (form.output, form.offset))}
    found = {name: stride for name, stride in strides if stride is not None}
    return found if len(found) == len(strides) else {}


@dataclass(frozen=True)
class _Block:
    """Emits the loops over parts, blocks and panels, and the steps within. `counted`: whether the number of images is an argument of the call."""

    form: WinogradForm
    facts: CpuWinogradFacts
    schedule: CpuWinogradSchedule
    layouts: Mapping[str, Layout]
    points: str
    sums: str
    filters: str
    counted: bool

    @property
    def tiles(self) -> tuple[Var, ...]:
        return self.form.tiles(self.schedule.transform.tile)

    @property
    def count(self) -> int:
        """Tiles of all images."""
        return extent_of(self.tiles)

    @property
    def all_tiles(self) -> Expr:
        """`count` in the code."""
        return TRIPS * (self.count // self.trips) if self.counted else index_const(self.count)

    @property
    def trips(self) -> int:
        return self.form.images[0].extent or 1

    def loops(self) -> Statement:
        """The whole loop nest."""
        s = self.schedule
        blocks, panels = -(-self.count // s.tiles), -(-self.facts.outputs // s.panel)
        blocks_each, panels_each = -(-blocks // s.tile_parts), -(-panels // s.panel_parts)
        part, within = Var("part", s.tile_parts * s.panel_parts), Var("within", panels_each)
        tile_part = part // s.panel_parts
        panel = Var("panel", panels_each * s.panel_parts)
        share: Expr = Var("share") if self.counted else index_const(blocks_each)
        at, first = (Var("at"), Var("first")) if self.counted else (Var("at", blocks_each), Var("first", blocks_each * s.tile_parts * s.tiles))
        # a part has adjacent blocks, because rows of tiles share rows of the image
        start = Let(first, (tile_part * share + at) * s.tiles)
        which = Let(panel, part % s.panel_parts * panels_each + within)
        inner: Statement = block(self._multiply(part, panel), self._outputs(part, panel, first))
        if panels_each * s.panel_parts > panels:
            inner = If(panel < panels, inner)
        steps: Statement = block(self._inputs(part, first), For(within, index_const(panels_each), block(which, inner)))
        if self.counted or blocks_each * s.tile_parts > blocks:
            steps = If(compare("lt", first, self.all_tiles), steps)
        every = For(at, share, block(start, steps))
        loops = For(part, index_const(part.extent or 1), every, "parallel" if (part.extent or 1) > 1 else "serial")
        if not isinstance(share, Var):
            return loops
        each = s.tiles * s.tile_parts
        return defined(block(Let(share, floordiv(self.all_tiles + (each - 1), index_const(each))), loops), self.trips)

    def _plane(self, name: str, part: Expr, point: Expr) -> Expr:
        """The offset of a point's plane in the part's slice of V or M."""
        strides = self.layouts[name].strides
        return part * strides[0] + point * strides[1]

    def _each_tile(self, first: Expr, body: Callable[[Var, Expr, Mapping[Var, Expr]], Sequence[Statement]]) -> For:
        """A loop over the tiles of the block. `body` receives the tile's place in the block, its number, and its axes, clamped to the last tile."""
        i, tile = Var("i", self.schedule.tiles), Var("tile", self.count)
        number = first + i
        lets, where = named(decode(tile, self.tiles))
        axes = {axis: where.get(axis, axis) for axis in self.tiles}
        inside = block(Let(tile, binary("min", number, self.all_tiles - 1)), *lets, *body(i, number, axes))
        return For(i, index_const(self.schedule.tiles), inside)

    def _inputs(self, part: Expr, first: Expr) -> Statement:
        """V = B^T d."""
        lanes, form = self.schedule.lanes, self.form
        transform, layout, channels = self.schedule.transform, self.layouts[self.form.source.buffer], self.facts.channels

        def body(tile: Var, number: Expr, axes: Mapping[Var, Expr]) -> list[Statement]:
            vector = Var("vector", channels // lanes)
            where = {**axes, form.c: vector * lanes}
            at = tile * channels + vector * lanes

            def load(i: Expr, j: Expr) -> Expr:
                return Load(
                    form.source.buffer, (layout.offset(input_index(form, self.tiles, layout, where, transform.tile, i, j)),), form.dtype, lanes
                )

            def store(point: Expr, value: Expr) -> Statement:
                return Store(self.points, self._plane(self.points, part, point) + at, value)

            passes = transform.input_passes(self._values(), load, store)
            return [For(vector, index_const(channels // lanes), self._transformed(passes))]

        return self._each_tile(first, body)

    def _values(self) -> Values:
        dtype, lanes = self.form.dtype, self.schedule.lanes

        def get(place: Expr) -> Expr:
            return Load(SCRATCH, (place * lanes,), dtype, lanes)

        return Values(dtype, lanes, get, lambda place, value: Store(SCRATCH, place * lanes, value))

    def _transformed(self, passes: Sequence[Pass]) -> Block:
        """The pieces of each pass one after another, with a scratch array between passes."""
        lanes, size = self.schedule.lanes, self.schedule.transform.scratch
        pieces = [Var(f"piece{number}", one.pieces) for number, one in enumerate(passes)]
        loops = [
            block(one.body(ZERO)) if one.pieces == 1 else For(piece, index_const(one.pieces), block(one.body(piece)))
            for one, piece in zip(passes, pieces, strict=True)
        ]
        return block([Allocate(Buffer(SCRATCH, self.form.dtype, size * lanes, "register", lanes))] if size else [], *loops)

    def _multiply(self, part: Expr, panel: Expr) -> Statement:
        """M = V U for the panel, point by point, one register tile at a time."""
        s, channels, dtype = self.schedule, self.facts.channels, self.form.dtype
        point, group, c = Var("point", s.points), Var("group", s.blocks), Var("c", channels)
        i, v, k = Var("row", s.tile), Var("v", s.vectors), Var("k", s.tile * s.vectors)
        zero = Apply("broadcast", (Const(0.0, dtype),), dtype, s.lanes)
        start: list[Statement] = [
            Allocate(Buffer("acc", dtype, s.tile * s.panel, "register", s.lanes)),
            For(k, index_const(s.tile * s.vectors), Store("acc", k * s.lanes, zero), "unroll"),
        ]
        weights = self.layouts[self.filters].offset([point, c, panel * s.panel])
        read = For(v, index_const(s.vectors), Store("b", v * s.lanes, Load(self.filters, (weights + v * s.lanes,), dtype, s.lanes)), "unroll")
        where = self._plane(self.points, part, point) + (group * s.tile + i) * channels + c
        element = Var("a", None, dtype)
        at = i * s.panel + v * s.lanes
        term = Apply("mul", (element, Load("b", (v * s.lanes,), dtype, s.lanes)), dtype, s.lanes)
        update = Store("acc", at, Apply("add", (Load("acc", (at,), dtype, s.lanes), term), dtype, s.lanes))
        step = block(Let(element, Load(self.points, (where,), dtype)), For(v, index_const(s.vectors), update, "unroll"))
        start_of_step = [Allocate(Buffer("b", dtype, s.panel, "register", s.lanes)), read, *self._prefetch(point, group, c, panel)]
        products = block(start_of_step, For(i, index_const(s.tile), step, "unroll"))
        target = self._plane(self.sums, part, point) + group * (s.tile * s.panel) + k * s.lanes
        leave = For(k, index_const(s.tile * s.vectors), Store(self.sums, target, Load("acc", (k * s.lanes,), dtype, s.lanes)), "unroll")
        tile = block(start, For(c, index_const(channels), products), leave)
        return For(point, index_const(s.points), For(group, index_const(s.blocks), tile) if s.blocks > 1 else substitute_in(tile, {group: ZERO}))

    def _prefetch(self, point: Var, group: Var, c: Var, panel: Expr) -> list[Statement]:
        """Prefetches the panel of the next point while the register tiles of one point are computed, a share with each tile."""
        s, channels = self.schedule, self.facts.channels
        line = LINE_BYTES // size_of(self.form.dtype)
        lines = s.panel // line
        if s.panel % line:
            return []
        following = self.layouts[self.filters].offset([point + 1, index_const(0), panel * s.panel])
        each = -(-lines // s.blocks)
        share = group % lines if s.blocks > lines else group
        return [prefetch(self.filters, following + ((share * each + number) * channels + c) * line) for number in range(each)]

    def _outputs(self, part: Expr, panel: Expr, first: Expr) -> Statement:
        """Y = A^T M, then the epilogue and store of each element inside the image."""
        s, form = self.schedule, self.form
        wide = _wide_element(form, s.lanes)
        whole = self.facts.outputs % s.panel == 0

        def body(tile: Var, number: Expr, axes: Mapping[Var, Expr]) -> list[Statement]:
            v = Var("v", s.vectors)
            channel = panel * s.panel + v * s.lanes
            at = tile * s.panel + v * s.lanes
            where = {**axes, form.k: channel}

            def load(point: Expr) -> Expr:
                return Load(self.sums, (self._plane(self.sums, part, point) + at,), form.dtype, s.lanes)

            def store(row: Expr, sums: Sequence[Sequence[Expr]]) -> list[Statement]:
                if wide is None:
                    return self._single_stores(row, sums, where)
                return store_vectors(form, self.tiles, wide, where, s.transform.tile, row, sums)

            made: Statement = self._transformed(s.transform.output_passes(self._values(), load, store))
            if not whole:
                made = If(channel < self.facts.outputs, made)
            vectors = For(v, index_const(s.vectors), made)
            return [vectors if self.count % s.tiles == 0 and not self.counted else If(compare("lt", number, self.all_tiles), vectors)]

        return self._each_tile(first, body)

    def _single_stores(self, first: Expr, rows: Sequence[Sequence[Expr]], where: Mapping[Var, Expr]) -> list[Statement]:
        """Stores adjacent rows of a tile, from row `first` on, element by element through a buffer, channel by channel, for an image that is not
        channels-last."""
        form, (height, width), lanes = self.form, self.schedule.transform.tile, self.schedule.lanes
        entries = [value for row in rows for value in row]
        lane, i, j = Var("lane", lanes), Var("i_out", len(rows)), Var("j_out", width)
        y, x = where[self.tiles[-2]] * height + first + i, where[self.tiles[-1]] * width + j
        at = {**where, form.y: y, form.x: x, form.k: where[form.k] + lane}
        held = Load("spill", ((i * width + j) * lanes + lane,), self.form.dtype)
        shared, (offset, what) = bind_shared([substitute(form.offset, at), substitute(replace_loads(form.element, {form.step.name: held}), at)])
        inside = logical_and(compare("lt", y, index_const(self.facts.height)), compare("lt", x, index_const(self.facts.width)))
        body: Statement = block(*shared, Store(form.output, offset, what))
        if inside != TRUE:
            body = If(inside, body)
        for axis in (j, i, lane):
            body = For(axis, index_const(axis.extent or 0), body)
        spilled = [Store("spill", index_const(number * lanes), value) for number, value in enumerate(entries)]
        return [Allocate(Buffer("spill", self.form.dtype, len(entries) * lanes, "register")), *spilled, body]
