"""Pooling as a library's operator: windows that slide over dimensions of an input, whose greatest element or mean is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilewright.codegen.access import is_bounds_check
from tilewright.graph.operators.definition import number
from tilewright.graph.operators.pooling import taps_within
from tilewright.ir.computation import Step, lowest
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import ZERO, Apply, Const, Expr, Load, Var, const, linear, loads, rewrite, substitute
from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall, Pooling
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.ir.windows import pooled_extent
from tilewright.kernels.library.views import Address, Operation, merged_axes, target_of, view_of

MOST_DIMENSIONS = 3
"""Dimensions along which PyTorch's windows slide at most."""


@dataclass(frozen=True)
class Window:
    """A dimension of `size` elements, `pitch` apart, along which a window of `taps` slides: output * stride + tap * dilation - padding."""

    pitch: int = 0
    output: Var | None = None
    taps: int = 1
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    size: int = 1

    @property
    def outputs(self) -> int:
        return (self.output.extent or 1) if self.output is not None else 1

    def sized(self, ceiling: bool) -> Window | None:
        """The dimension, perhaps without elements behind the last one that is read, so that PyTorch counts as many outputs; None if it never does. A
        single window may have any stride."""
        if self.output is None:
            return replace(self, stride=self.size + 2 * self.padding)
        read = (self.outputs - 1) * self.stride + (self.taps - 1) * self.dilation + 1 - self.padding
        for size in (self.size, read):
            counted = pooled_extent(size, self.taps, self.stride, (self.padding, self.padding), self.dilation, ceiling)
            if size <= self.size and counted == self.outputs:
                return replace(self, size=size)
        return None


@dataclass(frozen=True)
class Windows:
    """The step that pools; the address of the first element that it reads, with the strides of `axes`, which do not slide; and the dimensions along
    which windows slide, one to three, in the order of the input."""

    step: Step
    input: Address
    axes: tuple[Var, ...]
    dims: tuple[Window, ...]


def pooling_operations(problem: Problem) -> Mapping[str, Callable[[], Operation]]:
    """The operator that pools as the region does, with what finds the operation, or raises ValueError: Unsuitable, or because the operator is not
    defined for these views and types. Raises Unsuitable if the region does not begin with windows of an input."""
    step = problem.region.steps[0]
    names = {"max": "max_pooling", "sum": "average_pooling"}
    if step.combiner not in names or len(step.bodies) != 1 or step.dtypes[0] != FLOAT32:
        raise Unsuitable("the region does not begin with greatest elements or sums of float32")
    if any(later.kind != "map" for later in problem.region.steps[1:]):
        raise Unsuitable("further reductions follow")
    outside = lowest(FLOAT32) if step.combiner == "max" else const(0, FLOAT32)
    find = _greatest if step.combiner == "max" else _average
    return {names[step.combiner]: partial(find, problem, _windows(step, outside, problem))}


def _greatest(problem: Problem, found: Windows) -> Operation:
    return _operation(problem, found, problem.region.steps[1:], "max_pooling", None, False)


def _average(problem: Problem, found: Windows) -> Operation:
    """The mean that the first map after the sum computes if the operator can divide as the map does, otherwise the sum."""
    step, following = found.step, problem.region.steps[1:]
    averaged, count = _divided(step, following)
    if isinstance(count, Const) and float(count.value).is_integer() and count.value >= 1:
        return _operation(problem, found, averaged, "average_pooling", int(count.value), False)
    for padded in (False, True):
        if count is not None and count == _count(found, padded):
            return _operation(problem, found, averaged, "average_pooling", None, padded)
    total = _operation(problem, found, following, "average_pooling", 1, False)
    if total.epilogue is not None and problem.values[found.input.buffer].dtype == "f16":
        raise Unsuitable("sums that what follows reads may exceed the range of f16")
    return total


def _divided(step: Step, following: Sequence[Step]) -> tuple[Sequence[Step], Expr | None]:
    """The steps with the mean in place of the sum, and what the first divides the sum by, over the step's axes; None if it is no such division."""
    if not following or following[0].kind != "map" or len(following[0].axes) != len(step.axes):
        return following, None
    first, *more = following
    divisors: set[Expr] = set()
    mean, total = f"{step.name}.mean", Load(step.name, first.axes, FLOAT32)

    def visit(node: Expr) -> Expr:
        if isinstance(node, Apply) and node.operation == "div" and node.args[0] == total:
            divisors.add(node.args[1])
            return Load(mean, total.index, total.dtype)
        return node

    (body,) = (rewrite(body, visit) for body in first.bodies)
    read = {load.buffer for load in loads(body, *(each for later in more for each in later.bodies))}
    if len(divisors) != 1 or step.name in read:
        return following, None
    (divisor,) = divisors
    body = rewrite(body, lambda node: replace(node, buffer=step.name) if isinstance(node, Load) and node.buffer == mean else node)
    at_step = {old: new if new.extent != 1 else ZERO for old, new in zip(first.axes, step.axes, strict=True)}
    return (replace(first, bodies=(body,)), *more), substitute(divisor, at_step)


def _count(found: Windows, padded: bool) -> Expr:
    """The number of taps within the input, or also in its padding, as the operators of the graph express it."""
    dims = found.dims
    where = [dim.output if dim.output is not None else ZERO for dim in dims]
    sizes, taps, strides = ([getattr(dim, name) for dim in dims] for name in ("size", "taps", "stride"))
    return number(taps_within(where, sizes, taps, strides, [(dim.padding, dim.padding) for dim in dims], padded), FLOAT32)


def _operation(problem: Problem, found: Windows, following: Sequence[Step], name: str, divisor: int | None, padded: bool) -> Operation:
    """The operator over two or three dimensions, with the innermost of the other axes as channels and the rest as images. What is not one dimension
    of images becomes one of windows of one element."""
    for ceiling in (False, True):
        dims = [sized for dim in found.dims if (sized := dim.sized(ceiling)) is not None]
        if len(dims) == len(found.dims) and not (padded and [dim.size for dim in dims] != [dim.size for dim in found.dims]):
            break
    else:
        raise Unsuitable("the operator would have another number of windows")
    a = found.input
    *images, channel = sorted(found.axes, key=lambda axis: -a.stride(axis)) or (None,)
    while True:
        dims = sorted(dims, key=lambda dim: -dim.pitch)
        slides = [dim.output for dim in dims if dim.output is not None]
        order = (*images, *slides, *([channel] if channel is not None else []))
        target = target_of(problem, found.step, following, problem.values[a.buffer].dtype, order)
        try:
            n, (a_n, out_n) = merged_axes(images, a, target.address)
            break
        except Unsuitable:
            if len(dims) == MOST_DIMENSIONS:
                raise
            axis = images.pop()
            dims.append(Window(a.stride(axis), axis, size=axis.extent or 1))
    dims = [Window()] * (2 - len(dims)) + dims
    out, c = target.address, (channel.extent or 1) if channel is not None else 1
    window, stride, dilation, padding = (tuple(getattr(dim, name) for dim in dims) for name in ("taps", "stride", "dilation", "padding"))
    operator = Pooling(name, window, stride, dilation, padding, ceiling, divisor, padded)
    read = view_of(a, (n, c, *(dim.size for dim in dims)), (a_n, a.stride(channel) or 1, *(dim.pitch or 1 for dim in dims)))
    sizes, strides = (n, c, *(dim.outputs for dim in dims)), (out_n, out.stride(channel) or 1, *(out.stride(dim.output) or 1 for dim in dims))
    return target.operation(problem, LibraryCall(operator, (read,), (view_of(out, sizes, strides),)))


def _windows(step: Step, outside: Expr, problem: Problem) -> Windows:
    """The dimensions along which windows slide. Raises Unsuitable if the step does not reduce such windows of a stored input."""
    (body,) = step.bodies
    inside = None
    if isinstance(body, Apply) and body.operation == "select" and body.args[2] == outside:
        inside, body, _ = body.args
    if not isinstance(body, Load) or body.buffer not in problem.layouts:
        raise Unsuitable("elements are computed while they are read")
    layout = problem.layouts[body.buffer]
    if inside is not None and not is_bounds_check(inside, body.index, layout.shape):
        raise Unsuitable("elements inside the input are left out")
    return _dimensions(step, body, layout)


def _dimensions(step: Step, read: Load, layout: Layout) -> Windows:
    pitches = layout.dense_strides()
    if pitches is None:
        raise Unsuitable("a dimension of the input is split")
    dims: list[Window] = []
    first: list[int] = []
    strides: dict[Var, int] = {}
    used: list[Var] = []
    for pitch, extent, position in zip(pitches, layout.shape, read.index, strict=True):
        form = linear(position)
        pairs = [(atom, scale) for atom, scale in form.terms if isinstance(atom, Var) and atom.extent != 1]
        outputs, taps = ([pair for pair in pairs if pair[0] in role] for role in (step.axes, step.reduction))
        if len(pairs) != len(form.terms) or len(outputs) > 1 or len(taps) > 1 or any(scale < 1 for _, scale in pairs):
            raise Unsuitable(f"an index of the input is not one place of a window and one of its taps: {position}")
        used += [axis for axis, _ in pairs]
        (output, stride), (tap, dilation) = (found[0] if found else (None, 1) for found in (outputs, taps))
        first.append(max(form.constant, 0))
        if tap is None and form.constant >= 0 and stride == 1:
            strides |= {output: pitch} if output is not None else {}
        else:
            size = extent - max(form.constant, 0)
            dims.append(Window(pitch, output, (tap.extent or 1) if tap is not None else 1, stride, dilation, max(-form.constant, 0), size))
    if sorted(used, key=str) != sorted((axis for axis in (*step.axes, *step.reduction) if axis.extent != 1), key=str):
        raise Unsuitable("an axis indexes no dimension of the input, or two")
    if not 1 <= len(dims) <= MOST_DIMENSIONS:
        raise Unsuitable("windows do not slide along one, two or three dimensions")
    return Windows(step, Address(read.buffer, linear(layout.offset(first)).constant, strides), tuple(strides), tuple(dims))
