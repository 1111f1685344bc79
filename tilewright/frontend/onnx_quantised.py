"""ONNX's quantisation, and its convolutions and products of quantised tensors, in terms of the operator table: products of differences from the zero
points in 32-bit integers.
"""

from __future__ import annotations

import numpy as np

from tilewright.frontend.aten_neural import matmul as matrix_product
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_neural import window_of
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, axis_of, numpy_dtype
from tilewright.frontend.onnx_pointwise import element_type
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import is_float
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


@HANDLERS.handles("DequantizeLinear")
def dequantize(call: NodeCall) -> Value:
    """(x - zero point) * scale, with one scale for the tensor, one per position along an axis, or one per block along an axis."""
    g, x = call.g, call.value(0)
    scale = _along_axis(call, 1)
    if call.has(2):
        # the difference of two 8-bit numbers needs more than 8 bits
        x = g.pointwise("sub", x, _along_axis(call, 2), dtype="i32")
    return g.pointwise("mul", g.cast(x, scale.dtype), scale)


@HANDLERS.handles("QuantizeLinear")
def quantize(call: NodeCall) -> Value:
    """round(x / scale) + zero point, saturated to the range of the result."""
    x, scale = call.value(0), _along_axis(call, 1)
    dtype = element_type(call.attribute("output_dtype")) if call.attribute("output_dtype") else "u8"
    zero = _along_axis(call, 2) if call.has(2) else None
    y = call.g.pointwise("div", call.g.cast(x, scale.dtype), scale)
    return _saturated(call.g, y, zero, zero.dtype if zero is not None else dtype)


def _saturated(g: GraphBuilder, y: Value, zero: Value | None, dtype: str) -> Value:
    """The nearest integers to y, plus the zero point, in the range of an integer type of at most 16 bits."""
    if dtype not in ("u8", "i8", "u16", "i16"):
        raise Unsupported(f"quantisation to {dtype}")
    y = g.pointwise("round", y)
    if zero is not None:
        y = g.pointwise("add", y, g.cast(zero, y.dtype))
    limits = np.iinfo(numpy_dtype(dtype))
    return g.cast(g.pointwise("clamp", y, int(limits.min), int(limits.max)), dtype)


def _along_axis(call: NodeCall, position: int) -> Value:
    """A quantisation parameter in a shape that broadcasts against the data."""
    g, x, parameter = call.g, call.value(0), call.value(position)
    axis, block = axis_of(call.attribute("axis", 1), max(len(x.shape), 2)), call.attribute("block_size", 0)
    if block:
        wide = g.expand(g.unsqueeze(parameter, axis + 1), (*parameter.shape[: axis + 1], block, *parameter.shape[axis + 1 :]))
        flat = g.reshape(wide, (*parameter.shape[:axis], -1, *parameter.shape[axis + 1 :]))
        return g.slice(flat, axis, 0, x.shape[axis])
    if parameter.elements == 1:
        return g.reshape(parameter, ())
    return g.reshape(parameter, (-1, *(1 for _ in x.shape[axis + 1 :])))


def _difference(call: NodeCall, position: int, zero: int, axis: int | None = None) -> Value:
    """Operand `position` minus its zero point, in 32-bit integers. Zero points along an axis are a vector."""
    g, x = call.g, call.value(position)
    if not call.has(zero):
        return g.cast(x, "i32")
    return g.pointwise("sub", x, _spread(g, call.value(zero), x, axis), dtype="i32")


def _spread(g: GraphBuilder, parameter: Value, x: Value, axis: int | None) -> Value:
    """A parameter of a whole tensor, or of each position along an axis of it, in a shape that broadcasts against it."""
    if parameter.elements == 1:
        return g.reshape(parameter, ())
    if len(parameter.shape) > 1 or axis is None:
        return parameter
    return g.reshape(parameter, (-1, *(1 for _ in x.shape[axis % len(x.shape) + 1 :])))


@HANDLERS.handles("MatMulInteger")
def matmul_integer(call: NodeCall) -> Value:
    return matrix_product(call.g, _difference(call, 0, 2, -2), _difference(call, 1, 3, -1))


@HANDLERS.handles("QLinearMatMul")
def quantised_matmul(call: NodeCall) -> Value:
    g, a, b = call.g, call.value(0), call.value(3)
    product = matrix_product(g, _difference(call, 0, 2, -2), _difference(call, 3, 5, -1))
    return _rescaled(call, product, _spread(g, call.value(1), a, -2), _spread(g, call.value(4), b, -1), 6)


def _rescaled(call: NodeCall, product: Value, first: Value, second: Value, result: int) -> Value:
    """An integer sum times both scales, quantised with the scale and the zero point in operands `result` and `result` + 1."""
    g, zero = call.g, call.value(result + 1)
    scale = g.pointwise("div", g.pointwise("mul", first, second), g.reshape(call.value(result), ()))
    if not is_float(scale.dtype):
        raise Unsupported(f"scales of {scale.dtype}")
    return _saturated(g, g.pointwise("mul", g.cast(product, scale.dtype), scale), g.reshape(zero, ()), zero.dtype)


def _convolution(call: NodeCall, x: Value, w: Value) -> Value:
    window = window_of(call, x, w.shape[2:])
    return call.g.op(
        "convolution", x, w, stride=window.stride, padding=window.padding, dilation=window.dilation, groups=call.attribute("group", 1)
    )  # fmt: skip


@HANDLERS.handles("ConvInteger")
def conv_integer(call: NodeCall) -> Value:
    """Padding is the zero point, which is the integer 0 after the subtraction."""
    return _convolution(call, _difference(call, 0, 2), _difference(call, 1, 3, 0))


@HANDLERS.handles("QLinearConv")
def quantised_conv(call: NodeCall) -> Value:
    g = call.g
    total = _convolution(call, _difference(call, 0, 2), _difference(call, 3, 5, 0))
    if call.has(8):
        total = g.pointwise("add", total, _spread(g, call.value(8), total, 1))
    return _rescaled(call, total, g.reshape(call.value(1), ()), _spread(g, call.value(4), total, 1), 6)
