"""A recurrent layer as one CPU kernel: one parallel region around all steps, and a barrier after each.

    in one team of threads:
        for each step t:
            for each worker:                                 (in parallel; a worker always has the same panels)
                for each of its panels of units, forwards if t is even, else backwards:
                    for each tile of rows:
                        for each group of gates:
                            sums[gate][row][vector] += A[row, r] * B[r, gate, vector]      for r in reduction
                        out[t + 1, row, unit] = value(sums, what is stored for t)
            barrier

Weights are packed in panels of units, with all gates of a panel beside one another, so that a thread's share of them stays in its level-2 cache. With
fewer threads at run time than planned, a thread has several workers' panels.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from tilewright.codegen.access import bind_shared, merge_axes, vectorise
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.prefetch import prefetch
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import ZERO, Apply, Const, Expr, Load, Var, as_lanes, binary, coefficient, index_const, loads, mod, rewrite, substitute
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Let, Statement, Store, substitute_in
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.kernels.cpu.common import common_origin
from tilewright.kernels.cpu.recurrence.space import CpuRecurrenceSchedule
from tilewright.kernels.cpu.transposition import vector_pieces
from tilewright.kernels.recurrence_form import GATES, Product, RecurrenceForm, recurrence_form


def vector_form(problem: Problem, lanes: int) -> RecurrenceForm:
    """The form of a recurrence whose results are computed in vectors of units.

    Raises:
        Unsuitable: as `recurrence_form`, and if that is impossible.
    """
    form = recurrence_form(problem)
    contiguous = all(coefficient(offset, form.unit) == 1 for offset in form.offsets)
    if not contiguous or any(_wide(value, form.unit, lanes) is None for value in form.values):
        raise Unsuitable("its results cannot be computed in vectors of units")
    return form


def _wide(value: Expr, unit: Var, lanes: int) -> Expr | None:
    """The value of `lanes` neighbouring units; None if it cannot be vectorised."""
    if lanes == 1:
        return value
    wide = vectorise(value, unit, lanes, resident=lambda load: load.buffer == GATES)
    return None if wide is None else as_lanes(wide, lanes)


def lower_recurrence(problem: Problem, form: RecurrenceForm, schedule: CpuRecurrenceSchedule, machine: Machine) -> Lowered:
    """The kernel of all steps, with its weights packed at compile time."""
    weights = [_packed(problem, product, number, schedule) for number, product in enumerate(form.products)]
    storage = MappingProxyType({entry.value.name: entry for entry in weights})
    panels = -(-form.facts.units // schedule.panel)
    panel_bytes = form.facts.weight_bytes * schedule.panel // form.facts.units
    each = -(-panels // schedule.workers)
    worker, position = Var("worker", -(-panels // each)), Var("position", each)
    first = worker * each
    count = index_const(each) if panels % each == 0 else binary("min", panels - first, index_const(each))
    panel = Var("panel", panels)
    turn = mod(form.step, 2) * (count - 1 - position * 2)
    level_2 = machine.cache(2)
    leaves = level_2 is not None and each * panel_bytes > level_2.bytes
    body: Statement = _Panel(form, schedule, panel, tuple(weights), level_2.line_bytes if level_2 is not None and leaves else 0).emit()
    body = For(position, count, block(Let(panel, first + position + turn), body))
    shared = (worker.extent or 1) > 1
    body = For(worker, index_const(worker.extent or 1), body, "parallel" if shared else "serial")
    body = For(form.step, index_const(form.facts.steps), body, "team" if shared else "serial")
    header = f"{described(problem)}\n{schedule}"
    roles = {entry.value.name: f"weights in panels of {schedule.panel} units" for entry in weights}
    kernel, arguments = assemble("recurrence", body, problem.with_storage(storage), problem.region.outputs, header=header, roles=roles)
    return Lowered(problem.region, str(schedule), (kernel,), (Call.of(kernel, arguments),), storage)


def _packed(problem: Problem, product: Product, number: int, schedule: CpuRecurrenceSchedule) -> Storage:
    """The weights of a product as (panel, gate / gates of a tile, reduced..., gate mod that, unit mod panel); units past the last are zeros."""
    sizes = product.view[0]
    reduced = tuple((dim, 0) for dim in range(2, len(sizes)))
    value = Value(f"{product.b}@{problem.region.name}.{number}", sizes, problem.values[product.b].dtype)
    return Storage(value, Layout(sizes, ((1, 0), (0, 0), *reduced, (0, schedule.gates), (1, schedule.panel))), product.b, product.view)


@dataclass(frozen=True)
class _Panel:
    """Emits one step of one panel of units. `line_bytes`: bytes of a cache line if panels are prefetched, else 0."""

    form: RecurrenceForm
    schedule: CpuRecurrenceSchedule
    panel: Var
    weights: tuple[Storage, ...]
    line_bytes: int

    def emit(self) -> Block:
        height, rows = self.schedule.rows, self.form.facts.rows
        tile = Var("tile", rows // height)
        parts: list[Statement] = []
        if rows // height > 1:
            parts.append(For(tile, index_const(rows // height), self._tile(tile, height)))
        elif rows // height:
            parts.append(self._tile(ZERO, height))
        if rows % height:
            parts.append(self._tile(index_const(rows // height), rows % height))
        return Block(tuple(parts))

    def _tile(self, tile: Expr, height: int) -> Block:
        """All gates of `height` rows, and the results that follow from them."""
        row = tile * self.schedule.rows
        sums = Allocate(Buffer("sums", self.form.dtype, height * self.form.facts.gates * self.schedule.panel, "register"))
        products = [self._product(number, tile, height) for number in range(len(self.form.products))]
        full, rest = divmod(self.form.facts.units, self.schedule.panel)
        v = Var("v", self.schedule.vectors)
        whole = For(v, index_const(v.extent or 1), self._results(row, height, v * self.schedule.lanes, self.schedule.lanes), "unroll")
        pieces = vector_pieces(rest, self.schedule.lanes)
        last = [self._results(row, height, index_const(start), lanes) for start, lanes in pieces]
        results = If(self.panel < full, whole, block(last)) if full and rest else whole if full else block(last)
        return block(sums, Block(tuple(products)), results)

    def _product(self, number: int, tile: Expr, height: int) -> Statement:
        """The sums of a product, as many gates at a time as the tile has: in registers, then in the array `sums`."""
        groups = self.form.products[number].gates // self.schedule.gates
        gate = Var("gate", groups)
        body = self._gates(number, gate, tile, height)
        return substitute_in(body, {gate: ZERO}) if groups == 1 else For(gate, index_const(groups), body)

    def _gates(self, number: int, gate: Var, tile: Expr, height: int) -> Statement:
        """The sums of group `gate` of a product's gates."""
        row = tile * self.schedule.rows
        form, lanes, chains = self.form, self.schedule.lanes, self.schedule.chains
        product, packed = form.products[number], self.weights[number]
        wide = self.schedule.gates * self.schedule.vectors
        size = chains * height * wide
        acc, k = "acc", Var("k", size)
        zero = Apply("broadcast", (Const(0.0, form.dtype),), form.dtype, lanes)
        result: list[Statement] = [Allocate(Buffer(acc, form.dtype, size * lanes, "register", lanes))]
        result.append(For(k, index_const(size), Store(acc, k * lanes, zero), "unroll"))
        start = packed.layout.offset((gate * self.schedule.gates, self.panel * self.schedule.panel, *product.r))
        axes, (a, base) = merge_axes(product.r, [product.a, start])
        *outer, inner = axes or (Var("single", 1),)
        i, v = Var("i", height), Var("v", wide)

        def step(at: Expr, chain: int) -> list[Statement]:
            """acc[chain][row][v] += A[row] * B[v]"""
            b, element = f"b{chain}", Var(f"a{chain}", None, form.dtype)
            load = Load(packed.value.name, (substitute(base, {inner: at}) + v * lanes,), form.dtype, lanes)
            place = ((i + chain * height) * wide + v) * lanes
            term = Apply("mul", (element, Load(b, (v * lanes,), form.dtype, lanes)), form.dtype, lanes)
            add = Store(acc, place, Apply("add", (Load(acc, (place,), form.dtype, lanes), term), form.dtype, lanes))
            origin, value = common_origin(substitute(a, {inner: at, form.row: row + i}), (i,))
            return [
                Allocate(Buffer(b, form.dtype, wide * lanes, "register", lanes)),
                For(v, index_const(wide), Store(b, v * lanes, load), "unroll"),
                *self._prefetch(number, tile, substitute(base, {inner: at})),
                *origin,
                For(i, index_const(height), block(Let(element, value), For(v, index_const(wide), add, "unroll")), "unroll"),
            ]

        extent = inner.extent or 0
        group, left = Var("group", extent // chains), Var("left", extent % chains)
        loops: list[Statement] = [For(group, index_const(extent // chains), block(*(step(group * chains + c, c) for c in range(chains))))]
        if extent % chains:
            loops.append(For(left, index_const(extent % chains), block(step(extent // chains * chains + left, 0))))
        body: Statement = block(loops)
        for axis in reversed(outer):
            body = For(axis, index_const(axis.extent or 0), body)
        total: Expr = Load(acc, ((i * wide + v) * lanes,), form.dtype, lanes)
        for chain in range(1, chains):
            total = Apply("add", (total, Load(acc, (((i + chain * height) * wide + v) * lanes,), form.dtype, lanes)), form.dtype, lanes)
        where = (i * form.facts.gates + product.first + gate * self.schedule.gates) * self.schedule.panel + v * lanes
        summed = For(i, index_const(height), For(v, index_const(wide), Store("sums", where, total), "unroll"), "unroll")
        return block(result, body, summed)

    def _prefetch(self, number: int, tile: Expr, place: Expr) -> list[Statement]:
        """Prefetches the panel that comes next while the tiles of this one are computed: each tile a share of the lines that a step of the sum reads
        at `place`. With a single row there is too little to compute meanwhile."""
        tiles, packed = -(-self.form.facts.rows // self.schedule.rows), self.weights[number]
        line = self.line_bytes // self.form.facts.element_bytes
        if self.form.facts.rows == 1 or not self.line_bytes:
            return []
        lines = -(-self.schedule.gates * self.schedule.panel // line)
        share = -(-lines // tiles)
        following = place + (1 - mod(self.form.step, 2) * 2) * (packed.layout.size // (self.panel.extent or 1))
        return [prefetch(packed.value.name, following + (tile * share + at) * line) for at in range(share)]

    def _results(self, row: Expr, height: int, start: Expr, lanes: int) -> Statement:
        """Values and stores of `lanes` units, from `start` on in the panel, of each row."""
        form, i = self.form, Var("i", height)

        def held(node: Expr) -> Expr:
            if isinstance(node, Load) and node.buffer == GATES:
                return Load("sums", ((i * form.facts.gates + node.index[0]) * self.schedule.panel + start,), form.dtype, lanes)
            return node

        place: dict[Var, Expr] = {form.unit: self.panel * self.schedule.panel + start, form.row: row + i}
        wide = [_wide(value, form.unit, lanes) for value in form.values]
        values = [rewrite(substitute(value, place), held) for value in wide if value is not None]
        lets, bound = bind_shared([*values, *(substitute(offset, place) for offset in form.offsets)])
        stores = [Store(name, where, value) for name, value, where in zip(form.outputs, bound, bound[len(values) :], strict=False)]
        assert len(values) == len(form.outputs) and not any(load.buffer == GATES for load in loads(*values))
        return For(i, index_const(height), block(lets, stores))
