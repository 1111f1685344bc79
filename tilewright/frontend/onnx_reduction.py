"""ONNX's reductions, softmax family and prefix sums in terms of the operator table."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, axis_of, through_torch
from tilewright.frontend.sorting import first_sorted
from tilewright.ir.dtypes import is_float
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


def _axes(call: NodeCall) -> tuple[int, ...] | None:
    """The axes to reduce over, from the attribute or the input; None if nothing is to be reduced."""
    rank = len(call.value(0).shape)
    listed = call.integers(1, "axes") if call.has(1) else call.attribute("axes")
    if not listed:
        return None if call.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis_of(a, rank) for a in listed}))


def _reduction(call: NodeCall, x: Value, operator: str, **attributes: Any) -> Value:
    axes, keep = _axes(call), bool(call.attribute("keepdims", 1))
    if axes is None:  # each element is its own reduction
        axes, keep = (), True
    if not axes and operator in ("sum", "prod", "amax", "amin", "mean", "any", "all"):
        return x
    return call.g.op(operator, x, axes=axes, keepdim=keep, **attributes)


@HANDLERS.handles("ReduceSum")
def reduce_sum(call: NodeCall) -> Value:
    return _reduction(call, call.value(0), "sum")


@HANDLERS.handles("ReduceMean")
def reduce_mean(call: NodeCall) -> Value:
    x = call.value(0)
    if is_float(x.dtype):
        return _reduction(call, x, "mean")
    return call.g.cast(_reduction(call, call.g.cast(x, "f64"), "mean"), x.dtype)


@HANDLERS.handles("ReduceProd")
def reduce_prod(call: NodeCall) -> Value:
    return _reduction(call, call.value(0), "prod")


@HANDLERS.handles("ReduceMax")
def reduce_max(call: NodeCall) -> Value:
    return _reduction(call, call.value(0), "any" if call.kind() == "bool" else "amax")


@HANDLERS.handles("ReduceMin")
def reduce_min(call: NodeCall) -> Value:
    return _reduction(call, call.value(0), "all" if call.kind() == "bool" else "amin")


@HANDLERS.handles("ReduceL1")
def reduce_l1(call: NodeCall) -> Value:
    return _reduction(call, call.g.pointwise("abs", call.value(0)), "sum")


@HANDLERS.handles("ReduceL2")
def reduce_l2(call: NodeCall) -> Value:
    x = call.value(0)
    if is_float(x.dtype):
        return _reduction(call, x, "norm", order=2.0)
    return call.g.cast(_reduction(call, call.g.cast(x, "f64"), "norm", order=2.0), x.dtype)


@HANDLERS.handles("ReduceSumSquare")
def reduce_sum_square(call: NodeCall) -> Value:
    x = call.value(0)
    return _reduction(call, call.g.pointwise("mul", x, x), "sum")


@HANDLERS.handles("ReduceLogSum")
def reduce_log_sum(call: NodeCall) -> Value:
    return call.g.pointwise("log", _reduction(call, call.value(0), "sum"))


@HANDLERS.handles("ReduceLogSumExp")
def reduce_log_sum_exp(call: NodeCall) -> Value:
    """log sum exp(x - m) + m, where m is the maximum, or 0 if the maximum is infinite."""
    g, x, axes, keep = call.g, call.value(0), _axes(call), bool(call.attribute("keepdims", 1))
    if not axes:
        return x
    greatest = g.op("amax", x, axes=axes, keepdim=True)
    finite = g.pointwise("where", g.pointwise("isinf", greatest), 0.0, greatest, dtype=x.dtype)
    total = g.op("sum", g.pointwise("exp", g.pointwise("sub", x, finite)), axes=axes, keepdim=keep)
    return g.pointwise("add", g.pointwise("log", total), g.reshape(finite, total.shape))


def _extreme(call: NodeCall, operator: str) -> Value:
    g, x = call.g, call.value(0)
    axis, last = axis_of(call.attribute("axis", 0), len(x.shape)), call.attribute("select_last_index", 0)
    if last:
        x = g.op("flip", x, axes=(axis,))
    position = g.emit(operator, x, axis=axis, keepdim=bool(call.attribute("keepdims", 1)))[1]
    return g.pointwise("sub", x.shape[axis] - 1, position) if last else position


@HANDLERS.handles("ArgMax")
def argmax(call: NodeCall) -> Value:
    return _extreme(call, "argmax_with_value")


@HANDLERS.handles("ArgMin")
def argmin(call: NodeCall) -> Value:
    return _extreme(call, "argmin_with_value")


@HANDLERS.handles("Softmax", "LogSoftmax")
def softmax(call: NodeCall) -> Value:
    x = call.value(0)
    operator = "softmax" if call.operator == "Softmax" else "log_softmax"
    return call.g.op(operator, x, axis=axis_of(call.attribute("axis", -1), len(x.shape)))


@HANDLERS.handles("Hardmax")
def hardmax(call: NodeCall) -> Value:
    """1 at the first greatest element along an axis, 0 elsewhere."""
    g, x = call.g, call.value(0)
    axis = axis_of(call.attribute("axis", -1), len(x.shape))
    best = g.emit("argmax_with_value", x, axis=axis, keepdim=True)[1]
    positions = call.materialise(np.arange(x.shape[axis], dtype=np.int64).reshape(-1, *(1 for _ in x.shape[axis + 1 :])))
    return g.cast(g.pointwise("eq", positions, best), x.dtype)


def _prefix(call: NodeCall, operator: str) -> Value:
    """Prefix sums or products: `exclusive` leaves the element itself out, `reverse` runs from the end."""
    g, x = call.g, call.value(0)
    axis = axis_of(int(call.constant(1, "axis").reshape(-1)[0]), len(x.shape))
    reverse = call.attribute("reverse", 0)
    if reverse:
        x = g.op("flip", x, axes=(axis,))
    y = g.op(operator, x, axis=axis)
    if call.attribute("exclusive", 0):
        padding = tuple((1, -1) if k == axis else (0, 0) for k in range(len(x.shape)))
        y = g.op("pad", y, padding=padding, value=0 if operator == "cumsum" else 1)
    return g.op("flip", y, axes=(axis,)) if reverse else y


@HANDLERS.handles("CumSum")
def cumsum(call: NodeCall) -> Value:
    return _prefix(call, "cumsum")


@HANDLERS.handles("CumProd")
def cumprod(call: NodeCall) -> Value:
    return _prefix(call, "cumprod")


@HANDLERS.handles("TopK")
def top_k(call: NodeCall) -> tuple[Value, ...]:
    """The first k elements of a stable sort: of equal elements the one with the lower index comes first, which PyTorch's topk does not guarantee."""
    g, x, count = call.g, call.value(0), int(call.constant(1, "k").reshape(-1)[0])
    axis = axis_of(call.attribute("axis", -1), len(x.shape))
    descending = bool(call.attribute("largest", 1))
    try:
        return first_sorted(g, x, axis, count, descending)
    except Unsupported:
        pass
    keywords = {"stable": True, "dim": axis, "descending": descending}
    return tuple(g.slice(v, axis, 0, count) for v in through_torch(g, "aten.sort.stable", (x,), keywords))


@HANDLERS.handles("LpNormalization")
def lp_normalization(call: NodeCall) -> Value:
    """x divided by its norm along an axis; 0 where the norm is 0."""
    g, x, order = call.g, call.value(0), call.attribute("p", 2)
    if order not in (1, 2):
        raise Unsupported(f"a norm of order {order}")
    length = g.op("norm", x, order=float(order), axes=(axis_of(call.attribute("axis", -1), len(x.shape)),), keepdim=True)
    quotient = g.pointwise("div", x, length)
    return g.pointwise("where", g.pointwise("eq", length, 0), 0, quotient, dtype=x.dtype)
