"""The form of poolings that join the contraction whose result they read (`graph.windows`). `poolings` decides which do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.graph.contraction import contraction
from tilewright.graph.windows import pooling_of
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, Var, loads, replace_loads, substitute


def with_windows(host: tuple[Step, ...], name: str, steps: Sequence[Step], constants: frozenset[str]) -> tuple[Step, ...] | str:
    """The host's steps followed by `steps`, which pool the host's result `name` and map what that gives, over the axes of the contraction where those
    are whole; or why that is not possible."""
    found = contraction(host[0], constants)
    last, pool = host[-1], steps[0]
    places = [place for place in last.index if isinstance(place, Var)]
    if found is None or len(places) != len(last.shape) or {*places} != {*last.axes}:
        return f"{name} is stored in another order than its axes"
    if pool.kind != "reduce" or len(pool.bodies) != 1 or len(pool.axes) != len(places) or pool.dtypes[0] != found.dtype:
        return f"does not pool {name}"
    if any(load.buffer == name for step in steps[1:] for load in loads(*step.bodies)):
        return f"reads {name} again"
    axes = [place if place.extent == axis.extent else Var(f"{place.name}_window", axis.extent) for axis, place in zip(pool.axes, places, strict=True)]
    own: dict[Var, Expr] = dict(zip(pool.axes, axes, strict=True))
    within: dict[Var, Expr] = {axis: Var(f"{axis.name}_within", axis.extent) for axis in pool.reduction}
    body = substitute(pool.bodies[0], {**own, **within})
    taps = tuple(axis for axis in within.values() if isinstance(axis, Var))
    moved = replace(pool, axes=tuple(axes), bodies=(body,), reduction=taps, index=tuple(axes))
    held = {pool.name: Load(pool.name, tuple(axes), pool.dtypes[0])}
    after = []
    for step in steps[1:]:
        body = replace_loads(substitute(step.bodies[0], dict(zip(step.axes, axes, strict=True))), held)
        after.append(replace(step, axes=tuple(axes), bodies=(body,), index=tuple(axes)))
    joined = (*host, moved, *after)
    pooling = pooling_of(joined)
    if pooling is None or any(size > 1 and place not in found.m for size, place in zip(pooling.sizes, places, strict=True)):
        return f"does not pool windows of pixels of {name} that are beside each other"
    return joined
