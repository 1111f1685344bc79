"""Attention whose keys are divided among blocks (Flash-Decoding, Dao et al., 2023): what each part stores, and the kernel that puts parts together.

A few queries do not fill a GPU with tiles of their own. Each part of the keys gives a row the sums of its values, weighted by exp(logit - greatest of
the part), the total of these weights, and that greatest logit; the parts are rescaled to the greatest of all and added in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.codegen.access import bind_shared
from tilewright.codegen.assemble import assemble, block
from tilewright.codegen.common import below, decode, named, vectors_fit
from tilewright.codegen.describe import described
from tilewright.ir.computation import lowest
from tilewright.ir.expr import Const, Expr, Load, Var, as_lanes, binary, index_const, replace_loads, substitute, unary
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Allocate, Buffer, For, Kernel, Launch, Let, Statement, Store, block_variable, thread_variable
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage
from tilewright.kernels.attention_form import SUM, AttentionForm, finite, inverse

THREADS = 128
"""Threads of a block that puts parts together."""
UNROLLED_PARTS = 16
"""Maximum parts of unrolled loops over them."""


@dataclass(frozen=True)
class Parts:
    """`count` parts of the keys of an attention that stores `output`. Each row of a part has d sums, a greatest logit and a total."""

    output: str
    count: int

    @property
    def sums(self) -> str:
        return f"{self.output}#sums"

    @property
    def rows(self) -> str:
        return f"{self.output}#rows"

    def place(self, row: Expr, part: Expr) -> Expr:
        """The number of a part of a row, which is that of a query among those of all heads: parts of one row are adjacent."""
        return row * self.count + part

    def storage(self, form: AttentionForm) -> dict[str, Storage]:
        """The workspaces; none for a single part."""
        rows = form.facts.batch * form.facts.m * self.count
        shapes = {self.sums: (rows, form.facts.d), self.rows: (rows, 2)}
        return {name: Storage(Value(name, shape, form.dtype), row_major(shape)) for name, shape in shapes.items()} if self.count > 1 else {}

    def written(self) -> tuple[str, ...]:
        """What the first kernel stores."""
        return (self.sums, self.rows) if self.count > 1 else (self.output,)


def stored(form: AttentionForm, query: Mapping[Var, Expr], d: Expr, value: Expr, wide: int) -> list[Statement]:
    """Stores the elements of a vector of results `value` from column d on, for the query's axes."""
    element = vectors_fit(form.element, form.d[-1], wide, form.layouts)
    assert element is not None
    held = Var("result", None, form.dtype, wide)
    inner, axes = named(decode(d, form.d))
    both = {**query, **axes}
    result = replace_loads(substitute(as_lanes(element, wide), both), {SUM: held})
    shared, (offset, result) = bind_shared([substitute(form.offset, both), result])
    return [*inner, Let(held, value), *shared, Store(form.output, offset, result)]


def with_parts(
    problem: Problem, form: AttentionForm, parts: Parts, kernel: Kernel, arguments: tuple[str, ...], schedule: str, scale: float
) -> Lowered:
    """The kernel of attention, and behind it, if the keys are divided, the one that puts parts together. `scale`: of logits, as the first kernel
    stores them, in the exponent."""
    kernels, calls = [kernel], [Call(kernel.name, arguments)]
    storage = parts.storage(form)
    if storage:
        second, names = _together(problem.with_storage(storage), form, parts, schedule, scale)
        kernels.append(second)
        calls.append(Call(second.name, names))
    return Lowered(problem.region, schedule, tuple(kernels), tuple(calls), MappingProxyType(storage))


def _together(problem: Problem, form: AttentionForm, parts: Parts, schedule: str, scale: float) -> tuple[Kernel, tuple[str, ...]]:
    facts, dtype, zero = form.facts, form.dtype, index_const(0)
    wide = next(lanes for lanes in (4, 2, 1) if lanes <= facts.store_vector and facts.d % lanes == 0)
    vectors = facts.d // wide
    points = facts.batch * facts.m * vectors
    launch = Launch((-(-points // THREADS), 1, 1), (THREADS, 1, 1), ((points, THREADS),))
    position = block_variable(launch) * THREADS + thread_variable(launch)
    part, base, factor = Var("part", parts.count), Var("base", None, dtype), Var("factor", None, dtype)
    best, total, sums = Load("best", (zero,), dtype), Load("total", (zero,), dtype), Load("sums", (zero,), dtype, wide)

    how = "unroll" if parts.count <= UNROLLED_PARTS else "serial"

    def one(place: Var) -> list[Statement]:
        row, d = place // vectors, place % vectors * wide
        batch, m = row // facts.m, row % facts.m
        lets, axes = named({**decode(batch, form.batch), **decode(m, form.m)})
        of_part = parts.place(row, part)
        greatest, weight = (Load(parts.rows, (of_part * 2 + number,), dtype) for number in (0, 1))
        mine = Load(parts.sums, (of_part * facts.d + d,), dtype, wide)
        exponent = (greatest - base) * Const(scale, dtype) if scale != 1 else greatest - base
        bound = form.bound(axes)
        return [
            *lets,
            Allocate(Buffer("best", dtype, 1, "register")),
            Allocate(Buffer("total", dtype, 1, "register")),
            Allocate(Buffer("sums", dtype, wide, "register", wide)),
            Store("best", zero, lowest(dtype)),
            Store("total", zero, Const(0.0, dtype)),
            Store("sums", zero, as_lanes(Const(0.0, dtype), wide)),
            For(part, index_const(parts.count), Store("best", zero, binary("max", best, greatest)), how),
            Let(base, finite(best)),
            For(part, index_const(parts.count), block(
                Let(factor, unary("exp", exponent)),
                Store("total", zero, total + weight * factor),
                Store("sums", zero, sums + mine * as_lanes(factor, wide)),
            ), how),
            *stored(bound, axes, d, sums * as_lanes(inverse(total, form.zeroed), wide), wide),
        ]  # fmt: skip

    body = block(below(position, points, "place", one))
    header = f"{described(problem)}\n{schedule}: {parts.count} parts of the keys are put together"
    return assemble("attention_parts", body, problem, (form.output,), header=header, roles={}, launch=launch)
