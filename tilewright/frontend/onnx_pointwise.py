"""ONNX's elementwise operators in terms of the operator table."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from onnx import helper

from tilewright.frontend.handlers import Unsupported, torch_dtype
from tilewright.frontend.onnx_node import NodeCall, NodeHandler, NodeHandlers, dtype_of, dtype_of_numpy, numpy_dtype, through_torch
from tilewright.graph.builder import GraphBuilder, Operand
from tilewright.ir.dtypes import NARROW_FLOATS, is_float, size_of
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


def _simple(operator: str) -> NodeHandler:
    return lambda call: call.g.pointwise(operator, *call.operands(), dtype=call.kind())


_SAME = {
    "Abs": "abs", "Neg": "neg", "Sign": "sign", "Floor": "floor", "Ceil": "ceil", "Round": "round", "Sqrt": "sqrt", "Exp": "exp", "Log": "log",
    "Reciprocal": "reciprocal", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh",
    "Cosh": "cosh", "Tanh": "tanh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Erf": "erf", "Sigmoid": "sigmoid", "Relu": "relu",
    "Softsign": "softsign", "HardSwish": "hardswish", "Mish": "mish", "Add": "add", "Sub": "sub", "Mul": "mul", "Equal": "eq", "Greater": "gt",
    "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "Not": "logical_not",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor", "BitwiseNot": "bitwise_not", "IsNaN": "isnan",
}  # fmt: skip
HANDLERS.table.update({name: _simple(operator) for name, operator in _SAME.items()})


@HANDLERS.handles("Div")
def div(call: NodeCall) -> Value:
    """Integer division truncates towards zero."""
    return call.g.pointwise("div" if is_float(call.kind()) else "trunc_divide", *call.operands(), dtype=call.kind())


@HANDLERS.handles("Mod")
def mod(call: NodeCall) -> Value:
    return call.g.pointwise("fmod" if call.attribute("fmod", 0) else "remainder", *call.operands(), dtype=call.kind())


@HANDLERS.handles("Pow")
def power(call: NodeCall) -> Value:
    """The result has the base's type; an integer to a fractional power is computed in floating point."""
    kind = call.kind()
    exponent = next(dtype_of(v) for v in call.inputs[1:] if v is not None)
    computing = exponent if is_float(exponent) and not is_float(kind) else kind
    return call.g.cast(call.g.pointwise("pow", *call.operands(), dtype=computing), kind)


@HANDLERS.handles("BitShift")
def bit_shift(call: NodeCall) -> Value:
    operator = {"LEFT": "shift_left", "RIGHT": "shift_right"}[call.attribute("direction")]
    return call.g.pointwise(operator, *call.operands(), dtype=call.kind())


def _variadic(call: NodeCall, operator: str) -> Value:
    kind = call.kind()
    if len(call.inputs) == 1:
        return call.value(0)
    values = [call.value(i) for i in range(len(call.inputs))]
    return reduce(lambda a, b: call.g.pointwise(operator, a, b, dtype=kind), values)


@HANDLERS.handles("Max")
def maximum(call: NodeCall) -> Value:
    return _variadic(call, "maximum")


@HANDLERS.handles("Min")
def minimum(call: NodeCall) -> Value:
    return _variadic(call, "minimum")


@HANDLERS.handles("Sum")
def total(call: NodeCall) -> Value:
    return _variadic(call, "add")


@HANDLERS.handles("Mean")
def mean(call: NodeCall) -> Value:
    return call.g.pointwise("div", _variadic(call, "add"), len(call.inputs))


@HANDLERS.handles("Where")
def where(call: NodeCall) -> Value:
    kind = next(dtype_of(v) for v in call.inputs[1:] if v is not None)
    return call.g.pointwise("where", *call.operands(), dtype=kind)


@HANDLERS.handles("Clip")
def clip(call: NodeCall) -> Value:
    x = call.value(0)
    for position, operator in ((1, "maximum"), (2, "minimum")):
        if call.has(position):
            x = call.g.pointwise(operator, x, _scalar(call, position))
    return x


def _scalar(call: NodeCall, position: int) -> Operand:
    """A one-element operand, as a Python number if it is constant."""
    operand = call.inputs[position]
    return operand.reshape(-1)[0].item() if isinstance(operand, np.ndarray) else call.g.reshape(call.value(position), ())


@HANDLERS.handles("LeakyRelu")
def leaky_relu(call: NodeCall) -> Value:
    return call.g.pointwise("leaky_relu", call.value(0), call.attribute("alpha", 0.01))


@HANDLERS.handles("PRelu")
def prelu(call: NodeCall) -> Value:
    return call.g.pointwise("leaky_relu", *call.operands(), dtype=call.kind())


@HANDLERS.handles("Elu")
def elu(call: NodeCall) -> Value:
    return call.g.pointwise("elu", call.value(0), call.attribute("alpha", 1.0), 1.0, 1.0)


@HANDLERS.handles("Selu")
def selu(call: NodeCall) -> Value:
    alpha, gamma = call.attribute("alpha", 1.67326319217681884765625), call.attribute("gamma", 1.05070102214813232421875)
    return call.g.pointwise("elu", call.value(0), alpha, gamma, 1.0)


@HANDLERS.handles("Celu")
def celu(call: NodeCall) -> Value:
    return call.g.pointwise("celu", call.value(0), call.attribute("alpha", 1.0))


@HANDLERS.handles("Softplus")
def softplus(call: NodeCall) -> Value:
    """log(1 + exp x) without overflow: -log_sigmoid(-x)."""
    g = call.g
    return g.pointwise("neg", g.pointwise("log_sigmoid", g.pointwise("neg", call.value(0))))


@HANDLERS.handles("HardSigmoid")
def hard_sigmoid(call: NodeCall) -> Value:
    alpha, beta = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    return call.g.pointwise("clamp", _affine(call.g, call.value(0), alpha, beta), 0.0, 1.0)


def _affine(g: GraphBuilder, x: Value, scale: float, shift: float) -> Value:
    return g.pointwise("add", g.pointwise("mul", x, scale), shift)


@HANDLERS.handles("ThresholdedRelu")
def thresholded_relu(call: NodeCall) -> Value:
    return call.g.pointwise("threshold", call.value(0), call.attribute("alpha", 1.0), 0.0)


@HANDLERS.handles("Shrink")
def shrink(call: NodeCall) -> Value:
    """x + bias below -lambd, x - bias above lambd, else 0."""
    g, x, limit, bias = call.g, call.value(0), call.attribute("lambd", 0.5), call.attribute("bias", 0.0)
    above = g.pointwise("where", g.pointwise("gt", x, limit), g.pointwise("sub", x, bias), 0, dtype=x.dtype)
    return g.pointwise("where", g.pointwise("lt", x, -limit), g.pointwise("add", x, bias), above, dtype=x.dtype)


@HANDLERS.handles("Gelu")
def gelu(call: NodeCall) -> Value:
    return call.g.pointwise("gelu_tanh" if call.attribute("approximate", "none") == "tanh" else "gelu", call.value(0))


@HANDLERS.handles("Swish")
def swish(call: NodeCall) -> Value:
    g, x, alpha = call.g, call.value(0), call.attribute("alpha", 1.0)
    return g.pointwise("silu", x) if alpha == 1 else g.pointwise("mul", x, g.pointwise("sigmoid", g.pointwise("mul", x, alpha)))


@HANDLERS.handles("IsInf")
def is_infinite(call: NodeCall) -> Value:
    g, x = call.g, call.value(0)
    negative, positive = call.attribute("detect_negative", 1), call.attribute("detect_positive", 1)
    if negative and positive:
        return g.pointwise("isinf", x)
    if not negative and not positive:
        return g.full(x.shape, False, "bool")
    return g.pointwise("eq", x, float("inf") if positive else float("-inf"))


@HANDLERS.handles("Cast")
def cast(call: NodeCall) -> Value:
    return _converted(call, element_type(call.attribute("to")))


@HANDLERS.handles("CastLike")
def cast_like(call: NodeCall) -> Value | np.ndarray:
    x, like = call.inputs
    assert like is not None
    if isinstance(x, np.ndarray):
        return x.astype(numpy_dtype(dtype_of(like)))
    return _converted(call, dtype_of(like))


def _converted(call: NodeCall, dtype: str) -> Value:
    return call.g.cast(call.value(0), dtype)


@HANDLERS.handles("BitCast")
def bit_cast(call: NodeCall) -> Value:
    g, x, dtype = call.g, call.value(0), element_type(call.attribute("to"))
    if dtype == x.dtype:
        return x
    if NARROW_FLOATS & {dtype, x.dtype} and size_of(dtype) == size_of(x.dtype):
        return through_torch(g, "aten.view.dtype", (x, torch_dtype(dtype)))[0]
    return g.op("bit_cast", g.cast(x, "u8") if x.dtype == "bool" else x, dtype=dtype)


def element_type(code: int) -> str:
    """The name of an ONNX element type (TensorProto.DataType). Raises Unsupported for one that the compiler does not have."""
    return dtype_of_numpy(np.dtype(helper.tensor_dtype_to_np_dtype(code)))


@HANDLERS.handles("Identity")
def identity(call: NodeCall) -> Any:
    return call.inputs[0]


@HANDLERS.handles("Dropout")
def dropout(call: NodeCall) -> tuple[Value, Value | None]:
    """Inference: the input itself, and a mask of ones."""
    g, x = call.g, call.value(0)
    if call.has(2) and call.constant(2, "training mode").any() and not (call.has(1) and not call.constant(1, "ratio").any()):
        raise Unsupported("dropout in training mode draws random numbers")
    return x, g.full(x.shape, True, "bool") if len(call.used) > 1 and call.used[1] else None
