"""The form of matrix products of a few rows that are computed by the maps that read parts of them.

In a recurrent step the gates' matrix product has one row per sequence, so no tile would reuse its weights, and each gate reads its own columns of it.
Every reader then sums its own columns, and product, gates and new state are one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.graph.contraction import contraction
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, loads, replace_loads, rewrite, substitute

# Maximum rows of a matrix product that reads each weight only once or twice in any kernel.
THIN_ROWS = 4


def thin_rows(host: Sequence[Step], constants: frozenset[str]) -> int | None:
    """The rows of the host's contraction, all batches together, if they are few and its result is stored at its own axes; otherwise None."""
    found = contraction(host[0], constants)
    if found is None or found.size_m * found.size_batch > THIN_ROWS or host[-1].index != host[-1].axes:
        return None
    return found.size_m


def read_in_parts(readers: Sequence[Step], name: str, elements: int) -> bool:
    """Whether the maps read `name`, which has `elements` elements, at two or more places and none of its elements more often than once on average."""
    sites = [(step, load) for step in readers for load in loads(*step.bodies) if load.buffer == name]
    points = sum(prod(axis.extent or 0 for axis in step.axes) for step, _ in sites)
    return points <= elements and len(sites) >= 2


def summing(step: Step, name: str, product: tuple[Step, ...]) -> tuple[Step, ...]:
    """The map with each load of `name` computed by a separate reduction; `product` are the steps that define `name`."""
    reduce, final = product[0], product[-1]
    reductions: list[Step] = []
    body = step.bodies[0]
    for load in loads(body):
        if load.buffer != name:
            continue
        at = dict(zip(reduce.axes, load.index, strict=True))
        part = replace(
            reduce,
            name=f"{name}.part{len(reductions)}.{step.name}",
            shape=tuple(axis.extent or 0 for axis in step.axes),
            axes=step.axes,
            bodies=tuple(substitute(b, at) for b in reduce.bodies),
            index=step.axes,
        )
        value: Expr = Load(part.name, step.axes, part.dtypes[0])
        if final is not reduce:
            inner = replace_loads(final.bodies[0], {reduce.name: value})
            value = substitute(inner, {axis: at[axis] for axis in reduce.axes if axis not in step.axes or at[axis] != axis})
            value = replace_loads(value, {part.name: Load(part.name, step.axes, part.dtypes[0])})
        body = rewrite(body, lambda node, load=load, value=value: value if node == load else node)  # type: ignore[misc]
        reductions.append(part)
    return (*reductions, replace(step, bodies=(body,)))
