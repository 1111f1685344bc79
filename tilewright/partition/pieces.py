"""Maps that are defined piece by piece along an axis, such as concatenations, and those of them that are one load of one value.

    select(c < 3, x[c, 2 y, 2 w], select(c < 6, x[c - 3, 2 y + 1, 2 w], ...))  →  x[c % 3, 2 y + c // 3 % 2, 2 w + c // 6]

Pieces of one length that are slices of one value at regular distances (shifted channels, the phases of an image, repetitions) are then a view, and
readers read through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from operator import mul

from tilewright.ir.computation import Step
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, floordiv, linear, mod, substitute

MOST_PIECES = 64


def pieces(step: Step) -> tuple[int, tuple[tuple[int, int, Expr], ...]] | None:
    """The dimension along which a map is defined piece by piece, and for each piece its start, its end and its body; None for any other step."""
    if step.kind != "map" or len(step.bodies) != 1 or not step.identity_index:
        return None
    body, start, found, dim = step.bodies[0], 0, list[tuple[int, int, Expr]](), -1
    while isinstance(body, Apply) and body.operation == "select":
        condition, value, otherwise = body.args
        if not (isinstance(condition, Apply) and condition.operation == "lt" and isinstance(condition.args[1], Const)):
            break
        at = next((at for at, axis in enumerate(step.axes) if axis == condition.args[0]), None)
        if at is None or dim not in (-1, at) or (end := int(condition.args[1].value)) <= start:
            break
        dim = at
        found.append((start, end, value))
        body, start = otherwise, end
    return (dim, (*found, (start, step.axes[dim].extent or 0, body))) if found else None


def as_one_load(step: Step) -> Step:
    """The map as a single load if its pieces are slices of one value at regular distances; otherwise as it is."""
    found = pieces(step)
    if found is None:
        return step
    dim, each = found
    axis, length = step.axes[dim], each[0][1]
    sources = [body for _, _, body in each if isinstance(body, Load)]
    if len(sources) != len(each) or len(each) > MOST_PIECES or any(end - start != length for start, end, _ in each):
        return step
    if len({(load.buffer, load.dtype) for load in sources}) > 1:
        return step
    index = [_of_all_pieces(positions, axis, length) for positions in zip(*(load.index for load in sources), strict=True)]
    known = tuple(position for position in index if position is not None)
    return replace(step, bodies=(replace(sources[0], index=known),)) if len(known) == len(index) else step


def _of_all_pieces(positions: Sequence[Expr], axis: Var, length: int) -> Expr | None:
    """One expression for the index that each piece has, in terms of the piece's number, axis // length, and the place in it, axis % length; None if
    the pieces are at no regular distances."""
    place = Var(f"{axis.name}_in_piece", length)
    forms = [linear(substitute(position, {axis: place + number * length})) for number, position in enumerate(positions)]
    if any(dict(form.terms) != dict(forms[0].terms) for form in forms):
        return None
    distances = [form.constant - forms[0].constant for form in forms]
    stride = dict(forms[0].terms).get(place, 0)
    if stride and all(distance == number * stride * length for number, distance in enumerate(distances)):
        return positions[0]  # linear in the axis: no division
    result = substitute(positions[0], {axis: mod(axis, length)})
    for radices in _factors(len(positions)):
        weights = [prod(radices[at + 1 :]) for at in range(len(radices))]
        steps = [distances[weight] for weight in weights]
        numbers = ([number // weight % radix for weight, radix in zip(weights, radices, strict=True)] for number in range(len(distances)))
        if all(sum(map(mul, steps, digits)) == distance for digits, distance in zip(numbers, distances, strict=True)):
            for step, weight, radix in zip(steps, weights, radices, strict=True):
                result = result + mod(floordiv(axis, length * weight), radix) * step
            return result
    return None


def _factors(count: int) -> Iterator[tuple[int, ...]]:
    """The radices of number systems of up to three digits, in which pieces may be counted, first digit first."""
    yield (count,)
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            yield first, count // first
    for first in range(2, count // 4 + 1):
        for second in range(2, count // first // 2 + 1):
            if count % (first * second) == 0:
                yield first, second, count // (first * second)
