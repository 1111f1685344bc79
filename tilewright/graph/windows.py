"""Pooling of what a sum of products gives: a reduction over windows of its result that do not overlap, without padding, in the same region.

    [sum of products, map?, reduction over windows, map?]

Along a dimension with windows of n elements, element i of the pooled result has the result's elements i n to i n + n - 1 as its window; all windows
together are the whole result. The positions within a window are axes of their own, unlike those of rows and pixels that are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.ir.computation import Step
from tilewright.ir.expr import Load, Var, linear, loads

COMBINERS = ("sum", "prod", "max", "min")


@dataclass(frozen=True)
class Pooling:
    """The steps before the pooling, the pooling, the map of what it gives, and the extent of a window along each dimension of the result."""

    before: tuple[Step, ...]
    pool: Step
    after: Step | None
    sizes: tuple[int, ...]


def pooling_of(steps: Sequence[Step]) -> Pooling | None:
    """The pooling of a region's steps; None if they do not have the form."""
    at = next((at for at, step in enumerate(steps) if at and step.kind == "reduce"), 0)
    before, pool, after = steps[:at], steps[at], steps[at + 1 :]
    if at not in (1, 2) or len(after) > 1 or any(step.kind != "map" for step in (*before[1:], *after)):
        return None
    sizes = window_sizes(pool, before[-1])
    own = {axis for step in before for axis in (*step.axes, *step.reduction)}
    again = {name for step in before for name in step.names} & {load.buffer for step in after for load in loads(*step.bodies)}
    if sizes is None or own & {*pool.reduction} or again or any(step.axes != pool.axes for step in after):
        return None
    return Pooling(tuple(before), pool, after[0] if after else None, sizes)


def window_sizes(pool: Step, result: Step) -> tuple[int, ...] | None:
    """The extents of the windows over which a reduction combines another step's result; None if it does anything else."""
    body = pool.bodies[0]
    if pool.combiner not in COMBINERS or not pool.identity_index or not isinstance(body, Load) or body.buffer != result.name:
        return None
    sizes: list[int] = []
    taken: list[Var] = []
    for position, extent in zip(body.index, result.shape, strict=True):
        form = linear(position)
        scales = {atom: scale for atom, scale in form.terms if isinstance(atom, Var)}
        windows, taps = ([axis for axis in scales if axis in some] for some in (pool.axes, pool.reduction))
        size, count = (prod(axis.extent or 0 for axis in axes) for axes in (taps, windows))
        expected = {**dict.fromkeys(windows, size), **dict.fromkeys(taps, 1)}
        if form.constant or dict(form.terms) != expected or max(len(windows), len(taps)) > 1 or size * count != extent:
            return None
        sizes.append(size)
        taken += scales
    wide = {axis for axis in (*pool.axes, *pool.reduction) if axis.extent != 1}
    return tuple(sizes) if len(set(taken)) == len(taken) and wide <= {*taken} and max(sizes) > 1 else None
