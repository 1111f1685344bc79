"""Lowering of the `contraction` schema: implicit GEMM with tiles of both factors in shared memory and of the result in registers.

Each block computes one tile of C. Per step over the reduction, threads fetch the next tiles of A and B from global memory to registers,
multiply the present tiles out of shared memory, and then store what they fetched to the other of two buffers: one barrier a step. Tiles lie
as [k][m] and [k][n], so that the inner product reads vectors. Rows past the end repeat the last one and are never stored; elements past
the end of the reduction are zero.

With `split` > 1 the blocks of a tile divide the reduction and store parts, which a second kernel adds in order: no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.gpu.common import (
    Unsuitable,
    as_lanes,
    below,
    decode,
    index_const,
    named,
    replace_loads,
    vectors_fit,
)
from tilewright.codegen.gpu.product import ProductForm, product_form
from tilewright.codegen.gpu.window import lower_window, window_form
from tilewright.graph.contraction import contraction
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import (
    TRUE,
    Const,
    Expr,
    Linear,
    Load,
    Var,
    binary,
    compare,
    from_linear,
    linear,
    range_of,
    rewrite,
    select,
    substitute,
    variables,
)
from tilewright.ir.graph import Value
from tilewright.ir.kernel import (
    Allocate,
    Barrier,
    Block,
    Buffer,
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
from tilewright.ir.region import Call, Lowered, Region, Storage
from tilewright.schedule.gpu_contraction import PADDING, ContractionSchedule, GemvSchedule, Operand, blocks_to_ask_for
from tilewright.schedule.gpu_window import WindowSchedule

UNROLLED_PRODUCTS = 1024
"""Multiply-adds that one unrolled stretch of the inner loop holds at most."""
WARP = 32


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
    if schedule.split == 1:
        form = product_form(region, layouts, values, constants)
        body, launch = lower(form)
        kernel, names = _assembled(region, form, schedule, body, launch, machine)
        return Lowered(region, str(schedule), (kernel,), (Call(kernel.name, names),), form.storage)
    first, second, name, work = split_regions(region, constants, schedule.split)
    layouts, values = {**layouts, name: work.layout}, {**values, name: work.value}
    form = product_form(first, layouts, values, constants)
    body, launch = lower(form)
    kernel, names = _assembled(first, form, schedule, body, launch, machine)
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
        header=str(schedule),
        launch=launch,
        blocks_per_processor=occupancy,
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


@dataclass(frozen=True)
class _Tile:
    """One factor's tile: how threads share its loads. `own` are its axes besides r, `size` elements of them, `ld` the tile's row in elements."""

    name: str
    expr: Expr
    own: tuple[Var, ...]
    operand: Operand
    size: int
    depth: int
    threads: int

    @property
    def along_r(self) -> bool:
        return self.operand.along == "r"

    @property
    def ld(self) -> int:
        return self.size + (PADDING if self.along_r else 0)

    @property
    def lanes(self) -> int:
        return self.operand.lanes

    @property
    def run(self) -> int:
        """Threads that load neighbouring vectors."""
        return (self.depth if self.along_r else self.size) // self.lanes

    @property
    def reach(self) -> int:
        """Lines (along the other direction) that all threads load at once."""
        return self.threads // self.run

    @property
    def passes(self) -> int:
        return -(-(self.size if self.along_r else self.depth) // self.reach)

    @property
    def lines(self) -> int:
        return self.size if self.along_r else self.depth

    @property
    def stage(self) -> str:
        return f"{self.name}_next"

    @property
    def tile(self) -> str:
        return f"{self.name}_tile"


def tiles(form: ProductForm, schedule: ContractionSchedule) -> tuple[Block, Launch]:
    """The body of the tiled kernel. A form whose offset knows a variable `part` stores the parts of a split reduction."""
    problem = form.problem
    bm, bn, bk = schedule.block_m, schedule.block_n, schedule.block_k
    tm, tn = schedule.thread_m, schedule.thread_n
    steps_in_all = -(-problem.r // bk)
    steps_each = -(-steps_in_all // schedule.split)
    counts = (schedule.split, problem.batch, -(-problem.m // bm), -(-problem.n // bn))
    launch = Launch((prod(counts), 1, 1), (schedule.threads, 1, 1))
    thread = thread_variable(launch)
    part, batch = Var("part", counts[0]), Var("batch", counts[1])
    tile_m, tile_n = Var("tile_m", counts[2]), Var("tile_n", counts[3])
    lets, where = named(decode(block_variable(launch), (part, batch, tile_m, tile_n)))
    root: list[Statement] = list(lets)
    part_, batch_, tile_m_, tile_n_ = (where.get(v, v) for v in (part, batch, tile_m, tile_n))
    batch_lets, batch_values = named(decode(batch_, form.batch))
    root += batch_lets
    bind = {**batch_values, **({part: part_} if part in where else {})}
    a = _Tile("a", substitute(form.a, bind), form.m, problem.a, bm, bk, schedule.threads)
    b = _Tile("b", substitute(form.b, bind), form.b_n, problem.b, bn, bk, schedule.threads)
    first = tile_m_ * bm, tile_n_ * bn
    loads = []
    for tile, start in zip((a, b), first, strict=True):
        setup, load = _loader(tile, start, form, thread, part_ * (steps_each * bk), bk)
        root += setup
        root.append(Allocate(Buffer(tile.stage, "f32", tile.passes * tile.lanes, "register", tile.lanes)))
        root.append(Allocate(Buffer(tile.tile, "f32", min(2, steps_each) * bk * tile.ld, "shared")))
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
    zero = index_const(0)
    root += [s for load in loads for s in load(zero)]
    root += [s for tile in (a, b) for s in _to_shared(tile, thread, zero)]
    root.append(Barrier())
    step = Var("step", steps_each)
    more = compare("lt", step + 1, steps)
    body: list[Statement] = []
    if steps_each > 1:
        body.append(If(more, block([s for load in loads for s in load(step + 1)])))
    body += _inner_product(a, b, schedule, thread_m, thread_n, step % 2)
    if steps_each > 1:
        body.append(If(more, block([s for t in (a, b) for s in _to_shared(t, thread, (step + 1) % 2)])))
        body.append(Barrier())
    root.append(For(step, steps, block(body)))
    root += _epilogue(form, schedule, bind, first, thread_m, thread_n)
    return block(root), launch


def _loader(tile: _Tile, start: Expr, form: ProductForm, thread: Var, first_r: Expr, bk: int):  # noqa: ANN202
    """(statements before the loop, function from a step to the statements that fetch its elements to registers)."""
    fastest = form.r[-1] if tile.along_r else tile.own[-1] if tile.own else None
    expr = vectors_fit(tile.expr, fastest, tile.lanes, form.layouts) if tile.lanes > 1 and fastest else tile.expr
    assert expr is not None
    run, line = Var(f"{tile.name}_run", tile.run), Var(f"{tile.name}_line", tile.reach)
    setup: list[Statement] = [Let(run, thread % tile.run), Let(line, thread // tile.run)]
    extent = prod(axis.extent or 1 for axis in tile.own)
    own_lanes = 1 if tile.along_r else tile.lanes
    total_r = prod(axis.extent or 1 for axis in form.r)
    # the positions of this thread along m (or n): one for each pass along r, else a single one
    rows: list[Expr] = []
    for number in range(tile.passes if tile.along_r else 1):
        position = start + (line + number * tile.reach if tile.along_r else run * tile.lanes)
        last = extent - own_lanes
        if range_of(position)[1] > last:
            position = binary("min", position, index_const(last))
        row = Var(f"{tile.name}_row{number}", extent)
        setup.append(Let(row, position))
        row_lets, mapping = named(_suffixed(decode(row, tile.own), f"_{tile.name}{number}", setup))
        setup += row_lets
        hoisted, based = _hoist(substitute(expr, mapping), set(form.r), f"{tile.name}{number}")
        setup += hoisted
        rows.append(based)

    def load(step: Expr) -> list[Statement]:
        statements: list[Statement] = []
        for number in range(tile.passes):
            along = run * tile.lanes if tile.along_r else line + number * tile.reach
            position = first_r + step * bk + along
            value = substitute(rows[number if tile.along_r else 0], decode(position, form.r))
            value = as_lanes(value, tile.lanes)
            if total_r % bk:
                value = select(
                    compare("lt", position, index_const(total_r)), value, as_lanes(Const(0.0, "f32"), tile.lanes)
                )
            one: Statement = Store(tile.stage, index_const(number * tile.lanes), value)
            statements += _in_tile(tile, line, number, one)
        return statements

    return setup, load


def _suffixed(axes: Mapping[Var, Expr], suffix: str, setup: list[Statement]) -> dict[Var, Expr]:
    """Positions of axes under names of their own, where they are more than a variable."""
    result: dict[Var, Expr] = {}
    for axis, expr in axes.items():
        if isinstance(expr, (Var, Const)):
            result[axis] = expr
        else:
            variable = Var(axis.name + suffix, axis.extent)
            setup.append(Let(variable, expr))
            result[axis] = variable
    return result


def _in_tile(tile: _Tile, line: Var, number: int, statement: Statement) -> list[Statement]:
    """The statement, for the threads whose line lies in the tile."""
    condition = compare("lt", line + number * tile.reach, index_const(tile.lines))
    return [statement] if condition == TRUE else [If(condition, block([statement]))]


def _hoist(expr: Expr, varying: set[Var], name: str) -> tuple[list[Statement], Expr]:
    """The part of every offset that no varying variable moves, under a name: it is computed once, before the loop."""
    lets: list[Statement] = []
    known: dict[Expr, Var] = {}

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or len(node.index) != 1:
            return node
        form = linear(node.index[0])
        fixed = tuple(term for term in form.terms if not variables(term[0]) & varying)
        if len(fixed) + (1 if form.constant else 0) < 2 and not (fixed and fixed[0][1] != 1):
            return node
        base = from_linear(Linear(fixed, form.constant))
        if base not in known:
            low, high = range_of(base)
            bounded = low >= 0 and high != float("inf")
            known[base] = Var(f"{name}_base{len(known)}", int(high) + 1 if bounded else None)
            lets.append(Let(known[base], base))
        rest = from_linear(Linear(tuple(term for term in form.terms if term not in fixed), 0))
        return replace(node, index=(rest + known[base],))

    return lets, rewrite(expr, visit)


def _to_shared(tile: _Tile, thread: Var, buffer: Expr) -> list[Statement]:
    """Stores what was fetched to one of the two tiles, [k][m] or [k][n]."""
    run, line = Var(f"{tile.name}_run", tile.run), Var(f"{tile.name}_line", tile.reach)
    base = buffer * (tile.depth * tile.ld)
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
        statements += _in_tile(tile, line, number, block(inner))
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


def _spread(index: Expr | int, thread: Var, per_thread: int, size: int) -> Expr:
    """The position in a tile of a thread's element `index`: vectors of four (or fewer) of neighbouring threads lie side by side, and a
    thread's next vector a full row of threads further on."""
    width = min(4, per_thread)
    groups = per_thread // width
    index = index_const(index) if isinstance(index, int) else index
    return index // width * (size // groups) + thread * width + index % width


def _inner_product(
    a: _Tile, b: _Tile, schedule: ContractionSchedule, thread_m: Var, thread_n: Var, buffer: Expr
) -> list[Statement]:
    """acc[i, j] += a[k, i] * b[k, j] over the tile."""
    tm, tn, bk = schedule.thread_m, schedule.thread_n, schedule.block_k
    stretch = bk
    # a single step is straight code, of which the assembler would load every fragment first
    limit = UNROLLED_PRODUCTS if buffer != index_const(0) else UNROLLED_PRODUCTS // 8
    while stretch * tm * tn > limit and stretch > 4:
        stretch //= 2
    outer, inner = Var("k_outer", bk // stretch), Var("k", stretch)
    k = outer * stretch + inner if stretch < bk else inner
    i, j = Var("i", tm), Var("j", tn)
    body: list[Statement] = []
    for tile, count, thread, name in ((a, tm, thread_m, "a_part"), (b, tn, thread_n, "b_part")):
        width = min(4, count)
        body.append(Allocate(Buffer(name, "f32", count, "register")))
        for start in range(0, count, width):
            offset = buffer * (tile.depth * tile.ld) + k * tile.ld + _spread(start, thread, count, tile.size)
            body.append(Store(name, index_const(start), Load(tile.tile, (offset,), "f32", width)))
    place = i * tn + j
    product = Load("a_part", (i,), "f32") * Load("b_part", (j,), "f32")
    update = Store("acc", place, Load("acc", (place,), "f32") + product)
    body.append(For(i, index_const(tm), For(j, index_const(tn), update, "unroll"), "unroll"))
    loop: Statement = For(inner, index_const(stretch), block(body), "unroll")
    return [For(outer, index_const(bk // stretch), loop) if stretch < bk else loop]


def _epilogue(
    form: ProductForm,
    schedule: ContractionSchedule,
    bind: Mapping[Var, Expr],
    first: Sequence[Expr],
    thread_m: Var,
    thread_n: Var,
) -> list[Statement]:
    """Stores the thread's elements, in vectors along n where the output allows it."""
    tm, tn = schedule.thread_m, schedule.thread_n
    lanes = min(form.problem.store_lanes, tn)
    i, j = Var("i", tm), Var("j", tn // lanes)
    element, offset = substitute(form.element, bind), substitute(form.offset, bind)
    if lanes > 1:
        wide = vectors_fit(element, form.n[-1], lanes, form.layouts)
        assert wide is not None
        element = as_lanes(wide, lanes)
    held = Load("acc", (i * tn + j * lanes,), "f32", lanes)
    element = replace_loads(element, {form.step.name: held})

    def columns(m: Var, mapping: Mapping[Var, Expr]) -> list[Statement]:
        def store(n: Var) -> list[Statement]:
            lets, more = named(decode(n, form.n))
            everything = {**mapping, **more}
            shared, (where, what) = bind_shared([substitute(offset, everything), substitute(element, everything)])
            return [*lets, *shared, Store(form.output, where, what)]

        position = first[1] + _spread(j * lanes, thread_n, tn, schedule.block_n)
        inner = block(below(position, form.problem.n, "n", store))
        return [For(j, index_const(tn // lanes), inner, "unroll")]

    def row(m: Var) -> list[Statement]:
        lets, mapping = named(decode(m, form.m))
        return [*lets, *columns(m, mapping)]

    position = first[0] + _spread(i, thread_m, tm, schedule.block_m)
    return [For(i, index_const(tm), block(below(position, form.problem.m, "m", row)), "unroll")]
