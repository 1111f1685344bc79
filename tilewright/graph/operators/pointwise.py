"""Elementwise operators: one scalar function each."""

from __future__ import annotations

import math

from tilewright.graph.operators.definition import Operator, convert, pointwise
from tilewright.ir.computation import StepBuilder, Tensor, maximum, minimum
from tilewright.ir.dtypes import ELEMENT_TYPES, is_float
from tilewright.ir.expr import Apply, Const, Expr, add, binary, cast, compare, const, select, unary


def _is(value: Expr, number: float) -> bool:
    return isinstance(value, Const) and value.value == number


def _power(x: Expr, y: Expr) -> Expr:
    """x ** y; small constant exponents by multiplication and roots."""
    if _is(y, 2):
        return x * x
    if _is(y, 3):
        return x * x * x
    if _is(y, 1):
        return x
    if _is(y, 0.5):
        return unary("sqrt", x)
    if _is(y, -0.5):
        return unary("rsqrt", x)
    if _is(y, -1) and is_float(x.dtype):
        return 1.0 / x
    return binary("pow", x, y)


def sigmoid(x: Expr) -> Expr:
    return 1.0 / (1.0 + unary("exp", -x))


def gelu(x: Expr) -> Expr:
    return x * 0.5 * (1.0 + unary("erf", x * math.sqrt(0.5)))


def gelu_tanh(x: Expr) -> Expr:
    return x * 0.5 * (1.0 + unary("tanh", (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)))


def _softplus(x: Expr, beta: Expr, threshold: Expr) -> Expr:
    return select(compare("gt", x * beta, threshold), x, unary("log1p", unary("exp", x * beta)) / beta)


def _mish(x: Expr) -> Expr:
    softplus = maximum(x, 0.0) + unary("log1p", unary("exp", -unary("abs", x)))
    return x * unary("tanh", softplus)


def _elu(x: Expr, alpha: Expr, scale: Expr, input_scale: Expr) -> Expr:
    return select(compare("gt", x, 0.0), x * scale, unary("expm1", x * input_scale) * alpha * scale)


def _hardsigmoid(x: Expr) -> Expr:
    return minimum(maximum(x + 3.0, 0.0), 6.0) / 6.0


def _remainder(a: Expr, b: Expr) -> Expr:
    return binary("mod", a, b)


def _not(a: Expr) -> Expr:
    return Apply("not", (a,), "bool")


def _signed(x: Expr) -> Expr:
    return unary("sign", x)


def _lerp(a: Expr, b: Expr, weight: Expr) -> Expr:
    return select(compare("lt", unary("abs", weight), 0.5), a + weight * (b - a), b - (b - a) * (1.0 - weight))


def _is_finite(x: Expr) -> Expr:
    return compare("lt", unary("abs", x), float("inf")) if is_float(x.dtype) else const(True, "bool")


def _nan_to_num(x: Expr, nan: Expr, above: Expr, below: Expr) -> Expr:
    finite = select(unary("isinf", x, "bool"), select(compare("gt", x, 0.0), above, below), x)
    return select(unary("isnan", x, "bool"), nan, finite)


def _cast(b: StepBuilder, x: Tensor, *, dtype: str) -> Tensor:
    return b.map(x.shape, lambda *index: convert(x(*index), dtype))


def _bit_cast(b: StepBuilder, x: Tensor, *, dtype: str) -> Tensor:
    """The bits of x as another type of its size. Kernels widen 16-bit floats, which does not keep the bits of every NaN."""
    source, target = ELEMENT_TYPES[x.dtype], ELEMENT_TYPES[dtype]
    known = all(t.kind == "int" or t.kind == "float" and not t.is_narrow for t in (source, target))
    if source.bytes != target.bytes or not known:
        raise ValueError(f"the bits of {x.dtype} as {dtype}")
    whole = f"i{8 * source.bytes}"

    def body(*index: Expr) -> Expr:
        if source.kind == target.kind:
            return cast(x(*index), dtype)  # integers wrap
        if source.kind == "float":
            return cast(unary("reinterpret", x(*index), whole), dtype)
        return unary("reinterpret", cast(x(*index), whole), dtype)

    return b.map(x.shape, body)


_UNARY_FLOAT = "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf".split()


def _unary(name: str) -> Operator:
    return pointwise(name, lambda x: unary(name, x))


def _rounding(name: str) -> Operator:
    return pointwise(name, lambda x: unary(name, x) if is_float(x.dtype) else x)


OPERATORS: tuple[Operator, ...] = (
    *(_unary(name) for name in _UNARY_FLOAT),
    *(_rounding(name) for name in ("floor", "ceil", "round", "trunc")),
    pointwise("abs", lambda x: unary("abs", x)),
    pointwise("neg", lambda x: -x),
    pointwise("sign", _signed),
    pointwise("reciprocal", lambda x: 1.0 / x),
    pointwise("erfc", lambda x: 1.0 - unary("erf", x)),
    pointwise("frac", lambda x: x - unary("trunc", x)),
    pointwise("isnan", lambda x: unary("isnan", x, "bool")),
    pointwise("isinf", lambda x: unary("isinf", x, "bool")),
    pointwise("isfinite", _is_finite),
    pointwise("nan_to_num", _nan_to_num),
    # arithmetic of two operands
    pointwise("add", add),
    pointwise("sub", lambda a, b: a - b),
    pointwise("mul", lambda a, b: a * b),
    pointwise("div", lambda a, b: a / b),
    pointwise("floor_divide", lambda a, b: binary("floordiv", a, b)),
    pointwise("trunc_divide", lambda a, b: unary("trunc", a / b) if is_float(a.dtype) else binary("truncdiv", a, b)),
    pointwise("remainder", _remainder),
    pointwise("fmod", lambda a, b: binary("fmod", a, b)),
    pointwise("pow", _power),
    pointwise("atan2", lambda a, b: binary("atan2", a, b)),
    pointwise("maximum", maximum),
    pointwise("minimum", minimum),
    pointwise("lerp", _lerp),
    pointwise("clamp", lambda x, low, high: minimum(maximum(x, low), high)),
    pointwise("logaddexp", lambda a, b: maximum(a, b) + unary("log1p", unary("exp", -unary("abs", a - b)))),
    # comparisons and logic
    pointwise("eq", lambda a, b: compare("eq", a, b)),
    pointwise("ne", lambda a, b: compare("ne", a, b)),
    pointwise("lt", lambda a, b: compare("lt", a, b)),
    pointwise("le", lambda a, b: compare("le", a, b)),
    pointwise("gt", lambda a, b: compare("gt", a, b)),
    pointwise("ge", lambda a, b: compare("ge", a, b)),
    pointwise("logical_and", lambda a, b: Apply("and", (a, b), "bool"), ("bool", "bool")),
    pointwise("logical_or", lambda a, b: Apply("or", (a, b), "bool"), ("bool", "bool")),
    pointwise("logical_xor", lambda a, b: compare("ne", a, b), ("bool", "bool")),
    pointwise("logical_not", _not, ("bool",)),
    pointwise("bitwise_and", lambda a, b: binary("bitwise_and", a, b), whole=True),
    pointwise("bitwise_or", lambda a, b: binary("bitwise_or", a, b), whole=True),
    pointwise("bitwise_xor", lambda a, b: binary("bitwise_xor", a, b), whole=True),
    pointwise("bitwise_not", lambda a: unary("bitwise_not", a), whole=True),
    pointwise("shift_left", lambda a, b: binary("shift_left", a, b), whole=True),
    pointwise("shift_right", lambda a, b: binary("shift_right", a, b), whole=True),
    pointwise("where", lambda condition, a, b: select(condition, a, b), ("bool",)),
    # activations
    pointwise("relu", lambda x: maximum(x, 0)),
    pointwise("sigmoid", sigmoid),
    pointwise("log_sigmoid", lambda x: minimum(x, 0.0) - unary("log1p", unary("exp", -unary("abs", x)))),
    pointwise("silu", lambda x: x * sigmoid(x)),
    pointwise("gelu", gelu),
    pointwise("gelu_tanh", gelu_tanh),
    pointwise("hardsigmoid", _hardsigmoid),
    pointwise("hardswish", lambda x: x * _hardsigmoid(x)),
    pointwise("elu", _elu),
    pointwise("celu", lambda x, alpha: select(compare("gt", x, 0.0), x, unary("expm1", x / alpha) * alpha)),
    pointwise("softplus", _softplus),
    pointwise("softsign", lambda x: x / (1.0 + unary("abs", x))),
    pointwise("mish", _mish),
    pointwise("leaky_relu", lambda x, slope: select(compare("gt", x, 0), x, x * slope)),
    pointwise("threshold", lambda x, limit, value: select(compare("le", x, limit), value, x)),
    pointwise("hardshrink", lambda x, limit: select(compare("le", unary("abs", x), limit), const(0, x.dtype), x)),
    pointwise("softshrink", lambda x, limit: select(compare("gt", x, limit), x - limit, select(compare("lt", x, -limit), x + limit, x * 0.0))),
    Operator("cast", _cast),
    Operator("bit_cast", _bit_cast),
    Operator("copy", lambda b, x: b.map(x.shape, x)),
)
