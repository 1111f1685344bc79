"""ATen's reductions, scans and attention in terms of the operator table."""

from __future__ import annotations

import math
from typing import Any

from tilewright.frontend.handlers import Handlers, Unsupported, axes_of, elementwise
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import is_float
from tilewright.ir.graph import Value

HANDLERS = Handlers()


def _reduce(g: GraphBuilder, operator: str, x: Value, axes: Any, keepdim: bool, **attributes: Any) -> Value:
    return g.op(operator, x, axes=axes_of(axes, len(x.shape)), keepdim=keepdim, **attributes)


@HANDLERS.handles("sum.default")
def sum_all(g: GraphBuilder, x: Value, _: Any = None) -> Value:
    return _reduce(g, "sum", x, None, False, dtype=g.expected[0][1])


@HANDLERS.handles("sum.dim_IntList")
def sum_axes(g: GraphBuilder, x: Value, axes: Any, keepdim: bool, _: Any = None) -> Value:
    return _reduce(g, "sum", x, axes, keepdim, dtype=g.expected[0][1])


@HANDLERS.handles("mean.default")
def mean_all(g: GraphBuilder, x: Value, _: Any = None) -> Value:
    return _reduce(g, "mean", x, None, False, dtype=g.expected[0][1])


@HANDLERS.handles("mean.dim")
def mean_axes(g: GraphBuilder, x: Value, axes: Any, keepdim: bool, _: Any = None) -> Value:
    return _reduce(g, "mean", x, axes, keepdim, dtype=g.expected[0][1])


@HANDLERS.handles("prod.default")
def prod_all(g: GraphBuilder, x: Value, _: Any = None) -> Value:
    return _reduce(g, "prod", x, None, False, dtype=g.expected[0][1])


@HANDLERS.handles("prod.dim_int")
def prod_axis(g: GraphBuilder, x: Value, axis: int, keepdim: bool, _: Any = None) -> Value:
    return _reduce(g, "prod", x, axis, keepdim, dtype=g.expected[0][1])


@HANDLERS.handles("amax.default")
def amax(g: GraphBuilder, x: Value, axes: Any, keepdim: bool) -> Value:
    return _reduce(g, "amax", x, axes, keepdim)


@HANDLERS.handles("amin.default")
def amin(g: GraphBuilder, x: Value, axes: Any, keepdim: bool) -> Value:
    return _reduce(g, "amin", x, axes, keepdim)


@HANDLERS.handles("aminmax.default")
def aminmax(g: GraphBuilder, x: Value, axis: int | None, keepdim: bool) -> tuple[Value, Value]:
    return _reduce(g, "amin", x, axis, keepdim), _reduce(g, "amax", x, axis, keepdim)


@HANDLERS.handles("max.default")
def max_all(g: GraphBuilder, x: Value) -> Value:
    return _reduce(g, "amax", x, None, False)


@HANDLERS.handles("min.default")
def min_all(g: GraphBuilder, x: Value) -> Value:
    return _reduce(g, "amin", x, None, False)


def _with_value(g: GraphBuilder, operator: str, x: Value, axis: int, keepdim: bool) -> tuple[Value, ...]:
    if not x.shape:
        results = g.emit(operator, g.reshape(x, (1,)), axis=0)
        return tuple(results)
    return g.emit(operator, x, axis=axis % len(x.shape), keepdim=keepdim)


@HANDLERS.handles("max.dim")
def max_axis(g: GraphBuilder, x: Value, axis: int, keepdim: bool) -> tuple[Value, ...]:
    return _with_value(g, "argmax_with_value", x, axis, keepdim)


@HANDLERS.handles("min.dim")
def min_axis(g: GraphBuilder, x: Value, axis: int, keepdim: bool) -> tuple[Value, ...]:
    return _with_value(g, "argmin_with_value", x, axis, keepdim)


def _position(g: GraphBuilder, operator: str, x: Value, axis: int | None, keepdim: bool) -> Value:
    if axis is None:
        flat = g.emit(operator, g.reshape(x, (-1,)), axis=0)[1]
        return g.reshape(flat, g.expected[0][0])
    return _with_value(g, operator, x, axis, keepdim)[1]


@HANDLERS.handles("argmax.default")
def argmax(g: GraphBuilder, x: Value, axis: int | None, keepdim: bool) -> Value:
    return _position(g, "argmax_with_value", x, axis, keepdim)


@HANDLERS.handles("argmin.default")
def argmin(g: GraphBuilder, x: Value, axis: int | None, keepdim: bool) -> Value:
    return _position(g, "argmin_with_value", x, axis, keepdim)


@HANDLERS.handles("any.default", "any.dim", "any.dims")
def any_(g: GraphBuilder, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
    return g.cast(_reduce(g, "any", x, axes, keepdim), g.expected[0][1])


@HANDLERS.handles("all.default", "all.dim", "all.dims")
def all_(g: GraphBuilder, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
    return g.cast(_reduce(g, "all", x, axes, keepdim), g.expected[0][1])


@HANDLERS.handles("count_nonzero.default", "count_nonzero.dim_IntList")
def count_nonzero(g: GraphBuilder, x: Value, axes: Any = None) -> Value:
    return _reduce(g, "sum", g.cast(x, "bool"), axes, False, dtype="i64")


# --- statistics -------------------------------------------------------------------------------------------------------


def _variance(g: GraphBuilder, x: Value, axes: Any, correction: float | None, keepdim: bool, root: bool) -> Value:
    return _reduce(g, "variance", x, axes, keepdim, correction=1.0 if correction is None else float(correction), root=root)


@HANDLERS.handles("var.correction")
def var(g: GraphBuilder, x: Value, axes: Any, correction: float | None, keepdim: bool) -> Value:
    return _variance(g, x, axes, correction, keepdim, False)


@HANDLERS.handles("std.correction")
def std(g: GraphBuilder, x: Value, axes: Any, correction: float | None, keepdim: bool) -> Value:
    return _variance(g, x, axes, correction, keepdim, True)


@HANDLERS.handles("var.default")
def var_default(g: GraphBuilder, x: Value, unbiased: bool) -> Value:
    return _variance(g, x, None, float(unbiased), False, False)


@HANDLERS.handles("std.default")
def std_default(g: GraphBuilder, x: Value, unbiased: bool) -> Value:
    return _variance(g, x, None, float(unbiased), False, True)


@HANDLERS.handles("var.dim")
def var_dim(g: GraphBuilder, x: Value, axes: Any, unbiased: bool, keepdim: bool) -> Value:
    return _variance(g, x, axes, float(unbiased), keepdim, False)


@HANDLERS.handles("std.dim")
def std_dim(g: GraphBuilder, x: Value, axes: Any, unbiased: bool, keepdim: bool) -> Value:
    return _variance(g, x, axes, float(unbiased), keepdim, True)


@HANDLERS.handles("var_mean.correction")
def var_mean(g: GraphBuilder, x: Value, axes: Any, correction: float | None, keepdim: bool) -> tuple[Value, Value]:
    return _variance(g, x, axes, correction, keepdim, False), _reduce(g, "mean", x, axes, keepdim)


@HANDLERS.handles("std_mean.correction")
def std_mean(g: GraphBuilder, x: Value, axes: Any, correction: float | None, keepdim: bool) -> tuple[Value, Value]:
    return _variance(g, x, axes, correction, keepdim, True), _reduce(g, "mean", x, axes, keepdim)


@HANDLERS.handles("var_mean.dim")
def var_mean_dim(g: GraphBuilder, x: Value, axes: Any, unbiased: bool, keepdim: bool) -> tuple[Value, Value]:
    return var_mean(g, x, axes, float(unbiased), keepdim)


@HANDLERS.handles("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def vector_norm(g: GraphBuilder, x: Value, order: float | None, axes: Any, keepdim: bool, _: Any = None) -> Value:
    return _reduce(g, "norm", g.cast(x, g.expected[0][1]), axes, keepdim, order=2.0 if order is None else float(order))


@HANDLERS.handles("norm.Scalar")
def norm_all(g: GraphBuilder, x: Value, order: float) -> Value:
    return vector_norm(g, x, order, None, False)


@HANDLERS.handles("_weight_norm.default")
def weight_norm(g: GraphBuilder, x: Value, length: Value, axis: int = 0) -> Value:
    """x length / |x|, where |x| is the length for each index of the axis; -1: that of all of x."""
    over = None if axis == -1 else [other for other in range(len(x.shape)) if other != axis % len(x.shape)]
    return g.pointwise("mul", x, g.pointwise("div", length, _reduce(g, "norm", x, over, True, order=2.0)))


@HANDLERS.handles("cosine_similarity.default")
def cosine_similarity(g: GraphBuilder, a: Value, b: Value, axis: int, epsilon: float) -> Value:
    """Each side is divided by its length, but not by less than epsilon."""
    kind = g.expected[0][1]
    rank = max(len(a.shape), len(b.shape))

    def unit(x: Value) -> Value:
        length = _reduce(g, "norm", x, axis % rank - rank, True, order=2.0)
        return g.pointwise("div", x, g.pointwise("maximum", length, epsilon))

    product = g.pointwise("mul", unit(g.cast(a, kind)), unit(g.cast(b, kind)))
    return _reduce(g, "sum", product, axis, False)


@HANDLERS.handles("pairwise_distance.default")
def pairwise_distance(g: GraphBuilder, a: Value, b: Value, order: float, epsilon: float, keepdim: bool) -> Value:
    difference = g.pointwise("add", elementwise(g, "sub", a, b), epsilon)
    return _reduce(g, "norm", difference, -1, keepdim, order=float(order))


# --- scans ------------------------------------------------------------------------------------------------------------


def _cumulative(g: GraphBuilder, operator: str, x: Value, axis: int) -> Value:
    if not x.shape:
        return g.cast(x, g.expected[0][1])
    return g.op(operator, x, axis=axis % len(x.shape), dtype=g.expected[0][1])


@HANDLERS.handles("cumsum.default")
def cumsum(g: GraphBuilder, x: Value, axis: int, _: Any = None) -> Value:
    return _cumulative(g, "cumsum", x, axis)


@HANDLERS.handles("cumprod.default")
def cumprod(g: GraphBuilder, x: Value, axis: int, _: Any = None) -> Value:
    return _cumulative(g, "cumprod", x, axis)


# --- attention --------------------------------------------------------------------------------------------------------


@HANDLERS.handles("scaled_dot_product_attention.default")
def attention(
    g: GraphBuilder, q: Value, k: Value, v: Value, mask: Value | None, dropout: float, causal: bool, scale: float | None = None, grouped: bool = False
) -> Value:
    """softmax(q k^T scale + mask) v; a boolean mask and the causal triangle set scores to minus infinity where they are false."""
    if dropout:
        raise Unsupported("attention with dropout draws random numbers")
    if not is_float(q.dtype):
        raise Unsupported("attention of integers")
    if grouped and k.shape[-3] != q.shape[-3]:
        k, v = (_repeated_heads(g, x, q.shape[-3] // x.shape[-3]) for x in (k, v))
    q = g.pointwise("mul", q, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = g.op("matmul", q, g.transpose(k, -1, -2))
    if causal:
        scores = g.op("causal_mask", scores)
    if mask is not None and mask.dtype == "bool":
        scores = g.pointwise("where", mask, scores, float("-inf"), dtype=scores.dtype)
    elif mask is not None:
        scores = g.pointwise("add", scores, mask)
    # a completely masked row has no maximum: PyTorch returns zeros there
    weights = g.op("softmax" if mask is None else "safe_softmax", scores, axis=len(scores.shape) - 1)
    return g.op("matmul", weights, v)


def _repeated_heads(g: GraphBuilder, x: Value, times: int) -> Value:
    lead, (heads, length, size) = x.shape[:-3], x.shape[-3:]
    wide = g.expand(g.reshape(x, (*lead, heads, 1, length, size)), (*lead, heads, times, length, size))
    return g.reshape(wide, (*lead, heads * times, length, size))


# --- einsum -----------------------------------------------------------------------------------------------------------


@HANDLERS.handles("einsum.default")
def einsum(g: GraphBuilder, equation: str, operands: list[Value], *_: Any) -> Value:
    """Operands are contracted from left to right; each pair becomes a batched matrix product."""
    if "." in equation:
        raise Unsupported("einsum with an ellipsis")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = "".join(terms)
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if any(len(set(term)) != len(term) for term in terms):
        raise Unsupported("einsum with a diagonal")
    current, labels = operands[0], terms[0]
    for position in range(1, len(operands)):
        later = set(right).union(*terms[position + 1 :])
        current, labels = _contract(g, current, labels, operands[position], terms[position], later)
    gone = [i for i, c in enumerate(labels) if c not in right]
    if gone:
        current = g.op("sum", current, axes=tuple(gone), keepdim=False)
        labels = "".join(c for c in labels if c in right)
    return g.permute(current, [labels.index(c) for c in right])


def _contract(g: GraphBuilder, a: Value, a_labels: str, b: Value, b_labels: str, later: set[str]) -> tuple[Value, str]:
    """Contracts one pair: labels of one side that nothing else uses are summed first; shared labels are batch (if used later) or contracted."""
    a, a_labels = _summed(g, a, a_labels, later | set(b_labels))
    b, b_labels = _summed(g, b, b_labels, later | set(a_labels))
    extents = {**dict(zip(a_labels, a.shape, strict=True)), **dict(zip(b_labels, b.shape, strict=True))}
    batch = [c for c in a_labels if c in b_labels and c in later]
    inner = [c for c in a_labels if c in b_labels and c not in later]
    rows = [c for c in a_labels if c not in b_labels]
    columns = [c for c in b_labels if c not in a_labels]

    def size(labels: list[str]) -> int:
        return math.prod(extents[c] for c in labels)

    lead = [extents[c] for c in batch]
    a2 = g.reshape(g.permute(a, [a_labels.index(c) for c in (*batch, *rows, *inner)]), (*lead, size(rows), size(inner)))
    b2 = g.reshape(g.permute(b, [b_labels.index(c) for c in (*batch, *inner, *columns)]), (*lead, size(inner), size(columns)))
    product = g.op("matmul", a2, b2)
    labels = "".join((*batch, *rows, *columns))
    return g.reshape(product, [extents[c] for c in labels]), labels


def _summed(g: GraphBuilder, x: Value, labels: str, needed: set[str]) -> tuple[Value, str]:
    gone = tuple(i for i, c in enumerate(labels) if c not in needed)
    if not gone:
        return x, labels
    return g.op("sum", x, axes=gone, keepdim=False), "".join(c for c in labels if c in needed)
