"""Problems of more images or rows than a given one, whose kernels serve other sizes too: on CPUs that of two images, of which one is computed
(`of_two`), on GPUs one of several times the rows, whose kernel is compared with the given one's (`scaled`, `kernels.gpu.trips`).

A CPU kernel whose loop over images has its extent as an argument (`codegen.trips`) is the same for every number of images but one, for which that
loop is left out: after a model was compiled for one image, the next batch would have all kernels compiled again. So a problem of one image is lowered
as that of two, with the schedule for one. Its images are assumed to be the outermost dimension of all values that are computed. Where that is wrong
no other size has the same kernel, but the kernel is right, since it is called for the first image.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from tilewright.ir.computation import Step
from tilewright.ir.expr import ZERO, Expr, Load, Var, linear, loads, range_of, rewrite, substitute, variables
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable

_AXIS = "i0"
"""The name of the axis of images where a step has none: that which operators give to the first dimension of their results."""


def lowered_for_images(problem: Problem, lower: Callable[[Problem], Lowered]) -> Lowered:
    """The lowering of a problem for a CPU; the kernels of one image are those of any number of images where that is possible.

    Raises:
        Unsuitable: as `lower` does.
    """
    try:
        lowered = lower(of_two(problem))
    except Unsuitable:
        return lower(problem)
    # A library's operator takes the number of images from its views.
    return replace(lowered, region=problem.region) if lowered.library is None else lower(problem)


def of_two(problem: Problem) -> Problem:
    """The problem of two images, of which that of one image, `one`, is the first.

    Raises:
        Unsuitable: if the problem is not that of one image, or if images are not outermost.
    """
    images = frozenset(name for name, layout in problem.layouts.items() if name not in problem.constants and layout.shape[:1] == (1,))
    images = frozenset(name for name in images if len(problem.layouts[name].shape) > 1)
    if not images.issuperset(problem.region.outputs) or not all(_is_outermost(problem.layouts[name]) for name in images):
        raise Unsuitable("it is not the problem of one image")
    layouts = {name: replace(layout, shape=(2, *layout.shape[1:])) if name in images else layout for name, layout in problem.layouts.items()}
    values = {name: replace(value, shape=layouts[name].shape) if name in images else value for name, value in problem.values.items()}
    return Problem(_of_two(problem.region, images), layouts, values, problem.constants, problem)


def _is_outermost(layout: Layout) -> bool:
    """Whether all of an image lies together, so that the number of images affects no address inside of one."""
    return layout.order[0] == (0, 0) and not any((*layout.halo[0], *layout.outside(0))) and all(dim for dim, _ in layout.order[1:])


def _of_two(region: Region, images: Collection[str]) -> Region:
    steps: list[Step] = []
    known, widened = set(images), set[str]()
    for step in region.steps:
        twice = _step(step, known, widened)
        steps.append(twice)
        (known if len(twice.shape) == len(step.shape) else widened).update(step.names)
    return _with_steps(region, steps)


def _with_steps(region: Region, steps: Sequence[Step]) -> Region:
    numbers = iter(steps)
    stages = tuple(replace(stage, steps=tuple(next(numbers) for _ in stage.steps)) for stage in region.stages)
    return replace(region, steps=tuple(steps), stages=stages)


def _step(step: Step, images: Collection[str], widened: Collection[str]) -> Step:
    """The step for two images. `images`: values with a dimension of images; `widened`: results of earlier steps that have none for one image, and got
    one. Attention's logits are such results: the axis of a single image is left out of what stays inside of its kernel."""
    outer = step.index[:1] == (ZERO,)
    old = step.axes[0] if step.axes and outer else step.index[0] if step.index else None
    if not isinstance(old, Var) or old.extent != 1 or old not in step.axes:
        old = None
    if old is None and not outer and step.name in images:
        raise Unsuitable(f"{step.name} has no axis of images")
    image = Var(_AXIS if old is None else old.name, 2)
    if old is None and any(axis.name == _AXIS for axis in {*step.axes, *step.reduction, *variables(*step.bodies, *step.index)}):
        raise Unsuitable(f"{step.name} has an axis with the name of that of images")

    def moved(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer in widened:
            return replace(node, index=(image, *node.index))
        if not isinstance(node, Load) or node.buffer not in images:
            return node
        if node.index[0] != ZERO:
            raise Unsuitable(f"{step.name} does not read {node.buffer} image by image")
        return replace(node, index=(image, *node.index[1:]))

    def twice(expr: Expr) -> Expr:
        return rewrite(expr if old is None else substitute(expr, {old: ZERO}), moved)

    within = old is None and not outer  # the result gets a dimension
    index = (image, *map(twice, step.index if within else step.index[1:]))
    shape = (2, *(step.shape if within else step.shape[1:]))
    axes = (image, *step.axes) if old is None else tuple(image if axis == old else axis for axis in step.axes)
    return replace(step, shape=shape, axes=axes, bodies=tuple(map(twice, step.bodies)), index=index)


def scaled(problem: Problem, factor: int) -> Problem:
    """The problem with `factor` times the extent along the first dimension of the result that has several indices, and of all values that are read by
    it. Where that is no dimension of the model's, the problem is still a problem.

    Raises:
        Unsuitable: if values are read otherwise than entry by entry along it.
    """
    steps: list[Step] = []
    dims: dict[str, int | None] = dict.fromkeys(problem.constants)
    for step in problem.region.steps:
        steps.append(_scaled_step(step, factor, dims, problem))
    changed = {name: dim for name, dim in dims.items() if dim is not None and name in problem.layouts}
    if not changed.keys() >= set(problem.region.outputs):
        raise Unsuitable("its results have no outermost dimension")

    def larger(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return (*shape[:dim], shape[dim] * factor, *shape[dim + 1 :])

    layouts, values = dict(problem.layouts), dict(problem.values)
    for name, dim in changed.items():
        layouts[name] = replace(layouts[name], shape=larger(layouts[name].shape, dim))
        values[name] = replace(values[name], shape=larger(values[name].shape, dim))
    return Problem(_with_steps(problem.region, steps), layouts, values, problem.constants)


def _scaled_step(step: Step, factor: int, dims: dict[str, int | None], problem: Problem) -> Step:
    """The step of a scaled problem. `dims`: along which dimension values are scaled, None if they are not; those of this step are added."""
    dim = _outermost(step.shape)
    terms = dict(linear(step.index[dim]).terms)
    axis = max((v for v in variables(step.index[dim]) if v in step.axes), key=lambda v: terms.get(v, 0), default=None)
    if axis is None or axis.extent is None:
        raise Unsuitable(f"{step.name} has no outermost axis")
    larger = Var(axis.name, axis.extent * factor)

    def moved(index: Sequence[Expr], shape: Sequence[int]) -> int | None:
        """The dimension along which a value is accessed by the axis, entry by entry."""
        found = [k for k, one in enumerate(index) if range_of(substitute(one, {axis: larger})) != range_of(one)]
        if not found:
            return None
        (first, *others) = found
        if others or first != _outermost(shape) or range_of(substitute(index[first], {axis: larger})) != (0, shape[first] * factor - 1):
            raise Unsuitable(f"{step.name} does not pass over its operands entry by entry")
        return first

    if moved(step.index, step.shape) is None:
        raise Unsuitable(f"{step.name} does not store entry by entry")
    inner = {one.name: one.shape for one in problem.region.steps}
    for load in loads(*step.bodies):
        shape = problem.values[load.buffer].shape if load.buffer in problem.values else inner[load.buffer.partition(".")[0]]
        if dims.setdefault(load.buffer, moved(load.index, shape)) != moved(load.index, shape):
            raise Unsuitable(f"{load.buffer} is read in two ways")
    for name in (*step.names, *(problem.region.outputs if step is problem.region.steps[-1] else ())):
        dims[name] = dim
    shape = (*step.shape[:dim], step.shape[dim] * factor, *step.shape[dim + 1 :])
    axes = tuple(larger if one == axis else one for one in step.axes)
    bodies, index = (tuple(substitute(one, {axis: larger}) for one in part) for part in (step.bodies, step.index))
    return replace(step, shape=shape, axes=axes, bodies=bodies, index=index)


def _outermost(shape: Sequence[int]) -> int:
    """The first dimension of several indices."""
    found = next((dim for dim, extent in enumerate(shape) if extent > 1), None)
    if found is None:
        raise Unsuitable("a value has a single element")
    return found
