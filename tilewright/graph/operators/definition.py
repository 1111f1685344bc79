"""The definition of an operator, and helpers that definitions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.dtypes import DEFAULT_FLOAT, is_float
from tilewright.ir.expr import INDEX, Const, Expr, Operand, cast, compare, const, floordiv, mod, mul, wrap

Define = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator: `define(b, *inputs, **attributes)` appends its steps to the builder and returns its result tensor, or several.

    `view`: a pure index map of one input."""

    name: str
    define: Define
    view: bool = False


def pointwise(name: str, function: Callable[..., Expr], operands: Sequence[str] = (), whole: bool = False) -> Operator:
    """An elementwise operator with broadcasting: one scalar function of one expression for each operand.

    Attributes: `dtype` is the type the operands are converted to (default: that of the first tensor); `scalars` holds Python numbers at given operand
    positions, as ((position, number), ...). `operands` may fix an operand's type ("" means `dtype`). `whole`: for integers and booleans only."""
    arity = len(inspect.signature(function).parameters)
    kinds = tuple(operands) + ("",) * (arity - len(operands))

    def define(b: StepBuilder, *inputs: Tensor, dtype: str | None = None, scalars: Sequence[tuple[int, float | int | bool]] = ()) -> Tensor:
        numbers = dict(scalars)
        if len(inputs) + len(numbers) != arity:
            raise ValueError(f"{name} has {arity} operands, not {len(inputs) + len(numbers)}")
        shape = broadcast(*(tensor.shape for tensor in inputs))
        kind = dtype or inputs[0].dtype
        if whole and is_float(kind):
            raise ValueError(f"{name} is for integers and booleans, not for {kind}")

        def body(*index: Expr) -> Expr:
            rest = iter(inputs)
            arguments: list[Expr] = []
            for position in range(arity):
                wanted = kinds[position] or kind
                if position in numbers:
                    arguments.append(const(numbers[position], wanted))
                else:
                    arguments.append(convert(broadcast_load(next(rest), index), wanted))
            return function(*arguments)

        return b.map(shape, body)

    return Operator(name, define)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which shapes broadcast by PyTorch's rule; raises ValueError if they do not fit."""
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for i, extent in enumerate(shape, rank - len(shape)):
            if extent != 1:
                if result[i] not in (1, extent):
                    raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
                result[i] = extent
    return tuple(result)


def broadcast_load(tensor: Tensor, index: Sequence[Operand]) -> Expr:
    """The tensor's element that broadcasts to the position `index` of a result of equal or greater rank."""
    tail = index[len(index) - tensor.rank :]
    return tensor(*(0 if extent == 1 else i for i, extent in zip(tail, tensor.shape, strict=True)))


def convert(value: Expr, dtype: str) -> Expr:
    """A value converted to another type; as a boolean, every number except zero is true."""
    if dtype == "bool" and value.dtype != "bool":
        return compare("ne", value, const(0, value.dtype))
    return cast(value, dtype)


def unflatten(position: Expr, shape: Sequence[int]) -> tuple[Expr, ...]:
    """The index of a flat position in a row-major shape."""
    result = []
    for i, extent in enumerate(shape):
        part = position
        inner = prod(shape[i + 1 :])
        if inner:
            part = floordiv(part, inner)
        result.append(part if i == 0 or not extent else mod(part, extent))
    return tuple(result)


def flatten(index: Sequence[Operand], shape: Sequence[int]) -> Expr:
    """The flat position of an index in a row-major shape."""
    result: Expr = Const(0, INDEX)
    for i, extent in zip(index, shape, strict=True):
        result = mul(result, extent) + i
    return result


def in_bounds(position: Expr, extent: int) -> tuple[Expr, Expr]:
    """The two conditions of 0 <= position < extent."""
    return compare("ge", position, 0), compare("lt", position, extent)


def number(position: Expr, dtype: str) -> Expr:
    """An index converted to the type of the computation."""
    return cast(wrap(position), dtype)


def computing(dtype: str) -> str:
    """The floating-point type in which to compute with values of a type."""
    return dtype if is_float(dtype) else DEFAULT_FLOAT
