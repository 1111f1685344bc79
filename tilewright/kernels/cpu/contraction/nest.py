"""The flat form of a CPU contraction: axes in loop order, the first factor's element, the result's offset, and the stages before the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.access import flatten, merge_axes, storage_order
from tilewright.graph.contraction import Contraction, anchor, sums_pixels
from tilewright.ir.computation import Step
from tilewright.ir.expr import ZERO, Apply, Expr, Load, Var, rewrite, substitute, variables
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.common import accumulated


def summed_up(dtype: str) -> Var:
    """The variable that stands for a sum over pixels in the expressions that follow it."""
    return Var("total", None, dtype)


@dataclass(frozen=True)
class Stage:
    """A stage on the tile's rows before the epilogue: a reduction over N, or a map that overwrites the tile (`reduction` is None)."""

    body: Expr
    reduction: Step | None = None
    result: Var | None = None


@dataclass(frozen=True)
class Nest:
    """The contraction in flat form: axes in loop order, A's element, the result's offset, and the epilogue (None: store the sum).

    With `final` the epilogue's values are summed over the pixels: rows, columns and the `serial` axes outside these. The result is `final`, an
    expression of the variable `summed_up`, each channel's total."""

    found: Contraction
    outer: tuple[Var, ...]
    rows: Var | None
    columns: Var
    a: Expr
    offset: Expr
    epilogue: Expr | None
    n: Var
    stages: tuple[Stage, ...] = ()
    serial: tuple[Var, ...] = ()
    final: Expr | None = None

    def at(self, expr: Expr, row: Expr, column: Expr) -> Expr:
        """The expression at this row and column of pixels."""
        mapping: dict[Var, Expr] = {self.columns: column}
        if self.rows is not None:
            mapping[self.rows] = row
        return substitute(expr, mapping)

    @property
    def dtype(self) -> str:
        """The type of the sums, and of the factors as multiplied."""
        return self.found.dtype

    @property
    def n_outer(self) -> tuple[Var, ...]:
        return tuple(axis for axis in self.found.n if axis != self.n and axis.extent != 1)

    @property
    def batch(self) -> tuple[Var, ...]:
        return tuple(axis for axis in self.found.batch if axis.extent != 1)


def flat_nest(problem: Problem) -> Nest:
    """The nest of [sum, map?, row reductions..., map?], or of [sum, sum over pixels, map?], made once."""
    if flat_nest not in problem.found:
        problem.found[flat_nest] = _flat_nest(problem)
    nest: Nest = problem.found[flat_nest]
    return nest


def _flat_nest(problem: Problem) -> Nest:
    region, layouts = problem.region, problem.layouts
    found = anchor(region.steps, problem.constants)
    assert found is not None
    last = region.steps[-1]
    offset = layouts[region.outputs[0]].offset(last.index)
    a = flatten(found.a, layouts)
    if sums_pixels(region.steps, found):
        return _pixel_sum(problem, found, a, offset)
    # sums and totals are plain variables without an index while axes are merged: the tile holds them
    held: dict[str, Expr] = {found.step.name: accumulated(found.dtype)}
    stages: list[Stage] = []
    for step in region.steps[1:]:
        body = rewrite(flatten(step.bodies[0], layouts), lambda x: held.get(x.buffer, x) if isinstance(x, Load) else x, plain=False)
        result = Var(f"total{len(stages)}", None, body.dtype) if step.combiner else None
        stages.append(Stage(body, step if step.combiner else None, result))
        held[step.name] = result if result is not None else accumulated(found.dtype)
    ordered = storage_order(found.m, offset)
    axes, merged = merge_axes(ordered, [a, offset, *(stage.body for stage in stages)])
    unit_axes: dict[Var, Expr] = {v: ZERO for v in (*found.batch, *found.n, *found.step.reduction) if v.extent == 1}
    merged = tuple(substitute(e, unit_axes) for e in merged)
    columns = axes[-1] if axes else Var("m", 1)
    rows = axes[-2] if len(axes) > 1 else None
    n = max(found.n, key=lambda axis: axis.extent or 0)
    stages = [replace(stage, body=body) for stage, body in zip(stages, merged[2:], strict=True)]
    epilogue: Expr | None = None
    if stages:
        epilogue = stages[-1].result or stages.pop().body
    kept, epilogue = _kept(stages, epilogue, found.dtype)
    return Nest(found, axes[:-2], rows, columns, merged[0], merged[1], epilogue, n, kept)


def _pixel_sum(problem: Problem, found: Contraction, a: Expr, offset: Expr) -> Nest:
    """The nest of [sum, sum over pixels, map?]."""
    product, total, *rest = problem.region.steps

    def held(step: Step, variable: Var, body: Expr) -> Expr:
        flat = flatten(body, problem.layouts)
        return rewrite(flat, lambda x: variable if isinstance(x, Load) and x.buffer == step.name else x, plain=False)

    element = held(product, accumulated(found.dtype), total.bodies[0])
    final: Expr = held(total, summed_up(found.dtype), rest[0].bodies[0]) if rest else summed_up(found.dtype)
    summed = tuple(axis for axis in found.m if axis in total.reduction)
    images = storage_order([axis for axis in found.m if axis not in summed], offset)
    # axes of images and axes of the pixels within one run in different loops, so they are not merged with each other
    outer, merged = merge_axes(images, [a, offset, element, final])
    pixels, merged = merge_axes(summed, merged)
    unit_axes: dict[Var, Expr] = {v: ZERO for v in (*found.batch, *found.n, *found.step.reduction) if v.extent == 1}
    a, offset, element, final = (substitute(e, unit_axes) for e in merged)
    columns = pixels[-1] if pixels else Var("m", 1)
    rows = pixels[-2] if len(pixels) > 1 else None
    n = max(found.n, key=lambda axis: axis.extent or 0)
    return Nest(found, outer, rows, columns, a, offset, element, n, serial=pixels[:-2], final=final)


def _kept(stages: Sequence[Stage], epilogue: Expr | None, dtype: str) -> tuple[tuple[Stage, ...], Expr | None]:
    """Stages and epilogue that keep the values computed by a reduction's body in the tile. They overwrite the tile's elements if all later stages
    read only them. A softmax then evaluates its exponential once."""
    tile = accumulated(dtype)
    result: list[Stage] = []
    rest = list(stages)
    while rest:
        stage = rest.pop(0)
        body = stage.body
        if stage.reduction is not None and isinstance(body, Apply) and body.dtype == dtype and epilogue is not None:
            later = [rewrite(e, lambda x: tile if x == body else x) for e in (*(s.body for s in rest), epilogue)]  # noqa: B023
            without = [rewrite(e, lambda x: ZERO if x == body else x) for e in (*(s.body for s in rest), epilogue)]  # noqa: B023
            if any(tile in variables(e) for e in later) and not any(tile in variables(e) for e in without):
                result.append(Stage(body))
                stage = replace(stage, body=tile)
                rest = [replace(s, body=e) for s, e in zip(rest, later[:-1], strict=True)]
                epilogue = later[-1]
        result.append(stage)
    return tuple(result), epilogue
