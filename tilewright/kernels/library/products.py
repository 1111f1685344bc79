"""A sum of products as a library's operator: convolution with its stored padding, or matrix product, and the epilogue that is left for a kernel.

Operators are found by axes and addresses, not by the names of nodes: `a` is stored input, `b` the other factor, and their views follow from the
layouts. An axis that indexes only `a` belongs to m, one that indexes only `b` to n, one that indexes both to the groups, as in `graph.contraction`;
unlike there, n may be empty (depthwise convolution).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from tilewright.codegen.access import flatten
from tilewright.codegen.common import guarded_load
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32, computed_in
from tilewright.ir.expr import Apply, Expr, Load, Var, linear, variables
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.library import Convolution, LibraryCall, Product
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.library.views import Address, Operation, linear_address, merged_axes, target_of, view_of

LEAST_TAPS = 49
"""Least elements of a filter for which Fourier transforms are a candidate: convolutions by them take about the same time for any filter."""
MOST_TRANSFORMED = 1 << 26
"""Most bytes of transformed filters: half of the spectrum, of complex numbers, for each channel of each filter."""


@dataclass(frozen=True)
class Factors:
    """A sum of products: its factors, and its axes of extent above 1 by what they index."""

    step: Step
    a: Address
    b: Address
    groups: tuple[Var, ...]
    m: tuple[Var, ...]
    n: tuple[Var, ...]
    r: tuple[Var, ...]


def product_operations(problem: Problem) -> Mapping[str, Callable[[], Operation]]:
    """The operators that compute sums of products, each with what finds the operation, or raises ValueError: Unsuitable, or because the operator is
    not defined for these views and types. Raises Unsuitable if the region does not begin with such a sum."""
    found = _factors(problem)
    channels_last, rows = (*found.m, *found.groups, *found.n), (*found.groups, *found.m, *found.n)

    def by(matching: Callable[[Problem, Factors, Address], LibraryCall], order: Sequence[Var]) -> Operation:
        dtype = problem.values[found.a.buffer].dtype
        target = target_of(problem, found.step, problem.region.steps[1:], dtype, order)
        return target.operation(problem, matching(problem, found, target.address))

    return {
        "convolution": partial(by, _convolution, channels_last),
        "fft_convolution": partial(by, _fft_convolution, channels_last),
        "matmul": partial(by, _matmul, rows),
        "linear": partial(by, _linear_map, rows),
    }


def _factors(problem: Problem) -> Factors:
    step, layouts = problem.region.steps[0], problem.layouts
    body = step.bodies[0]
    if step.combiner != "sum" or len(step.bodies) != 1 or not (isinstance(body, Apply) and body.operation == "mul") or body.dtype != FLOAT32:
        raise Unsuitable("the region does not begin with a sum of products in float32")
    first, second = body.args
    if isinstance(first, Load) and first.buffer in problem.constants:
        first, second = second, first
    a, b = (_address(factor, layouts, problem.values) for factor in (first, second))
    own = [axis for axis in (*step.axes, *step.reduction) if axis.extent != 1]
    if any(axis not in step.axes and not (axis in variables(first) and axis in variables(second)) for axis in own):
        raise Unsuitable("a reduced axis indexes only one factor")
    in_a, in_b = variables(*a.index), variables(*b.index)
    free = [axis for axis in own if axis in step.axes]
    if any(axis not in in_a and axis not in in_b for axis in free):
        raise Unsuitable("an axis of the result indexes no factor")
    return Factors(
        step,
        a,
        b,
        tuple(axis for axis in free if axis in in_a and axis in in_b),
        tuple(axis for axis in free if axis not in in_b),
        tuple(axis for axis in free if axis not in in_a),
        tuple(axis for axis in own if axis not in step.axes),
    )


def _address(factor: Expr, layouts: Mapping[str, Layout], values: Mapping[str, Value]) -> Address:
    """The address of a factor whose padding, if it has any, is stored."""
    guarded, flat = guarded_load(factor), flatten(factor, layouts)
    if guarded is None or not isinstance(flat, Load) or flat.buffer not in layouts or computed_in(values[flat.buffer].dtype) != FLOAT32:
        raise Unsuitable("a factor is computed or guarded while it is read, or of a type that is not computed in float32")
    return linear_address(flat.buffer, flat.index[0], guarded[1].index)


def _matmul(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    if not found.n or not found.r:
        raise Unsuitable("no axis indexes only the second factor, or none is reduced")
    a, b = found.a, found.b
    groups, (a_group, b_group, out_group) = merged_axes(found.groups, a, b, target)
    m, (a_m, out_m) = merged_axes(found.m, a, target)
    n, (b_n, out_n) = merged_axes(found.n, b, target)
    r, (a_r, b_r) = merged_axes(found.r, a, b)
    return LibraryCall(
        Product("matmul"),
        (view_of(a, (groups, m, r), (a_group, a_m, a_r)), view_of(b, (groups, r, n), (b_group, b_r, b_n))),
        (view_of(target, (groups, m, n), (out_group, out_m, out_n)),),
    )


def _linear_map(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    if found.b.buffer not in problem.constants or found.groups:
        raise Unsuitable("the second factor is not one constant matrix")
    return replace(_matmul(problem, found, target), operator=Product("linear"))


@dataclass(frozen=True)
class Sliding:
    """A dimension of the input along which filters slide: `output` * stride + `tap` * dilation, where either axis may be missing."""

    pitch: int = 0
    output: Var | None = None
    tap: Var | None = None
    stride: int = 1
    dilation: int = 1
    available: int = 1
    """Stored elements from the first that is read."""

    @property
    def outputs(self) -> int:
        return (self.output.extent or 1) if self.output is not None else 1

    @property
    def taps(self) -> int:
        return (self.tap.extent or 1) if self.tap is not None else 1

    @property
    def size(self) -> int:
        """Extent of the view: what is read, and what is stored behind it if that adds no output, so that the view is contiguous if it can be."""
        read = (self.outputs - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        return max(read, min(self.available, read + self.stride - 1))


def _convolution(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    a, b = found.a, found.b
    if b.buffer not in problem.constants:
        raise Unsuitable("the filters are not constant")
    sliding, channel = _dimensions(problem.layouts[a.buffer], found)
    used = [axis for one in sliding for axis in (one.output, one.tap) if axis is not None] + [axis for axis in (channel,) if axis is not None]
    if len(used) != len(set(used)) or {*found.m, *found.r} != {*used}:
        raise Unsuitable("an axis slides along two dimensions, or along none")
    count = max(2, sum(one.tap is not None for one in sliding))
    images, spatial = sliding[:-count], sliding[-count:]
    if count > 3 or any(one.tap is not None for one in images) or (len(sliding) < 2 and all(one.tap is None for one in sliding)):
        raise Unsuitable("the filters do not slide along two or three dimensions of images")
    spatial = [Sliding()] * (count - len(spatial)) + spatial
    n, (a_n, out_n) = merged_axes([one.output for one in images if one.output is not None], a, target)
    groups, (a_group, *_) = merged_axes(found.groups, a, b, target)
    k, (b_k, out_k) = merged_axes((*found.groups, *found.n), b, target)
    inside, a_c, b_c = (channel.extent or 1, a.stride(channel), b.stride(channel)) if channel is not None else (1, a_group, 1)
    if groups > 1 and (a_group != inside * a_c or any(b.stride(outer) < b.stride(inner) for outer in found.groups for inner in found.n)):
        raise Unsuitable("the channels of the groups are not one dimension")
    return LibraryCall(
        Convolution("convolution", tuple(one.stride for one in spatial), tuple(one.dilation for one in spatial), groups),
        (
            view_of(a, (n, groups * inside, *(one.size for one in spatial)), (a_n, a_c, *(one.pitch for one in spatial))),
            view_of(b, (k, inside, *(one.taps for one in spatial)), (b_k, b_c, *(b.stride(one.tap) for one in spatial))),
        ),
        (view_of(target, (n, k, *(one.outputs for one in spatial)), (out_n, out_k, *(target.stride(one.output) for one in spatial))),),
    )


def _fft_convolution(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    call = _convolution(problem, found, target)
    (a, b), operator = call.inputs, call.operator
    assert isinstance(operator, Convolution)
    if prod(b.sizes[2:]) < LEAST_TAPS or {*operator.stride, *operator.dilation} != {1}:
        raise Unsuitable(f"the filters have fewer than {LEAST_TAPS} taps, or do not slide over every pixel")
    if 4 * prod(a.sizes[2:]) * prod(b.sizes[:2]) > MOST_TRANSFORMED:
        raise Unsuitable(f"the transformed filters take more than {MOST_TRANSFORMED} bytes")
    return replace(call, operator=replace(operator, name="fft_convolution"))


def _dimensions(layout: Layout, found: Factors) -> tuple[list[Sliding], Var | None]:
    """The input's dimensions that outputs or taps index, outermost in memory first, and the axis of the channels: the reduced axis of the dimension
    that groups index, or, without groups, of the innermost one that no output indexes."""
    pitches = layout.dense_strides()
    if pitches is None:
        raise Unsuitable("a dimension of the input is split")
    sliding: list[Sliding] = []
    channels: list[Var] = []
    for dim, position in enumerate(found.a.index):
        form = linear(position)
        axes = [(atom, scale) for atom, scale in form.terms if isinstance(atom, Var)]
        outputs, taps, groups = ([pair for pair in axes if pair[0] in role] for role in (found.m, found.r, found.groups))
        if len(axes) != len(form.terms) or len(outputs) > 1 or len(taps) > 1 or (groups and outputs):
            raise Unsuitable(f"an index of the input is not one axis of the output and one of the filters: {position}")
        if groups:
            channels += [axis for axis, _ in taps]
        elif axes:
            (output, stride), (tap, dilation) = (pairs[0] if pairs else (None, 1) for pairs in (outputs, taps))
            available = layout.shape[dim] + layout.halo[dim][1] - form.constant
            sliding.append(Sliding(pitches[dim], output, tap, stride, dilation, available))
    sliding.sort(key=lambda one: -one.pitch)
    if not found.groups:
        alone = [one for one in sliding if one.output is None]
        channels = [one.tap for one in alone[-1:] if one.tap is not None]
        sliding = [one for one in sliding if one not in alone[-1:]]
    return sliding, channels[0] if channels else None
