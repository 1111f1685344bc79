"""The meaning of steps, evaluated with PyTorch on the device of their inputs, for checking candidates and whole programs: `graph.reference`, which
defines the meaning, would take longer than all trials.

Only what PyTorch computes alike is evaluated (`Unsupported` otherwise): floats are float64, integers are signed or of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod, sqrt
from types import MappingProxyType

import torch
from torch import Tensor

from tilewright.ir.computation import Computation, Step
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, walk
from tilewright.ir.scalar import NEAREST_TF32, REAL

POINTS_AT_ONCE = 1 << 22
"""Iteration points evaluated together, which bounds the memory of temporaries."""
TYPES = frozenset({"f64", "i64", "i32", "i16", "i8", "u8", "bool"})
"""Element types of which PyTorch has all operations."""

Window = tuple[int, int]
"""First and last + 1 of an axis's values."""


class Unsupported(Exception):
    """The steps are not evaluated here; the text names what is not."""


def _divided(function: Callable[[Tensor, Tensor], Tensor], quotient: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of integers, made total as in `ir.scalar`."""

    def total(a: Tensor, b: Tensor) -> Tensor:
        negative = (b < 0) & (b == -1)
        result = function(a, torch.where((b == 0) | negative, torch.ones_like(b), b))
        return torch.where(b == 0, torch.zeros_like(result), torch.where(negative, -a if quotient else torch.zeros_like(result), result))

    return total


def _checked(index: Tensor, least: Tensor, extent: Tensor, _: Tensor) -> Tensor:
    inside = (least <= index) & (index < extent)
    return torch.where(inside, torch.where(index < 0, index + extent, index), torch.zeros_like(index))


OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign,
        "floordiv": _divided(torch.floor_divide, quotient=True), "mod": _divided(torch.remainder, quotient=False),
        "fmod": _divided(torch.fmod, quotient=False),
        "truncdiv": _divided(lambda a, b: torch.div(a, b, rounding_mode="trunc"), quotient=True),
        "min": torch.minimum, "max": torch.maximum, "atan2": torch.atan2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp,
        "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
        "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh,
        "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh, "erf": torch.erf,
        "narrow_gelu": lambda a: a * 0.5 * (1.0 + torch.erf(a * sqrt(0.5))), "narrow_sigmoid": torch.sigmoid,
        NEAREST_TF32: lambda a: a,
        "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "isnan": torch.isnan, "isinf": torch.isinf,
        "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
        "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
        "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor, "bitwise_not": torch.bitwise_not,
        "select": torch.where, "checked": _checked, "cast": lambda a: a, "pow": torch.pow,
    }
)  # fmt: skip
FLOATS_ALONE = REAL | {"pow", "div", "atan2", "floor", "ceil", "round", "trunc"}
INTEGERS_ALONE = frozenset({"floordiv", "mod", "fmod", "truncdiv"})
"""Operations whose other operands PyTorch refuses or treats otherwise (infinite divisors, integers, which it divides as float32)."""
REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "sum": lambda a: a.sum(-1, dtype=a.dtype), "prod": lambda a: a.prod(-1, dtype=a.dtype), "max": lambda a: a.amax(-1),
        "min": lambda a: a.amin(-1), "any": lambda a: a.any(-1), "all": lambda a: a.all(-1),
    }
)  # fmt: skip
SCANS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"sum": lambda a: a.cumsum(-1, dtype=a.dtype), "prod": lambda a: a.cumprod(-1, dtype=a.dtype)}
)


def run(computation: Computation, inputs: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The outputs of a computation, from the tensors that its steps load; an index out of range is taken as 0.

    Raises:
        Unsupported: before anything is computed, but for what PyTorch does not implement for a type.
    """
    for step in computation.steps:
        _refuse(step)
    environment = dict(inputs)
    for step in computation.steps:
        try:
            environment.update(zip(step.names, _run_step(step, environment, device), strict=True))
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
    return tuple(environment[name] for name in computation.outputs)


def _refuse(step: Step) -> None:
    if step.scan is not None and step.combiner not in SCANS:
        raise Unsupported(f"a scan by {step.combiner}")
    if step.combiner is not None and step.combiner not in REDUCTIONS:
        raise Unsupported(f"a reduction by {step.combiner}")
    if step.combiner is not None and not prod(axis.extent or 0 for axis in step.reduction):
        raise Unsupported("a reduction of nothing")
    refuse(step.bodies)


def refuse(roots: Sequence[Expr]) -> None:
    """Raises Unsupported unless `values` evaluates the expressions."""
    for node in walk(*roots):
        if node.dtype not in TYPES:
            raise Unsupported(f"numbers of type {node.dtype}")
        if isinstance(node, Apply) and node.operation not in OPERATIONS:
            raise Unsupported(node.operation)
        if isinstance(node, Apply) and node.operation in (INTEGERS_ALONE if node.dtype == "f64" else FLOATS_ALONE):
            raise Unsupported(f"{node.operation} of {node.dtype}")


def _type(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, ELEMENT_TYPES[dtype].torch)
    return found


def _run_step(step: Step, environment: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, ...]:
    results = tuple(torch.zeros(step.shape, dtype=_type(dtype), device=device) for dtype in step.dtypes)
    # a scan's axis is not iterated: the bodies are evaluated over the reduction variable and accumulated along it
    axes = tuple(axis for axis in step.axes if axis != step.scan)
    space = (*axes, *step.reduction)
    rows = max(1, POINTS_AT_ONCE // max(prod(axis.extent or 0 for axis in step.reduction), 1))
    for windows in _blocks([axis.extent or 0 for axis in axes], rows):
        whole = (*windows, *((0, axis.extent or 0) for axis in step.reduction))
        shape = [last - first for first, last in whole]
        bodies = [value.expand(shape) for value in values(step.bodies, dict(zip(space, whole, strict=True)), environment, device)]
        flat = [body.reshape(*shape[: len(axes)], -1) for body in bodies]
        if step.scan is not None:
            found = [SCANS[step.combiner or ""](one).movedim(-1, step.axes.index(step.scan)) for one in flat]
        elif step.combiner is not None:
            found = [REDUCTIONS[step.combiner](one) for one in flat]
        else:
            found = bodies
        within = dict(zip(axes, windows, strict=True))
        for result, value in zip(results, found, strict=True):
            _store(step, result, value, within)
    return results


def _store(step: Step, result: Tensor, value: Tensor, windows: Mapping[Var, Window]) -> None:
    """Stores the values of a block; an axis without a window has all its values."""
    within = {axis: windows.get(axis, (0, axis.extent or 0)) for axis in step.axes}
    if step.index == step.axes:
        result[tuple(slice(*within[axis]) for axis in step.axes)] = value
    else:
        result[tuple(values(step.index, within, {}, result.device))] = value.to(result.dtype)


def _blocks(extents: Sequence[int], points: int) -> Iterator[tuple[Window, ...]]:
    """Windows of axes that cover their space, each of at most so many points."""
    if prod(extents) <= points:
        if prod(extents):
            yield tuple((0, extent) for extent in extents)
        return
    inner = prod(extents[1:])
    rows = points // inner
    if rows:
        for start in range(0, extents[0], rows):
            yield ((start, min(start + rows, extents[0])), *((0, extent) for extent in extents[1:]))
        return
    for start in range(extents[0]):
        for rest in _blocks(extents[1:], points):
            yield ((start, start + 1), *rest)


def values(roots: Sequence[Expr], space: Mapping[Var, Window], environment: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    """The values of expressions over a space of variables, whose order is that of the results' dimensions; they broadcast to it. Guarded loads read a
    clamped position, and the guard discards the value."""
    rank = len(space)
    along = {
        axis.name: torch.arange(*window, device=device).reshape([-1 if place == own else 1 for place in range(rank)])
        for own, (axis, window) in enumerate(space.items())
    }
    places = {axis.name: place for place, axis in enumerate(space)}
    windows = {axis.name: window for axis, window in space.items()}
    done: dict[int, Tensor] = {}
    for node in walk(*roots):
        if isinstance(node, Var):
            done[id(node)] = along[node.name]
        elif isinstance(node, Const):
            done[id(node)] = torch.tensor(node.value, dtype=_type(node.dtype), device=device)
        elif isinstance(node, Load):
            tensor = environment[node.buffer]
            straight = _straight(node, tensor, places, windows)
            done[id(node)] = _gathered(tensor, [done[id(index)] for index in node.index]) if straight is None else straight
        else:
            assert isinstance(node, Apply)
            done[id(node)] = OPERATIONS[node.operation](*(done[id(argument)] for argument in node.args)).to(_type(node.dtype))
    return [done[id(root)] for root in roots]


def _gathered(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The elements at an index, clamped to the tensor; 0 for one without elements, which is read only under a guard that never holds."""
    if not tensor.numel():
        return tensor.new_zeros(())
    return tensor[tuple(own.clamp(0, extent - 1) for own, extent in zip(index, tensor.shape, strict=True))] if index else tensor


def _straight(load: Load, tensor: Tensor, places: Mapping[str, int], windows: Mapping[str, Window]) -> Tensor | None:
    """A load whose index is different variables and constants, within the tensor, as a view; None for others."""
    parts: list[slice | int] = []
    dimensions: list[int] = []
    for index, extent in zip(load.index, tensor.shape, strict=True):
        if isinstance(index, Const) and 0 <= int(index.value) < extent:
            parts.append(int(index.value))
        elif isinstance(index, Var) and windows[index.name][1] <= extent:
            parts.append(slice(*windows[index.name]))
            dimensions.append(places[index.name])
        else:
            return None
    if len(set(dimensions)) < len(dimensions):
        return None
    order = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    view = tensor[tuple(parts)].permute(order) if parts else tensor
    extents = dict(zip(sorted(dimensions), view.shape, strict=True))
    return view.reshape([extents.get(place, 1) for place in range(len(places))])
