"""Inlining: a load of a map's result becomes the map's body at that index. All fusion is made of this."""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping

from ..ir.computation import Computation, Step
from ..ir.expr import Expr, Load, loads, rewrite, substitute


def inline(expr: Expr, maps: Mapping[str, Step]) -> Expr:
    """The expression with every load of a result of `maps` replaced by that map's body; bodies may load other maps."""
    done: dict[Load, Expr] = {}

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in maps:
            return node
        if node not in done:
            step = maps[node.buffer]
            done[node] = inline(substitute(step.bodies[0], dict(zip(step.axes, node.index, strict=True))), maps)
        return done[node]

    return rewrite(expr, visit)


def inline_step(step: Step, maps: Mapping[str, Step]) -> Step:
    return replace(step, bodies=tuple(inline(body, maps) for body in step.bodies))


def slice_for(computation: Computation, output: str) -> tuple[Step, ...]:
    """The steps that `output` needs, with maps between them inlined: reductions and scans, then at most one map that is the output."""
    by_name = {name: step for step in computation.steps for name in step.names}
    final = by_name[output]
    maps = {step.name: step for step in computation.steps if step.kind == "map" and step.identity_index and step is not final}
    kept: list[Step] = []
    wanted = [final]
    seen: set[str] = set()
    while wanted:
        step = wanted.pop()
        if step.name in seen:
            continue
        seen.add(step.name)
        fresh = inline_step(step, maps)
        kept.append(fresh)
        wanted.extend(by_name[load.buffer] for load in loads(*fresh.bodies) if load.buffer in by_name)
    order = {step.name: i for i, step in enumerate(computation.steps)}
    return tuple(sorted(kept, key=lambda step: order[step.name]))
