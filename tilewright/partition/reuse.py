"""Kernels of other sizes of a model, which a region takes without being lowered again.

A region has the kernels of one of another size if both have the same canonical problem. It also has them if its problem is that of `count` images
where the other's is that of one: values that differ are `count` values of the other size one behind another, and each image of a result is computed
from the same image of what is read as in the other problem. This is proven step by step (`images_of`): the axis of images becomes the number of the
image and an axis inside of it, what is loaded is told relative to the image's first element, and the result has to be the other step. An "image" is
whatever sizes share along the outermost dimension, such as a sequence, whose rows may be those of a matrix with the rows of all sequences.

Kernels that take their trips as an argument (`codegen.trips`) do as many more of them where trips pass from one image to the next; others are called
once for each image, at its addresses (`Call.shifts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tilewright.codegen.trips import with_trips
from tilewright.ir.computation import Step
from tilewright.ir.expr import ZERO, Expr, Load, Var, mul, rewrite, sub, substitute, variables
from tilewright.ir.kernel import TRIPS, If, Kernel, statements
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered
from tilewright.partition.canonical import key_of
from tilewright.partition.merges import Known, Memory

MOST_KNOWN = 128
"""Problems of one form that are kept, those lowered last: more than a network has layers that differ."""
MOST_CALLS = 64
"""Most images for which a kernel is called one by one. Each call costs about a microsecond, and threads divide the work of one image only."""

_IMAGE = "number of the image"
"""The name of a variable that no kernel has."""


def lowered_once(memory: Memory, problem: Problem, schedule: Any, lower: Callable[[], Lowered]) -> Lowered:
    """The kernels of a canonical problem under a schedule: those of an equal problem, or what `lower` gives, which is kept for others."""
    form, key = _form(problem), key_of(problem)
    every = memory.kernels.get(form, ())
    found = next((known.lowered for known in reversed(every) if known.schedule == schedule and known.key == key), None)
    if found is None:
        found = lower()
        memory.kernels[form] = (*memory.kernels.get(form, ()), Known(problem, key, schedule, found))[-MOST_KNOWN:]
    return found


def kernels_of_images(memory: Memory, problem: Problem) -> Lowered | None:
    """The kernels of a canonical problem that equals one whose kernels are kept, or as few images of one as possible; None if there is none."""
    key, result = key_of(problem), problem.region.outputs[0]
    every = memory.kernels.get(_form(problem), ())[::-1]
    for known in every:
        if known.key == key:
            return known.lowered
    for known in sorted(every, key=lambda known: known.problem.values[result].elements, reverse=True):
        images = images_of(problem, known.problem)
        made = _for_images(known.lowered, images) if images is not None else None
        if made is not None:
            return made
    return None


def _form(problem: Problem) -> object:
    """What problems have in common that are of the same steps for other sizes."""
    region = problem.region
    steps = tuple((step.names, step.kind, step.combiner, *_extents(step.reduction)) for step in region.steps)
    values = tuple((name, value.dtype, name in problem.constants) for name, value in problem.values.items())
    return (region.kind, tuple((stage.kind, len(stage.steps)) for stage in region.stages), region.outputs, region.wholes, steps, values)


@dataclass(frozen=True)
class Images:
    """A problem as `count` images of another one. `distances`: by name, the elements between one image of a value and the next."""

    count: int
    distances: Mapping[str, int]


@dataclass(frozen=True)
class _Part:
    """Where extents have images: at one position, of `extent` entries each; `dropped` if the extents of one image lack it."""

    at: int
    extent: int
    dropped: bool


Parts: TypeAlias = Mapping[str, _Part | None]
"""By name of a value where its shape has images; None if it has none."""


class _Differs(Exception):
    """It is not known to be several images of the other problem."""


def images_of(problem: Problem, one: Problem) -> Images | None:
    """The canonical problem as images of a problem of the same form; None if that is not proven."""
    try:
        return _images_of(problem, one)
    except _Differs:
        return None


def _images_of(problem: Problem, one: Problem) -> Images:
    result = problem.region.outputs[0]
    count, rest = divmod(problem.values[result].elements, max(one.values[result].elements, 1))
    if rest or count < 2:
        raise _Differs
    parts: dict[str, _Part | None] = {}
    distances: dict[str, int] = {}
    for name, value in problem.values.items():
        part = parts[name] = _part(value.shape, one.values[name].shape, count)
        if part is None and problem.layouts[name] != one.layouts[name]:
            raise _Differs
        if part is not None:
            distances[name] = _distance(problem.layouts[name], one.layouts[name], part)
    if not distances.keys() >= {*problem.region.outputs}:
        raise _Differs
    image = Var(_IMAGE, count)
    for step, other in zip(problem.region.steps, one.region.steps, strict=True):
        part = _part(step.shape, other.shape, count)
        parts.update(dict.fromkeys(step.names, part))
        _require_image(step, other, image, parts)
    return Images(count, distances)


def _part(extents: Sequence[int], one: Sequence[int], count: int) -> _Part | None:
    """Where the extents differ from those of one image; None if they are the same."""
    if tuple(extents) == tuple(one):
        return None
    for at, extent in enumerate(extents):
        before, after = tuple(extents[:at]), tuple(extents[at + 1 :])
        if extent % count == 0 and (*before, extent // count, *after) == tuple(one):
            return _Part(at, extent // count, dropped=False)
        if extent == count and (*before, *after) == tuple(one):
            return _Part(at, 1, dropped=True)
    raise _Differs


def _distance(layout: Layout, one: Layout, part: _Part) -> int:
    """The elements between images of a value, if they follow one another and are stored alike."""
    positions = [position for position, (dim, _) in enumerate(layout.order) if dim == part.at]
    alike = (layout.order, layout.halo, layout.around) == (one.order, one.halo, one.around) and not part.dropped
    if not alike or len(positions) != 1 or any((*layout.halo[part.at], *layout.outside(part.at))):
        raise _Differs
    if any(extent > 1 and a != b for extent, a, b in zip(layout.extents, layout.strides, one.strides, strict=True)):
        raise _Differs
    return part.extent * layout.strides[positions[0]]


def _require_image(step: Step, other: Step, image: Var, parts: Parts) -> None:
    """Raises unless the step computes for each image what the other one does."""
    assert image.extent is not None
    extents, its = ([axis.extent or 0 for axis in one.axes if axis.extent != 1] for one in (step, other))
    found = _part(extents, its, image.extent)
    mine, theirs = _axes(step, found, image), _axes(other, None, image)
    if [_extents(step.reduction), len(step.bodies)] != [_extents(other.reduction), len(other.bodies)]:
        raise _Differs
    if (step.scan is None) != (other.scan is None) or (step.scan is not None and other.scan is not None and mine[step.scan] != theirs[other.scan]):
        raise _Differs

    def within(expr: Expr) -> Expr:
        return rewrite(substitute(expr, mine), lambda node: _relative(node, image, parts) if isinstance(node, Load) else node)

    bodies, index = tuple(map(within, step.bodies)), tuple(map(within, step.index))
    index = _relative_index(step.name, index, image, parts)
    if bodies != tuple(substitute(body, theirs) for body in other.bodies) or index != tuple(substitute(one, theirs) for one in other.index):
        raise _Differs


def _extents(axes: Sequence[Var]) -> list[int | None]:
    return [axis.extent for axis in axes]


def _axes(step: Step, part: _Part | None, image: Var) -> dict[Var, Expr]:
    """The axes of a step, by other names and without those of one entry; that of all images as the number of the image and the axis inside of it."""
    replaced: dict[Var, Expr] = {}
    kept = inside = 0
    for axis in step.axes:
        if axis.extent == 1:
            replaced[axis] = ZERO
            continue
        has_images, kept = part is not None and part.at == kept, kept + 1
        if part is not None and has_images:
            replaced[axis] = mul(image, part.extent)
            if part.dropped:
                continue
            replaced[axis] = replaced[axis] + Var(f"axis {inside}", part.extent)
        else:
            replaced[axis] = Var(f"axis {inside}", axis.extent)
        inside += 1
    return replaced | {axis: Var(f"reduced {number}", axis.extent) for number, axis in enumerate(step.reduction)}


def _relative(load: Load, image: Var, parts: Parts) -> Load:
    return replace(load, index=_relative_index(load.buffer, load.index, image, parts))


def _relative_index(name: str, index: Sequence[Expr], image: Var, parts: Parts) -> tuple[Expr, ...]:
    """An index of a value relative to the first element of the image."""
    part, found = parts[name], list(index)
    if part is not None:
        found[part.at] = sub(found[part.at], mul(image, part.extent))
        if part.dropped and found.pop(part.at) != ZERO:
            raise _Differs
    if image in variables(*found):
        raise _Differs
    return tuple(found)


def _for_images(lowered: Lowered, images: Images) -> Lowered | None:
    """The kernels of one image for all of them; None if that takes too many calls, or a constant of all images is packed."""
    packed = {entry.source for entry in lowered.storage.values()}
    if lowered.library is not None or lowered.repeat != 1 or not packed.isdisjoint(images.distances):
        return None
    kernels = {(kernel.name, kernel.trips): kernel for kernel in lowered.kernels}
    called = [(kernels[call.kernel, call.trips], call, [images.distances.get(name, 0) for name in call.arguments]) for call in lowered.calls]
    note = f"for {images.count} images, of which the sizes below are those of one"
    if all(_passes_on(kernel, distances) for kernel, _, distances in called):
        larger = {key: _described(with_trips(kernel, images.count * kernel.trips), note) for key, kernel in kernels.items()}
        calls = tuple(Call.of(larger[call.kernel, call.trips], call.arguments) for call in lowered.calls)
        return replace(lowered, kernels=tuple(larger.values()), calls=calls)
    if images.count > MOST_CALLS:
        return None
    calls = tuple(
        replace(call, shifts=tuple(number * distance for distance in distances)) if number else call
        for number in range(images.count)
        for _, call, distances in called
    )
    return replace(lowered, kernels=tuple(_described(kernel, f"{note}, one by one") for kernel in lowered.kernels), calls=calls)


def _described(kernel: Kernel, note: str) -> Kernel:
    return replace(kernel, header=f"{note}\n{kernel.header}")


def _passes_on(kernel: Kernel, distances: Sequence[int]) -> bool:
    """Whether the trip after the last one of an image is the first one of the next image: no trip is told from others."""
    told = any(isinstance(statement, If) and TRIPS in variables(statement.condition) for statement in statements(kernel.body))
    return kernel.trips > 0 and not told and [buffer.growth * kernel.trips for buffer in kernel.parameters] == [*distances]
