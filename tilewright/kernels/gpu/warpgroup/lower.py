"""Lowering of the `warpgroups` schema: one warp has the copy engine fill the stages of a pipeline, warpgroups multiply them on tensor cores.

Each stage has a barrier for "full" and one for "empty". The producer, one thread, waits until a stage is empty, expects the bytes of both tiles, and
starts to copy them. A consumer waits until it is full, multiplies its 64 rows by all columns, awaits the products of the step before, and arrives at
the "empty" barrier of that step's stage, with one thread per warp. Blocks of a cluster copy parts of B to all of them, and a stage is empty when the
consumers of all have arrived. wgmma's first factor, of 64 rows, is A, or B if the schedule is swapped. Elements outside of the factors are zeros, so
that rows, columns and channels may end anywhere. Results are stored from registers (`gemm/block_result.py`), or, `staged` or added by the blocks
of a split that meet, through shared memory (`results.py`), or by the copy engine (`sent.py`). With a single producing warp there are
registers enough for every consumer, so that none have to be moved between warps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics import mbarrier, wgmma
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.codegen.intrinsics.launching import wait_for_earlier_kernels
from tilewright.codegen.intrinsics.tensor_copy import copy_box
from tilewright.codegen.intrinsics.wgmma import DEPTHS, M, Tile
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Const, Expr, Load, Var, compare, index_const
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Let, Place, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.frame import block_frame
from tilewright.kernels.gpu.split import in_one_or_two
from tilewright.kernels.gpu.warpgroup.form import WarpgroupForm, warpgroup_form
from tilewright.kernels.gpu.warpgroup.pairs import PAIRS, UNIT
from tilewright.kernels.gpu.warpgroup.results import ending
from tilewright.kernels.gpu.warpgroup.sent import matrix_boxes, sending, sent_map
from tilewright.kernels.gpu.warpgroup.space import ALIGNMENT, WarpgroupSchedule, blocks_to_ask_for, in_whole_clusters
from tilewright.kernels.gpu.warpgroup.tensors import Pixels, Rows, unit_of

F = TypeVar("F", bound=Any)
S = TypeVar("S", bound=Any)
GROUP, WARP = LANES["warpgroup"], LANES["warp"]


@dataclass(frozen=True)
class Side:
    """A factor of wgmma: its tensor and map, the first of its rows that the block multiplies, and the buffer of its tiles, of `rows` rows each."""

    tensor: Rows | Pixels
    map: TensorMap
    first: Expr
    tiles: str
    rows: int

    blocks: int
    """Of the cluster, each of which copies an equal part of the rows to all of them; 1 if the block copies its own."""

    @property
    def elements(self) -> int:
        """Of a tile, with all parts of its elements."""
        return self.tensor.parts * self.blocks * prod(self.map.box)

    @property
    def bytes(self) -> int:
        return self.elements * size_of(self.tensor.dtype)

    def buffer(self, stages: int) -> Buffer:
        return Buffer(self.tiles, self.tensor.dtype, stages * self.elements, "shared", alignment=ALIGNMENT)

    def place(self, stage: Expr) -> Place:
        return Place(self.tiles, stage * self.elements)

    def copied(self, stage: Expr, batch: Expr, tap: Expr, channel: Expr, among: Expr, full: Place) -> list[Statement]:
        """What the block copies of the tile. `among`: its number in the cluster."""
        offset, first = stage * self.elements, self.first
        if self.blocks > 1:
            offset, first = offset + among * prod(self.map.box), first + among * (self.rows // self.blocks)
        copies: list[Statement] = []
        for part in range(self.tensor.parts):
            coordinates, filters = self.tensor.at(batch, first, tap, channel, part)
            place = Place(self.tiles, offset + part * (self.elements // self.tensor.parts))
            copies.append(copy_box(place, self.map, full, coordinates, filters, self.blocks))
        return copies


def lower_warpgroup(problem: Problem, form: WarpgroupForm, schedule: WarpgroupSchedule, machine: Machine) -> Lowered:
    """One kernel, or two with a workspace if the reduction is split; packed weights are in the storage.

    Raises:
        Unsuitable: as `lowered`; or if the copy engine is to store results that others store or add, or that it cannot.
    """
    if schedule.sent and (not schedule.persistent or schedule.staged or schedule.meeting):
        raise Unsuitable("the copy engine stores results of persistent blocks, which are not staged")
    if schedule.pairs and schedule.swapped:
        raise Unsuitable("warpgroups split rows of the first factor alone")

    def in_pairs(form: WarpgroupForm) -> WarpgroupForm:
        return form.in_pairs(PAIRS[schedule.pairs].numbers) if schedule.pairs else form

    return lower_as(problem, in_pairs(form), schedule, machine, lambda part: in_pairs(warpgroup_form(part, machine).parts))


def lower_as(
    problem: Problem, form: WarpgroupForm, schedule: WarpgroupSchedule, machine: Machine, form_of: Callable[[Problem], WarpgroupForm]
) -> Lowered:
    """A problem of a form, given how problems that it is divided into are understood. Raises Unsuitable as `lowered`."""

    def maps(form: WarpgroupForm, schedule: WarpgroupSchedule) -> tuple[TensorMap, ...]:
        stored = (sent_map(form.product, schedule),) if schedule.sent else ()
        return (*(one.map for one in sides(form, schedule)), *stored)

    return lowered(problem, form, schedule, machine, form_of, tiles, maps, blocks_to_ask_for)


def lowered(
    problem: Problem,
    form: F,
    schedule: S,
    machine: Machine,
    form_of: Callable[[Problem], F],
    tiles: Callable[[F, S, int], tuple[Block, Launch]],
    maps: Callable[[F, S], tuple[TensorMap, ...]],
    resident: Callable[[S, Any, Machine], int],
) -> Lowered:
    """A problem, or the one that stores parts of its sums and the one that adds them, by a schema of this kind: `tiles` makes the body of a form for
    grids of a number of blocks at most (0: a block for each tile), `maps` its tensor maps, and `resident` the number of blocks per processor to
    request, given the form's facts.

    Raises:
        Unsuitable: if parts of a split are staged, or computed in turns, or if a cluster shares both copies and a reduction.
    """
    if schedule.split > 1 and (schedule.staged or schedule.persistent):
        raise Unsuitable("parts of a split are stored as they are, by a block for each tile")
    if schedule.meeting and schedule.cluster > 1:
        raise Unsuitable("blocks that share a reduction have no tile in common")
    at_once = int(in_whole_clusters(resident(schedule, form.facts, machine), schedule.cluster, machine))
    forms = {form.product.output: form}

    def of_parts(part: Problem) -> ProductForm:
        found = form_of(part)
        product: ProductForm = found.product
        forms[product.output] = found
        return product

    return in_one_or_two(
        problem,
        form.product,
        schedule,
        machine,
        lambda product: tiles(forms[product.output], schedule, at_once * schedule.persistent),
        of_parts,
        lambda product: resident(schedule, form.facts, machine),
        lambda product: maps(forms[product.output], schedule),
        split=schedule.split,
        cluster=bool(schedule.meeting),
        together=schedule.cluster,
    )


def sides(form: WarpgroupForm, schedule: WarpgroupSchedule, first: Sequence[Expr] = (index_const(0), index_const(0))) -> list[Side]:
    """A and B, whose first rows in the block are `first`."""
    tensors, rows, blocks = (form.a, form.b), (schedule.block_m, schedule.block_n), (1, schedule.cluster)
    wide = form.facts.row_bytes // form.facts.element_bytes
    return [
        Side(tensor, tensor.map(f"map_{name}", count // each, wide * size_of(tensor.dtype)), start, f"{name}_tile", count, each)
        for name, tensor, count, start, each in zip("ab", tensors, rows, first, blocks, strict=True)
    ]


def tiles(form: WarpgroupForm, schedule: WarpgroupSchedule, most: int) -> tuple[Block, Launch]:
    """The body of the kernel, of up to `most` blocks. A form whose offset depends on a variable `part` stores the parts of a split reduction."""
    facts, product, columns = form.facts, form.product, schedule.columns
    depth, wide = DEPTHS[facts.kind], facts.row_bytes // facts.element_bytes
    size = schedule.block_m, schedule.block_n, wide
    frame = block_frame(product, size, schedule.threads, schedule.split, bool(schedule.meeting), facts.steps, schedule.cluster, most, equal=False)
    left, right = reversed(sides(form, schedule, frame.first)) if schedule.swapped else sides(form, schedule, frame.first)
    turns, parts = frame.turns, facts.steps // facts.taps
    stages = min(schedule.stages, frame.steps_each * turns.most)
    group, step, part = Var("group", schedule.consumers + 1), Var("step", frame.steps_each), Var("part", wide // depth)
    number, before = frame.first_step + step, turns.turn * frame.steps_each
    thread, stage, phase = frame.thread, (before + step) % stages, (before + step) // stages
    full, empty, sums = Place("full", stage), Place("empty", stage), Place("acc", index_const(0))
    batch: Expr = index_const(0)
    for axis in product.batch:
        batch = batch * (axis.extent or 1) + frame.bind[axis]

    produce = block(
        mbarrier.wait(empty, (phase + 1) % 2, "thread"),
        mbarrier.expect(full, left.bytes + right.bytes),
        *(side.copied(stage, batch, number // parts, number % parts * wide, frame.among, full) for side in (left, right)),
    )
    multiply = wgmma.multiply(
        facts.kind,
        columns,
        sums,
        Place(left.tiles, left.place(stage).offset + group * (M * wide) + part * depth),
        Place(right.tiles, right.place(stage).offset + part * depth),
        compare("gt", step + part, 0),
        (Tile(facts.row_bytes), Tile(facts.row_bytes)),
    )
    one_a_warp = compare("eq", thread % WARP, 0)
    freed = If(one_a_warp, arrivals_in(Place("empty", (before + step + (stages - 1)) % stages), schedule.cluster))  # of the step before
    last = If(one_a_warp, arrivals_in(Place("empty", (before + (frame.steps_each - 1)) % stages), schedule.cluster))
    consume = block(
        mbarrier.wait(full, phase % 2, "warpgroup"),
        wgmma.fence(),
        For(part, index_const(wide // depth), multiply, "unroll"),
        wgmma.commit(),
        wgmma.await_groups(1),
        If(compare("gt", step, 0), freed),
    )
    zeros: list[Statement] = []
    last_freed: list[Statement] = [last] if turns.most > 1 else []
    summed: list[Statement] = [wgmma.await_sums(columns, sums)]
    once: list[Statement] = []
    if schedule.pairs:  # every product has been awaited
        pairs, at = PAIRS[schedule.pairs], Var("at", columns // 2)
        zeros = [For(at, index_const(columns // 2), Store("acc", at, Const(0.0, product.dtype)), "unroll")]
        rows, weights = Place(left.tiles, left.place(stage).offset + group * (M * wide)), right.place(stage)
        run, unit = pairs.run_of(schedule, product.facts.r), unit_of(form.b.buffer)
        once = [Let(UNIT, Load(unit, (index_const(0),), FLOAT32))] if unit in product.storage else []
        consume = block(
            mbarrier.wait(full, phase % 2, "warpgroup"),
            pairs.multiplied(columns, rows, weights, schedule.block_n * wide, wide, run, thread, UNIT if once else None),
            mbarrier.group_barrier(group + 1),  # all threads have read their rows
            If(one_a_warp, arrivals_in(empty, schedule.cluster)),
        )
        last_freed, summed = [], []
    setup = [
        mbarrier.initialise(Place(name, index_const(at)), count)
        for name, count in (("full", 1), ("empty", GROUP // WARP * schedule.consumers * schedule.cluster))
        for at in range(stages)
    ]
    if schedule.sent:
        stored = sending(frame.result, schedule, matrix_boxes(frame.result, schedule, frame.first[0], batch, group), group, thread)
    else:
        stored = ending(frame.result, schedule, frame.part, group, thread)
    common, placed = (frame.statements, ()) if stored.end else ((), frame.statements)
    body = block(
        [Allocate(side.buffer(stages)) for side in (left, right)],
        Allocate(mbarrier.barriers("full", stages)),
        Allocate(mbarrier.barriers("empty", stages)),
        stored.beginning,
        common,
        Let(group, thread // GROUP),
        If(compare("eq", thread, 0), block(*setup, mbarrier.publish(schedule.cluster > 1))),
        wait_for_earlier_kernels(),
        block_barrier() if schedule.cluster == 1 else cluster_barrier(),
        If(
            compare("eq", group, schedule.consumers),
            If(compare("eq", thread, schedule.consumers * GROUP), turns.each(placed, For(step, frame.steps, produce))),
            block(
                once,
                turns.each(
                    placed,
                    Allocate(Buffer("acc", product.dtype, columns // 2, "register")),
                    zeros,
                    For(step, frame.steps, consume),
                    summed,
                    last_freed,
                    stored.products,
                ),
                stored.after,
            ),
        ),
        stored.end,
        [] if schedule.cluster == 1 else [cluster_barrier()],  # others may still copy to this block, and arrive at its barriers
    )
    return body, frame.launch


def arrivals_in(barrier: Place, cluster: int) -> Statement:
    """An arrival of one thread at the barrier of each block of the cluster."""
    if cluster == 1:
        return mbarrier.arrive(barrier)
    return block(*(mbarrier.arrive_in(barrier, index_const(number)) for number in range(cluster)))
