"""Recognising reductions that share rows (softmax, normalisations) by how their results are read."""

from __future__ import annotations

from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Var, loads


def rows_of(steps: tuple[Step, ...]) -> tuple[Var, ...] | None:
    """The axes of the last step that index the rows, in the order of the reductions' axes, if every reduction has the same row space and every later
    step reads reductions at plain row variables; otherwise None."""
    reduces = [step for step in steps if step.kind == "reduce"]
    if not reduces:
        return None
    space = [axis.extent for axis in reduces[0].axes]
    if any([axis.extent for axis in step.axes] != space for step in reduces):
        return None
    inner = {name for step in reduces for name in step.names}
    rows: tuple[Expr, ...] | None = None
    for step in steps:
        for load in loads(*step.bodies):
            if load.buffer not in inner:
                continue
            wanted = tuple(step.axes) if step.kind == "reduce" else rows
            if wanted is None:
                rows = wanted = load.index
            for position, expected, extent in zip(load.index, wanted, space, strict=True):
                if extent != 1 and position != expected:
                    return None
    last = steps[-1]
    if last.kind == "reduce":
        return tuple(last.axes)
    if rows is None:
        return None
    plain = [position for position, extent in zip(rows, space, strict=True) if extent != 1]
    if any(not isinstance(p, Var) for p in plain) or len(set(plain)) != len(plain):
        return None
    placeholder = [position if isinstance(position, Var) else Var(f"unit{i}", 1) for i, position in enumerate(rows)]
    return tuple(placeholder)
