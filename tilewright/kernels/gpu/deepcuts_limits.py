"""The operations of our GPU schedules as DeepCuts counts them (`kernels.gpu.deepcuts`), fused by its rules, and the least time by its limit.

An epilogue and a map that a product computes where it reads it are fused in registers; Winograd's transforms in one kernel with the product, the two
products of attention, and the regions of a chain in tiles, in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import SOFTMAX_FLOPS, AttentionFacts
from tilewright.kernels.block_transforms import elements_of
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.gpu.attention.schema import ATTENTION
from tilewright.kernels.gpu.attention.space import columns_of
from tilewright.kernels.gpu.attention.space import shared_bytes_of as shared_bytes_of_attention
from tilewright.kernels.gpu.attention.space import threads_of as threads_of_attention
from tilewright.kernels.gpu.deepcuts import (
    ELEMENT_BYTES,
    Launch,
    Operation,
    PrintedLimit,
    Tile,
    Window,
    convolution,
    elementwise,
    limit,
    matrix_product,
    pooling,
    winograd_transform,
)
from tilewright.kernels.gpu.deepcuts_conflicts import conflicts
from tilewright.kernels.gpu.direct.schedule import SHARED, DirectFacts, extents_of, patch_of
from tilewright.kernels.gpu.direct.schedule import threads_of as threads_of_direct
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, shared_bytes_of, threads_of
from tilewright.kernels.gpu.gemv.schema import GEMV
from tilewright.kernels.gpu.gemv.space import lanes_of, meeting_size
from tilewright.kernels.gpu.map.schema import MAP
from tilewright.kernels.gpu.map.space import MapFacts
from tilewright.kernels.gpu.window.schema import WINDOW
from tilewright.kernels.gpu.window.space import WindowFacts, blocks_of
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd.space import WinogradFacts
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.gpu.winograd_fused.space import fused_shared_bytes_of, fused_threads_of, tiles_there
from tilewright.kernels.schema import AnySchema
from tilewright.kernels.winograd_transform import output_tiles


@dataclass(frozen=True)
class Stage:
    """An operation of a kernel, or several that are fused in registers, with the number of its operations in the whole call."""

    operation: Operation
    launch: Launch
    flops: np.ndarray | float


def printed_limit(schema: AnySchema, facts: Any, candidates: Columns, machine: Machine) -> PrintedLimit:
    """The limit of a schema whose kernels are one operation.

    Raises:
        Unsuitable: for another schema.
    """
    stages = stages_of(schema, facts, candidates)
    if len(stages) != 1:
        raise Unsuitable(f"the schema {schema.name} computes {len(stages)} operations, each with a limit of its own")
    return limit(stages[0].operation, stages[0].launch, machine, conflicts(schema, facts, candidates, 1)[0])


def limit_seconds(schema: AnySchema, facts: Any, candidates: Columns, machine: Machine) -> np.ndarray:
    """The least seconds of each candidate's call by the limits of its operations, one after another; infinity if a limit is 0.

    Raises:
        Unsuitable: for a schema to which no formula of the paper applies.
    """
    total = np.zeros(())
    stages = stages_of(schema, facts, candidates)
    for stage, coefficient in zip(stages, conflicts(schema, facts, candidates, len(stages)), strict=True):
        rate = limit(stage.operation, stage.launch, machine, coefficient).flops(machine)
        total = total + np.divide(stage.flops, rate, out=np.full(np.shape(rate), np.inf), where=rate > 0)
    return total


def worst_conflicts(schema: AnySchema, facts: Any, candidate: Columns) -> float:
    """The largest COEF_bc of a schema's operations for the only candidate of the columns."""
    return max(float(coefficient[0]) for coefficient in conflicts(schema, facts, candidate, 1))


@dataclass(frozen=True)
class Part:
    """What a block of a chain computes of one region: a problem of the schema with these facts under a schedule, the only candidate of its columns,
    `times` times."""

    schema: AnySchema
    facts: Any
    candidate: Columns
    times: int


def fused_seconds(parts: Sequence[Part], launch: Launch, machine: Machine) -> float:
    """The least seconds of a chain by the limits of its operations, one after another, all with the launch of its kernel; infinity if a limit is 0.
    All but those of the first region find what they read in shared memory.

    Raises:
        Unsuitable: if no formula of the paper applies to a region.
    """
    total = 0.0
    for number, part in enumerate(parts):
        stages = stages_of(part.schema, part.facts, part.candidate)
        for stage, coefficient in zip(stages, conflicts(part.schema, part.facts, part.candidate, len(stages)), strict=True):
            operation = stage.operation.after() if number else stage.operation
            rate = float(np.ravel(limit(operation, launch, machine, coefficient).flops(machine))[0])
            flops = float(np.ravel(stage.flops)[0]) * part.times * float(launch.blocks)
            total += flops / rate if rate > 0 else inf
    return total


def stages_of(schema: AnySchema, facts: Any, candidates: Columns) -> tuple[Stage, ...]:
    """The operations of a schema's candidates.

    Raises:
        Unsuitable: for a schema to which no formula of the paper applies.
    """
    if schema not in _STAGES:
        raise Unsuitable(f"DeepCuts prints no formulas for the schema {schema.name}")
    return _STAGES[schema](facts, candidates)


def _contraction(facts: ContractionFacts, candidates: Columns) -> tuple[Stage, ...]:
    """N is m, K is n, C_block the reduced elements of one step."""
    block = Tile(n=candidates["block_m"], k=candidates["block_n"])
    thread = Tile(n=candidates["thread_m"], k=candidates["thread_n"])
    steps = ceil_divided(ceil_divided(facts.r, candidates["block_k"]), candidates["split"])
    tiles = ceil_divided(facts.m, candidates["block_m"]) * ceil_divided(facts.n, candidates["block_n"])
    launch = Launch(tiles * facts.batch * candidates["split"], threads_of(candidates), shared_bytes_of(facts, candidates))
    computed = candidates["block_m"] * candidates["block_k"] * steps
    product = matrix_product(block, thread, candidates["block_k"], steps)
    return (_fused_product(facts, product, (block, thread), (computed, computed / launch.threads), launch),)


def _gemv(facts: ContractionFacts, candidates: Columns) -> tuple[Stage, ...]:
    """A matrix product of few rows in one step, whose reduced elements are divided among blocks and threads. Every thread has columns of its own, and
    computes itself what it reads of the first factor."""
    lanes, _ = lanes_of(facts)
    columns, along, split = (candidates[name] for name in ("columns", "threads_along_r", "split"))
    block, thread = Tile(n=facts.m, k=columns * lanes), Tile(n=facts.m, k=lanes)
    reduced = ceil_divided(facts.r, split)
    own = ceil_divided(reduced, along)
    product = matrix_product(block, thread, reduced, thread_reduced=own)
    shared = meeting_size(block.k * facts.m, along) * facts.element_bytes
    launch = Launch(ceil_divided(facts.n, columns * lanes) * facts.batch * split, columns * along, shared)
    return (_fused_product(facts, product, (block, thread), (facts.m * reduced * columns, facts.m * own), launch),)


def _fused_product(
    facts: ContractionFacts, product: Operation, tiles: tuple[Tile, Tile], computed: tuple[np.ndarray, np.ndarray], launch: Launch
) -> Stage:
    """A product with its epilogue, which a block and a thread compute for their `tiles`, and with the map that computes its first factor, of which
    they compute so many elements."""
    before = elementwise(Tile(n=computed[0]), Tile(n=computed[1]), operations=facts.a.arithmetic)
    operation = product.then(elementwise(*tiles, operations=facts.epilogue_flops)).then(before)
    flops = facts.flops + facts.epilogue_flops * facts.batch * facts.m * facts.n + before.block_flops * launch.blocks
    return Stage(operation, launch, flops)


def _direct(facts: DirectFacts, candidates: Columns) -> tuple[Stage, ...]:
    """A problem has no padding of its own: its input is stored with a halo. Shared memory holds what one step stages of both operands."""
    k, y, x = extents_of(candidates)
    block, thread = Tile(k=k, h=y, w=x), Tile(k=candidates["register_k"], h=candidates["register_y"], w=candidates["register_x"])
    window = Window(facts.filter_y, facts.filter_x, facts.stride_y, facts.stride_x)
    operation = convolution(block, thread, facts.channels, window).then(elementwise(block, thread, operations=facts.epilogue_flops))
    tiles = ceil_divided(facts.outputs, k) * ceil_divided(facts.height, y) * ceil_divided(facts.width, x)
    patch_y, patch_x = patch_of(facts, candidates)
    staged = patch_y * patch_x + np.where(candidates["filters"] == SHARED, k * window.area, 0)
    launch = Launch(tiles * facts.images * facts.groups * candidates["split"], threads_of_direct(candidates), 4 * candidates["channels"] * staged)
    points = facts.images * facts.groups * facts.outputs * facts.height * facts.width
    return (Stage(operation, launch, facts.flops + facts.epilogue_flops * points),)


def _winograd(facts: WinogradFacts, candidates: Columns) -> tuple[Stage, ...]:
    """Three kernels. A thread of a transform has one tile of `transform_vector` channels."""
    _check_filter(facts)
    size, threads, vector = (candidates[name] for name in ("output_tile", "transform_threads", "transform_vector"))
    thread = Tile(k=vector, h=size, w=size)
    block = Tile(k=threads * vector, h=size, w=size)
    points = facts.images * facts.height * facts.width

    def transform(channels: int, epilogue: float) -> Stage:
        operation = winograd_transform(block, thread).then(elementwise(block, thread, operations=epilogue))
        launch = Launch(ceil_divided(tiles_there(facts, candidates) * channels, threads * vector), threads, 0)
        return Stage(operation, launch, (2.25 + epilogue) * points * channels)

    products = [_contraction(product, candidates)[0] for product in facts.products]
    chosen = [size == output_tile for output_tile in output_tiles(PRINTED_FILTER)]

    def select(of: Callable[[Stage], np.ndarray | float]) -> np.ndarray:
        """A number of the product of each candidate's output tile."""
        return np.select(chosen, [np.broadcast_to(of(stage), len(size)) for stage in products])

    middle = Operation(*(select(lambda stage, name=name: getattr(stage.operation, name)) for name in _COUNTS))  # type: ignore[misc]
    launch = Launch(*(select(lambda stage, name=name: getattr(stage.launch, name)) for name in ("blocks", "threads", "shared_bytes")))  # type: ignore[misc]
    return transform(facts.channels, 0.0), Stage(middle, launch, select(lambda stage: stage.flops)), transform(facts.outputs, facts.epilogue_flops)


PRINTED_FILTER = (3, 3)
"""The filters for whose transforms the paper prints operations."""


def _check_filter(facts: WinogradFacts) -> None:
    if facts.filter_shape != PRINTED_FILTER:
        rows, columns = facts.filter_shape
        raise Unsuitable(f"DeepCuts prints the operations of Winograd's transforms for 3 x 3 filters, and these are {rows} x {columns}")


_COUNTS = ("block_flops", "transactions", "thread_flops", "loads")


def _winograd_fused(facts: WinogradFacts, candidates: Columns) -> tuple[Stage, ...]:
    """The transforms and the product exchange tiles in shared memory. A block transforms all channels of its part of the sum."""
    _check_filter(facts)
    size, tiles, outputs, split = (candidates[name] for name in ("output_tile", "tiles", "outputs", "split"))
    points, threads = elements_of(candidates), fused_threads_of(candidates)
    blocks = ceil_divided(tiles_there(facts, candidates), tiles) * ceil_divided(facts.outputs, outputs) * split
    launch = Launch(blocks, threads, fused_shared_bytes_of(facts, candidates))
    channels = ceil_divided(facts.channels, split)
    whole, pixels = tiles_there(facts, candidates), facts.images * facts.height * facts.width

    def spread(block: Tile) -> Tile:
        return Tile(n=block.points / threads)

    first, last = Tile(n=tiles, k=channels, h=size, w=size), Tile(n=tiles, k=outputs, h=size, w=size)
    product = matrix_product(Tile(n=tiles, k=outputs), Tile(n=candidates["thread_m"], k=candidates["thread_n"]), channels)
    middle = Operation(product.block_flops * points, 0, product.thread_flops, product.loads)
    epilogue = elementwise(last, spread(last), operations=facts.epilogue_flops)
    return (
        Stage(winograd_transform(first, spread(first)), launch, 2.25 * pixels * facts.channels),
        Stage(middle, launch, 2.0 * points * whole * facts.channels * facts.outputs),
        Stage(winograd_transform(last, spread(last)).then(epilogue).after(), launch, (2.25 + facts.epilogue_flops) * pixels * facts.outputs),
    )


def _window(facts: WindowFacts, candidates: Columns) -> tuple[Stage, ...]:
    """Pooling; operations beyond one for each element of a window (the products of a depthwise convolution, an epilogue) are fused in registers. Each
    thread has channels of its own."""
    if not facts.loads:
        raise Unsuitable("DeepCuts' formulas are of windows that read a value, and these read none")
    thread = Tile(k=candidates["vector_width"], h=candidates["rows"], w=candidates["items"])
    threads = candidates["threads"]
    block = replace(thread, k=thread.k * threads)
    (stride_h, height), (stride_w, width) = facts.loads[0].rows, facts.loads[0].items
    window = Window(height, width, max(stride_h, 1), max(stride_w, 1))
    operation = pooling(block, thread, window).then(elementwise(block, thread, operations=max(facts.flops - window.area, 0)))
    return (Stage(operation, Launch(blocks_of(facts, candidates), threads, 0), facts.flops * facts.points),)


def _map(facts: MapFacts, candidates: Columns) -> tuple[Stage, ...]:
    """Element by element, with the operations that an element has; a row is what a block computes. Loads beyond those of whole operands are of
    parameters."""
    if not facts.flops:
        raise Unsuitable("DeepCuts' limit is a share of the peak of arithmetic, and this map has none")
    points, threads = candidates["vector_width"] * candidates["items"], candidates["threads"]
    block = Tile(w=points * threads)
    loaded = max(facts.requests - 1, 1)
    operands = min(max(round(facts.bytes_read / (ELEMENT_BYTES * facts.points)), 1), loaded)
    operation = elementwise(block, Tile(w=points), operands, facts.flops, loaded - operands)
    return (Stage(operation, Launch(ceil_divided(facts.points, points * threads), threads, 0), facts.flops * facts.points),)


def _attention(facts: AttentionFacts, candidates: Columns) -> tuple[Stage, ...]:
    """Two products, for each tile of keys, that are fused in shared memory; the softmax is fused with the first in registers."""
    block = Tile(n=candidates["block_m"], k=candidates["block_n"])
    thread = Tile(n=candidates["thread_m"], k=candidates["thread_n"])
    steps = facts.passes(candidates["block_m"], candidates["block_n"])
    softmax = facts.logit_flops + SOFTMAX_FLOPS
    first = matrix_product(block, thread, facts.r, steps).then(elementwise(block, thread, operations=softmax * steps))
    values = Tile(n=block.n, k=facts.d), Tile(n=thread.n, k=columns_of(facts, candidates))
    second = matrix_product(*values, candidates["block_n"], steps).then(elementwise(*values, operations=facts.epilogue_flops)).after()
    blocks = ceil_divided(facts.m, candidates["block_m"]) * facts.batch
    launch = Launch(blocks, threads_of_attention(candidates), shared_bytes_of_attention(facts, candidates))
    seen = facts.flops / (2 * facts.r + 2 * facts.d + softmax)
    queries = facts.batch * facts.m * facts.d
    return (
        Stage(first, launch, seen * (2 * facts.r + softmax)),
        Stage(second, launch, seen * 2 * facts.d + facts.epilogue_flops * queries),
    )


_STAGES: Mapping[AnySchema, Callable[[Any, Columns], tuple[Stage, ...]]] = MappingProxyType(
    {
        GEMM: _contraction,
        GEMV: _gemv,
        DIRECT: _direct,
        WINOGRAD: _winograd,
        WINOGRAD_FUSED: _winograd_fused,
        WINDOW: _window,
        MAP: _map,
        ATTENTION: _attention,
    }
)
