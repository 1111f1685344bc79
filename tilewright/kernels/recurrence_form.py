"""Loops whose body is a recurrence, in flat form, for the schemas of both back ends.

In step t, out_k[t + 1, row, unit] = value_k(gates[g][row, unit], what is stored [t, row, unit]), where gates[g][row, unit] = sum over r of
A[row, r] B_g[unit, r] (LSTM, GRU, simple recurrent networks). A reads results of earlier steps, so a step needs all units of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import flatten
from tilewright.codegen.common import expression_flops
from tilewright.codegen.operand import operand_view
from tilewright.graph.contraction import Contraction, contraction
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.ir.expr import ZERO, Const, Expr, Load, Var, index_const, linear, loads, rewrite, substitute, variables
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable

GATES = "gates"
"""Name by which `RecurrenceForm.values` load gate g, as element g."""


@dataclass(frozen=True)
class Product:
    """Gates that are sums over the same axes of the same A. `view` is (sizes, strides, offset) of the constant `b` as an array of gates, units, and
    the reduced axes `r`. `a`: flat; `first`: the number of its first gate."""

    a: Expr
    b: str
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    r: tuple[Var, ...]
    first: int

    @property
    def gates(self) -> int:
        return self.view[0][0]

    @property
    def size_r(self) -> int:
        return prod(axis.extent or 0 for axis in self.r)


@dataclass(frozen=True)
class RecurrenceFacts:
    """Sizes: `steps` of the loop; `rows` (sequences of a batch) by `units`; for each product its number of gates and of products summed. `flops`:
    operations of an element of all results, without the products; `stream_bytes`: what a step reads and writes besides weights. `states`: results of
    the step before that sums read, of which each has a recurrence of its own where loops were joined; `parts`: the number of these if they are alike,
    otherwise 1. `together`: how many adjacent elements of a state a load of 4 bytes has."""

    steps: int
    rows: int
    units: int
    products: tuple[tuple[int, int], ...]
    flops: float
    stream_bytes: int
    element_bytes: int = size_of(DEFAULT_FLOAT)
    states: int = 1
    parts: int = 1
    together: int = 1

    @property
    def weight_bytes(self) -> int:
        return self.element_bytes * self.units * sum(gates * r for gates, r in self.products)

    @property
    def gates(self) -> int:
        """The number of all gates."""
        return sum(gates for gates, _ in self.products)

    @property
    def dependent_flops(self) -> float:
        """Operations of an element of all results, of which each waits for the one before: joint loops do not wait for one another."""
        return self.flops / self.states

    @property
    def total_flops(self) -> float:
        return self.steps * self.rows * self.units * (2.0 * sum(gates * r for gates, r in self.products) + self.flops)


@dataclass(frozen=True)
class RecurrenceForm:
    """In each step of `step`, and for each `row` and `unit`, `values[k]` is stored at `offsets[k]` of `outputs[k]`. Products, values and offsets are
    flat; values load gates from GATES."""

    step: Var
    row: Var
    unit: Var
    products: tuple[Product, ...]
    outputs: tuple[str, ...]
    values: tuple[Expr, ...]
    offsets: tuple[Expr, ...]
    dtype: str
    facts: RecurrenceFacts

    @property
    def parts(self) -> tuple[RecurrenceForm, ...]:
        """The recurrences that joint loops consist of, alike but for names and places; the form itself if it is not of that kind."""
        found = [self._part(product) for product in self.products]
        alike = len({(part.facts, len(part.outputs)) for part in found}) == 1
        whole = sum(len(part.outputs) for part in found) == len(self.outputs) and self.facts.states == len(found)
        return tuple(found) if alike and whole else (self,)

    def _part(self, product: Product) -> RecurrenceForm:
        """What the gates of one product, and the results that they make, are by themselves; the whole form if they need others."""

        def gates(value: Expr) -> set[int]:
            return {int(load.index[0].value) for load in loads(value) if load.buffer == GATES and isinstance(load.index[0], Const)}

        def own(node: Expr) -> Expr:
            if isinstance(node, Load) and node.buffer == GATES and isinstance(node.index[0], Const):
                return Load(GATES, (index_const(int(node.index[0].value) - product.first),), node.dtype)
            return node

        mine = set(range(product.first, product.first + product.gates))
        kept = [number for number, value in enumerate(self.values) if gates(value) and gates(value) <= mine]
        names = tuple(self.outputs[number] for number in kept)
        values = tuple(rewrite(self.values[number], own) for number in kept)
        read = {load.buffer for expr in (product.a, *values) for load in loads(expr)} & set(self.outputs)
        if not read <= set(names):
            return self
        count = len(self.products)
        flops, stream_bytes = self.facts.flops / count, self.facts.stream_bytes // count
        facts = replace(self.facts, products=((product.gates, product.size_r),), flops=flops, stream_bytes=stream_bytes, states=1)
        offsets = tuple(self.offsets[number] for number in kept)
        return replace(self, products=(replace(product, first=0),), outputs=names, values=values, offsets=offsets, facts=facts)


def recurrence_form(problem: Problem) -> RecurrenceForm:
    """The form of a region of kind loop.

    Raises:
        Unsuitable: if it is no recurrence whose weights are constants, with the reason.
    """
    region = problem.region
    sums = {step.name: step for step in region.steps if step.kind != "map"}
    maps = [step for step in region.steps if step.kind == "map"]
    free = {v for step in region.steps for v in variables(*step.bodies, *step.index)} - {
        axis for step in region.steps for axis in (*step.axes, *step.reduction)
    }
    if not sums:
        raise Unsuitable("it has no sums of products")
    if len(free) != 1:
        raise Unsuitable("it has a single step")
    (step,) = free
    *_, own = (axis.extent for axis in maps[0].axes) if maps[0].axes else (None,)
    shapes = {tuple(axis.extent for axis in one.axes) for one in maps}
    if len(shapes) != 1 or own is None:
        raise Unsuitable("the results of a step differ in shape")
    if sum(axis.extent != 1 for axis in maps[0].axes[:-1]) > 1:
        raise Unsuitable("its states have more than one axis of sequences")
    row = next((axis for axis in maps[0].axes[:-1] if axis.extent != 1), Var("row", 1))
    row, unit = Var("row", row.extent), Var("unit", own)
    columns: dict[str, list[int]] = {name: [] for name in sums}

    def at(one: Step) -> dict[Var, Expr]:
        """The axes of a step as those of the form."""
        *rows, last = one.axes
        return {**{axis: row if axis.extent != 1 else ZERO for axis in rows}, last: unit}

    bodies = [substitute(one.bodies[0], at(one)) for one in maps]
    for load in loads(*bodies):
        if load.buffer in sums:
            columns[load.buffer].append(_column(load, row, unit))
    products: list[Product] = []
    places: dict[tuple[str, int], int] = {}
    for name, gates in columns.items():
        gates = sorted(set(gates))
        first = len(places)
        places |= {(name, column): first + number for number, column in enumerate(gates)}
        products.append(_product(sums[name], gates, first, row, unit, problem))

    def gate(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer in sums:
            return Load(GATES, (index_const(places[node.buffer, _column(node, row, unit)]),), node.dtype)
        return node

    values = tuple(flatten(rewrite(body, gate), problem.layouts) for body in bodies)
    offsets = tuple(problem.layouts[one.name].offset([substitute(i, at(one)) for i in one.index]) for one in maps)
    streams = len({load for load in loads(*values) if load.buffer != GATES}) + len(values)
    sizes = tuple((product.gates, product.size_r) for product in products)
    rows, units = row.extent or 0, unit.extent or 0
    stream_bytes = size_of(DEFAULT_FLOAT) * rows * (units * streams + sum(r for _, r in sizes))
    read = {load.buffer for product in products for load in loads(product.a)} & {one.name for one in maps}
    facts = RecurrenceFacts(step.extent or 0, rows, units, sizes, expression_flops(*values), stream_bytes, states=max(len(read), 1))
    form = RecurrenceForm(step, row, unit, tuple(products), tuple(one.name for one in maps), values, offsets, maps[0].dtypes[0], facts)
    return replace(form, facts=replace(facts, parts=len(form.parts)))


def _column(load: Load, row: Var, unit: Var) -> int:
    """The c of a load of a sum at (row, c + unit).

    Raises:
        Unsuitable: if its index is another.
    """
    *rows, last = load.index
    form = linear(last)
    if form.terms != ((unit, 1),) or any(position not in (row, ZERO) for position in rows) or len(rows) and row.extent != 1 and row not in rows:
        raise Unsuitable("a result reads sums of other sequences or units")
    return form.constant


def _product(step: Step, columns: Sequence[int], first: int, row: Var, unit: Var, problem: Problem) -> Product:
    """The gates that begin at these columns of a sum of products.

    Raises:
        Unsuitable: if the sum has another form, or its weights are not constants.
    """
    found = contraction(step, problem.constants)
    if found is None or found.b.buffer not in problem.constants:
        raise Unsuitable("its weights are computed")
    if found.size_batch != 1 or [axis for axis in found.n if axis.extent != 1] != [step.axes[-1]] or found.size_m != (row.extent or 0):
        raise Unsuitable("its sums are no product of states and weights")
    if any(load.buffer not in problem.layouts for load in loads(found.a)):
        raise Unsuitable("a sum of products reads another of the same step")
    stride = columns[1] - columns[0] if len(columns) > 1 else 0
    if any(b - a != stride for a, b in zip(columns, columns[1:], strict=False)):
        raise Unsuitable("its gates are not equally spaced")
    gate = Var("gate", len(columns))
    b = substitute(found.b, {**_unit_axes(found), step.axes[-1]: gate * stride + columns[0] + unit})
    assert isinstance(b, Load)
    view = operand_view(b, problem.values[b.buffer].shape, (gate, unit, *found.r))
    if view is None:
        raise Unsuitable("its weights are no strided view of a constant")
    a = substitute(found.a, {axis: row if axis.extent != 1 else ZERO for axis in step.axes[:-1]})
    return Product(flatten(a, problem.layouts), b.buffer, view, found.r, first)


def _unit_axes(found: Contraction) -> dict[Var, Expr]:
    return {axis: ZERO for axis in (*found.batch, *found.m, *found.n, *found.step.reduction) if axis.extent == 1}
