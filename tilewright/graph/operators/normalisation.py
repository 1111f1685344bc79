"""Normalisations: softmax and the norms, as statistics over rows followed by maps."""

from __future__ import annotations

from math import prod

from tilewright.graph.operators.definition import Operator
from tilewright.graph.operators.reduction import moments, moments_over, reduced, spread
from tilewright.ir.computation import StepBuilder, Tensor, lowest
from tilewright.ir.expr import Expr, compare, floordiv, select, unary


def _check_shapes(shape: tuple[int, ...], *tensors: Tensor) -> None:
    """Checks that statistics, weights and biases have the given shape. Raises ValueError otherwise."""
    for tensor in tensors:
        if tensor.shape != shape:
            raise ValueError(f"a statistic, weight or bias has the shape {tensor.shape}, not {shape}")


def _shifted(b: StepBuilder, x: Tensor, axis: int) -> Tensor:
    (greatest,) = reduced(b, "max", x, (axis,), True)
    return b.map(x.shape, lambda *i: x(*i) - greatest(*spread(i, (axis,))))


def _softmax(b: StepBuilder, x: Tensor, *, axis: int) -> Tensor:
    """exp(x - max) / sum exp(x - max) along an axis"""
    (greatest,) = reduced(b, "max", x, (axis,), True)
    exponential = b.map(x.shape, lambda *i: unary("exp", x(*i) - greatest(*spread(i, (axis,)))))
    (total,) = reduced(b, "sum", exponential, (axis,), True)
    return b.map(x.shape, lambda *i: exponential(*i) / total(*spread(i, (axis,))))


def _safe_softmax(b: StepBuilder, x: Tensor, *, axis: int) -> Tensor:
    """softmax along an axis, with zeros instead of NaN where every element is minus infinity (a completely masked row of attention)"""
    (greatest,) = reduced(b, "max", x, (axis,), True)
    exponential = b.map(x.shape, lambda *i: unary("exp", x(*i) - greatest(*spread(i, (axis,)))))
    (total,) = reduced(b, "sum", exponential, (axis,), True)

    def weight(*i: Expr) -> Expr:
        at = spread(i, (axis,))
        return select(compare("eq", greatest(*at), lowest(x.dtype)), 0.0, exponential(*i) / total(*at))

    return b.map(x.shape, weight)


def _log_softmax(b: StepBuilder, x: Tensor, *, axis: int) -> Tensor:
    shifted = _shifted(b, x, axis)
    (total,) = reduced(b, "sum", shifted, (axis,), True, lambda value: unary("exp", value))
    return b.map(x.shape, lambda *i: shifted(*i) - unary("log", total(*spread(i, (axis,)))))


def _layer_norm(b: StepBuilder, x: Tensor, *parameters: Tensor, rank: int, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over the last `rank` dimensions, then times weight and plus bias if given."""
    _check_shapes(x.shape[x.rank - rank :], *parameters)
    axes = tuple(range(x.rank - rank, x.rank))
    found, count = moments_over(b, x, axes), max(prod(x.shape[x.rank - rank :]), 1)
    inverse = b.map(found.squares.shape, lambda *i: unary("rsqrt", found.squares(*i) * (1.0 / count) + epsilon))

    def body(*i: Expr) -> Expr:
        row = spread(i, axes)
        value = found.deviation(row, x(*i)) * inverse(*row)
        if parameters:
            value = value * parameters[0](*i[x.rank - rank :])
        return value + parameters[1](*i[x.rank - rank :]) if len(parameters) > 1 else value

    return b.map(x.shape, body)


def _rms_norm(b: StepBuilder, x: Tensor, *parameters: Tensor, rank: int, epsilon: float) -> Tensor:
    """x / sqrt(mean of squares + epsilon) over the last `rank` dimensions, times weight if given."""
    _check_shapes(x.shape[x.rank - rank :], *parameters)
    axes = tuple(range(x.rank - rank, x.rank))
    (total,) = reduced(b, "sum", x, axes, True, lambda value: value * value)
    count = prod(x.shape[x.rank - rank :])
    inverse = b.map(total.shape, lambda *i: unary("rsqrt", total(*i) * (1.0 / max(count, 1)) + epsilon))

    def body(*i: Expr) -> Expr:
        value = x(*i) * inverse(*spread(i, axes))
        return value * parameters[0](*i[x.rank - rank :]) if parameters else value

    return b.map(x.shape, body)


def _group_norm(b: StepBuilder, x: Tensor, *parameters: Tensor, groups: int, epsilon: float) -> Tensor:
    """Normalises x [N, C, ...] over each group of C / groups channels and all positions; then weight and bias by channel."""
    n, channels, spatial = x.shape[0], x.shape[1], x.shape[2:]
    _check_shapes((channels,), *parameters)
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels in {groups} groups")
    size = channels // groups
    count = float(max(size * prod(spatial), 1))
    found = moments(b, (n, groups), (size, *spatial), lambda i, g, c, *s: x(i, g * size + c, *s))
    inverse = b.map((n, groups), lambda i, g: unary("rsqrt", found.squares(i, g) * (1.0 / count) + epsilon))

    def body(i: Expr, c: Expr, *s: Expr) -> Expr:
        g = floordiv(c, size)
        value = found.deviation((i, g), x(i, c, *s)) * inverse(i, g)
        value = value * parameters[0](c) if parameters else value
        return value + parameters[1](c) if len(parameters) > 1 else value

    return b.map(x.shape, body)


def _batch_norm(b: StepBuilder, x: Tensor, mean: Tensor, square: Tensor, *parameters: Tensor, epsilon: float) -> Tensor:
    """x [N, C, ...] normalised by given statistics per channel, as one scale and one shift."""
    channels = (x.shape[1],)
    _check_shapes(channels, mean, square, *parameters)

    def scale_of(c: Expr) -> Expr:
        inverse = unary("rsqrt", square(c) + epsilon)
        return inverse * parameters[0](c) if parameters else inverse

    scale = b.map(channels, scale_of)
    shift = b.map(channels, lambda c: parameters[1](c) - mean(c) * scale(c) if len(parameters) > 1 else -(mean(c) * scale(c)))
    return b.map(x.shape, lambda i, c, *s: x(i, c, *s) * scale(c) + shift(c))


OPERATORS: tuple[Operator, ...] = (
    Operator("softmax", _softmax),
    Operator("safe_softmax", _safe_softmax),
    Operator("log_softmax", _log_softmax),
    Operator("layer_norm", _layer_norm),
    Operator("rms_norm", _rms_norm),
    Operator("group_norm", _group_norm),
    Operator("batch_norm", _batch_norm),
)
