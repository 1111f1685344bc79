"""Lowering of the `warpgroups` schema: one warpgroup has the copy engine fill the stages of a pipeline, others multiply them on tensor cores.

Each stage has a barrier for "full" and one for "empty". The producer, one thread, waits until a stage is empty, expects the bytes of both tiles, and
starts to copy them. A consumer waits until it is full, multiplies its 64 rows by all columns, awaits the products of the step before, and arrives at
the "empty" barrier of that step's stage, with one thread per warp. Elements outside of the factors are zeros, so that rows, columns and channels may
end anywhere. Results are stored from registers (`gemm/block_result.py`).
"""

from __future__ import annotations

from math import prod

from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics import launching, mbarrier, wgmma
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.tensor_copy import copy_box
from tilewright.codegen.intrinsics.wgmma import DEPTHS, STORED, M, Tile
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Expr, Var, compare, index_const
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Kernel, Launch, Let, Place, Statement
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.block_result import ThreadSums, store_sums
from tilewright.kernels.gpu.gemm.frame import block_frame
from tilewright.kernels.gpu.warpgroup.form import WarpgroupForm
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers of a thread, if there are two consumers, whose sums and addresses exceed an equal share."""
ALIGNMENT = 1024


def lower_warpgroup(problem: Problem, form: WarpgroupForm, schedule: WarpgroupSchedule, machine: Machine) -> Lowered:
    """One kernel; packed weights are in the storage."""
    maps = (
        form.a.map("map_a", schedule.block_m, form.facts.row_bytes),
        form.b.map("map_b", schedule.block_n, form.facts.row_bytes),
    )
    body, launch = tiles(form, schedule, maps)
    kernel: Kernel
    kernel, names = assemble(
        problem.region.kind,
        body,
        problem.with_storage(form.storage),
        (form.product.output,),
        header=f"{described(problem)}\n{schedule}",
        roles={form.a.buffer: "A", form.b.buffer: "B"},
        launch=launch,
        blocks_per_processor=1,
        maps=maps,
    )
    return Lowered(problem.region, str(schedule), (kernel,), (Call(kernel.name, names),), form.storage)


def tiles(form: WarpgroupForm, schedule: WarpgroupSchedule, maps: tuple[TensorMap, TensorMap]) -> tuple[Block, Launch]:
    """The body of the kernel."""
    facts, product = form.facts, form.product
    dtype, depth, wide = STORED[facts.kind], DEPTHS[facts.kind], facts.row_bytes // facts.element_bytes
    bm, bn, stages = schedule.block_m, schedule.block_n, min(schedule.stages, facts.steps)
    frame = block_frame(product, (bm, bn, product.facts.r), schedule.threads, 1, False)
    group, step, part = Var("group", schedule.consumers + 1), Var("step", facts.steps), Var("part", wide // depth)
    thread, parts = frame.thread, facts.steps // facts.taps
    batch: Expr = index_const(0)
    for axis in product.batch:
        batch = batch * (axis.extent or 1) + frame.bind[axis]
    tap, channel = step // parts, step % parts * wide

    def tile(name: str, stage: Expr, rows: int) -> Place:
        return Place(name, stage * (rows * wide))

    def copied(described: TensorMap, tensor: object, name: str, rows: int, first: Expr) -> Statement:
        assert tensor is form.a or tensor is form.b
        coordinates, filters = (form.a if tensor is form.a else form.b).at(batch, first, tap, channel)
        return copy_box(tile(name, step % stages, rows), described, Place("full", step % stages), coordinates, filters)

    produce = block(
        mbarrier.wait(Place("empty", step % stages), (step // stages + 1) % 2, "thread"),
        mbarrier.expect(Place("full", step % stages), sum(described.bytes for described in maps)),
        copied(maps[0], form.a, "a_tile", bm, frame.first[0]),
        copied(maps[1], form.b, "b_tile", bn, frame.first[1]),
    )
    a, b = tile("a_tile", step % stages, bm), tile("b_tile", step % stages, bn)
    multiply = wgmma.multiply(
        facts.kind,
        bn,
        Place("acc", index_const(0)),
        Place(a.buffer, a.offset + group * (M * wide) + part * depth),
        Place(b.buffer, b.offset + part * depth),
        compare("gt", step + part, 0),
        (Tile(facts.row_bytes), Tile(facts.row_bytes)),
    )
    freed = mbarrier.arrive(Place("empty", (step + (stages - 1)) % stages))  # of the step before
    consume = block(
        mbarrier.wait(Place("full", step % stages), step // stages % 2, "warpgroup"),
        wgmma.fence(),
        For(part, index_const(wide // depth), multiply, "unroll"),
        wgmma.commit(),
        wgmma.await_groups(1),
        If(compare("gt", step, 0), If(compare("eq", thread % WARP, 0), freed)),
    )
    lane, warp = thread % WARP, thread % GROUP // WARP
    sums = ThreadSums(
        2,
        bn // 4,
        lambda i: group * M + warp * 16 + lane // 4 + i * 8,
        lambda j: j // 2 * 8 + lane % 4 * 2 + j % 2,
        2,
        lambda row, column: column // 2 * 4 + row * 2 + column % 2,
    )
    setup = [
        mbarrier.initialise(Place(name, index_const(number)), count)
        for name, count in (("full", 1), ("empty", GROUP // WARP * schedule.consumers))
        for number in range(stages)
    ]
    several = schedule.consumers > 1
    root = block(
        Allocate(Buffer("a_tile", dtype, stages * bm * wide, "shared", alignment=ALIGNMENT)),
        Allocate(Buffer("b_tile", dtype, stages * bn * wide, "shared", alignment=ALIGNMENT)),
        Allocate(mbarrier.barriers("full", stages)),
        Allocate(mbarrier.barriers("empty", stages)),
        list(frame.statements),
        Let(group, thread // GROUP),
        If(compare("eq", thread, 0), block(*setup, mbarrier.publish())),
        block_barrier(),
        If(
            compare("eq", group, schedule.consumers),
            block(
                [launching.fewer_registers(PRODUCER_REGISTERS)] if several else [],
                If(compare("eq", thread, schedule.consumers * GROUP), For(step, index_const(facts.steps), produce)),
            ),
            block(
                [launching.more_registers(CONSUMER_REGISTERS)] if several else [],
                Allocate(Buffer("acc", product.dtype, bn // 2, "register")),
                For(step, index_const(facts.steps), consume),
                wgmma.await_groups(0),
                store_sums(frame.result, sums),
            ),
        ),
    )
    assert prod(frame.launch.block) == schedule.threads
    return root, frame.launch
