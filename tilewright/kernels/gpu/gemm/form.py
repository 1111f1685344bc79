"""The sum of products of a region for the GPU lowerings: flat operands, packed weights, how each is read, and the epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.access import flatten, merge_axes, storage_order
from tilewright.codegen.common import bytes_touched, expression_flops, extent_of, guarded_load, reduce_and_final, vectors_fit, widest
from tilewright.codegen.intrinsics.async_copy import COPIED_BYTES
from tilewright.codegen.operand import operand_view
from tilewright.graph.contraction import Contraction, anchor
from tilewright.graph.windows import pooling_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import (
    INDEX,
    Apply,
    Expr,
    Load,
    Var,
    coefficient,
    index_const,
    loads,
    replace_loads,
    substitute,
    walk,
)
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Storage, Unsuitable
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.gemm.offsets import offsets_along
from tilewright.kernels.gpu.gemm.row_epilogue import FIRST, RowStage
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand


@dataclass(frozen=True)
class ProductForm:
    """C[batch, m, n] = sum over r of a * b, with flat offsets, and axes merged where every access allows it.

    `element`, over loads of the reduction's name, is stored at `offset` of `output`. `m` and `n` are in loop order (fastest last); `b_n` is n with
    the extents to which b is stored; `r` is in summation order. `types`: those of stored values in memory."""

    output: str
    step: Step
    batch: tuple[Var, ...]
    m: tuple[Var, ...]
    n: tuple[Var, ...]
    b_n: tuple[Var, ...]
    r: tuple[Var, ...]
    a: Expr
    b: Expr
    element: Expr
    offset: Expr
    layouts: Mapping[str, Layout]
    storage: Mapping[str, Storage]
    types: Mapping[str, str]
    facts: ContractionFacts
    row_stages: tuple[RowStage, ...] = ()

    @property
    def dtype(self) -> str:
        """The type of the sums, and of the factors as multiplied."""
        return self.step.dtypes[0]

    def stored(self, factor: Expr) -> str:
        """The type in memory of the elements of a factor that is loaded without arithmetic; of others the one that is multiplied."""
        found = loads(factor)
        return self.types[found[0].buffer] if len(found) == 1 else factor.dtype


def product_form(problem: Problem, order: Sequence[Var] | None = None, apart: frozenset[Var] = frozenset()) -> ProductForm:
    """The form of a region, made once for each order. `order`: the reduction axes in the order in which they are summed and packed, if not their own
    order. `apart`: axes that are never merged with others.

    Raises:
        Unsuitable: if the region is not one sum of products followed by at most one map.
    """
    found = anchor(problem.region.steps, problem.constants)
    if found is None:
        _chain(problem.region)  # says more of a region of another form
        raise Unsuitable(f"the sum of region {problem.region.name} is not a matrix product")
    if order is not None:
        found = replace(found, r=tuple(order))
    key = (product_form, tuple(axis for axis in found.r if axis.extent != 1), apart)
    if key not in problem.found:
        problem.found[key] = _product_form(problem, found, apart)
    known: ProductForm = problem.found[key]
    return known


def _product_form(problem: Problem, found: Contraction, apart: frozenset[Var]) -> ProductForm:
    region = problem.region
    step, element, index, row_stages = _chain(region)
    output = region.outputs[0]
    b, storage = _packed(problem, found)
    packed = problem.with_storage(storage)
    layouts, values = packed.layouts, packed.values
    ones = {axis: index_const(0) for axis in (*step.axes, *step.reduction) if axis.extent == 1}
    a_flat, b_flat, element, offset = (
        substitute(e, ones)
        for e in (
            flatten(found.a, layouts),
            flatten(b, layouts),
            _without_index(flatten(element, layouts), step),
            layouts[output].offset(index),
        )
    )
    batch = storage_order([axis for axis in found.batch if axis.extent != 1], offset)
    m = storage_order([axis for axis in found.m if axis.extent != 1], offset)
    n = storage_order([axis for axis in found.n if axis.extent != 1], offset)
    bodies = [substitute(_without_index(flatten(stage.body, layouts), step), ones) for stage in row_stages]
    expressions: tuple[Expr, ...] = (a_flat, b_flat, element, offset, *bodies)
    m, expressions = merge_axes(m, expressions, lambda outer, inner: not {outer, inner} & apart)
    n, expressions = merge_axes(n, expressions)
    batch, expressions = merge_axes(batch, expressions)
    r, expressions = merge_axes([axis for axis in found.r if axis.extent != 1], expressions, lambda outer, inner: not {outer, inner} & apart)
    a_flat, b_flat, element, offset, *bodies = expressions
    row_stages = tuple(replace(stage, body=body) for stage, body in zip(row_stages, bodies, strict=True))
    # with another axis of n outside it, the padding would fall between columns that tiles treat as adjacent
    stored_n = (stored_axis(b_flat, n[-1], layouts),) if len(n) == 1 else n[-1:]
    b_flat = substitute(b_flat, dict(zip(n[-1:], stored_n, strict=True)))
    everything = (*step.axes, *step.reduction)
    store_vector = widest(element, n[-1], layouts, offset) if n and not row_stages else 1
    facts = ContractionFacts(
        extent_of(batch),
        extent_of(m),
        extent_of(n),
        extent_of(r),
        a=_operand(packed, a_flat, m, r, everything),
        b=_operand(packed, b_flat, (*n[:-1], *stored_n), r, everything),
        store_vector=store_vector,
        bytes_written=values[output].bytes,
        epilogue_bytes=bytes_touched([element, *bodies], (*batch, *m, *n), values),
        epilogue_flops=expression_flops(element) + sum(expression_flops(body) + 1 for body in bodies),
        row_stages=len(row_stages),
        element_bytes=size_of(found.dtype),
    )
    stored_n = (*n[:-1], *stored_n)
    types = {name: value.dtype for name, value in values.items()}
    return ProductForm(output, step, batch, m, n, stored_n, r, a_flat, b_flat, element, offset, layouts, storage, types, facts, row_stages)


def _chain(region: Region) -> tuple[Step, Expr, tuple[Expr, ...], tuple[RowStage, ...]]:
    """Like `reduce_and_final`, plus the stages on whole rows between the sum and the stored element."""
    if not any(step.kind == "reduce" for step in region.steps[1:]):
        return (*reduce_and_final(region), ())
    if pooling_of(region.steps) is not None:
        raise Unsuitable(f"windows of the result of region {region.name} are pooled")
    step, last = region.steps[0], region.steps[-1]
    held: dict[str, Expr] = {step.name: Load(step.name, (index_const(0),), step.dtypes[0])}
    firsts: dict[str, Expr] = {step.name: Load(FIRST, (index_const(0),), step.dtypes[0])}
    stages: list[RowStage] = []
    for other in region.steps[1:]:
        if other.kind == "reduce" and not other.reduction:
            held[other.name] = firsts[other.name] = replace_loads(other.bodies[0], firsts)
            continue
        if other.kind == "map" and other is not last and len(firsts) > 1:
            raise Unsuitable("a map overwrites elements that are read as the first of their rows")
        result = f"row_result{len(stages)}"
        stages.append(RowStage(replace_loads(other.bodies[0], held), other, result))
        held[other.name] = Load(result if other.kind == "reduce" else step.name, (index_const(0),), other.dtypes[0])
        firsts[other.name] = held[other.name] if other.kind == "reduce" else firsts[step.name]
    element = held[last.name] if last.kind == "reduce" else stages.pop().body
    return step, element, last.index, tuple(stages)


def _without_index(element: Expr, step: Step) -> Expr:
    """Drops the index of loads of the sum (it is that of the element), so that axes can be merged."""
    return replace_loads(element, {step.name: Load(step.name, (index_const(0),), step.dtypes[0])})


def _packed(problem: Problem, found: Contraction) -> tuple[Load, dict[str, Storage]]:
    """The second factor as a load of a constant packed as [batch, r, n], with n padded to whole vectors of 16 bytes; unchanged if it cannot be
    packed."""
    load = found.b
    if load.buffer not in problem.constants:
        return load, {}
    axes = tuple(axis for axis in (*found.batch, *found.r, *found.n) if axis.extent != 1)
    view = operand_view(load, problem.values[load.buffer].shape, axes)
    if view is None:
        return load, {}
    extents = view[0]
    last = len(extents) - 1
    order = tuple((dim, 0) for dim in range(len(extents)))
    lanes = WIDEST_BYTES // size_of(problem.values[load.buffer].dtype)
    layout = Layout(extents, (*order, (last, lanes))) if extents[last] % lanes else row_major(extents)
    name = f"{load.buffer}@{problem.region.name}"
    storage = Storage(Value(name, extents, problem.values[load.buffer].dtype), layout, load.buffer, view)
    return Load(name, axes, load.dtype), {name: storage}


def _operand(problem: Problem, expr: Expr, own: tuple[Var, ...], r: tuple[Var, ...], axes: tuple[Var, ...]) -> Operand:
    """How the factor is read: in vectors along r or along m (or n), whichever are wider. If there are no vectors, in single elements along the axis
    that is adjacent in memory."""
    fastest = {along: candidates[-1] for along, candidates in (("own", own), ("r", r)) if candidates}
    choices: list[tuple[int, bool, str]] = []
    for along, axis in fastest.items():
        strides = [coefficient(load.index[0], axis) for load in loads(expr) if len(load.index) == 1]
        choices.append((widest(expr, axis, problem.layouts), 1 in strides, along))
    lanes, _, along = max(choices, key=lambda choice: choice[:2], default=(1, False, "own"))
    divisions = 2 * (len(r) - 1) if r else 0
    guarded = any(isinstance(node, Apply) and node.operation == "select" for node in walk(expr))
    # one element broadcast to several lanes (an upsampled factor) is not a vector in memory, so it cannot be copied
    vector = vectors_fit(expr, fastest[along], lanes, problem.layouts) if along in fastest else expr
    size = max((size_of(problem.values[load.buffer].dtype) for load in loads(expr) if load.buffer in problem.values), default=size_of(expr.dtype))
    plain = vector is not None and vector.lanes == lanes and guarded_load(vector) is not None and lanes * size in COPIED_BYTES
    streamed = widest(expr, fastest[along], problem.layouts, most=WIDEST_BYTES // size) if lanes > 1 else 1
    touched = bytes_touched([expr], (*own, *r, *axes), problem.values)
    others = max(len({*loads(expr)}) - 1, 0)
    arithmetic = 0.0 if guarded_load(expr) is not None else expression_flops(expr)
    return Operand(along, lanes, touched, divisions, guarded, plain, size, offsets_along(expr, r) is not None, streamed, arithmetic, others)


def stored_axis(expr: Expr, axis: Var, layouts: Mapping[str, Layout]) -> Var:
    """The axis with the extent to which elements are stored, which exceeds its own if a packed operand is padded along it."""
    if isinstance(expr, Load) and expr.buffer in layouts and coefficient(expr.index[0], axis) == 1:
        layout = layouts[expr.buffer]
        dim, lanes = layout.order[-1] if layout.order else (0, 0)
        if lanes and dim == len(layout.shape) - 1 and layout.shape[-1] == axis.extent:
            return Var(axis.name, -(-layout.shape[-1] // lanes) * lanes, INDEX)
    return axis
