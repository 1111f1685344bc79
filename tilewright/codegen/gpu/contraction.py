"""Lowering of the `contraction` schema: implicit GEMM with tiles of both factors in shared memory and of the result in registers.

Each block computes one tile of C. With one stage, threads fetch the next tiles of A and B from global memory to registers, multiply the present
tiles out of shared memory, and then store what they fetched to the other of two buffers. With more, asynchronous copies run that many steps less
one ahead, without registers. Either way there is one barrier a step. Rows past the end repeat the last one and are never stored; elements past
the end of the reduction are zero.

With `split` > 1 the blocks of a tile divide the reduction. Either they are a cluster, put their sums into their shared memory, and each adds up
its share of the tile in the order of the parts; or they store parts, which a second kernel adds in order. No atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import problem
from tilewright.codegen.gpu.common import as_lanes, below, decode, named, vectors_fit
from tilewright.codegen.gpu.product import ProductForm, product_form
from tilewright.codegen.gpu.row_epilogue import TILE, RowBlock, row_epilogue
from tilewright.codegen.gpu.tile import Loader, Tile, in_tile, loader
from tilewright.codegen.gpu.window import lower_window, window_form
from tilewright.graph.contraction import contraction
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import (
    TRUE,
    Const,
    Expr,
    Load,
    Var,
    binary,
    compare,
    index_const,
    loads,
    replace_loads,
    substitute,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import (
    Allocate,
    AwaitCopies,
    Barrier,
    Block,
    Buffer,
    ClusterBarrier,
    CommitCopies,
    For,
    If,
    Kernel,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    thread_variable,
)
from tilewright.ir.layout import Layout, permuted
from tilewright.ir.region import Call, Lowered, Region, Storage, Unsuitable
from tilewright.schedule.gpu_contraction import ContractionSchedule, GemvSchedule, blocks_to_ask_for
from tilewright.schedule.gpu_window import WindowSchedule

UNROLLED_PRODUCTS = 1024
"""Multiply-adds that one unrolled stretch of the inner loop holds at most."""
WARP = 32
PARTS = "parts"
DEEP = 4
"""Elements of k that a thread reads at once of a tile that lies along k."""


def lower_contraction(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    schedule: ContractionSchedule,
) -> Lowered:
    """One kernel, or two with a workspace where the reduction is split; packed weights are in the storage.

    Raises:
        Unsuitable: where the region is not one sum of products.
    """
    return in_one_or_two(region, layouts, values, constants, machine, schedule, lambda form: tiles(form, schedule))


def in_one_or_two(
    region: Region,
    layouts: Mapping[str, Layout],
    values: Mapping[str, Value],
    constants: frozenset[str],
    machine: Machine,
    schedule: ContractionSchedule | GemvSchedule,
    lower: Callable[[ProductForm], tuple[Block, Launch]],
) -> Lowered:
    """One kernel that stores the region's output; with a split reduction one that stores parts and one that adds them in order.

    `lower` makes the body for a form, whose offset knows a variable `part` where it stores parts."""
    if schedule.split == 1 or isinstance(schedule, ContractionSchedule) and schedule.cluster:
        form = product_form(region, layouts, values, constants)
        body, launch = lower(form)
        kernel, names = _assembled(region, constants, form, schedule, body, launch, machine)
        return Lowered(region, str(schedule), (kernel,), (Call(kernel.name, names),), form.storage)
    first, second, name, work = split_regions(region, constants, schedule.split)
    layouts, values = {**layouts, name: work.layout}, {**values, name: work.value}
    form = product_form(first, layouts, values, constants)
    body, launch = lower(form)
    kernel, names = _assembled(first, constants, form, schedule, body, launch, machine)
    lanes = window_form(second, layouts, values, frozenset()).problem.lanes
    threads = 64 if work.value.elements // schedule.split < 64 * 4 * machine.processors else 256
    adding = lower_window(second, layouts, values, frozenset(), machine, WindowSchedule(threads, 1, lanes))
    return Lowered(
        region,
        str(schedule),
        (kernel, *adding.kernels),
        (Call(kernel.name, names), *adding.calls),
        {**form.storage, name: work},
    )


def _assembled(
    region: Region,
    constants: frozenset[str],
    form: ProductForm,
    schedule: ContractionSchedule | GemvSchedule,
    body: Block,
    launch: Launch,
    machine: Machine,
) -> tuple[Kernel, tuple[str, ...]]:
    occupancy = blocks_to_ask_for(schedule, form.problem, machine) if isinstance(schedule, ContractionSchedule) else 1
    return assemble(
        region.kind,
        body,
        form.layouts,
        {name: value.dtype for name, value in form.values.items()},
        (form.output,),
        header=f"{problem(region, constants)}\n{schedule}",
        roles={**{load.buffer: "A" for load in loads(form.a)}, **{load.buffer: "B" for load in loads(form.b)}},
        launch=launch,
        blocks_per_processor=occupancy,
        cluster=schedule.split if isinstance(schedule, ContractionSchedule) and schedule.cluster else 1,
    )


def split_regions(region: Region, constants: frozenset[str], split: int) -> tuple[Region, Region, str, Storage]:
    """A region that stores partial sums [split, batch, m, n], one that adds them up and stores the region's element, and the workspace."""
    step = region.steps[0]
    found = contraction(step, constants)
    if found is None:
        raise Unsuitable(f"the sum of region {region.name} is not a matrix product")
    name = f"{region.name}#parts"
    part = Var("part", split)
    shape = (split, *(axis.extent or 1 for axis in step.axes))
    order = [0, *(1 + step.axes.index(axis) for axis in (*found.batch, *found.m, *found.n))]
    work = Storage(Value(name, shape, "f32"), permuted(shape, order))
    first = replace(region, steps=(replace(step, index=(part, *step.axes)),), outputs=(name,))
    body = Load(name, (part, *step.axes), "f32")
    second = replace(region, kind="window", steps=(replace(step, bodies=(body,), reduction=(part,)), *region.steps[1:]))
    return first, second, name, work


def tiles(form: ProductForm, schedule: ContractionSchedule) -> tuple[Block, Launch]:
    """The body of the tiled kernel. A form whose offset knows a variable `part` stores the parts of a split reduction."""
    problem = form.problem
    bm, bn, bk = schedule.block_m, schedule.block_n, schedule.block_k
    tm, tn = schedule.thread_m, schedule.thread_n
    steps_in_all = -(-problem.r // bk)
    steps_each = -(-steps_in_all // schedule.split)
    counts = (schedule.split, problem.batch, -(-problem.m // bm), -(-problem.n // bn))
    if schedule.cluster and steps_in_all % schedule.split:
        raise Unsuitable(f"a cluster of {schedule.split} does not divide {steps_in_all} steps evenly")
    launch = Launch((prod(counts), 1, 1), (schedule.threads, 1, 1))
    thread = thread_variable(launch)
    part, batch = Var("part", counts[0]), Var("batch", counts[1])
    tile_m, tile_n = Var("tile_m", counts[2]), Var("tile_n", counts[3])
    # the blocks of a cluster are neighbours
    order = (batch, tile_m, tile_n, part) if schedule.cluster else (part, batch, tile_m, tile_n)
    lets, where = named(decode(block_variable(launch), order))
    root: list[Statement] = list(lets)
    part_, batch_, tile_m_, tile_n_ = (where.get(v, v) for v in (part, batch, tile_m, tile_n))
    batch_lets, batch_values = named(decode(batch_, form.batch))
    root += batch_lets
    bind = {**batch_values, **({part: part_} if part in where else {})}
    a = Tile("a", substitute(form.a, bind), form.m, problem.a, bm, bk, schedule.threads, schedule.stages)
    b = Tile("b", substitute(form.b, bind), form.b_n, problem.b, bn, bk, schedule.threads, schedule.stages)
    buffers = min(max(2, schedule.stages), steps_each)
    if schedule.stages > 1 and not (problem.a.plain and problem.b.plain):
        raise Unsuitable("a factor is computed while it is read: it cannot be copied asynchronously")
    first = tile_m_ * bm, tile_n_ * bn
    loads = []
    for tile, start in zip((a, b), first, strict=True):
        setup, load = loader(tile, start, form, thread, part_ * (steps_each * bk), bk)
        root += setup
        if schedule.stages == 1:
            root.append(Allocate(Buffer(tile.stage, "f32", tile.passes * tile.lanes, "register", tile.lanes)))
        root.append(Allocate(Buffer(tile.tile, "f32", buffers * tile.elements, "shared")))
        loads.append(load)
    root.append(Allocate(Buffer("acc", "f32", tm * tn, "register")))
    at = Var("at", tm * tn)
    root.append(For(at, index_const(tm * tn), Store("acc", at, Const(0.0, "f32")), "unroll"))
    thread_m, thread_n, ids = _thread_grid(thread, bm // tm, bn // tn)
    root += ids
    if schedule.split > 1 and steps_in_all % steps_each:
        steps: Expr = Var("steps", steps_each + 1)
        left = steps_in_all - part_ * steps_each
        root.append(Let(steps, binary("min", left, index_const(steps_each))))  # type: ignore[arg-type]
    else:
        steps = index_const(steps_each)
    inner = lambda buffers: _inner_product(a, b, schedule, thread_m, thread_n, buffers)  # noqa: E731
    if schedule.stages > 1:
        root += _pipeline((a, b), loads, buffers, steps, steps_each, inner)
    else:
        root += _double_buffer((a, b), loads, thread, steps, steps_each, inner)
    if form.row_stages:
        root += _whole_rows(form, schedule, bind, first, (a, b), thread, thread_m, thread_n)
    elif schedule.cluster:
        root += _meeting(schedule, (a, b), part_, thread_m, thread_n)
        root += _shared_epilogue(form, schedule, bind, first, part_, thread)
    else:
        root += _epilogue(form, schedule, bind, first, (a, b), thread_m, thread_n)
    return block(root), launch


Loads: TypeAlias = Sequence[Loader]


def _pipeline(
    pair: tuple[Tile, Tile],
    loads: Loads,
    buffers: int,
    steps: Expr,
    steps_each: int,
    inner: Callable[[Sequence[Expr]], list[Statement]],
) -> list[Statement]:
    """Copies run `stages` - 1 steps ahead of the products; one barrier a step both makes a buffer's copies visible and frees the buffer that the
    products of the step before have read."""
    stages = max(2, min(pair[0].stages, steps_each))
    statements: list[Statement] = []
    for ahead in range(stages - 1):
        copies = [s for tile, load in zip(pair, loads, strict=True) for s in load(index_const(ahead), index_const(ahead * tile.elements))]
        some = compare("lt", index_const(ahead), steps)
        statements += copies if some == TRUE else [If(some, block(copies))]
        statements.append(CommitCopies())
    step = Var("step", steps_each)
    body: list[Statement] = [AwaitCopies(stages - 2), Barrier()]
    if steps_each > stages - 1:
        following = step + (stages - 1)
        slot = Var("free_slot", buffers)
        copies = [Let(slot, following % stages)]
        copies += [s for tile, load in zip(pair, loads, strict=True) for s in load(following, slot * tile.elements)]
        body.append(If(compare("lt", following, steps), block(copies)))
    body.append(CommitCopies())
    slot = Var("slot", buffers)
    body.append(Let(slot, step % stages))
    body += inner([slot * tile.elements for tile in pair])
    return [*statements, For(step, steps, block(body))]


def _double_buffer(
    pair: tuple[Tile, Tile],
    loads: Loads,
    thread: Var,
    steps: Expr,
    steps_each: int,
    inner: Callable[[Sequence[Expr]], list[Statement]],
) -> list[Statement]:
    """The next tiles are fetched to registers while the present ones are multiplied, and then stored to the other buffer."""
    zero = index_const(0)
    root = [s for load in loads for s in load(zero, zero)]
    root += [s for tile in pair for s in _to_shared(tile, thread, zero)]
    root.append(Barrier())
    step = Var("step", steps_each)
    more = compare("lt", step + 1, steps)
    body: list[Statement] = []
    if steps_each > 1:
        body.append(If(more, block([s for load in loads for s in load(step + 1, zero)])))
    body += inner([step % 2 * tile.elements for tile in pair])
    if steps_each > 1:
        body.append(If(more, block([s for t in pair for s in _to_shared(t, thread, (step + 1) % 2)])))
        body.append(Barrier())
    return [*root, For(step, steps, block(body))]


def _to_shared(tile: Tile, thread: Var, buffer: Expr) -> list[Statement]:
    """Stores what was fetched to one of the two tiles, [k][m] or [k][n]."""
    run, line = Var(f"{tile.name}_run", tile.run), Var(f"{tile.name}_line", tile.reach)
    base = buffer * tile.elements
    statements: list[Statement] = []
    for number in range(tile.passes):
        other = line + number * tile.reach
        inner: list[Statement] = []
        if tile.along_r:
            for lane in range(tile.lanes):
                value = Load(tile.stage, (index_const(number * tile.lanes + lane),), "f32")
                inner.append(Store(tile.tile, base + (run * tile.lanes + lane) * tile.ld + other, value))
        else:
            value = Load(tile.stage, (index_const(number * tile.lanes),), "f32", tile.lanes)
            inner.append(Store(tile.tile, base + other * tile.ld + run * tile.lanes, value))
        statements += in_tile(tile, line, number, block(inner))
    return statements


def _thread_grid(thread: Var, count_m: int, count_n: int) -> tuple[Var, Var, list[Statement]]:
    """Positions of the thread in the block's grid of thread tiles. A warp covers a patch as square as possible, so that its threads share
    what they read; neighbouring threads alternate along m, which lets the hardware merge equal addresses of vector loads."""
    warp_n = next((w for w in (8, 4, 16, 2, 32, 1) if count_n % w == 0 and count_m % (WARP // w) == 0), None)
    m, n = Var("thread_m", count_m), Var("thread_n", count_n)
    if warp_n is None:
        return m, n, [Let(m, thread // count_n), Let(n, thread % count_n)]
    warp_m = WARP // warp_n
    warps_n = count_n // warp_n
    lane, warp = thread % WARP, thread // WARP
    if warp_m % 2 == 0:
        lane_m = lane // (2 * warp_n) * 2 + lane % 2
        lane_n = lane % (2 * warp_n) // 2
    else:
        lane_m, lane_n = lane // warp_n, lane % warp_n
    return m, n, [Let(m, warp // warps_n * warp_m + lane_m), Let(n, warp % warps_n * warp_n + lane_n)]


def _inner_product(
    a: Tile, b: Tile, schedule: ContractionSchedule, thread_m: Var, thread_n: Var, buffers: Sequence[Expr]
) -> list[Statement]:
    """acc[i, j] += a[k, i] * b[k, j] over the tiles that start at the offsets `buffers`. Of a deep tile a thread reads four k at a time."""
    tm, tn, bk = schedule.thread_m, schedule.thread_n, schedule.block_k
    group = DEEP if a.deep or b.deep else 1
    stretch = bk
    # a single step is straight code, of which the assembler would load every fragment first
    limit = UNROLLED_PRODUCTS if buffers[0] != index_const(0) else UNROLLED_PRODUCTS // 8
    while stretch * tm * tn > limit and stretch > 4:
        stretch //= 2
    outer, inner, within = Var("k_outer", bk // stretch), Var("k", stretch // group), Var("k_inner", group)
    first = inner * group
    k = outer * stretch + first if stretch < bk else first
    i, j = Var("i", tm), Var("j", tn)
    body: list[Statement] = []
    single: list[Statement] = []
    factors = []
    for tile, count, thread, part, at, start in (
        (a, tm, thread_m, "a_part", i, buffers[0]),
        (b, tn, thread_n, "b_part", j, buffers[1]),
    ):
        if tile.deep:
            body.append(Allocate(Buffer(part, "f32", count * group, "register")))
            for number in range(count):
                offset = start + tile.spread(number, thread, count) * tile.ld + k
                body.append(Store(part, index_const(number * group), Load(tile.tile, (offset,), "f32", group)))
            factors.append(Load(part, (at * group + within,), "f32"))
            continue
        width = min(4, count)
        single.append(Allocate(Buffer(part, "f32", count, "register")))
        for number in range(0, count, width):
            offset = start + (k + within) * tile.ld + tile.spread(number, thread, count)
            single.append(Store(part, index_const(number), Load(tile.tile, (offset,), "f32", width)))
        factors.append(Load(part, (at,), "f32"))
    place = i * tn + j
    update = Store("acc", place, Load("acc", (place,), "f32") + factors[0] * factors[1])
    single.append(For(i, index_const(tm), For(j, index_const(tn), update, "unroll"), "unroll"))
    body.append(For(within, index_const(group), block(single), "unroll"))
    loop: Statement = For(inner, index_const(stretch // group), block(body), "unroll")
    return [For(outer, index_const(bk // stretch), loop) if stretch < bk else loop]


def _whole_rows(
    form: ProductForm,
    schedule: ContractionSchedule,
    bind: Mapping[Var, Expr],
    first: Sequence[Expr],
    pair: tuple[Tile, Tile],
    thread: Var,
    thread_m: Var,
    thread_n: Var,
) -> list[Statement]:
    """Reductions over n, for which the block holds whole rows, and then the store."""
    tm, tn = schedule.thread_m, schedule.thread_n
    if schedule.block_n < form.problem.n or schedule.split > 1:
        raise Unsuitable("a block does not hold whole rows")
    i, j = Var("i", tm), Var("j", tn)

    def spill(place: Callable[[Expr, Expr], Expr]) -> Statement:
        column = pair[1].spread(j, thread_n, tn)
        store = Store(TILE, place(pair[0].spread(i, thread_m, tm), column), Load("acc", (i * tn + j,), "f32"))
        held: Statement = store if schedule.block_n == form.problem.n else If(compare("lt", column, index_const(form.problem.n)), store)
        return For(i, index_const(tm), For(j, index_const(tn), held, "unroll"), "unroll")

    at = RowBlock(form.step.name, schedule.block_m, form.problem.n, schedule.threads, form.problem.m, first[0], form.m, form.n, thread)
    stages = [replace(stage, body=substitute(stage.body, bind)) for stage in form.row_stages]
    return row_epilogue(at, stages, substitute(form.element, bind), substitute(form.offset, bind), form.output, spill)


def _epilogue(
    form: ProductForm,
    schedule: ContractionSchedule,
    bind: Mapping[Var, Expr],
    first: Sequence[Expr],
    pair: tuple[Tile, Tile],
    thread_m: Var,
    thread_n: Var,
) -> list[Statement]:
    """Stores the thread's elements, in vectors along n where the output allows it."""
    tm, tn = schedule.thread_m, schedule.thread_n
    lanes = 1 if pair[1].deep else min(form.problem.store_lanes, tn)
    i, j = Var("i", tm), Var("j", tn // lanes)
    element, offset = substitute(form.element, bind), substitute(form.offset, bind)
    if lanes > 1:
        wide = vectors_fit(element, form.n[-1], lanes, form.layouts)
        assert wide is not None
        element = as_lanes(wide, lanes)
    held = Load("acc", (i * tn + j * lanes,), "f32", lanes)
    element = replace_loads(element, {form.step.name: held})

    def columns(mapping: Mapping[Var, Expr]) -> list[Statement]:
        def store(n: Var) -> list[Statement]:
            lets, more = named(decode(n, form.n))
            everything = {**mapping, **more}
            shared, (where, what) = bind_shared([substitute(offset, everything), substitute(element, everything)])
            return [*lets, *shared, Store(form.output, where, what)]

        position = first[1] + pair[1].spread(j * lanes, thread_n, tn)
        inner = block(below(position, form.problem.n, "n", store))
        return [For(j, index_const(tn // lanes), inner, "unroll")]

    def row(m: Var) -> list[Statement]:
        lets, mapping = named(decode(m, form.m))
        return [*lets, *columns(mapping)]

    position = first[0] + pair[0].spread(i, thread_m, tm)
    return [For(i, index_const(tm), block(below(position, form.problem.m, "m", row)), "unroll")]


def _meeting(
    schedule: ContractionSchedule, pair: tuple[Tile, Tile], part: Expr, thread_m: Var, thread_n: Var
) -> list[Statement]:
    """Puts the thread's sums into the block's part of `parts` [part, m, n], and meets the other blocks of the cluster."""
    bm, bn, tm, tn = schedule.block_m, schedule.block_n, schedule.thread_m, schedule.thread_n
    lanes = 1 if pair[1].deep else min(4, tn)
    i, j = Var("i", tm), Var("j", tn // lanes)
    m, n = pair[0].spread(i, thread_m, tm), pair[1].spread(j * lanes, thread_n, tn)
    put = Store(PARTS, part * (bm * bn) + m * bn + n, Load("acc", (i * tn + j * lanes,), "f32", lanes))
    return [
        Allocate(Buffer(PARTS, "f32", schedule.split * bm * bn, "cluster")),
        For(i, index_const(tm), For(j, index_const(tn // lanes), put, "unroll"), "unroll"),
        ClusterBarrier(),
    ]


def _shared_epilogue(
    form: ProductForm,
    schedule: ContractionSchedule,
    bind: Mapping[Var, Expr],
    first: Sequence[Expr],
    part: Expr,
    thread: Var,
) -> list[Statement]:
    """Each block of the cluster adds up and stores its share of the tile, in vectors along n where the output allows it."""
    bm, bn = schedule.block_m, schedule.block_n
    lanes = form.problem.store_lanes
    share = bm * bn // (schedule.split * lanes)
    element, offset = substitute(form.element, bind), substitute(form.offset, bind)
    if lanes > 1:
        wide = vectors_fit(element, form.n[-1], lanes, form.layouts)
        assert wide is not None
        element = as_lanes(wide, lanes)
    turn = Var("turn", -(-share // schedule.threads))

    def vector(at: Var) -> list[Statement]:
        place = Var("place", bm * bn)
        mine = part * share + at
        total: Expr = Load(PARTS, (place,), "f32", lanes)
        for other in range(1, schedule.split):
            total = total + Load(PARTS, (place + other * bm * bn,), "f32", lanes)
        held = Var("sum", None, "f32", lanes)
        value = replace_loads(element, {form.step.name: held})

        def row(m: Var) -> list[Statement]:
            m_lets, mapping = named(decode(m, form.m))

            def store(n: Var) -> list[Statement]:
                n_lets, more = named(decode(n, form.n))
                everything = {**mapping, **more}
                shared, (where, what) = bind_shared([substitute(offset, everything), substitute(value, everything)])
                return [*n_lets, *shared, Store(form.output, where, what)]

            return [*m_lets, *below(first[1] + place % bn, form.problem.n, "n", store)]

        return [Let(place, mine * lanes), Let(held, total), *below(first[0] + place // bn, form.problem.m, "m", row)]

    body = block(below(turn * schedule.threads + thread, share, "at", vector))
    # no block ends while others read its sums
    return [For(turn, index_const(turn.extent or 1), body, "unroll"), ClusterBarrier()]
