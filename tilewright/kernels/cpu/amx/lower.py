"""CPU lowering of the `amx` schema: contractions of bfloat16 factors on tile registers, float32 sums.

    for each part:                                                   (in parallel)
        for each block of the part's output channels, and of its pixels:      (or the pixels outside)
            sums[i][j] = 0                                           (tiles of pixels by 16 channels)
            for r in reduction, a chunk at a time:                   (filter rows, filter columns, chunks of channels)
                sums[i][j] += A[i] * B[j]                            (A as stored in memory, one row per pixel; B packed)
            out = epilogue(sums), through a buffer                   (vectors along the channels)

A tile of A has a single stride between its rows. If the stride between image rows is a multiple of the stride between pixels, a tile may continue
past the end of an image row; positions between the rows are computed but not stored. The last tile of a run starts early enough not to read past the
run, and each pixel is stored by only one tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.access import bind_shared, flatten, merge_axes, split_divided_rows, storage_order
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import bytes_touched, decode
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics import amx as tiles
from tilewright.codegen.intrinsics.amx import TILE_CHANNELS
from tilewright.graph.contraction import Contraction, anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    TRUE,
    ZERO,
    Expr,
    Load,
    Var,
    binary,
    coefficient,
    compare,
    index_const,
    linear,
    rewrite,
    substitute,
    variables,
)
from tilewright.ir.kernel import (
    Allocate,
    Buffer,
    For,
    If,
    Let,
    Statement,
    Store,
)
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Region, Unsuitable
from tilewright.kernels.cpu.amx.space import CpuAmxFacts, CpuAmxSchedule, chunk_of
from tilewright.kernels.cpu.common import accumulated, wide_epilogue
from tilewright.kernels.cpu.contraction.pairs import adjacent, packed_pairs
from tilewright.kernels.cpu.contraction.second_factor import SecondFactor, how_b_lies


@dataclass(frozen=True)
class AmxForm:
    """The contraction in flat form. `outer`: axes of the result outside `rows` (extent 1 if there is one M axis) and `columns`. `a`: A's flat offset;
    its innermost reduction axes make up `depth` adjacent elements, and `reduced` are the other reduction axes, outermost first. `b_axes`: the order
    of the packed B, whose `leading` axes are outside the panels. `row_pixels`: see `CpuAmxFacts`."""

    found: Contraction
    outer: tuple[Var, ...]
    rows: Var
    columns: Var
    n: Var
    reduced: tuple[Var, ...]
    depth: int
    source: str
    a: Expr
    offset: Expr
    epilogue: Expr
    leading: tuple[Var, ...]
    b_axes: tuple[Var, ...]
    row_pixels: int

    @property
    def chunk(self) -> int:
        """Elements of the reduction in a tile; 0 if there is no suitable number (`chunk_of`)."""
        return chunk_of(self.depth)


def amx_form(problem: Problem, machine: Machine) -> tuple[AmxForm, CpuAmxFacts]:
    """The form, and the facts that the choice of a schedule depends on.

    Raises:
        Unsuitable: if the machine has no AMX, A is not stored in bfloat16 or not adjacent along the reduction, or reductions follow.
    """
    region, layouts, values = problem.region, problem.layouts, problem.values
    if not {"amx_tile", "amx_bf16"} <= set(machine.isa):
        raise Unsuitable(f"{machine.name} has no AMX for bfloat16")
    if not any(value.dtype == tiles.FACTOR for value in values.values()):
        raise Unsuitable("no value is stored in bfloat16")
    region_steps = split_divided_rows(region.steps)
    if region_steps[-1].axes != region_steps[0].axes:  # the map splits other axes than the sum
        region_steps = region.steps
    found = anchor(region_steps, problem.constants)
    if found is None or len(region_steps) > 2 or any(step.kind != "map" for step in region_steps[1:]):
        raise Unsuitable("reductions follow the sum of products")
    sums = accumulated(found.dtype)
    last = region_steps[-1]
    epilogue: Expr = sums
    if last.kind == "map":
        flat = flatten(last.bodies[0], layouts)
        epilogue = rewrite(flat, lambda x: sums if isinstance(x, Load) and x.buffer == found.step.name else x)
    a, offset = flatten(found.a, layouts), layouts[region.outputs[0]].offset(last.index)
    if not isinstance(a, Load) or values[a.buffer].dtype != tiles.FACTOR:
        raise Unsuitable("A is no value stored in bfloat16")
    axes, (a, offset, epilogue) = merge_axes(storage_order(found.m, offset), [a, offset, epilogue])
    assert isinstance(a, Load)
    unit_axes: dict[Var, Expr] = {v: ZERO for v in (*found.batch, *found.n, *found.step.reduction) if v.extent == 1}
    at, offset, epilogue = (substitute(e, unit_axes) for e in (a.index[0], offset, epilogue))
    if not all(isinstance(atom, Var) for atom, _ in linear(at).terms) or not found.r:
        raise Unsuitable("A's offset is not linear")
    columns = axes[-1] if axes else Var("m", 1)
    rows = axes[-2] if len(axes) > 1 else Var("m_row", 1)
    n = max(found.n, key=lambda axis: axis.extent or 0)
    ordered = storage_order(found.r, at)
    reduced, depth = adjacent(ordered, at, layouts[a.buffer])
    leading = tuple(v for v in (*found.batch, *(v for v in found.n if v != n)) if v.extent != 1)
    stride, row_stride = coefficient(at, columns) or 0, coefficient(at, rows) or 0
    row_pixels = row_stride // stride if stride > 0 and row_stride % stride == 0 and row_stride // stride >= (columns.extent or 1) else 0
    outer = (*leading, *axes[:-2])
    known = variables(found.b)
    packed = tuple(v for v in leading if v in known)
    form = AmxForm(found, outer, rows, columns, n, reduced, depth, a.buffer, at, offset, epilogue, packed, (*packed, *ordered, n), row_pixels)
    if form.chunk < 2:
        raise Unsuitable(f"{depth} adjacent elements of the reduction are no even number")
    steps = prod(axis.extent or 0 for axis in reduced)
    b_bytes = size_of(tiles.FACTOR) * prod(axis.extent or 0 for axis in form.b_axes)
    touched = bytes_touched([epilogue], found.step.axes, values)
    facts = CpuAmxFacts(
        prod(axis.extent or 0 for axis in outer),
        rows.extent or 1,
        columns.extent or 1,
        n.extent or 0,
        steps,
        depth,
        form.chunk,
        row_pixels,
        size_of(values[a.buffer].dtype) * layouts[a.buffer].own_size,
        b_bytes,
        touched,
        _wide(form, machine.vector_lanes()) is None,
        how_b_lies(problem, found, n),
    )
    return form, facts


def _wide(form: AmxForm, lanes: int) -> Expr | None:
    """The epilogue of a vector of sums along N; None if the result is not contiguous along N or the epilogue cannot be vectorised."""
    return wide_epilogue(form.epilogue, form.n, lanes, form.found.dtype) if coefficient(form.offset, form.n) == 1 else None


def lower_amx(problem: Problem, form: AmxForm, facts: CpuAmxFacts, schedule: CpuAmxSchedule, machine: Machine) -> Lowered:
    """Kernels of a contraction: one that packs B, unless B is constant, and the product."""
    region = problem.region
    b = packed_pairs(problem, form.found.b, form.b_axes, len(form.leading), TILE_CHANNELS, schedule.lanes)
    body = _Blocks(region, form, facts, schedule, b).parts()
    roles = {form.source: "A", b.buffer: f"B in panels of {TILE_CHANNELS}, pairs of steps"}
    header = f"{described(problem)}\n{schedule}"
    kernel, arguments = assemble("amx", body, problem.with_storage(b.storage), region.outputs, header=header, roles=roles)
    return Lowered(region, str(schedule), (*b.kernels, kernel), (*b.calls, Call.of(kernel, arguments)), b.storage)


@dataclass(frozen=True)
class _Blocks:
    """Emits the loops over parts and blocks, and the body of a block."""

    region: Region
    form: AmxForm
    facts: CpuAmxFacts
    schedule: CpuAmxSchedule
    b: SecondFactor

    @property
    def run(self) -> int:
        return int(self.facts.run(self.schedule.over_rows))

    @property
    def row_tiles(self) -> int:
        """Tiles in a run: one row, or all rows with `over_rows`."""
        return -(-self.run // self.schedule.pixels)

    @property
    def tiles(self) -> int:
        """Tiles of pixels for one outer index."""
        return int(self.facts.tiles(self.schedule.over_rows, self.schedule.pixels))

    @property
    def panels(self) -> int:
        return -(-self.facts.n // TILE_CHANNELS)

    def parts(self) -> Statement:
        """The whole loop nest: each part has a range of channel blocks and a range of pixel blocks."""
        s, form = self.schedule, self.form
        pixel_blocks = -(-self.tiles // s.pixel_tiles)
        items, channel_blocks = self.facts.outer * pixel_blocks, -(-self.panels // s.channel_tiles)
        items_each, channels_each = -(-items // s.pixel_parts), -(-channel_blocks // s.channel_parts)
        part = Var("part", s.pixel_parts * s.channel_parts)
        along, within = Var("along", channels_each), Var("within", items_each)
        item, channel_block = Var("item", items_each * s.pixel_parts), Var("channel_block", channels_each * s.channel_parts)
        pixel_block = Var("pixel_block", pixel_blocks)
        where = decode(item, (*form.outer, pixel_block))
        lets = [Let(axis, value) for axis, value in where.items() if axis.extent != 1]

        def over_items(body: Statement) -> Statement:
            if items_each * s.pixel_parts > items:
                body = If(compare("lt", item, index_const(items)), body)
            return For(within, index_const(items_each), block(Let(item, part // s.channel_parts * items_each + within), body))

        def over_channels(body: Statement) -> Statement:
            if channels_each * s.channel_parts > channel_blocks:
                body = If(compare("lt", channel_block, index_const(channel_blocks)), body)
            return For(along, index_const(channels_each), block(Let(channel_block, part % s.channel_parts * channels_each + along), body))

        one = self._block(pixel_block if pixel_blocks > 1 else ZERO, channel_block)
        body = over_items(block(lets, over_channels(one))) if s.pixels_first else over_channels(over_items(block(lets, one)))
        sums = (self._sums(i, j) for i in range(s.pixel_tiles) for j in range(s.channel_tiles))
        registers = (*sums, *map(self._a, range(s.pixel_tiles)), *map(self._b, range(s.channel_tiles)))
        extent = part.extent or 1
        return For(part, index_const(extent), tiles.with_tiles(registers, body), "parallel" if extent > 1 else "serial")

    def _sums(self, i: int, j: int) -> Buffer:
        return tiles.tile(f"sums{i}_{j}", self.schedule.pixels, TILE_CHANNELS, tiles.SUM)

    def _a(self, i: int) -> Buffer:
        return tiles.tile(f"a{i}", self.schedule.pixels, self.facts.chunk, tiles.FACTOR)

    def _b(self, j: int) -> Buffer:
        return tiles.tile(f"b{j}", self.facts.chunk // 2, 2 * TILE_CHANNELS, tiles.FACTOR)

    def _start(self, tile: Expr) -> tuple[Expr, Expr]:
        """Row and column of a tile's first pixel, clamped to an existing tile."""
        last = index_const(self.run - self.schedule.pixels)
        if self.schedule.over_rows or self.facts.rows == 1:
            first = tile * self.schedule.pixels
            return ZERO, first if self.tiles % self.schedule.pixel_tiles == 0 and self.run % self.schedule.pixels == 0 else binary("min", first, last)
        row, first = tile // self.row_tiles, tile % self.row_tiles * self.schedule.pixels
        if self.tiles % self.schedule.pixel_tiles:
            row = binary("min", row, index_const(self.facts.rows - 1))
        return row, first if self.run % self.schedule.pixels == 0 else binary("min", first, last)

    def _block(self, pixel_block: Expr, channel_block: Expr) -> Statement:
        """The sums of a block, and their epilogue and stores."""
        s, form = self.schedule, self.form
        single: dict[Var, Expr] = {axis: ZERO for axis in form.outer if axis.extent == 1}
        sums = [(i, j, self._sums(i, j)) for i in range(s.pixel_tiles) for j in range(s.channel_tiles)]
        starts: list[Statement] = []
        bases: list[Expr] = []
        for i in range(s.pixel_tiles):
            row, column = self._start(pixel_block * s.pixel_tiles + i)
            here: dict[Var, Expr] = {**single, form.rows: row, form.columns: column, **{axis: ZERO for axis in form.found.r}}
            base = Var(f"pixel{i}")
            starts.append(Let(base, substitute(form.a, here)))
            bases.append(base)
        panels = []
        for j in range(s.channel_tiles):
            panel: Expr = channel_block * s.channel_tiles + j
            if self.panels % s.channel_tiles:
                panel = binary("min", panel, index_const(self.panels - 1))
            base = Var(f"panel{j}")
            starts.append(Let(base, self._b_offset(panel)))
            panels.append(base)
        chunk = Var("chunk", form.depth // form.chunk)
        inner = For(chunk, index_const(chunk.extent or 1), self._step(bases, panels, chunk)) if chunk.extent != 1 else self._step(bases, panels, ZERO)
        steps: Statement = inner
        for axis in reversed(form.reduced):
            steps = For(axis, index_const(axis.extent or 0), steps)
        zero = [tiles.zero(each) for *_, each in sums]
        leave = [tiles.store(each, "sums", index_const((i * s.pixels * s.channel_tiles + j) * TILE_CHANNELS), s.panel) for i, j, each in sums]
        buffer = Allocate(Buffer("sums", self.form.found.dtype, s.pixel_tiles * s.pixels * s.panel, "register"))
        return block(starts, zero, steps, buffer, leave, self._outputs(pixel_block, channel_block))

    def _b_offset(self, panel: Expr) -> Expr:
        """The offset of a panel of B."""
        first: dict[Var, Expr] = {axis: ZERO for axis in self.form.b_axes[len(self.form.leading) : -1]}
        return substitute(self.b.offset, {**first, self.form.n: panel * TILE_CHANNELS})

    def _step(self, bases: Sequence[Expr], panels: Sequence[Expr], chunk: Expr) -> Statement:
        """One chunk of the reduction."""
        s, form = self.schedule, self.form
        distance = coefficient(form.a, form.columns) or 0
        place: Expr = chunk * form.chunk
        number: Expr = ZERO
        for axis in form.reduced:
            place = place + axis * (coefficient(form.a, axis) or 0)
            number = number * (axis.extent or 1) + axis
        weights = (number * form.depth + chunk * form.chunk) * TILE_CHANNELS
        result: list[Statement] = []
        for j, panel in enumerate(panels):
            result.append(tiles.load(self._b(j), self.b.buffer, panel + weights, 2 * TILE_CHANNELS))
        for i, base in enumerate(bases):
            result.append(tiles.load(self._a(i), form.source, base + place, distance))
            result += [tiles.multiply(self._sums(i, j), self._a(i), self._b(j)) for j in range(s.channel_tiles)]
        return block(result)

    def _outputs(self, pixel_block: Expr, channel_block: Expr) -> Statement:
        """The epilogue of the block's sums, pixel after pixel."""
        s, form, facts = self.schedule, self.form, self.facts
        i, j, v = Var("i", s.pixel_tiles), Var("j", s.pixels), Var("v", s.channel_tiles)
        tile: Expr = pixel_block * s.pixel_tiles + i
        row, start = self._start(tile)
        rows_in_one = s.over_rows or facts.rows == 1
        first = (tile if rows_in_one else tile % self.row_tiles) * s.pixels
        whole = self.run % s.pixels == 0
        at = Var("at", self.run)
        held = i * s.pixels + j if whole else i * s.pixels + (at - Var("start", self.run))
        column: Expr = at
        inside = TRUE
        if s.over_rows:
            row, column = at // facts.row_pixels, at % facts.row_pixels
            inside = compare("lt", column, index_const(facts.columns))
        y, x = Var("y", facts.rows), Var("x", facts.columns)
        place: dict[Var, Expr] = {form.rows: y, form.columns: x, **{axis: ZERO for axis in form.outer if axis.extent == 1}}
        channel = (channel_block * s.channel_tiles + v) * TILE_CHANNELS
        store = self._store(place, held * s.panel + v * TILE_CHANNELS, channel)
        if self.panels % s.channel_tiles:
            store = If(compare("lt", channel, index_const(facts.n)), store)
        channels = For(v, index_const(s.channel_tiles), store, "unroll")
        pixel: Statement = block(Let(y, row), Let(x, column), If(inside, channels) if inside != TRUE else channels)
        lets = [Let(at, first + j)] if whole else [Let(Var("start", self.run), start), Let(at, first + j)]
        count: Expr = index_const(s.pixels) if whole else binary("min", index_const(s.pixels), index_const(self.run) - first)
        body: Statement = For(j, count, block(lets, pixel))
        if self.tiles % s.pixel_tiles and not (rows_in_one and not whole):
            body = If(compare("lt", tile, index_const(self.tiles)), body)
        return For(i, index_const(s.pixel_tiles), body)

    def _store(self, place: Mapping[Var, Expr], at: Expr, channel: Expr) -> Statement:
        """The epilogue and store of a pixel's 16 sums, which start at `at`; `channel` is the channel of the first."""
        form, lanes, target = self.form, self.schedule.lanes, self.region.outputs[0]
        dtype, wide = form.found.dtype, _wide(form, lanes)
        lane = Var("lane", TILE_CHANNELS)
        here: dict[Var, Expr] = {**place, form.n: channel + lane}
        narrow = rewrite(substitute(form.epilogue, here), lambda x: Load("sums", (at + lane,), dtype) if x == accumulated(dtype) else x)
        lets, (value, offset) = bind_shared([narrow, substitute(form.offset, here)])
        left: Expr = index_const(TILE_CHANNELS)
        if self.facts.n % TILE_CHANNELS:
            left = binary("min", left, index_const(self.facts.n) - channel)
        singly: Statement = For(lane, left, block(lets, Store(target, offset, value)))
        if wide is None:
            return singly
        vectors: list[Statement] = []
        for part in range(0, TILE_CHANNELS, lanes):
            here = {**place, form.n: channel + part}
            sums = Load("sums", (at + part,), dtype, lanes)
            one = rewrite(substitute(wide, here), lambda x: sums if x == accumulated(dtype, lanes) else x)  # noqa: B023 - called at once
            lets, (value, offset) = bind_shared([one, substitute(form.offset, here)])
            vectors.append(block(lets, Store(target, offset, value)))
        if self.facts.n % TILE_CHANNELS == 0:
            return block(*vectors)
        return If(compare("le", channel + TILE_CHANNELS, index_const(self.facts.n)), block(*vectors), singly)


__all__ = ["AmxForm", "amx_form", "lower_amx"]
