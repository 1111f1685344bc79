"""ATen's operators that write to positions that data give, in terms of the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tilewright.frontend.handlers import Handlers, Unsupported
from tilewright.frontend.torch_indices import ALONG_A_DIMENSION, positions
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.operators.definition import broadcast
from tilewright.ir.graph import Value

HANDLERS = Handlers()

MOST_COMPARISONS = 8
"""Comparisons of an index and a position, for each element read or written, up to which our kernels find what PyTorch finds by writing."""


def _check_work(comparisons: int, *tensors: Value) -> None:
    if comparisons > MOST_COMPARISONS * sum(tensor.elements for tensor in tensors):
        raise Unsupported(f"it would compare {comparisons} pairs of indices and positions")


def _along(x: Value, axis: int) -> int:
    if not x.shape:
        raise Unsupported("writes to a tensor without dimensions")
    return axis % len(x.shape)


def _number(g: GraphBuilder, value: Any, dtype: str) -> Value:
    """A Python number, or a tensor with one element, as a value without dimensions."""
    return g.cast(g.reshape(value, ()), dtype) if isinstance(value, Value) else g.full((), value, dtype)


def put(g: GraphBuilder, x: Value, values: Value, indices: Sequence[Value], axes: tuple[int, ...], combiner: str) -> Value:
    """The table's operator `put`. Raises Unsupported if it would compare too many pairs."""
    count = prod(broadcast(*(index.shape for index in indices)))
    compared = x.elements if combiner else prod(x.shape[axis] for axis in axes)
    _check_work(compared * count if count > 1 else 0, x, values)
    return g.op("put", x, g.cast(values, x.dtype), *indices, axes=axes, combiner=combiner)


@HANDLERS.handles("index_copy.default")
def index_copy(g: GraphBuilder, x: Value, axis: int, index: Value, values: Value) -> Value:
    axis = _along(x, axis)
    at = positions(g, g.reshape(index, (-1,)), x.shape[axis], ALONG_A_DIMENSION["index_copy"])
    return put(g, x, values, [at], (axis,), "")


@HANDLERS.handles("index_add.default")
def index_add(g: GraphBuilder, x: Value, axis: int, index: Value, values: Value, factor: float = 1) -> Value:
    axis = _along(x, axis)
    at = positions(g, g.reshape(index, (-1,)), x.shape[axis], ALONG_A_DIMENSION["index_add"])
    return put(g, x, values if factor == 1 else g.pointwise("mul", values, factor), [at], (axis,), "sum")


@HANDLERS.handles("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(g: GraphBuilder, x: Value, axis: int, index: Value, value: Any) -> Value:
    axis = _along(x, axis)
    at = positions(g, g.reshape(index, (-1,)), x.shape[axis], ALONG_A_DIMENSION["index_fill"])
    return put(g, x, _number(g, value, x.dtype), [at], (axis,), "")


@HANDLERS.handles("index_put.default", "_unsafe_index_put.default", "_index_put_impl.default")
def index_put(g: GraphBuilder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False, *_: Any) -> Value:
    present = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(present) == 1 and present[0][1].dtype == "bool":
        return _masked(g, x, *present[0], values, accumulate)
    if any(index.dtype == "bool" for _, index in present) or not present:
        raise Unsupported("it writes where a mask and indices together say")
    at = [positions(g, index, x.shape[axis], True) for axis, index in present]
    return put(g, x, values, at, tuple(axis for axis, _ in present), "sum" if accumulate else "")


def _masked(g: GraphBuilder, x: Value, axis: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """x[..., mask, ...] = values, where the values are the same for all positions of the mask."""
    rest = len(x.shape) - axis - len(mask.shape)
    if len(values.shape) > rest and prod(values.shape[: len(values.shape) - rest]) != 1:
        raise Unsupported("it writes a value for each position of a mask, whose number depends on data")
    values = g.cast(g.reshape(values, values.shape[-rest:] if rest and len(values.shape) > rest else values.shape if rest else ()), x.dtype)
    wide = g.reshape(mask, (*mask.shape, *(1,) * rest))
    return g.pointwise("where", wide, g.pointwise("add", x, values) if accumulate else values, x, dtype=x.dtype)


@HANDLERS.handles("scatter.src", "scatter.value")
def scatter(g: GraphBuilder, x: Value, axis: int, index: Value, values: Any) -> Value:
    return scattered(g, x, axis, index, values, "")


@HANDLERS.handles("scatter_add.default")
def scatter_add(g: GraphBuilder, x: Value, axis: int, index: Value, values: Value) -> Value:
    return scattered(g, x, axis, index, values, "sum")


@HANDLERS.handles("scatter_reduce.two")
def scatter_reduce(g: GraphBuilder, x: Value, axis: int, index: Value, values: Value, reduction: str, include_self: bool = True) -> Value:
    combiner = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min"}.get(reduction)
    if combiner is None or not include_self:
        raise Unsupported(f"the reduction {reduction}" if combiner is None else "a reduction without the values that are overwritten")
    return scattered(g, x, axis, index, values, combiner)


def scattered(g: GraphBuilder, x: Value, axis: int, index: Value, values: Any, combiner: str, negative: bool = False) -> Value:
    """The table's operator `scatter`. `negative`: indices below zero count from the end. Raises Unsupported if it would compare too many pairs."""
    axis = _along(x, axis)
    if len(index.shape) != len(x.shape):
        raise Unsupported(f"an index of {len(index.shape)} dimensions for {len(x.shape)}")
    values = g.cast(values, x.dtype) if isinstance(values, Value) else _number(g, values, x.dtype)
    count = index.shape[axis]
    _check_work(x.elements * count if count > 1 else 0, x, values, index)
    at = positions(g, index, x.shape[axis], negative)
    return g.op("scatter", x, at, values, axis=axis, combiner=combiner)
