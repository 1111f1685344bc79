"""Lowering of the `winograd` schema: a transform of the input tiles, a batched product, and a transform of the sums with the epilogue.

V[t, p, c] holds point t of tile p of channel c, U[t, c, k] the transformed filters (packed at compile time), and M[t, p, k] = sum over c of V U. Each
thread of a transform in one pass computes one tile of a vector of channels in registers. A block of a transform in several passes computes one tile
of some channels, and its threads the pieces of one pass after another, with the scratch array in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import below, bytes_touched, decode, expression_flops, extent_of, named, vectors_fit, widest
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import ZERO, Const, Expr, Load, Var, as_lanes, coefficient, index_const
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Buffer, For, Kernel, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Region, Storage
from tilewright.kernels.block_transforms import Transform, transforms_of
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.lower import lower_contraction
from tilewright.kernels.gpu.winograd.space import CHANNELS_OF_BLOCK, Transforming, WinogradFacts, WinogradSchedule
from tilewright.kernels.transform_pass import SCRATCH, Pass, Values
from tilewright.kernels.winograd_form import WinogradForm, input_index, store_vectors
from tilewright.kernels.winograd_transform import Shape


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
        store_stride=abs(coefficient(form.offset, form.k) or 0),
        bytes_read=problem.values[form.source.buffer].bytes,
        bytes_written=problem.values[form.output].bytes,
        products=tuple(product_form(product_problem(form.output, form, transform)).facts for transform in transforms_of(form.filter_shape)),
        epilogue_bytes=bytes_touched([form.element], form.axes, problem.values),
        epilogue_flops=expression_flops(form.element),
        element_bytes=size_of(form.dtype),
        stored_bytes=size_of(problem.values[form.source.buffer].dtype),
        filter_shape=form.filter_shape,
    )


def input_vector(form: WinogradForm, layouts: Mapping[str, Layout]) -> int:
    """The widest vector of input channels that can be loaded."""
    return widest(form.read, form.c, layouts)


def store_vector(form: WinogradForm, layouts: Mapping[str, Layout]) -> int:
    """The widest vector of output channels that can be stored."""
    return widest(form.element, form.k, layouts, form.offset)


def filters_layout(shape: tuple[int, ...]) -> Layout:
    """[point, input channel, output channel], padded so that vectors along the last dimension start at multiples of four."""
    return Layout(shape, ((0, 0), (1, 0), (2, 0), (2, 4))) if shape[2] % 4 else row_major(shape)


def product_problem(name: str, form: WinogradForm, transform: Transform, filters: Callable[[tuple[int, ...]], Layout] = filters_layout) -> Problem:
    """The batched product; its inputs are V and U, its output is M. `filters`: the layout of U, given its shape [point, input, output channel]."""
    points, tiles, c, k = transform.points, extent_of(form.tiles(transform.tile)), form.channels, form.outputs
    v, u = Tensor(f"{name}#points", (points, tiles, c), form.dtype), Tensor(f"{name}#filters", (points, c, k), form.dtype)
    builder = StepBuilder(f"{name}#product")
    (result,) = builder.reduce("sum", (points, tiles, k), (c,), lambda t, p, j, r: v(t, p, r) * u(t, r, j))
    sums = f"{name}#sums"
    steps = builder.finish([result], [sums]).steps
    values = {t.name: Value(t.name, t.shape, form.dtype) for t in (v, u)} | {sums: Value(sums, result.shape, form.dtype)}
    layouts = {name: row_major(value.shape) for name, value in values.items()} | {u.name: filters(u.shape)}
    return Problem(Region(f"{name}#product", "contraction", (), steps, (v.name, u.name), (sums,)), layouts, values)


def filters_storage(name: str, form: WinogradForm, transform: Transform, filters: Callable[[tuple[int, ...]], Layout] = filters_layout) -> Storage:
    """Storage of the packed transformed filters U[t, c, k]."""
    value = Value(name, (transform.points, form.channels, form.outputs), form.dtype)
    return Storage(value, filters(value.shape), form.filters, form.view, transform.filter_matrix)


def lower_winograd(problem: Problem, form: WinogradForm, schedule: WinogradSchedule, machine: Machine) -> Lowered:
    """Three kernels (four if the product is split without a cluster), workspaces for V and M, and the filters transformed and packed."""
    product = product_problem(problem.region.name, form, schedule.transform)
    multiplied = lower_contraction(product, product_form(product), schedule.product, machine)
    _, filters = product.region.inputs
    return between_transforms(problem, form, schedule, product, multiplied, filters_storage(filters, form, schedule.transform))


def between_transforms(
    problem: Problem, form: WinogradForm, schedule: Transforming, product: Problem, multiplied: Lowered, packed: Storage, raised: int = 0
) -> Lowered:
    """The transform of the input, the lowered product, whose filters are `packed`, and the transform of its sums. Points are stored divided by
    2^`raised`, and their sums multiplied by it again."""
    tiles = form.tiles(schedule.transform.tile)
    points, filters, sums = *product.region.inputs, product.region.outputs[0]
    storage = {name: Storage(product.values[name], product.layouts[name]) for name in (points, sums)}
    storage[filters] = packed
    stored = problem.with_storage(storage)
    header = f"{described(problem)}\n{schedule}"

    def kernel(name: str, body: Statement, launch: Launch, written: str) -> tuple[Kernel, Call]:
        made, arguments = assemble(f"winograd_{name}", body, stored, (written,), header=f"{header}: the {name}s", launch=launch)
        return made, Call(made.name, arguments)

    first, first_call = kernel("input", *_transform_inputs(form, tiles, schedule, stored.layouts, points, raised), points)
    last, last_call = kernel("output", *_transform_outputs(form, tiles, schedule, stored.layouts, sums, raised), form.output)
    return Lowered(
        problem.region,
        str(schedule),
        (first, *multiplied.kernels, last),
        (first_call, *multiplied.calls, last_call),
        {**multiplied.storage, **storage},
    )


PassesOf: TypeAlias = Callable[[Values, Expr, Mapping[Var, Expr]], Sequence[Pass]]
"""The passes of a transform, by the flat position of its first element, and the axes of tile and channel."""


def _each_tile(tiles: Sequence[Var], channel: Var, lanes: int, schedule: Transforming, dtype: str, passes: PassesOf) -> tuple[Statement, Launch]:
    """The transform of each tile and vector of channels."""
    if schedule.transform.scratch:
        return _in_blocks(tiles, channel, schedule, dtype, passes)
    threads = schedule.transform_threads
    total = extent_of(tiles) * (channel.extent or 0) // lanes
    launch = Launch((-(-total // threads), 1, 1), (threads, 1, 1), ((total, threads),))
    values = Values(dtype, lanes, *_scratch(dtype, lambda place: place))

    def thread(position: Var) -> list[Statement]:
        lets, mapping = named(decode(position, (*tiles, channel), lanes))
        (one,) = passes(values, position * lanes, {axis: mapping.get(axis, axis) for axis in (*tiles, channel)})
        return [*lets, *one.body(ZERO)]

    return block(below(block_variable(launch) * threads + thread_variable(launch), total, "position", thread)), launch


def _in_blocks(tiles: Sequence[Var], channel: Var, schedule: Transforming, dtype: str, passes: PassesOf) -> tuple[Statement, Launch]:
    """A block for each tile and CHANNELS_OF_BLOCK channels: threads with the same channel share the pieces of each pass."""
    channels, threads, extent = CHANNELS_OF_BLOCK, schedule.transform_threads, channel.extent or 0
    chunk, axes = Var("chunk", -(-extent // channels)), (*tiles,)
    launch = Launch((extent_of(tiles) * (chunk.extent or 1), 1, 1), (threads, 1, 1), ((extent_of(tiles), 1),))
    lets, where = named(decode(block_variable(launch), (*axes, chunk)))
    own, first = Var("own", channels), Var("first_piece", threads // channels)
    lets += [Let(own, thread_variable(launch) % channels), Let(first, thread_variable(launch) // channels)]
    tile = block_variable(launch) // (chunk.extent or 1)
    values = Values(dtype, 1, *_scratch(dtype, lambda place: place * channels + own))
    body: list[Statement] = [*lets, Allocate(Buffer(SCRATCH, dtype, schedule.transform.scratch * channels, "shared"))]

    def on(at: Var) -> Sequence[Pass]:
        return passes(values, tile * extent + at, {**{axis: where.get(axis, axis) for axis in axes}, channel: at})

    for number in range(len(on(channel))):

        def pieces(at: Var, number: int = number) -> list[Statement]:
            one = on(at)[number]
            turn = Var(f"turn{number}", -(-one.pieces // (threads // channels)))
            inner = below(turn * (threads // channels) + first, one.pieces, "piece", lambda piece: list(one.body(piece)))
            return [For(turn, index_const(turn.extent or 1), block(inner))]

        body += [block_barrier()] * (number > 0)
        body += below(where.get(chunk, chunk) * channels + own, extent, channel.name, pieces)
    return block(body), launch


def _scratch(dtype: str, at: Callable[[Expr], Expr]) -> tuple[Callable[[Expr], Expr], Callable[[Expr, Expr], Statement]]:
    """How values are read from and written to the scratch array, for the place of a value."""
    return lambda place: Load(SCRATCH, (at(place),), dtype), lambda place, value: Store(SCRATCH, at(place), value)


def _times(value: Expr, exponent: int) -> Expr:
    """2^exponent value."""
    return value * as_lanes(Const(2.0**exponent, value.dtype), value.lanes) if exponent else value


def _transform_inputs(
    form: WinogradForm, tiles: Sequence[Var], schedule: Transforming, layouts: Mapping[str, Layout], points: str, raised: int
) -> tuple[Statement, Launch]:
    """V = 2^-raised B^T d."""
    tile, lanes = schedule.transform.tile, min(schedule.transform_vector, input_vector(form, layouts))
    layout = layouts[form.source.buffer]
    plane = layouts[points].strides[0]

    def passes(values: Values, first: Expr, where: Mapping[Var, Expr]) -> Sequence[Pass]:
        def load(i: Expr, j: Expr) -> Expr:
            return Load(form.source.buffer, (layout.offset(input_index(form, tiles, layout, where, tile, i, j)),), form.dtype, lanes)

        return schedule.transform.input_passes(values, load, lambda point, value: Store(points, first + point * plane, _times(value, -raised)))

    return _each_tile(tiles, form.c, lanes, schedule, form.dtype, passes)


def _transform_outputs(
    form: WinogradForm, tiles: Sequence[Var], schedule: Transforming, layouts: Mapping[str, Layout], sums: str, raised: int
) -> tuple[Statement, Launch]:
    """Y = A^T 2^raised M, then the epilogue and store of each element inside the image."""
    tile, lanes = schedule.transform.tile, min(schedule.transform_vector, store_vector(form, layouts))
    plane = layouts[sums].strides[0]

    def passes(values: Values, first: Expr, where: Mapping[Var, Expr]) -> Sequence[Pass]:
        def store(row: Expr, rows: Sequence[Sequence[Expr]]) -> list[Statement]:
            return store_tile(form, tiles, layouts, where, tile, row, rows, lanes)

        def load(point: Expr) -> Expr:
            return _times(Load(sums, (first + point * plane,), form.dtype, lanes), raised)

        return schedule.transform.output_passes(values, load, store)

    return _each_tile(tiles, form.k, lanes, schedule, form.dtype, passes)


def store_tile(
    form: WinogradForm,
    tiles: Sequence[Var],
    layouts: Mapping[str, Layout],
    where: Mapping[Var, Expr],
    tile: Shape,
    first: Expr,
    sums: Sequence[Sequence[Expr]],
    lanes: int,
) -> list[Statement]:
    """Epilogue and store of the part of adjacent rows of a tile of sums (vectors of `lanes` along the output channels), from row `first`
    on, that is inside the image."""
    wide = vectors_fit(form.element, form.k, lanes, layouts)
    assert wide is not None
    return store_vectors(form, tiles, as_lanes(wide, lanes), where, tile, first, sums)
