"""A sum of products as a library's operator: convolution with its stored padding, or matrix product, and the epilogue that is left for a kernel.

Operators are found by axes and addresses, not by the names of nodes: `a` is stored input, `b` the other factor, and their views follow from the
layouts. An axis that indexes only `a` belongs to m, one that indexes only `b` to n, one that indexes both to the groups, as in `graph.contraction`;
unlike there, n may be empty (depthwise convolution).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import flatten
from tilewright.codegen.common import guarded_load
from tilewright.graph.inline import inline_step
from tilewright.graph.rows import rows_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32, computed_in
from tilewright.ir.expr import Apply, Expr, Load, Var, linear, loads, rewrite, variables
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, permuted
from tilewright.ir.library import LibraryCall, View
from tilewright.ir.problem import Problem
from tilewright.ir.region import Storage, Unsuitable

LEAST_TAPS = 49
"""Least elements of a filter for which Fourier transforms are a candidate: convolutions by them take about the same time for any filter."""
MOST_TRANSFORMED = 1 << 26
"""Most bytes of transformed filters: half of the spectrum, of complex numbers, for each channel of each filter."""
Strides = Mapping[Var, int]
"""Elements between neighbours along each axis."""


@dataclass(frozen=True)
class Address:
    """The address of a factor or of the result: a buffer's element `start`, plus `strides` times the axes. `index` is a factor's logical index."""

    buffer: str
    start: int
    strides: Strides
    index: tuple[Expr, ...] = ()

    def stride(self, axis: Var | None) -> int:
        """The axis's stride; 0 for None or an axis of extent 1."""
        return self.strides.get(axis, 0) if axis is not None else 0


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


@dataclass(frozen=True)
class Operation:
    """A library's operator, and what is left of the region: a problem that reads `product`, where the operator stores its result."""

    call: LibraryCall
    product: Storage | None = None
    epilogue: Problem | None = None


@dataclass(frozen=True)
class LibraryForm:
    """The operators that compute the region's sum, by name; `facts` are these names."""

    operations: Mapping[str, Operation]

    @property
    def facts(self) -> tuple[str, ...]:
        return tuple(self.operations)


def library_form(problem: Problem, operators: Sequence[str]) -> LibraryForm:
    """Those of the operators with which a library can compute the region's sum. Raises Unsuitable if there is none."""
    found = _factors(problem)
    operations, reasons = {}, []
    channels_last, rows = (*found.m, *found.groups, *found.n), (*found.groups, *found.m, *found.n)
    ways = (
        ("convolution", _convolution, channels_last), ("fft_convolution", _fft_convolution, channels_last),
        ("matmul", _matmul, rows), ("linear", _linear_map, rows),
    )  # fmt: skip
    for name, matching, order in ways:
        if name not in operators:
            continue
        try:
            target, product, epilogue = _result(problem, found, order)
            call = matching(problem, found, target)
            call.check()
            call.check_types(*(problem.values[factor.buffer].dtype for factor in (found.a, found.b)))
            operations[name] = Operation(call, product, epilogue)
        except ValueError as reason:  # Unsuitable, or views whose elements overlap
            reasons.append(f"{name}: {reason}")
    if not operations:
        raise Unsuitable("; ".join(reasons))
    return LibraryForm(operations)


def _factors(problem: Problem) -> Factors:
    step, layouts = problem.region.steps[0], problem.layouts
    body = step.bodies[0]
    if step.combiner != "sum" or len(step.bodies) != 1 or not (isinstance(body, Apply) and body.operation == "mul") or body.dtype != FLOAT32:
        raise Unsuitable("the region does not begin with a sum of products in float32")
    if len(problem.region.outputs) != 1 or not problem.is_whole:
        raise Unsuitable("the region has more than one result, or depends on a loop's step")
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
    return _linear(flat.buffer, flat.index[0], guarded[1].index)


def _linear(buffer: str, offset: Expr, index: tuple[Expr, ...] = ()) -> Address:
    form = linear(offset)
    strides = {atom: scale for atom, scale in form.terms if isinstance(atom, Var) and scale > 0}
    if len(strides) != len(form.terms) or form.constant < 0:
        raise Unsuitable(f"an address does not grow linearly with the axes: {offset}")
    return Address(buffer, form.constant, strides, index)


def _result(problem: Problem, found: Factors, order: Sequence[Var]) -> tuple[Address, Storage | None, Problem | None]:
    """Where the operator stores the sum, in the type of `a`: in place if nothing follows; otherwise in a buffer with the axes in this order, which
    the epilogue reads."""
    region, step, dtype = problem.region, found.step, problem.values[found.a.buffer].dtype
    if len(region.steps) == 1:
        target = _linear(region.outputs[0], problem.layouts[region.outputs[0]].offset(step.index))
        if problem.values[region.outputs[0]].dtype != dtype:
            raise Unsuitable("the result is stored in another type")
        return target, None, None
    if region.outputs[0] == step.name:
        raise Unsuitable("steps follow whose results are not stored")
    name = f"{step.name}.product"

    def renamed(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer != step.name:
            return node
        if len(node.index) != len(step.axes):
            raise Unsuitable("the epilogue reads the sum by another number of axes")
        return replace(node, buffer=name)

    shape = tuple(axis.extent or 0 for axis in step.axes)
    rest = [axis for axis in step.axes if axis not in order]
    layout = permuted(shape, [step.axes.index(axis) for axis in (*rest, *order)])
    product = Storage(Value(name, shape, dtype), layout)
    after = [replace(later, bodies=tuple(rewrite(body, renamed) for body in later.bodies)) for later in region.steps[1:]]
    maps = {later.name: later for later in after[:-1] if later.kind == "map"}
    steps = tuple(inline_step(later, maps) for later in after if later.name not in maps)
    read = {load.buffer for later in steps for load in loads(*later.bodies)}
    kind = "map" if all(later.kind == "map" for later in steps) else "row reduction"
    if any(later.kind == "scan" for later in steps) or (kind == "row reduction" and rows_of(steps) is None):
        raise Unsuitable("the epilogue reduces something other than rows")
    inputs = (*(name for name in region.inputs if name in read), name)
    left = replace(problem, region=replace(region, kind=kind, steps=steps, inputs=inputs)).with_storage({name: product})
    return _linear(name, layout.offset(step.axes)), product, left


def _merged(axes: Sequence[Var], *addresses: Address) -> tuple[int, tuple[int, ...]]:
    """The axes as one dimension: its extent, and its stride at each address."""
    if not axes:
        return 1, (1,) * len(addresses)
    inner, *outer = sorted(axes, key=addresses[0].stride)
    extent, strides = inner.extent or 1, tuple(address.stride(inner) for address in addresses)
    for axis in outer:
        if any(address.stride(axis) != extent * stride for address, stride in zip(addresses, strides, strict=True)):
            raise Unsuitable(f"the axes {', '.join(axis.name for axis in axes)} are not one dimension in memory")
        extent *= axis.extent or 1
    return extent, strides


def _view(address: Address, sizes: Sequence[int], strides: Sequence[int]) -> View:
    """A view; dimensions of extent 1 get the stride of an outermost one, so that PyTorch does not take the view for a permuted one."""
    whole = max(1, *(size * stride for size, stride in zip(sizes, strides, strict=True)))
    own = tuple(stride if size != 1 else whole for size, stride in zip(sizes, strides, strict=True))
    return View(address.buffer, tuple(sizes), own, address.start)


def _matmul(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    if not found.n or not found.r:
        raise Unsuitable("no axis indexes only the second factor, or none is reduced")
    a, b = found.a, found.b
    groups, (a_group, b_group, out_group) = _merged(found.groups, a, b, target)
    m, (a_m, out_m) = _merged(found.m, a, target)
    n, (b_n, out_n) = _merged(found.n, b, target)
    r, (a_r, b_r) = _merged(found.r, a, b)
    return LibraryCall(
        "matmul",
        _view(a, (groups, m, r), (a_group, a_m, a_r)),
        _view(b, (groups, r, n), (b_group, b_r, b_n)),
        _view(target, (groups, m, n), (out_group, out_m, out_n)),
    )


def _linear_map(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    if found.b.buffer not in problem.constants or found.groups:
        raise Unsuitable("the second factor is not one constant matrix")
    return replace(_matmul(problem, found, target), operator="linear")


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
    n, (a_n, out_n) = _merged([one.output for one in images if one.output is not None], a, target)
    groups, (a_group, *_) = _merged(found.groups, a, b, target)
    k, (b_k, out_k) = _merged((*found.groups, *found.n), b, target)
    inside, a_c, b_c = (channel.extent or 1, a.stride(channel), b.stride(channel)) if channel is not None else (1, a_group, 1)
    if groups > 1 and (a_group != inside * a_c or any(b.stride(outer) < b.stride(inner) for outer in found.groups for inner in found.n)):
        raise Unsuitable("the channels of the groups are not one dimension")
    return LibraryCall(
        "convolution",
        _view(a, (n, groups * inside, *(one.size for one in spatial)), (a_n, a_c, *(one.pitch for one in spatial))),
        _view(b, (k, inside, *(one.taps for one in spatial)), (b_k, b_c, *(b.stride(one.tap) for one in spatial))),
        _view(target, (n, k, *(one.outputs for one in spatial)), (out_n, out_k, *(target.stride(one.output) for one in spatial))),
        tuple(one.stride for one in spatial),
        tuple(one.dilation for one in spatial),
        groups,
    )


def _fft_convolution(problem: Problem, found: Factors, target: Address) -> LibraryCall:
    call = _convolution(problem, found, target)
    if prod(call.b.sizes[2:]) < LEAST_TAPS or {*call.stride, *call.dilation} != {1}:
        raise Unsuitable(f"the filters have fewer than {LEAST_TAPS} taps, or do not slide over every pixel")
    if 4 * prod(call.a.sizes[2:]) * prod(call.b.sizes[:2]) > MOST_TRANSFORMED:
        raise Unsuitable(f"the transformed filters take more than {MOST_TRANSFORMED} bytes")
    return replace(call, operator="fft_convolution")


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
