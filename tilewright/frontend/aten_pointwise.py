"""ATen's elementwise operators in terms of the operator table."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.frontend.handlers import Handler, Handlers, Unsupported, elementwise, result_type, simple, torch_dtype
from tilewright.graph.builder import GraphBuilder, Operand
from tilewright.ir.dtypes import NARROW_FLOATS, is_float
from tilewright.ir.graph import Value

HANDLERS = Handlers()


def _jumping(operator: str) -> Handler:
    """A handler for a comparison or a remainder. It jumps where its operands are equal or multiples, so numbers are rounded to the 16-bit type of its
    tensor, as PyTorch does on every device: a tensor filled with 0.1 equals 0.1, and its remainder by 0.1 is 0."""

    def handler(g: GraphBuilder, *operands: Operand) -> Value:
        kind = result_type(*operands)
        if kind in NARROW_FLOATS:
            operands = tuple(o if isinstance(o, Value) else torch.tensor(o, dtype=torch_dtype(kind)).item() for o in operands)
        return elementwise(g, operator, *operands)

    return handler


_SAME_NAME = (
    "relu sigmoid silu mish hardswish hardsigmoid sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh erf erfc abs neg sign reciprocal floor ceil trunc frac isnan isinf isfinite logical_not bitwise_not "
    "logical_and logical_or logical_xor maximum minimum atan2 log_sigmoid logaddexp"
).split()
HANDLERS.table.update({f"{name}.default": simple(name) for name in _SAME_NAME})
HANDLERS.table |= {"round.default": simple("round"), "max.other": simple("maximum"), "min.other": simple("minimum")}
for _name in ("and", "or", "xor"):
    HANDLERS.table.update({f"__{_name}__.{overload}": simple(f"bitwise_{_name}") for overload in ("Tensor", "Scalar")})
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    HANDLERS.table.update({f"{_name}.{overload}": simple(_name) for overload in ("Tensor", "Scalar", "Scalar_Tensor")})
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "fmod", "remainder"):
    HANDLERS.table.update({f"{_name}.{overload}": _jumping(_name) for overload in ("Tensor", "Scalar", "Scalar_Tensor")})
HANDLERS.table["softsign.default"] = simple("softsign")
for _name, _operator in (
    ("__lshift__", "shift_left"),
    ("__rshift__", "shift_right"),
    ("bitwise_left_shift", "shift_left"),
    ("bitwise_right_shift", "shift_right"),
):
    HANDLERS.table.update({f"{_name}.{overload}": simple(_operator) for overload in ("Tensor", "Scalar", "Tensor_Scalar")})


@HANDLERS.handles("add.Tensor", "add.Scalar")
def add(g: GraphBuilder, a: Operand, b: Operand, alpha: float = 1, *, operator: str = "add") -> Value:
    kind = g.expected[0][1]
    if kind == "bool":
        return g.pointwise("logical_or", a, b)
    if alpha != 1:
        b = g.pointwise("mul", b, alpha, dtype=kind) if isinstance(b, Value) else b * alpha
    return g.pointwise(operator, a, b, dtype=kind)


@HANDLERS.handles("sub.Tensor", "sub.Scalar")
def sub(g: GraphBuilder, a: Operand, b: Operand, alpha: float = 1) -> Value:
    return add(g, a, b, alpha, operator="sub")


@HANDLERS.handles("rsub.Tensor", "rsub.Scalar")
def rsub(g: GraphBuilder, a: Operand, b: Operand, alpha: float = 1) -> Value:
    return sub(g, b, a, 1) if alpha == 1 else sub(g, b, elementwise(g, "mul", a, alpha), 1)


@HANDLERS.handles("mul.Tensor", "mul.Scalar")
def mul(g: GraphBuilder, a: Operand, b: Operand) -> Value:
    return g.pointwise("logical_and", a, b) if g.expected[0][1] == "bool" else elementwise(g, "mul", a, b)


@HANDLERS.handles("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(g: GraphBuilder, a: Operand, b: Operand) -> Value:
    return elementwise(g, "div", a, b)


@HANDLERS.handles("div.Tensor_mode", "div.Scalar_mode")
def div_mode(g: GraphBuilder, a: Operand, b: Operand, mode: str | None) -> Value:
    return elementwise(g, {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}[mode], a, b)


@HANDLERS.handles("floor_divide.default", "floor_divide.Scalar")
def floor_divide(g: GraphBuilder, a: Operand, b: Operand) -> Value:
    return elementwise(g, "floor_divide", a, b)


@HANDLERS.handles("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "float_power.Tensor_Scalar")
def power(g: GraphBuilder, a: Operand, b: Operand) -> Value:
    return elementwise(g, "pow", a, b)


@HANDLERS.handles("square.default")
def square(g: GraphBuilder, a: Value) -> Value:
    return elementwise(g, "pow", a, 2)


@HANDLERS.handles("round.decimals")
def round_decimals(g: GraphBuilder, a: Value, decimals: int) -> Value:
    scale = 10.0**decimals
    return elementwise(g, "div", elementwise(g, "round", elementwise(g, "mul", a, scale)), scale)


@HANDLERS.handles("gelu.default")
def gelu(g: GraphBuilder, x: Value, approximate: str = "none") -> Value:
    return elementwise(g, "gelu_tanh" if approximate == "tanh" else "gelu", x)


@HANDLERS.handles("leaky_relu.default")
def leaky_relu(g: GraphBuilder, x: Value, slope: float) -> Value:
    return elementwise(g, "leaky_relu", x, slope)


@HANDLERS.handles("prelu.default", "_prelu_kernel.default")
def prelu(g: GraphBuilder, x: Value, weight: Value) -> Value:
    if weight.elements > 1 and len(weight.shape) == 1 and len(x.shape) > 1:
        weight = g.reshape(weight, (1, -1, *(1 for _ in x.shape[2:])))
    elif weight.elements == 1:
        weight = g.reshape(weight, (1,) * max(len(x.shape), 0))
    return elementwise(g, "leaky_relu", x, weight)


@HANDLERS.handles("elu.default")
def elu(g: GraphBuilder, x: Value, alpha: float, scale: float, input_scale: float) -> Value:
    return elementwise(g, "elu", x, alpha, scale, input_scale)


@HANDLERS.handles("selu.default")
def selu(g: GraphBuilder, x: Value) -> Value:
    return elementwise(g, "elu", x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


@HANDLERS.handles("celu.default")
def celu(g: GraphBuilder, x: Value, alpha: float) -> Value:
    return elementwise(g, "celu", x, alpha)


@HANDLERS.handles("softplus.default")
def softplus(g: GraphBuilder, x: Value, beta: float, threshold: float) -> Value:
    return elementwise(g, "softplus", x, beta, threshold)


@HANDLERS.handles("hardtanh.default")
def hardtanh(g: GraphBuilder, x: Value, low: float, high: float) -> Value:
    return elementwise(g, "clamp", x, low, high)


@HANDLERS.handles("relu6.default")
def relu6(g: GraphBuilder, x: Value) -> Value:
    return elementwise(g, "clamp", x, 0, 6)


@HANDLERS.handles("threshold.default")
def threshold(g: GraphBuilder, x: Value, limit: float, value: float) -> Value:
    return elementwise(g, "threshold", x, limit, value)


@HANDLERS.handles("hardshrink.default")
def hardshrink(g: GraphBuilder, x: Value, limit: float) -> Value:
    return elementwise(g, "hardshrink", x, limit)


@HANDLERS.handles("softshrink.default")
def softshrink(g: GraphBuilder, x: Value, limit: float) -> Value:
    return elementwise(g, "softshrink", x, limit)


@HANDLERS.handles("tanhshrink.default")
def tanhshrink(g: GraphBuilder, x: Value) -> Value:
    return elementwise(g, "sub", x, elementwise(g, "tanh", x))


@HANDLERS.handles("glu.default")
def glu(g: GraphBuilder, x: Value, axis: int) -> Value:
    half = x.shape[axis] // 2
    return elementwise(g, "mul", g.slice(x, axis, 0, half), elementwise(g, "sigmoid", g.slice(x, axis, half, 2 * half)))


@HANDLERS.handles("clamp.default", "clamp.Tensor", "clip.default")
def clamp(g: GraphBuilder, x: Value, low: Operand | None, high: Operand | None) -> Value:
    if low is not None:
        x = elementwise(g, "maximum", x, low)
    if high is not None:
        x = elementwise(g, "minimum", x, high)
    return x


@HANDLERS.handles("clamp_min.default", "clamp_min.Tensor")
def clamp_min(g: GraphBuilder, x: Value, low: Operand) -> Value:
    return elementwise(g, "maximum", x, low)


@HANDLERS.handles("clamp_max.default", "clamp_max.Tensor")
def clamp_max(g: GraphBuilder, x: Value, high: Operand) -> Value:
    return elementwise(g, "minimum", x, high)


@HANDLERS.handles("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(g: GraphBuilder, condition: Value, a: Operand, b: Operand) -> Value:
    return g.pointwise("where", condition, a, b, dtype=g.expected[0][1])


@HANDLERS.handles("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(g: GraphBuilder, x: Value, mask: Value, value: Operand) -> Value:
    return g.pointwise("where", mask, value, x, dtype=x.dtype)


@HANDLERS.handles("lerp.Scalar", "lerp.Tensor")
def lerp(g: GraphBuilder, a: Value, b: Value, weight: Operand) -> Value:
    return elementwise(g, "lerp", a, b, weight)


@HANDLERS.handles("addcmul.default")
def addcmul(g: GraphBuilder, x: Value, a: Value, b: Value, value: float = 1) -> Value:
    product = elementwise(g, "mul", a, b)
    return elementwise(g, "add", x, product if value == 1 else elementwise(g, "mul", product, value))


@HANDLERS.handles("addcdiv.default")
def addcdiv(g: GraphBuilder, x: Value, a: Value, b: Value, value: float = 1) -> Value:
    quotient = elementwise(g, "div", a if value == 1 else elementwise(g, "mul", a, value), b)
    return elementwise(g, "add", x, quotient)


@HANDLERS.handles("nan_to_num.default")
def nan_to_num(g: GraphBuilder, x: Value, nan: float | None, above: float | None, below: float | None) -> Value:
    if not is_float(x.dtype):
        return x
    greatest = torch.finfo(torch_dtype(x.dtype)).max
    return elementwise(g, "nan_to_num", x, nan or 0.0, greatest if above is None else above, -greatest if below is None else below)


@HANDLERS.handles("sign.default", "sgn.default")
def sign(g: GraphBuilder, x: Value) -> Value:
    return elementwise(g, "sign", x)


@HANDLERS.handles("deg2rad.default")
def deg2rad(g: GraphBuilder, x: Value) -> Value:
    return elementwise(g, "mul", x, math.pi / 180)


@HANDLERS.handles("_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "type_as.default", "to.other")
def to(g: GraphBuilder, x: Value, *_: Any) -> Value:
    return g.cast(x, g.expected[0][1])


@HANDLERS.handles("view.dtype")
def bits(g: GraphBuilder, x: Value, *_: Any) -> Value:
    return g.op("bit_cast", x, dtype=g.expected[0][1])


@HANDLERS.handles(
    "clone.default", "alias.default", "detach.default", "contiguous.default", "lift_fresh_copy.default", "lift.default", "positive.default"
)
def same(g: GraphBuilder, x: Value, *rest: Any) -> Value:
    return x


@HANDLERS.handles("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def dropout(g: GraphBuilder, x: Value, probability: float, train: bool) -> Value:
    if train and probability:
        raise Unsupported("dropout in training mode draws random numbers; call module.eval()")
    return x


@HANDLERS.handles("native_dropout.default")
def native_dropout(g: GraphBuilder, x: Value, probability: float, train: bool | None) -> tuple[Value, None]:
    return dropout(g, x, probability, bool(train)), None


@HANDLERS.handles("fill.Scalar", "fill.Tensor")
def fill(g: GraphBuilder, x: Value, value: Operand) -> Value:
    if isinstance(value, Value):
        return g.expand(g.cast(value, x.dtype), x.shape)
    return g.full(x.shape, value, x.dtype)


@HANDLERS.handles("copy.default")
def copy(g: GraphBuilder, x: Value, source: Value, *_: Any) -> Value:
    return g.expand(g.cast(source, x.dtype), x.shape)


@HANDLERS.handles("isclose.default")
def isclose(g: GraphBuilder, a: Value, b: Value, relative: float, absolute: float, equal_nan: bool) -> Value:
    if equal_nan:
        raise Unsupported("isclose with equal_nan")
    kind = result_type(a, b)
    limit = g.pointwise("add", g.pointwise("mul", g.pointwise("abs", b, dtype=kind), relative), absolute)
    near = g.pointwise("le", g.pointwise("abs", g.pointwise("sub", a, b, dtype=kind)), limit)
    return g.pointwise("logical_or", near, g.pointwise("eq", a, b, dtype=kind))
