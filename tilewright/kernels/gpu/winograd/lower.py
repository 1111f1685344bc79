"""Lowering of the `winograd` schema: a transform of the input tiles, a batched product, and a transform of the sums with the epilogue.

V[t, p, c] holds point t of tile p of channel c, U[t, c, k] the transformed filters (packed at compile time), and M[t, p, k] = sum over c of V U. Each
thread of a transform computes one tile of a vector of channels in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import below, bytes_touched, decode, expression_flops, extent_of, named, vectors_fit, widest
from tilewright.codegen.describe import described
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    Expr,
    Load,
    Var,
    as_lanes,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Region, Storage
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.lower import lower_contraction
from tilewright.kernels.gpu.winograd.space import WinogradFacts, WinogradSchedule
from tilewright.kernels.winograd_form import WinogradForm, input_index, store_vectors
from tilewright.kernels.winograd_transform import FILTER, OUTPUT_TILES, TRANSFORMS, both_sides, filter_matrix


def winograd_facts(problem: Problem, form: WinogradForm) -> WinogradFacts:
    """The facts that the choice of a schedule depends on: extents, vectors, bytes, and the batched products."""
    return WinogradFacts(
        images=extent_of(form.images),
        height=form.height,
        width=form.width,
        channels=form.channels,
        outputs=form.outputs,
        input_vector=input_vector(form, problem.layouts),
        store_vector=store_vector(form, problem.layouts),
        bytes_read=problem.values[form.source.buffer].bytes,
        bytes_written=problem.values[form.output].bytes,
        products=tuple(product_form(_product(form.output, form, size)).facts for size in OUTPUT_TILES),
        epilogue_bytes=bytes_touched([form.element], form.axes, problem.values),
        epilogue_flops=expression_flops(form.element),
        element_bytes=size_of(form.dtype),
        stored_bytes=size_of(problem.values[form.source.buffer].dtype),
    )


def input_vector(form: WinogradForm, layouts: Mapping[str, Layout]) -> int:
    """The widest vector of input channels that can be loaded."""
    return widest(form.read, form.c, layouts)


def store_vector(form: WinogradForm, layouts: Mapping[str, Layout]) -> int:
    """The widest vector of output channels that can be stored."""
    return widest(form.element, form.k, layouts, form.offset)


def _product(name: str, form: WinogradForm, output_tile: int) -> Problem:
    """The batched product; its inputs are V and U, its output is M."""
    points, tiles, c, k = (output_tile + FILTER - 1) ** 2, extent_of(form.tiles(output_tile)), form.channels, form.outputs
    v, u = Tensor(f"{name}#points", (points, tiles, c), form.dtype), Tensor(f"{name}#filters", (points, c, k), form.dtype)
    builder = StepBuilder(f"{name}#product")
    (result,) = builder.reduce("sum", (points, tiles, k), (c,), lambda t, p, j, r: v(t, p, r) * u(t, r, j))
    sums = f"{name}#sums"
    steps = builder.finish([result], [sums]).steps
    values = {t.name: Value(t.name, t.shape, form.dtype) for t in (v, u)} | {sums: Value(sums, result.shape, form.dtype)}
    layouts = {name: row_major(value.shape) for name, value in values.items()} | {u.name: _filters_layout(u.shape)}
    return Problem(Region(f"{name}#product", "contraction", (), steps, (v.name, u.name), (sums,)), layouts, values)


def _filters_layout(shape: tuple[int, ...]) -> Layout:
    """[point, input channel, output channel], padded so that vectors along the last dimension start at multiples of four."""
    return Layout(shape, ((0, 0), (1, 0), (2, 0), (2, 4))) if shape[2] % 4 else row_major(shape)


def filters_storage(name: str, form: WinogradForm, output_tile: int) -> Storage:
    """Storage of the packed transformed filters U[t, c, k]."""
    value = Value(name, ((output_tile + FILTER - 1) ** 2, form.channels, form.outputs), form.dtype)
    return Storage(value, _filters_layout(value.shape), form.filters, form.view, filter_matrix(output_tile))


def lower_winograd(problem: Problem, form: WinogradForm, schedule: WinogradSchedule, machine: Machine) -> Lowered:
    """Three kernels (four if the product is split without a cluster), workspaces for V and M, and the filters transformed and packed."""
    size = schedule.output_tile
    tiles = form.tiles(size)
    product = _product(problem.region.name, form, size)
    points, filters, sums = *product.region.inputs, product.region.outputs[0]
    multiplied = lower_contraction(product, product_form(product), schedule.product, machine)
    storage = {name: Storage(product.values[name], product.layouts[name]) for name in (points, sums)}
    storage[filters] = filters_storage(filters, form, size)
    stored = problem.with_storage(storage)
    header = f"{described(problem)}\n{schedule}"

    def kernel(name: str, body: Statement, launch: Launch, written: str) -> tuple[Kernel, Call]:
        made, arguments = assemble(f"winograd_{name}", body, stored, (written,), header=f"{header}: the {name}s", launch=launch)
        return made, Call(made.name, arguments)

    first, first_call = kernel("input", *_transform_inputs(form, tiles, schedule, stored.layouts, points), points)
    last, last_call = kernel("output", *_transform_outputs(form, tiles, schedule, stored.layouts, sums), form.output)
    return Lowered(
        problem.region,
        str(schedule),
        (first, *multiplied.kernels, last),
        (first_call, *multiplied.calls, last_call),
        {**multiplied.storage, **storage},
    )


def _each_tile(tiles: Sequence[Var], channel: Var, lanes: int, threads: int, body: object) -> tuple[Statement, Launch]:
    """One thread for each tile and vector of channels. `body` receives the flat position of the thread's first element, and the axes."""
    total = extent_of(tiles) * (channel.extent or 0) // lanes
    launch = Launch((-(-total // threads), 1, 1), (threads, 1, 1))

    def thread(position: Var) -> list[Statement]:
        lets, mapping = named(decode(position, (*tiles, channel), lanes))
        return [*lets, *body(position * lanes, {axis: mapping.get(axis, axis) for axis in (*tiles, channel)})]  # type: ignore[operator]

    return block(below(block_variable(launch) * threads + thread_variable(launch), total, "position", thread)), launch


def _transform_inputs(
    form: WinogradForm, tiles: Sequence[Var], schedule: WinogradSchedule, layouts: Mapping[str, Layout], points: str
) -> tuple[Statement, Launch]:
    """V = B^T d B."""
    size, lanes = schedule.output_tile, min(schedule.transform_vector, input_vector(form, layouts))
    layout, matrix = layouts[form.source.buffer], TRANSFORMS[size].inputs
    span = len(matrix)
    plane = layouts[points].strides[0]

    def load(where: Mapping[Var, Expr], i: int, j: int) -> Expr:
        return Load(form.source.buffer, (layout.offset(input_index(form, tiles, layout, where, size, i, j)),), form.dtype, lanes)

    def body(first: Expr, where: Mapping[Var, Expr]) -> list[Statement]:
        loaded = [[Var(f"d{i}_{j}", None, form.dtype, lanes) for j in range(span)] for i in range(span)]
        reads = [Let(variable, load(where, i, j)) for i, row in enumerate(loaded) for j, variable in enumerate(row)]
        lets, rows = both_sides(matrix, loaded)
        values = [value for row in rows for value in row]
        return [*reads, *lets, *(Store(points, first + t * plane, value) for t, value in enumerate(values))]

    return _each_tile(tiles, form.c, lanes, schedule.transform_threads, body)


def _transform_outputs(
    form: WinogradForm, tiles: Sequence[Var], schedule: WinogradSchedule, layouts: Mapping[str, Layout], sums: str
) -> tuple[Statement, Launch]:
    """Y = A^T M A, then the epilogue and store of each element inside the image."""
    size, lanes = schedule.output_tile, min(schedule.transform_vector, store_vector(form, layouts))
    matrix = TRANSFORMS[size].outputs
    span = len(matrix[0])
    plane = layouts[sums].strides[0]

    def body(first: Expr, where: Mapping[Var, Expr]) -> list[Statement]:
        loaded = [[Var(f"m{i}_{j}", None, form.dtype, lanes) for j in range(span)] for i in range(span)]
        reads = [Let(v, Load(sums, (first + (i * span + j) * plane,), form.dtype, lanes)) for i, row in enumerate(loaded) for j, v in enumerate(row)]
        lets, rows = both_sides(matrix, loaded)
        return [*reads, *lets, *store_tile(form, tiles, layouts, where, rows, lanes)]

    return _each_tile(tiles, form.k, lanes, schedule.transform_threads, body)


def store_tile(
    form: WinogradForm, tiles: Sequence[Var], layouts: Mapping[str, Layout], where: Mapping[Var, Expr], sums: Sequence[Sequence[Expr]], lanes: int
) -> list[Statement]:
    """Epilogue and store of the part of a tile of sums (vectors of `lanes` along the output channels) that is inside the image."""
    wide = vectors_fit(form.element, form.k, lanes, layouts)
    assert wide is not None
    return store_vectors(form, tiles, as_lanes(wide, lanes), where, sums)
