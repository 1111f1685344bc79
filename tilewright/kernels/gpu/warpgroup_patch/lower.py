"""Lowering of the `warpgroup patches` schema: a pipeline of patches of the image, and one of the tiles of the filter that are multiplied with them.

As in `warpgroup/lower.py` one thread produces and warpgroups consume, each buffer with a barrier for "full" and one for "empty". For each part of the
channels the producer copies a patch, and then the filter's tile for each tap. The products of a tap read the patch from that tap's first pixel on: a
swizzle permutes pieces by bits of the address, so that rows may begin at any pixel. A tile of the filter is freed when the products of the next step
were begun and its own have completed; a patch, when the first products with the next one were begun.
"""

from __future__ import annotations

from math import prod

from tilewright.codegen.assemble import block
from tilewright.codegen.common import decode, named
from tilewright.codegen.intrinsics import mbarrier, wgmma
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.codegen.intrinsics.launching import wait_for_earlier_kernels
from tilewright.codegen.intrinsics.tensor_copy import copy_box
from tilewright.codegen.intrinsics.wgmma import DEPTHS, STORED, M, Tile
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Expr, Var, binary, compare, index_const
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Let, Place, Statement, thread_variable
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.block_result import BlockResult
from tilewright.kernels.gpu.gemm.frame import turns_of
from tilewright.kernels.gpu.warpgroup.lower import arrivals_in, lowered
from tilewright.kernels.gpu.warpgroup.results import Ending, ending
from tilewright.kernels.gpu.warpgroup.sent import sending
from tilewright.kernels.gpu.warpgroup.space import ALIGNMENT, IN_PARTS
from tilewright.kernels.gpu.warpgroup_patch.form import PatchForm, patch_form
from tilewright.kernels.gpu.warpgroup_patch.pixels import patch_of, positions_of, rows_at
from tilewright.kernels.gpu.warpgroup_patch.pooled import store_pooled
from tilewright.kernels.gpu.warpgroup_patch.sent_lines import line_boxes, sent_lines
from tilewright.kernels.gpu.warpgroup_patch.space import ROWS, PatchSchedule, blocks_to_ask_for

GROUP, WARP = LANES["warpgroup"], LANES["warp"]


def lower_patches(problem: Problem, form: PatchForm, schedule: PatchSchedule, machine: Machine) -> Lowered:
    """One kernel, or two with a workspace if the channels are split; packed weights are in the storage.

    Raises:
        Unsuitable: as `warpgroup.lower.lowered`; or if results are pooled that are not in the registers of one thread.
    """
    if form.pooled is not None and (schedule.staged or schedule.meeting or (schedule.split == 1 and not schedule.swapped)):
        raise Unsuitable("windows are pooled in registers alone, of swapped factors")
    if schedule.sent and (form.pooled is not None or not (schedule.swapped and schedule.persistent) or schedule.staged or schedule.meeting):
        raise Unsuitable("the copy engine stores pixels on columns, of persistent blocks, which are neither staged nor pooled")
    if schedule.sent == IN_PARTS:
        raise Unsuitable("lines of a tile are sent at once")
    return lowered(problem, form, schedule, machine, lambda part: patch_form(part, machine).parts, tiles, maps, blocks_to_ask_for)


def maps(form: PatchForm, schedule: PatchSchedule) -> tuple[TensorMap, ...]:
    """Of the image, whose boxes are patches, and of the filter; and of the result, if the copy engine stores it."""
    return (*factor_maps(form, schedule), *([sent_lines(form, schedule)] if schedule.sent else []))


def factor_maps(form: PatchForm, schedule: PatchSchedule) -> tuple[TensorMap, TensorMap]:
    """Of the image and of the filter."""
    pixels, base = form.pixels, form.facts.base
    extents, _ = patch_of(form.facts, schedule)
    box = (base.row_bytes // base.element_bytes, *reversed(extents), 1)
    image = TensorMap("map_a", pixels.buffer, pixels.dtype, pixels.extents[::-1], pixels.strides[::-1], box, base.row_bytes, pixels.offset)
    return image, form.base.b.map("map_b", schedule.channels // schedule.cluster, base.row_bytes)


def tiles(form: PatchForm, schedule: PatchSchedule, most: int) -> tuple[Block, Launch]:
    """The body of the kernel, of up to `most` blocks. A form whose offset depends on a variable `part` stores the parts of a split reduction."""
    facts, base, product, columns = form.facts, form.facts.base, form.product, schedule.columns
    dtype, depth, wide = STORED[base.kind], DEPTHS[base.kind], base.row_bytes // base.element_bytes
    image_map, filter_map = factor_maps(form, schedule)
    _, pitches = patch_of(facts, schedule)
    each = -(-facts.chunks // schedule.split)
    cluster, part_size = schedule.cluster, prod(filter_map.box)
    patch_size, filter_size = -(-prod(image_map.box[1:]) // ROWS) * ROWS * wide, part_size * cluster

    tile = tuple(int(extent) for extent in facts.tile(schedule.height, schedule.width))
    places_of = (-(-extent // one) for extent, one in zip(facts.outputs, tile, strict=True))
    extents = [facts.images, *places_of]
    clusters = -(-prod(extents) // cluster)
    counts = (schedule.split, clusters, product.facts.batch, -(-product.facts.n // schedule.channels), cluster)
    turns = turns_of(prod(counts), schedule.threads, most)
    launch, before = turns.launch, turns.turn * each
    stages, patches = min(schedule.stages, each * base.taps * turns.most), min(schedule.patches, each * turns.most)
    order = [Var(name, count) for name, count in zip(("part", "cluster", "batch", "tile_n", "among"), counts, strict=True)]
    # parts that meet are adjacent blocks
    statements, where = named(decode(turns.tile, [*order[1:], order[0]] if schedule.meeting else order))
    part, number, batch, tile_n, among = (where.get(axis, axis) for axis in order)
    batch_lets, bind = named(decode(batch, product.batch))
    statements += batch_lets
    if clusters * cluster > prod(extents):  # the last block of the last cluster is beyond the end of the outermost of these
        extents[next(i for i, extent in enumerate(extents) if extent > 1)] += 1
    axes = [Var(name, count) for name, count in zip(("image", *(f"tile{i}" for i in range(len(tile)))), extents, strict=True)]
    lets, where = named(decode(number * cluster + among, axes))
    statements += lets
    image, *places = (where.get(axis, axis) for axis in axes)
    first = [place * one for place, one in zip(places, tile, strict=True)]
    chunks: Expr = index_const(each)
    if facts.chunks % each:
        chunks = Var("chunks", each + 1)
        statements.append(Let(chunks, binary("min", facts.chunks - part * each, index_const(each))))

    thread, group = thread_variable(launch), Var("group", schedule.consumers + 1)
    chunk, tap, piece = Var("chunk", each), Var("tap", base.taps), Var("piece", wide // depth)
    channel, step, patch = (part * each + chunk) * wide, chunk * base.taps + tap, before + chunk
    begin = form.pixels.channel(batch, channel)
    stage, slot, phase = (before * base.taps + step) % stages, patch % patches, (before * base.taps + step) // stages
    full, empty, sums = Place("full", stage), Place("empty", stage), Place("acc", index_const(0))
    begins = [start + slide.first for start, slide in zip(first, form.pixels.slides, strict=True)]
    at_filter, _ = form.base.b.at(batch, tile_n * schedule.channels + among * (schedule.channels // cluster), tap, channel)
    produce = block(
        mbarrier.wait(Place("patch_empty", slot), (patch // patches + 1) % 2, "thread"),
        mbarrier.expect(Place("patch_full", slot), image_map.bytes),
        copy_box(Place("patch", slot * patch_size), image_map, Place("patch_full", slot), [begin, *reversed(begins), image]),
        For(
            tap,
            index_const(base.taps),
            block(
                mbarrier.wait(empty, (phase + 1) % 2, "thread"),
                mbarrier.expect(full, filter_map.bytes * cluster),
                copy_box(Place("filter", stage * filter_size + among * part_size), filter_map, full, at_filter, blocks=cluster),
            ),
        ),
    )

    _, offsets = form.pixels.at(index_const(0), index_const(0), tap, index_const(0))
    shift: Expr = index_const(0)
    for offset, pitch in zip(reversed(offsets), pitches, strict=True):
        shift = shift + offset * pitch
    own = group * (M * wide) + piece * depth
    pixel_rows, filter_rows = slot * patch_size + shift * wide, stage * filter_size
    patch_place, filter_place = (
        Place("patch", pixel_rows + (piece * depth if schedule.swapped else own)),
        Place("filter", filter_rows + (own if schedule.swapped else piece * depth)),
    )
    left, right = (filter_place, patch_place) if schedule.swapped else (patch_place, filter_place)
    lines, filters = (Tile(base.row_bytes, group=pitches[-2]) if schedule.lines else Tile(base.row_bytes)), Tile(base.row_bytes)
    both = (filters, lines) if schedule.swapped else (lines, filters)
    multiply = wgmma.multiply(base.kind, columns, sums, left, right, compare("gt", step + piece, 0), both)
    one_a_warp = compare("eq", thread % WARP, 0)
    freed = arrivals_in(Place("empty", (before * base.taps + step + (stages - 1)) % stages), cluster)  # of the step before
    # two patches: the one before is freed behind the first products with the next one; one: behind its own
    patch_freed = mbarrier.arrive(Place("patch_empty", (patch + (patches - 1)) % patches))
    during: Statement = If(compare("eq", tap, 0), If(compare("gt", chunk, 0), If(one_a_warp, patch_freed)))
    behind: list[Statement] = [wgmma.await_groups(0), If(one_a_warp, patch_freed)] if patches == 1 < each else []
    # of the last step, for the next tile
    last = arrivals_in(Place("empty", (before * base.taps + (each * base.taps - 1)) % stages), cluster)
    last_patch = [] if behind else [mbarrier.arrive(Place("patch_empty", (before + (each - 1)) % patches))]
    consume = block(
        mbarrier.wait(Place("patch_full", slot), patch // patches % 2, "warpgroup"),
        For(
            tap,
            index_const(base.taps),
            block(
                mbarrier.wait(full, phase % 2, "warpgroup"),
                wgmma.fence(),
                For(piece, index_const(wide // depth), multiply, "unroll"),
                wgmma.commit(),
                wgmma.await_groups(1),
                If(compare("gt", step, 0), If(one_a_warp, freed)),
                [during] if patches > 1 else [],
            ),
        ),
        behind,
    )
    pipelines = (("", stages), ("patch_", patches))
    arrivals = GROUP // WARP * schedule.consumers
    setup = [
        mbarrier.initialise(Place(f"{kind}{name}", index_const(at)), count)
        for kind, number in pipelines
        for name, count in (("full", 1), ("empty", arrivals if kind else arrivals * cluster))
        for at in range(number)
    ]
    positions = positions_of(facts, schedule, image, first)
    at_row = rows_at(form, positions)
    result = BlockResult(product, {**bind, order[0]: part}, schedule.pixels, schedule.channels, tile_n * schedule.channels, at_row)
    if form.pooled is not None:
        stored = Ending(products=tuple(store_pooled(form, schedule, result, positions, group, thread)))
    elif schedule.sent:
        stored = sending(result, schedule, line_boxes(form, schedule, result, image, first, group), group, thread)
    else:
        stored = ending(result, schedule, part, group, thread)
    common, placed = (statements, []) if stored.end else ([], statements)
    body = block(
        Allocate(Buffer("patch", dtype, patches * patch_size, "shared", alignment=ALIGNMENT)),
        Allocate(Buffer("filter", dtype, stages * filter_size, "shared", alignment=ALIGNMENT)),
        [Allocate(mbarrier.barriers(f"{kind}{name}", number)) for kind, number in pipelines for name in ("full", "empty")],
        stored.beginning,
        common,
        Let(group, thread // GROUP),
        If(compare("eq", thread, 0), block(*setup, mbarrier.publish(cluster > 1))),
        wait_for_earlier_kernels(),
        block_barrier() if cluster == 1 else cluster_barrier(),
        If(
            compare("eq", group, schedule.consumers),
            If(compare("eq", thread, schedule.consumers * GROUP), turns.each(placed, For(chunk, chunks, produce))),
            block(
                turns.each(
                    placed,
                    Allocate(Buffer("acc", product.dtype, columns // 2, "register")),
                    For(chunk, chunks, consume),
                    wgmma.await_sums(columns, sums),
                    [If(one_a_warp, block(last, *last_patch))] if turns.most > 1 else [],
                    stored.products,
                ),
                stored.after,
            ),
        ),
        stored.end,
        [] if cluster == 1 else [cluster_barrier()],  # others may still copy to this block, and arrive at its barriers
    )
    return body, launch
