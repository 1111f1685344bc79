"""The form of sums over pixels (global average pooling) that join the contraction whose result they reduce.

A sum needs all pixels of an image, so it joins if one thread computes all of them for a panel of channels. Only `sum` is accepted: a mean is a sum
and a map of the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.graph.contraction import Contraction, contraction
from tilewright.ir.computation import Step
from tilewright.ir.expr import INDEX, Const, Expr, Load, Var, loads, replace_loads, substitute


def summed_pixels(host: Sequence[Step], name: str, steps: Sequence[Step], constants: frozenset[str]) -> tuple[Var, ...]:
    """The M axes of the host's contraction over which the first of `steps` reduces the host's result `name`; empty if it does not."""
    found = contraction(host[0], constants)
    if found is None or any(step.kind == "reduce" for step in host[1:]):
        return ()
    mapping = _reads(steps[0], name, _places(host[-1]), host[-1].shape)
    if mapping is None or not steps[0].reduction:
        return ()
    reduced = tuple(mapping[axis] for axis in steps[0].reduction if axis in mapping)
    return reduced if reduced and set(reduced) <= set(found.m) else ()


def with_pixels(host: tuple[Step, ...], name: str, steps: tuple[Step, ...], constants: frozenset[str]) -> tuple[Step, ...] | str:
    """[sum of products, sum over pixels, map?] for the host's steps followed by `steps`, or why that is not possible. `steps` sum the pixels of the
    host's result `name`. The host's own map is inlined into the sum."""
    found = contraction(host[0], constants)
    pixels = summed_pixels(host, name, steps, constants)
    assert found is not None and pixels
    points = f"{prod(axis.extent or 0 for axis in pixels)} pixels of {name}"
    reduce, last = steps[0], host[-1]
    if len(steps) > 2 or any(step.kind != "map" for step in steps[1:]) or any(load.buffer == name for s in steps[1:] for load in loads(*s.bodies)):
        return f"reduces {points}, and reads them again: a thread holds a tile of an image, not all of it"
    if reduce.combiner != "sum" or {*reduce.dtypes, *last.dtypes} != {found.dtype}:
        return f"reduces {points} with {reduce.combiner} over {', '.join(reduce.dtypes)}, and tiles add to a total in {found.dtype} only"
    refusal = _refuse_form(found, last, reduce, name)
    if refusal:
        return refusal
    mapping: dict[Var, Expr] = dict(_reads(reduce, name, _places(last), last.shape) or {})
    mapping |= {axis: Const(0, INDEX) for axis in (*reduce.axes, *reduce.reduction) if axis.extent == 1}
    value = last.bodies[0] if last.kind == "map" else Load(last.name, last.axes, last.dtypes[0])
    kept = tuple(axis for axis in host[0].axes if axis not in pixels)
    total = replace(
        reduce,
        axes=kept,
        bodies=(replace_loads(substitute(reduce.bodies[0], mapping), {name: value}),),
        reduction=pixels,
        index=tuple(substitute(position, mapping) for position in reduce.index),
    )
    if len(steps) == 1:
        return (host[0], total)
    final = steps[1]
    own = _reads(final, reduce.name, total.index, reduce.shape)
    if own is None or set(own) != {axis for axis in final.axes if axis.extent != 1} or final.dtypes != (found.dtype,):
        return f"what becomes of the sums over {points} is not one {found.dtype} for each"
    place: dict[Var, Expr] = {**own, **{axis: Const(0, INDEX) for axis in final.axes if axis.extent == 1}}
    body, index = substitute(final.bodies[0], place), tuple(substitute(position, place) for position in final.index)
    return (host[0], total, replace(final, axes=kept, bodies=(body,), index=index))


def _refuse_form(found: Contraction, last: Step, reduce: Step, name: str) -> str:
    if any(not isinstance(place, Var) for place, extent in zip(_places(last), last.shape, strict=True) if extent != 1):
        return f"{name} is stored in another order than its axes"
    mapping = _reads(reduce, name, _places(last), last.shape) or {}
    wide = {axis for axis in (*reduce.axes, *reduce.reduction) if axis.extent != 1}
    everything = {axis for axis in found.step.axes if axis.extent != 1}
    if not reduce.identity_index or set(mapping) != wide or set(mapping.values()) != everything or len(wide) != len(everything):
        return f"does not sum whole images of {name}"
    return ""


def _places(last: Step) -> tuple[Expr, ...]:
    unit: dict[Var, Expr] = {axis: Const(0, INDEX) for axis in last.axes if axis.extent == 1}
    return tuple(substitute(position, unit) for position in last.index)


def _reads(step: Step, name: str, places: Sequence[Expr], shape: Sequence[int]) -> dict[Var, Var] | None:
    """Maps the step's axes to axes of the result `name` that it reads; None unless all loads read whole axes in the same way."""
    mapping: dict[Var, Var] = {}
    read = [load for load in loads(*step.bodies) if load.buffer == name]
    for load in read:
        for position, place, extent in zip(load.index, places, shape, strict=True):
            if extent == 1:
                continue
            if not isinstance(position, Var) or not isinstance(place, Var) or position.extent != extent:
                return None
            if mapping.setdefault(position, place) != place:
                return None
    return mapping if read else None


__all__ = ["summed_pixels", "with_pixels"]
