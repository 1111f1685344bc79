"""Upsampling: nearest, linear and cubic interpolation in the trailing dimensions, in exact index arithmetic.

The scale of a dimension is the ratio p / q of input to output steps. The centre of output i is at ((2 i + 1) p - q) / (2 q) in the input,
or with `align_corners` at i p / q with p = size - 1 and q = outputs - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tilewright.graph.operators.definition import Operator, number
from tilewright.ir.computation import StepBuilder, Tensor, maximum, minimum
from tilewright.ir.expr import Expr, floordiv, mod, mul, range_of

Ratio = tuple[int, int]


def _nearest(b: StepBuilder, x: Tensor, *, output: Sequence[int], ratios: Sequence[Ratio]) -> Tensor:
    """out[i] = x[floor(i p / q)]"""
    lead = x.rank - len(output)

    def body(*index: Expr) -> Expr:
        at = [_clamped(floordiv(mul(i, p), q), s) for i, (p, q), s in zip(index[lead:], ratios, x.shape[lead:], strict=True)]
        return x(*index[:lead], *at)

    return b.map((*x.shape[:lead], *output), body)


def _clamped(position: Expr, size: int) -> Expr:
    low, high = range_of(position)
    position = maximum(position, 0) if low < 0 else position
    return minimum(position, size - 1) if high >= size else position


def _centre(i: Expr, ratio: Ratio, align_corners: bool) -> tuple[Expr, int]:
    """Numerator and denominator of the centre of output i."""
    p, q = ratio
    return (mul(i, p), q) if align_corners else (mul(i * 2 + 1, p) - q, 2 * q)


def _linear_taps(i: Expr, size: int, ratio: Ratio, align_corners: bool, dtype: str) -> list[tuple[Expr, Expr]]:
    """(position, weight) of the two neighbours."""
    numerator, denominator = _centre(i, ratio, align_corners)
    if range_of(numerator)[0] < 0:
        numerator = maximum(numerator, 0)
    low = floordiv(numerator, denominator)
    weight = number(mod(numerator, denominator), dtype) * (1.0 / denominator)
    return [(_clamped(low, size), 1.0 - weight), (_clamped(low + 1, size), weight)]


def _cubic_taps(i: Expr, size: int, ratio: Ratio, align_corners: bool, dtype: str) -> list[tuple[Expr, Expr]]:
    """(position, weight) of the four neighbours, by Keys' kernel with a = -0.75."""
    numerator, denominator = _centre(i, ratio, align_corners)
    low = floordiv(numerator, denominator)
    t = number(mod(numerator, denominator), dtype) * (1.0 / denominator)
    a = -0.75

    def near(d: Expr) -> Expr:
        return ((a + 2) * d - (a + 3)) * d * d + 1.0

    def far(d: Expr) -> Expr:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    weights = (far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t))
    return [(_clamped(low + k - 1, size), w) for k, w in enumerate(weights)]


def _interpolate(b: StepBuilder, x: Tensor, *, output: Sequence[int], ratios: Sequence[Ratio], align_corners: bool, order: int = 1) -> Tensor:
    """Linear (order 1) or cubic (order 3) interpolation; the weights of the dimensions are multiplied."""
    lead = x.rank - len(output)
    taps_of = _linear_taps if order == 1 else _cubic_taps

    def body(*index: Expr) -> Expr:
        dims = [
            [(i, None)] if size == extent and ratio[0] == ratio[1] else taps_of(i, size, ratio, align_corners, x.dtype)
            for i, size, extent, ratio in zip(index[lead:], x.shape[lead:], output, ratios, strict=True)
        ]
        result: Expr | None = None
        for combination in product(*dims):
            term = x(*index[:lead], *(position for position, _ in combination))
            for _, weight in combination:
                term = term if weight is None else term * weight
            result = term if result is None else result + term
        assert result is not None
        return result

    return b.map((*x.shape[:lead], *output), body)


OPERATORS: tuple[Operator, ...] = (Operator("nearest", _nearest), Operator("interpolate", _interpolate))
