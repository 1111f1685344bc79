"""Addresses of what a region reads and stores, and views over them that a library's operator takes; what is left of a region after the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.inline import inline_step
from tilewright.graph.rows import rows_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, linear, loads, rewrite, substitute
from tilewright.ir.graph import Value
from tilewright.ir.layout import permuted
from tilewright.ir.library import LibraryCall, View
from tilewright.ir.problem import Problem
from tilewright.ir.region import Storage, Unsuitable

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


def linear_address(buffer: str, offset: Expr, index: tuple[Expr, ...] = ()) -> Address:
    """The address of an element `offset` of a buffer. Raises Unsuitable if it does not grow linearly with the axes."""
    form = linear(offset)
    strides = {atom: scale for atom, scale in form.terms if isinstance(atom, Var) and scale > 0}
    if len(strides) != len(form.terms) or form.constant < 0:
        raise Unsuitable(f"an address does not grow linearly with the axes: {offset}")
    return Address(buffer, form.constant, strides, index)


def merged_axes(axes: Sequence[Var], *addresses: Address) -> tuple[int, tuple[int, ...]]:
    """The axes as one dimension: its extent, and its stride at each address. Raises Unsuitable if they are not one."""
    if not axes:
        return 1, (1,) * len(addresses)
    inner, *outer = sorted(axes, key=addresses[0].stride)
    extent, strides = inner.extent or 1, tuple(address.stride(inner) for address in addresses)
    for axis in outer:
        if any(address.stride(axis) != extent * stride for address, stride in zip(addresses, strides, strict=True)):
            raise Unsuitable(f"the axes {', '.join(axis.name for axis in axes)} are not one dimension in memory")
        extent *= axis.extent or 1
    return extent, strides


def view_of(address: Address, sizes: Sequence[int], strides: Sequence[int]) -> View:
    """A view; dimensions of extent 1 get the stride of an outermost one, so that PyTorch does not take the view for a permuted one."""
    whole = max(1, *(size * stride for size, stride in zip(sizes, strides, strict=True)))
    own = tuple(stride if size != 1 else whole for size, stride in zip(sizes, strides, strict=True))
    return View(address.buffer, tuple(sizes), own, address.start)


@dataclass(frozen=True)
class Operation:
    """A library's operator, and what is left of the region: a problem that reads `product`, where the operator stores its result."""

    call: LibraryCall
    product: Storage | None = None
    epilogue: Problem | None = None


@dataclass(frozen=True)
class Target:
    """Where an operator stores its result, and what is left of the region."""

    address: Address
    product: Storage | None = None
    epilogue: Problem | None = None

    def operation(self, problem: Problem, call: LibraryCall) -> Operation:
        """The call with what follows it. Raises ValueError if the operator is not defined for these views and types."""
        call.check()
        call.check_types(*(problem.values[view.name].dtype for view in call.inputs))
        return Operation(call, self.product, self.epilogue)


def target_of(problem: Problem, step: Step, following: Sequence[Step], dtype: str, order: Sequence[Var]) -> Target:
    """Where the operator stores the result of the step, in a type: in place if what follows only stores it; otherwise in a buffer with the axes in
    this order, which the epilogue reads. Raises Unsuitable if no kernel could compute what follows."""
    region = problem.region
    if len(region.outputs) != 1 or not problem.is_whole:
        raise Unsuitable("the region has more than one result, or depends on a loop's step")
    index, is_stored_so = _stored_at(step, following), problem.values[region.outputs[0]].dtype == dtype
    if not following and not is_stored_so:
        raise Unsuitable("the result is stored in another type")
    if index is not None and is_stored_so:
        return Target(linear_address(region.outputs[0], problem.layouts[region.outputs[0]].offset(index)))
    if size_of(problem.values[region.outputs[0]].dtype) > size_of(dtype):
        raise Unsuitable(f"what follows, whose result has more bits, would read a result rounded to {dtype}")
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
    after = [replace(later, bodies=tuple(rewrite(body, renamed) for body in later.bodies)) for later in following]
    maps = {later.name: later for later in after[:-1] if later.kind == "map"}
    steps = tuple(inline_step(later, maps) for later in after if later.name not in maps)
    read = {load.buffer for later in steps for load in loads(*later.bodies)}
    kind = "map" if all(later.kind == "map" for later in steps) else "row reduction"
    if any(later.kind == "scan" for later in steps) or (kind == "row reduction" and rows_of(steps) is None):
        raise Unsuitable("the epilogue reduces something other than rows")
    inputs = (*(name for name in region.inputs if name in read), name)
    left = replace(problem, region=replace(region, kind=kind, steps=steps, inputs=inputs)).with_storage({name: product})
    return Target(linear_address(name, layout.offset(step.axes)), product, left)


def _stored_at(step: Step, following: Sequence[Step]) -> tuple[Expr, ...] | None:
    """The index at which the step's elements are stored if nothing follows but a map that stores them as they are; otherwise None."""
    if not following:
        return step.index
    (last, *more) = following
    body = last.bodies[0]
    whole = isinstance(body, Load) and body.buffer == step.name and body.index == last.axes and len(last.axes) == len(step.axes)
    if more or last.kind != "map" or not whole:
        return None
    axes = dict(zip(last.axes, step.axes, strict=True))
    return tuple(substitute(position, axes) for position in last.index)
