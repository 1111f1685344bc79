"""Lowering of the `winograd` schema: a transform of the input's tiles, a batched product, a transform of the sums with the epilogue behind it.

V[t, p, c] holds point t of tile p of channel c, U[t, c, k] the transformed filters (packed when compiling), M[t, p, k] = sum over c of V U.
Each thread of a transform does one tile of a vector of channels in registers. A tile at the lower or right edge may reach beyond the image: what it
reads there is the last row or column that is stored once more, and what it computes there is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import problem as describe
from tilewright.codegen.gpu.common import as_lanes, below, bytes_touched, decode, expression_flops, flat, named, vectors_fit, widest
from tilewright.codegen.gpu.contraction import lower_contraction
from tilewright.codegen.gpu.product import extent_of, guarded_load, product_form
from tilewright.codegen.gpu.window import reduce_and_final
from tilewright.codegen.gpu.winograd_transform import TRANSFORMS, both_sides, filter_matrix
from tilewright.codegen.operand import operand_view
from tilewright.graph.contraction import anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step, StepBuilder, Tensor
from tilewright.ir.expr import (
    TRUE,
    Expr,
    Load,
    Var,
    binary,
    coefficient,
    compare,
    index_const,
    linear,
    logical_and,
    range_of,
    replace_loads,
    substitute,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import If, Kernel, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.region import Call, Lowered, Region, Storage, Unsuitable
from tilewright.schedule.gpu_winograd import FILTER, OUTPUT_TILES, WinogradProblem, WinogradSchedule


@dataclass(frozen=True)
class WinogradForm:
    """A 3x3 convolution with stride 1: out[images, k, y, x] = sum over tap_y, tap_x, c of source[.., y + tap_y, .., x + tap_x, ..] * filters.

    `source` has logical indices; `element` is what is stored at `offset` of `output`, over loads of the reduction's name, both flat."""

    output: str
    step: Step
    source: Load
    images: tuple[Var, ...]
    y: Var
    x: Var
    tap_y: Var
    tap_x: Var
    c: Var
    k: Var
    filters: str
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    element: Expr
    offset: Expr
    problem: WinogradProblem

    def tiles(self, output_tile: int) -> tuple[Var, ...]:
        """The axes of the tiles: images, and rows and columns of tiles."""
        return (*self.images, *(Var(f"tile_{axis.name}", -(-(axis.extent or 0) // output_tile)) for axis in (self.y, self.x)))


def winograd_form(region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str]) -> WinogradForm:
    """Raises Unsuitable where the region is not one 3x3 convolution with stride 1, constant filters, and an input stored with its padding."""
    step, element, index = reduce_and_final(region)
    found = anchor(region.steps, constants)
    if found is None or found.b.buffer not in constants or found.b.dtype != "f32":
        raise Unsuitable(f"the sum of region {region.name} is not a product with constant filters")
    ones = {axis: index_const(0) for axis in (*step.axes, *step.reduction) if axis.extent == 1}
    m, n, r = ([axis for axis in axes if axis.extent != 1] for axes in (found.m, found.n, found.r))
    if any(axis.extent != 1 for axis in found.batch) or len(n) != 1 or len(r) != 3:
        raise Unsuitable(f"region {region.name} is not a convolution of one group of channels by filters of two dimensions")
    guarded = guarded_load(found.a)
    flat_source = substitute(flat(found.a, layouts, values), ones)
    if guarded is None or guarded[1].buffer not in layouts or not isinstance(flat_source, Load):
        raise Unsuitable(f"the input of region {region.name} is computed or guarded while it is read")
    source = guarded[1]
    source = Load(source.buffer, tuple(substitute(position, ones) for position in source.index), source.dtype)
    windows = [pair for pair in (_window(position, m, r) for position in source.index) if pair is not None]
    if len(windows) != 2 or len({axis for pair in windows for axis in pair}) != 4:
        raise Unsuitable(f"region {region.name} does not slide filters of 3 x 3 with stride 1 over two dimensions")
    (y, tap_y), (x, tap_x) = windows
    (c,) = (axis for axis in r if axis not in (tap_y, tap_x))
    images = tuple(axis for axis in m if axis not in (y, x))
    view = operand_view(found.b, values[found.b.buffer].shape, (tap_y, tap_x, c, n[0]))
    if coefficient(flat_source.index[0], c) != 1 or view is None:
        raise Unsuitable(f"the input of region {region.name} is not stored channels last, or its filters are not one array")
    element, offset = (substitute(e, ones) for e in (flat(element, layouts, values), layouts[region.outputs[0]].offset(index)))
    axes = (*images, y, x, n[0])
    problem = WinogradProblem(
        images=extent_of(images),
        height=extent_of([y]),
        width=extent_of([x]),
        channels=extent_of([c]),
        outputs=extent_of(n),
        input_lanes=widest(flat_source, c, layouts),
        store_lanes=widest(element, n[0], layouts, offset),
        bytes_read=values[source.buffer].bytes,
        bytes_written=values[region.outputs[0]].bytes,
        products=tuple(
            product_form(*_product(region, (n[0].extent or 0), (c.extent or 0), _count(images, y, x, size), size), frozenset()).problem
            for size in OUTPUT_TILES
        ),
        epilogue_bytes=bytes_touched([element], axes, values),
        epilogue_flops=expression_flops(element),
    )
    return WinogradForm(region.outputs[0], step, source, images, y, x, tap_y, tap_x, c, n[0], found.b.buffer, view, element, offset, problem)


def _window(position: Expr, m: Sequence[Var], r: Sequence[Var]) -> tuple[Var, Var] | None:
    """(axis, tap) of an index axis + tap + constant with three taps."""
    terms = linear(position).terms
    own = [atom for atom, scale in terms if atom in m and scale == 1]
    taps = [atom for atom, scale in terms if atom in r and scale == 1]
    if len(terms) != 2 or len(own) != 1 or len(taps) != 1:
        return None
    axis, tap = own[0], taps[0]
    return (axis, tap) if isinstance(axis, Var) and isinstance(tap, Var) and tap.extent == FILTER else None


def _count(images: Sequence[Var], y: Var, x: Var, output_tile: int) -> int:
    return extent_of(images) * prod(-(-(axis.extent or 0) // output_tile) for axis in (y, x))


def _product(region: Region, k: int, c: int, tiles: int, output_tile: int) -> tuple[Region, dict[str, Layout], dict[str, Value]]:
    """(region, layouts, values) of the batched product; its inputs are V and U, its output is M."""
    points = (output_tile + FILTER - 1) ** 2
    v, u = Tensor(f"{region.name}#points", (points, tiles, c), "f32"), Tensor(f"{region.name}#filters", (points, c, k), "f32")
    builder = StepBuilder(f"{region.name}#product")
    (result,) = builder.reduce("sum", (points, tiles, k), (c,), lambda t, p, j, r: v(t, p, r) * u(t, r, j))
    sums = f"{region.name}#sums"
    steps = builder.finish([result], [sums]).steps
    values = {t.name: Value(t.name, t.shape, "f32") for t in (v, u)} | {sums: Value(sums, result.shape, "f32")}
    layouts = {name: row_major(value.shape) for name, value in values.items()} | {u.name: _filters_layout(u.shape)}
    return Region(f"{region.name}#product", "contraction", (), steps, (v.name, u.name), (sums,)), layouts, values


def _filters_layout(shape: tuple[int, ...]) -> Layout:
    """[point, input channel, output channel] so that vectors along the last begin at multiples of four."""
    return Layout(shape, ((0, 0), (1, 0), (2, 0), (2, 4))) if shape[2] % 4 else row_major(shape)


def filters_storage(name: str, form: WinogradForm, output_tile: int) -> Storage:
    """The transformed filters U[t, c, k] as they are packed."""
    value = Value(name, ((output_tile + FILTER - 1) ** 2, form.problem.channels, form.problem.outputs), "f32")
    return Storage(value, _filters_layout(value.shape), form.filters, form.view, filter_matrix(output_tile))


def lower_winograd(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    schedule: WinogradSchedule,
) -> Lowered:
    """Three kernels (four where the product is split without a cluster), workspaces for V and M, and the filters transformed and packed.

    Raises:
        Unsuitable: where the region is not a 3x3 convolution with stride 1; see `winograd_form`.
    """
    form = winograd_form(region, layouts, values, constants)
    size = schedule.output_tile
    tiles = form.tiles(size)
    inner, placed, inner_values = _product(region, form.problem.outputs, form.problem.channels, extent_of(tiles), size)
    points, filters, sums = *inner.inputs, inner.outputs[0]
    multiplied = lower_contraction(inner, placed, inner_values, frozenset(), machine, schedule.product)
    layouts, values = {**layouts, **placed}, {**values, **inner_values}
    dtypes = {name: value.dtype for name, value in values.items()}
    header = f"{describe(region, constants)}\n{schedule}"

    def kernel(name: str, body: Statement, launch: Launch, written: str) -> tuple[Kernel, Call]:
        made, arguments = assemble(f"winograd_{name}", body, layouts, dtypes, (written,), header=f"{header}: the {name}s", launch=launch)
        return made, Call(made.name, arguments)

    first, first_call = kernel("input", *_transform_inputs(form, tiles, schedule, layouts, points), points)
    last, last_call = kernel("output", *_transform_outputs(form, tiles, schedule, layouts, sums), form.output)
    storage = {name: Storage(values[name], placed[name]) for name in (points, sums)}
    storage[filters] = filters_storage(filters, form, size)
    return Lowered(
        region,
        str(schedule),
        (first, *multiplied.kernels, last),
        (first_call, *multiplied.calls, last_call),
        {**multiplied.storage, **storage},
    )


def _each_tile(tiles: Sequence[Var], channel: Var, lanes: int, threads: int, body: object) -> tuple[Statement, Launch]:
    """One thread for each tile and vector of channels. `body` gets the flat position of its first element, and the axes."""
    total = extent_of(tiles) * (channel.extent or 0) // lanes
    launch = Launch((-(-total // threads), 1, 1), (threads, 1, 1))

    def thread(position: Var) -> list[Statement]:
        lets, mapping = named(decode(position, (*tiles, channel), lanes))
        return [*lets, *body(position * lanes, {axis: mapping.get(axis, axis) for axis in (*tiles, channel)})]  # type: ignore[operator]

    return block(below(block_variable(launch) * threads + thread_variable(launch), total, "position", thread)), launch


def input_index(form: WinogradForm, tiles: Sequence[Var], layout: Layout, where: Mapping[Var, Expr], size: int, i: int, j: int) -> list[Expr]:
    """The logical index of element (i, j) of a tile of the input; beyond what is stored that of the last row or column."""
    taps = {form.tap_y: index_const(i), form.tap_x: index_const(j), form.y: where[tiles[-2]] * size, form.x: where[tiles[-1]] * size}
    index = []
    for position, extent, (_, after) in zip(form.source.index, layout.shape, layout.halo, strict=True):
        at = substitute(position, {**where, **taps})
        index.append(binary("min", at, index_const(extent - 1 + after)) if range_of(at)[1] > extent - 1 + after else at)
    return index


def _transform_inputs(
    form: WinogradForm, tiles: Sequence[Var], schedule: WinogradSchedule, layouts: Mapping[str, Layout], points: str
) -> tuple[Statement, Launch]:
    """V = B^T d B."""
    size, lanes = schedule.output_tile, min(schedule.transform_lanes, form.problem.input_lanes)
    layout, matrix = layouts[form.source.buffer], TRANSFORMS[size].inputs
    span = len(matrix)
    plane = layouts[points].strides[0]

    def load(where: Mapping[Var, Expr], i: int, j: int) -> Expr:
        return Load(form.source.buffer, (layout.offset(input_index(form, tiles, layout, where, size, i, j)),), "f32", lanes)

    def body(first: Expr, where: Mapping[Var, Expr]) -> list[Statement]:
        loaded = [[Var(f"d{i}_{j}", None, "f32", lanes) for j in range(span)] for i in range(span)]
        reads = [Let(variable, load(where, i, j)) for i, row in enumerate(loaded) for j, variable in enumerate(row)]
        lets, rows = both_sides(matrix, loaded)
        values = [value for row in rows for value in row]
        return [*reads, *lets, *(Store(points, first + t * plane, value) for t, value in enumerate(values))]

    return _each_tile(tiles, form.c, lanes, schedule.transform_threads, body)


def _transform_outputs(
    form: WinogradForm, tiles: Sequence[Var], schedule: WinogradSchedule, layouts: Mapping[str, Layout], sums: str
) -> tuple[Statement, Launch]:
    """Y = A^T M A, and of each element that lies in the image what the region stores."""
    size, lanes = schedule.output_tile, min(schedule.transform_lanes, form.problem.store_lanes)
    matrix = TRANSFORMS[size].outputs
    span = len(matrix[0])
    plane = layouts[sums].strides[0]

    def body(first: Expr, where: Mapping[Var, Expr]) -> list[Statement]:
        loaded = [[Var(f"m{i}_{j}", None, "f32", lanes) for j in range(span)] for i in range(span)]
        reads = [Let(v, Load(sums, (first + (i * span + j) * plane,), "f32", lanes)) for i, row in enumerate(loaded) for j, v in enumerate(row)]
        lets, rows = both_sides(matrix, loaded)
        return [*reads, *lets, *store_tile(form, tiles, layouts, where, rows, lanes)]

    return _each_tile(tiles, form.k, lanes, schedule.transform_threads, body)


def store_tile(
    form: WinogradForm, tiles: Sequence[Var], layouts: Mapping[str, Layout], where: Mapping[Var, Expr], sums: Sequence[Sequence[Expr]], lanes: int
) -> list[Statement]:
    """Stores what the region makes of a tile of sums (vectors of `lanes` along the output channels), as far as the tile lies in the image."""
    wide = vectors_fit(form.element, form.k, lanes, layouts)
    assert wide is not None
    return store_vectors(form, tiles, as_lanes(wide, lanes), where, sums)


def store_vectors(
    form: WinogradForm, tiles: Sequence[Var], wide: Expr, where: Mapping[Var, Expr], sums: Sequence[Sequence[Expr]]
) -> list[Statement]:
    """As `store_tile`; `wide` is the element stored, over vectors already."""
    statements: list[Statement] = []
    for i, row in enumerate(sums):
        for j, value in enumerate(row):
            y, x = where[tiles[-2]] * len(sums) + i, where[tiles[-1]] * len(row) + j
            at = {**where, form.y: y, form.x: x}
            element = substitute(replace_loads(wide, {form.step.name: value}), at)
            shared, (offset, what) = bind_shared([substitute(form.offset, at), element], f"e{i}_{j}_")
            inside = logical_and(compare("lt", y, index_const(form.problem.height)), compare("lt", x, index_const(form.problem.width)))
            store = block(*shared, Store(form.output, offset, what))
            statements.append(store if inside == TRUE else If(inside, store))
    return statements
