"""CPU contractions: direct convolution and matrix product from one register-tiled loop nest.

    for each panel of output channels, tile of pixels:      (in parallel)
        acc[pixel][vector] = 0
        for r in reduction:                                  (filter rows, filter columns, input channels)
            acc[pixel][vector] += A[pixel, r] * B[r, vector] (A broadcast, B a vector from a packed panel)
        out = epilogue(acc)

If reductions over all output channels follow (softmax, layer normalisation), a tile holds whole rows of channels, and reductions and epilogue run on
the tile before anything is stored. If a sum over pixels follows (global average pooling), one thread computes all tiles of an image for its panel in
turn, and adds them to a total for each channel instead of storing them.

The tile spans two M axes (rows and columns of an image), so it suits small images too. Partial tiles have their own code; partial vectors are stored
through a small buffer. Padding costs nothing if A has a zeroed halo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import expression_flops, guarded_load
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.prefetch import prefetch
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import ZERO, Apply, Const, Expr, Var, coefficient, index_const, loads
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Statement, Store, substitute_in
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Unsuitable
from tilewright.kernels.cpu.common import loops
from tilewright.kernels.cpu.contraction.nest import Nest
from tilewright.kernels.cpu.contraction.pairs import PairedNest, packed_pairs
from tilewright.kernels.cpu.contraction.products import PairProducts, Products, VectorProducts
from tilewright.kernels.cpu.contraction.second_factor import SecondFactor, depends_on, how_b_lies, second_factor
from tilewright.kernels.cpu.contraction.space import CpuContractionFacts, CpuContractionSchedule, CpuPairsSchedule
from tilewright.kernels.cpu.contraction.tile_stores import Pixels, TileStores

LINE_BYTES = 64
"""Bytes of a cache line."""


def contraction_facts(problem: Problem, nest: Nest) -> CpuContractionFacts:
    """The extents that the schedule's choice depends on."""
    region, layouts, values = problem.region, problem.layouts, problem.values
    element = size_of(nest.dtype)  # of B: it is packed in the multiplied type
    images = prod(axis.extent or 0 for axis in (*nest.batch, *nest.n_outer, *nest.outer))
    outer = images * prod(axis.extent or 0 for axis in nest.serial)
    rows = nest.rows.extent or 0 if nest.rows is not None else 1
    a_values = {load.buffer for load in loads(nest.found.a)}
    a_bytes = sum(size_of(values[name].dtype) * layouts[name].own_size for name in a_values if name in layouts)
    b_size = prod(axis.extent or 0 for axis in (*nest.found.batch, *nest.found.n, *nest.found.r))
    operations = sum(step.flops() for step in region.steps[1:]) if nest.stages or nest.final is not None else 0
    others = {load.buffer for step in region.steps[1:] for load in loads(*step.bodies)} & layouts.keys()
    return CpuContractionFacts(
        outer,
        rows,
        nest.columns.extent or 0,
        nest.n.extent or 0,
        nest.found.size_r,
        a_bytes,
        element * b_size,
        bool(nest.stages),
        operations,
        images if nest.final is not None else 0,
        how_b_lies(problem, nest.found, nest.n),
        sum(size_of(values[name].dtype) * layouts[name].own_size for name in others),
        coefficient(nest.offset, nest.n) != 1,
        element,
        size_of(values[region.outputs[0]].dtype),
        # arithmetic, loads of the other operands, and the broadcast from a register
        0.0 if guarded_load(nest.found.a) is not None else expression_flops(nest.found.a) + len({*loads(nest.found.a)}),
    )


def lower_contraction(problem: Problem, nest: Nest, schedule: CpuContractionSchedule, machine: Machine) -> Lowered:
    """Kernels of a contraction: one that copies B into panels, if needed, and the tiled product."""
    leading = depends_on(nest.found, (*nest.batch, *nest.n_outer))
    b = second_factor(problem, nest.found, nest.n, leading, schedule)
    role = f"B in panels of {schedule.panel}" if b.layout is not None else "B"
    return _lowered(problem, nest, schedule, machine, b, role, lambda panel: VectorProducts(nest, schedule, panel, b))


def lower_pairs(problem: Problem, form: PairedNest, schedule: CpuPairsSchedule, machine: Machine) -> Lowered:
    """Kernels of a contraction of bfloat16 in pairs: one that copies B into panels, unless it is constant, and the tiled product."""
    nest = form.nest
    leading = depends_on(nest.found, (*nest.batch, *nest.n_outer))
    b = packed_pairs(problem, nest.found.b, (*leading, *form.ordered, nest.n), len(leading), schedule.panel, schedule.lanes)
    role = f"B in panels of {schedule.panel}, pairs of steps"
    return _lowered(problem, nest, schedule, machine, b, role, lambda panel: PairProducts(form, schedule, panel, b))


def _lowered(
    problem: Problem, nest: Nest, schedule: CpuContractionSchedule, machine: Machine, b: SecondFactor, role: str, products: Callable[[Var], Products]
) -> Lowered:
    """The kernels with these products for the panel that a variable numbers.

    Raises:
        Unsuitable: if rows of the result are reduced and a tile would hold a part of one; the space has no such schedule, but another size may.
    """
    if nest.stages and schedule.panel < (nest.n.extent or 0):
        raise Unsuitable("a tile would hold a part of a row that is reduced")
    panel = Var("panel", -(-(nest.n.extent or 0) // schedule.panel))
    level_2 = machine.cache(2)
    stores = TileStores(problem.region.outputs[0], nest, schedule, panel)
    axis = _tile_axis(nest, schedule)
    prefetched = level_2.bytes // 2 if level_2 is not None else 0
    tile = _Tile(nest, schedule, panel, b, products(panel), stores, axis, _tiles_of_image(nest, axis), prefetched)
    body = _outer_loops(nest, schedule, panel, tile)
    header = f"{described(problem)}\n{schedule}"
    roles = {**{load.buffer: "A" for load in loads(nest.found.a)}, b.buffer: role}
    kernel, arguments = assemble("contraction", body, problem.with_storage(b.storage), problem.region.outputs, header=header, roles=roles)
    return Lowered(problem.region, str(schedule), (*b.kernels, kernel), (*b.calls, Call.of(kernel, arguments)), b.storage)


def _tile_axis(nest: Nest, schedule: CpuContractionSchedule) -> Var:
    """The axis of the loop over tile rows, or over tile columns if there is one M axis."""
    if nest.rows is None:
        return Var("tile_column", -(-(nest.columns.extent or 0) // schedule.tile_columns))
    return Var("tile_row", -(-(nest.rows.extent or 0) // schedule.tile_rows))


def _tiles_of_image(nest: Nest, tile: Var) -> int:
    """Extent of the tile axis for one image, as code must not depend on the number of images; all of it if the axis is not one of whole images."""
    tiles, merged = tile.extent or 1, nest.rows is None and not nest.outer
    images = prod(axis.extent or 1 for axis in nest.found.step.axes[:1] if merged and axis in nest.found.m)
    return tiles // images if tiles % images == 0 else tiles


def _outer_loops(nest: Nest, schedule: CpuContractionSchedule, panel: Var, tile: _Tile) -> Statement:
    """Threads over batch, panels and tile rows (or tile columns if there is one M axis), with columns of tiles inside. If pixels are summed, threads
    over batch, images and panels, with all tiles of an image inside."""
    width = schedule.tile_columns
    columns = nest.columns.extent or 0
    height = schedule.tile_rows
    row_extent = nest.rows.extent or 0 if nest.rows is not None else 1
    row_tile = _tile_axis(nest, schedule)

    def column_tiles(row_start: Expr, rows: int) -> list[Statement]:
        parts: list[Statement] = []
        full = columns // width
        if full == 1:
            parts.append(tile.emit(Pixels(row_start, rows, ZERO, width)))
        elif full:
            at = Var("tile_column", full)
            parts.append(For(at, index_const(full), tile.emit(Pixels(row_start, rows, at * width, width))))
        if columns % width:
            parts.append(tile.emit(Pixels(row_start, rows, index_const(full * width), columns % width)))
        return parts

    parallel: list[Var] = [*nest.batch, *nest.n_outer]
    if nest.rows is None and columns > width:
        at = row_tile
        inside: Statement
        whole = tile.emit(Pixels(ZERO, 1, at * width, width))
        if columns % width:
            rest = tile.emit(Pixels(ZERO, 1, at * width, columns % width))
            inside = If(at < columns // width, whole, rest)
        else:
            inside = whole
        m_axes: list[Var] = [at]
    elif row_extent % height:
        full = row_extent // height
        last = block(column_tiles(index_const(full * height), row_extent % height))
        inside = If(row_tile < full, block(column_tiles(row_tile * height, height)), last) if full else last
        m_axes = [row_tile]
    else:
        inside = block(column_tiles(row_tile * height, height))
        m_axes = [row_tile]
    if nest.final is not None:
        inside = tile.stores.sums([*nest.serial, *m_axes], inside)
        m_axes = []
    m_axes = [*nest.outer, *m_axes]
    order = [panel, *m_axes] if schedule.order == "n" else [*m_axes, panel]
    parallel += [axis for axis in order if axis.extent != 1]
    single: dict[Var, Expr] = {axis: ZERO for axis in order if axis.extent == 1}
    if single:
        inside = substitute_in(inside, single)
    return loops(parallel, inside, True, work=nest.found.flops // 8)


@dataclass(frozen=True)
class _Tile:
    """Emits the code of one register tile."""

    nest: Nest
    schedule: CpuContractionSchedule
    panel: Var
    b: SecondFactor
    products: Products
    stores: TileStores
    tile: Var  # the parallel loop over tile rows (or columns) inside the loop over panels
    tiles: int  # of one image along it
    prefetched_bytes: int

    def emit(self, pixels: Pixels) -> Block:
        """The tile of these pixels for the current panel."""
        lanes, vectors, dtype = self.schedule.lanes, self.schedule.vectors, self.nest.dtype
        size = pixels.rows * pixels.columns * vectors
        zero = Apply("broadcast", (Const(0.0, dtype),), dtype, lanes)
        k = Var("k", size)
        start: list[Statement] = [Allocate(Buffer("acc", dtype, size * lanes, "register", lanes))]
        start.append(For(k, index_const(size), Store("acc", k * lanes, zero), "unroll"))
        inner: Statement = block(self.products.loaded(), self._prefetch(), self.products.added(pixels))
        for axis in reversed(self.products.axes):
            inner = For(axis, index_const(axis.extent or 0), inner)
        return block(start, inner, self.stores.store(pixels))

    def _prefetch(self) -> list[Statement]:
        """Prefetches the next panel while the tiles of one panel are computed: each tile fetches its share, one cache line per step."""
        steps_of_tile, step_bytes = self.products.steps, self.schedule.panel * self.products.element_bytes
        element = size_of(self.b.dtype)
        lines = step_bytes * steps_of_tile // LINE_BYTES
        large = self.b.layout is not None and self.b.layout.size * element > self.prefetched_bytes
        if self.schedule.order != "n" or not large or not 2 <= self.tiles <= 16 or step_bytes % LINE_BYTES:
            return []
        shares = min(self.tiles, step_bytes // LINE_BYTES)
        line = (self.panel + 1) * lines + self.tile % shares * steps_of_tile + self.products.step
        return [prefetch(self.b.buffer, line * (LINE_BYTES // element))]
