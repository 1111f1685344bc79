"""ATen's convolutions, matrix products, normalisations and pooling in terms of the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tilewright.frontend.handlers import Handlers, Unsupported, axes_of, elementwise, expanded, torch_dtype
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import computed_in
from tilewright.ir.graph import Value

HANDLERS = Handlers()


def biased(g: GraphBuilder, x: Value, bias: Value | None, axis: int) -> Value:
    """x plus a bias along an axis."""
    if bias is None:
        return x
    trailing = len(x.shape) - 1 - axis
    return g.pointwise("add", x, g.reshape(bias, (*bias.shape, *(1,) * trailing)))


def _batched(g: GraphBuilder, x: Value, spatial: int) -> tuple[Value, bool]:
    """The input with a batch dimension, and whether one was added."""
    return (x, False) if len(x.shape) == spatial + 2 else (g.reshape(x, (1, *x.shape)), True)


def convolution(
    g: GraphBuilder,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Value:
    spatial = len(w.shape) - 2
    x, added = _batched(g, x, spatial)
    result = g.op("convolution", x, w, stride=expanded(stride, spatial), padding=tuple(padding), dilation=expanded(dilation, spatial), groups=groups)
    result = biased(g, result, bias, 1)
    return g.reshape(result, result.shape[1:]) if added else result


@HANDLERS.handles("conv1d.default", "conv2d.default", "conv3d.default")
def conv(g: GraphBuilder, x: Value, w: Value, bias: Value | None, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Value:
    pairs = [(p, p) for p in expanded(padding, len(w.shape) - 2)]
    return convolution(g, x, w, bias, stride, pairs, dilation, groups)


@HANDLERS.handles("conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv_named_padding(
    g: GraphBuilder, x: Value, w: Value, bias: Value | None, stride: list[int], padding: str, dilation: list[int], groups: int
) -> Value:
    spatial = len(w.shape) - 2
    totals = [d * (f - 1) if padding == "same" else 0 for d, f in zip(expanded(dilation, spatial), w.shape[2:], strict=True)]
    return convolution(g, x, w, bias, stride, [(t // 2, t - t // 2) for t in totals], dilation, groups)


@HANDLERS.handles("convolution.default")
def convolution_default(
    g: GraphBuilder,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Value:
    if transposed:
        return transposed_conv(g, x, w, bias, stride, padding, output_padding, groups, dilation)
    return conv(g, x, w, bias, stride, padding, dilation, groups)


@HANDLERS.handles("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def transposed_conv(
    g: GraphBuilder,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    groups: int,
    dilation: list[int],
) -> Value:
    spatial = len(w.shape) - 2
    x, added = _batched(g, x, spatial)
    result = g.op(
        "transposed_convolution",
        x,
        w,
        stride=expanded(stride, spatial),
        padding=expanded(padding, spatial),
        output_padding=expanded(output_padding, spatial),
        dilation=expanded(dilation, spatial),
        groups=groups,
    )
    result = biased(g, result, bias, 1)
    return g.reshape(result, result.shape[1:]) if added else result


# --- matrix products --------------------------------------------------------------------------------------------------


@HANDLERS.handles("linear.default")
def linear(g: GraphBuilder, x: Value, w: Value, bias: Value | None) -> Value:
    result = g.op("linear", x, g.reshape(w, (1, -1)) if len(w.shape) == 1 else w)
    if len(w.shape) == 1:
        result = g.reshape(result, x.shape[:-1])
    return result if bias is None else g.pointwise("add", result, bias)


@HANDLERS.handles("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default", "vdot.default", "inner.default")
def matmul(g: GraphBuilder, a: Value, b: Value) -> Value:
    """torch.matmul: vectors become matrices, and the added dimension is removed again."""
    left, right = len(a.shape) == 1, len(b.shape) == 1
    a2 = g.reshape(a, (1, *a.shape)) if left else a
    b2 = g.reshape(b, (*b.shape, 1)) if right else b
    result = g.op("matmul", a2, b2)
    shape = list(result.shape)
    if right:
        del shape[-1]
    if left:
        del shape[-1 if right else -2]
    return g.reshape(result, shape)


@HANDLERS.handles("addmm.default", "addmv.default", "baddbmm.default")
def addmm(g: GraphBuilder, x: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Value:
    product = matmul(g, a, b)
    if alpha != 1:
        product = g.pointwise("mul", product, alpha)
    if beta == 0:
        return product
    return g.pointwise("add", product, x if beta == 1 else g.pointwise("mul", x, beta))


@HANDLERS.handles("outer.default", "ger.default")
def outer(g: GraphBuilder, a: Value, b: Value) -> Value:
    return elementwise(g, "mul", g.reshape(a, (-1, 1)), g.reshape(b, (1, -1)))


@HANDLERS.handles("bilinear.default")
def bilinear(g: GraphBuilder, a: Value, b: Value, w: Value, bias: Value | None) -> Value:
    """out[..., k] = sum_ij a[..., i] w[k, i, j] b[..., j]"""
    outputs, inner, right = w.shape
    mapped = g.op("linear", a, g.reshape(g.permute(w, (0, 2, 1)), (outputs * right, inner)))
    product = g.pointwise("mul", g.reshape(mapped, (*a.shape[:-1], outputs, right)), g.unsqueeze(b, -2))
    result = g.op("sum", product, axes=(len(product.shape) - 1,), keepdim=False)
    return result if bias is None else g.pointwise("add", result, bias)


# --- softmax and norms ------------------------------------------------------------------------------------------------


@HANDLERS.handles("softmax.int", "_softmax.default")
def softmax(g: GraphBuilder, x: Value, axis: int, _: object = None, *, operator: str = "softmax") -> Value:
    x = g.cast(x, g.expected[0][1])
    if not x.shape:
        return g.reshape(g.op(operator, g.reshape(x, (1,)), axis=0), ())
    return g.op(operator, x, axis=axis % len(x.shape))


@HANDLERS.handles("log_softmax.int", "_log_softmax.default")
def log_softmax(g: GraphBuilder, x: Value, axis: int, _: object = None) -> Value:
    return softmax(g, x, axis, operator="log_softmax")


@HANDLERS.handles("_safe_softmax.default")
def safe_softmax(g: GraphBuilder, x: Value, axis: int, _: object = None) -> Value:
    return softmax(g, x, axis, operator="safe_softmax")


@HANDLERS.handles("softmin.int")
def softmin(g: GraphBuilder, x: Value, axis: int, _: object = None) -> Value:
    return softmax(g, g.pointwise("neg", x), axis)


@HANDLERS.handles("logsumexp.default")
def logsumexp(g: GraphBuilder, x: Value, axes: list[int], keepdim: bool) -> Value:
    """log sum exp(x - m) + m, where m is the maximum, or 0 if the maximum is infinite."""
    over = axes_of(axes, len(x.shape))
    x = g.cast(x, g.expected[0][1])
    greatest = g.op("amax", x, axes=over, keepdim=True)
    infinite = g.pointwise("isinf", greatest)
    finite = g.pointwise("where", infinite, 0.0, greatest, dtype=x.dtype)
    total = g.op("sum", g.pointwise("exp", g.pointwise("sub", x, finite)), axes=over, keepdim=keepdim)
    shift = finite if keepdim else g.reshape(finite, total.shape)
    return g.pointwise("add", g.pointwise("log", total), shift)


@HANDLERS.handles("batch_norm.default")
def batch_norm_of_either_mode(
    g: GraphBuilder, x: Value, w: Value | None, b: Value | None, mean: Value | None, variance: Value | None, training: bool, *rest: float
) -> Value:
    if training or mean is None or variance is None:
        raise Unsupported("batch_norm in training mode")
    return batch_norm(g, x, w, b, mean, variance, *rest[:-1])[0]


@HANDLERS.handles("_native_batch_norm_legit_no_training.default")
def batch_norm(g: GraphBuilder, x: Value, w: Value | None, b: Value | None, mean: Value, variance: Value, *rest: float) -> tuple[Value, None, None]:
    """Inference: normalises by the running statistics."""
    epsilon = float(rest[-1])
    return _affine(g, "batch_norm", [x, mean, variance], w, b, x.shape[1:2], epsilon=epsilon), None, None


@HANDLERS.handles("_native_batch_norm_legit_functional.default")
def training_batch_norm(
    g: GraphBuilder, x: Value, w: Value | None, b: Value | None, mean: Value, variance: Value, training: bool, momentum: float, epsilon: float
) -> tuple[Value | None, ...]:
    """Training: normalises by the batch's own statistics, and moves the running statistics towards them (with the unbiased variance)."""
    if not training:
        return *batch_norm(g, x, w, b, mean, variance, epsilon), mean, variance
    axes = tuple(i for i in range(len(x.shape)) if i != 1)
    count = x.elements // max(x.shape[1], 1)
    batch_mean = g.op("mean", x, axes=axes)
    batch_variance = g.op("variance", x, axes=axes, correction=0.0)
    result = _affine(g, "batch_norm", [x, batch_mean, batch_variance], w, b, x.shape[1:2], epsilon=epsilon)
    saved = g.pointwise("rsqrt", g.pointwise("add", batch_variance, epsilon))

    def moved(running: Value, batch: Value, factor: float) -> Value:
        wide = computed_in(running.dtype)
        old, new = (g.pointwise("mul", x, share, dtype=wide) for x, share in ((running, 1 - momentum), (batch, momentum * factor)))
        return g.cast(g.pointwise("add", old, new), g.expected[-1][1])  # of 16-bit statistics in 32 bits, which are rounded when they are stored

    return result, batch_mean, saved, moved(mean, batch_mean, 1.0), moved(variance, batch_variance, count / max(count - 1, 1))


@HANDLERS.handles("_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    g: GraphBuilder, x: Value, w: Value | None, b: Value | None, training: bool, momentum: float, epsilon: float
) -> tuple[Value, Value, Value]:
    """Normalises by the batch's own statistics."""
    axes = tuple(i for i in range(len(x.shape)) if i != 1)
    mean, variance = g.op("mean", x, axes=axes), g.op("variance", x, axes=axes, correction=0.0)
    result = _affine(g, "batch_norm", [x, mean, variance], w, b, x.shape[1:2], epsilon=epsilon)
    return result, mean, g.pointwise("rsqrt", g.pointwise("add", variance, epsilon))


def _affine(
    g: GraphBuilder, operator: str, inputs: list[Value], w: Value | None, b: Value | None, shape: Sequence[int], **attributes: object
) -> Value:
    """A norm with its weight and bias; a bias without a weight gets a weight of ones."""
    if b is not None and w is None:
        w = g.full(shape, 1.0, inputs[0].dtype)
    return g.op(operator, *inputs, *(p for p in (w, b) if p is not None), **attributes)


@HANDLERS.handles("layer_norm.default")
def layer_norm(g: GraphBuilder, x: Value, shape: list[int], w: Value | None, b: Value | None, epsilon: float, _: bool = True) -> Value:
    return _affine(g, "layer_norm", [x], w, b, shape, rank=len(shape), epsilon=epsilon)


@HANDLERS.handles("native_layer_norm.default")
def native_layer_norm(g: GraphBuilder, x: Value, shape: list[int], w: Value | None, b: Value | None, epsilon: float) -> tuple[Value, None, None]:
    return layer_norm(g, x, shape, w, b, epsilon), None, None


@HANDLERS.handles("rms_norm.default")
def rms_norm(g: GraphBuilder, x: Value, shape: list[int], w: Value | None, epsilon: float | None) -> Value:
    if epsilon is None:
        epsilon = torch.finfo(torch_dtype(x.dtype)).eps
    return _affine(g, "rms_norm", [x], w, None, shape, rank=len(shape), epsilon=epsilon)


@HANDLERS.handles("group_norm.default")
def group_norm(g: GraphBuilder, x: Value, groups: int, w: Value | None, b: Value | None, epsilon: float, _: bool = True) -> Value:
    return _affine(g, "group_norm", [x], w, b, x.shape[1:2], groups=groups, epsilon=epsilon)


@HANDLERS.handles("native_group_norm.default")
def native_group_norm(
    g: GraphBuilder, x: Value, w: Value | None, b: Value | None, images: int, channels: int, pixels: int, groups: int, epsilon: float
) -> tuple[Value, None, None]:
    if (images, channels, pixels) != (*x.shape[:2], prod(x.shape[2:])):
        raise Unsupported("group norm in sizes other than its input's")
    return group_norm(g, x, groups, w, b, epsilon), None, None


@HANDLERS.handles("instance_norm.default")
def instance_norm(
    g: GraphBuilder,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    variance: Value | None,
    use_input: bool,
    _m: float,
    epsilon: float,
    _c: bool,
) -> Value:
    if not use_input and mean is not None and variance is not None:
        return batch_norm(g, x, w, b, mean, variance, epsilon)[0]
    if mean is not None:
        raise Unsupported("instance norm that updates running statistics")
    return group_norm(g, x, x.shape[1], w, b, epsilon)


# --- pooling ----------------------------------------------------------------------------------------------------------


def _max_pool(
    g: GraphBuilder,
    x: Value,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    rank: int,
    indices: bool,
) -> tuple[Value, ...]:
    sizes = expanded(window, rank)
    return g.emit(
        "max_pool",
        x,
        window=sizes,
        stride=expanded(stride, rank) if stride else sizes,
        padding=tuple((p, p) for p in expanded(padding, rank)),
        dilation=expanded(dilation, rank),
        ceil_mode=ceil_mode,
        indices=indices,
    )


@HANDLERS.handles("max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def max_pool(g: GraphBuilder, x: Value, window: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool) -> Value:
    return _max_pool(g, x, window, stride, padding, dilation, ceil_mode, _pool_rank(g, x, window), False)[0]


@HANDLERS.handles("max_pool1d_with_indices.default", "max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool_with_indices(
    g: GraphBuilder, x: Value, window: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Value, ...]:
    return _max_pool(g, x, window, stride, padding, dilation, ceil_mode, _pool_rank(g, x, window), True)


def _pool_rank(g: GraphBuilder, x: Value, window: Sequence[int]) -> int:
    """The number of pooled dimensions: windows have one number per dimension, or one for all, in which case the expected result's shape tells."""
    if len(window) > 1:
        return len(window)
    shape = g.expected[0][0]
    return max(len(x.shape) - 2, 1) if shape else 1


@HANDLERS.handles("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def avg_pool(
    g: GraphBuilder, x: Value, window: list[int], stride: list[int], padding: list[int], ceil_mode: bool, include: bool, divisor: int | None = None
) -> Value:
    rank = _pool_rank(g, x, window)
    sizes = expanded(window, rank)
    return g.op(
        "average_pool",
        x,
        window=sizes,
        stride=expanded(stride, rank) if stride else sizes,
        padding=tuple((p, p) for p in expanded(padding, rank)),
        ceil_mode=ceil_mode,
        count_include_pad=include,
        divisor=divisor,
    )


@HANDLERS.handles(
    "adaptive_avg_pool1d.default",
    "adaptive_avg_pool2d.default",
    "adaptive_avg_pool3d.default",
    "_adaptive_avg_pool2d.default",
    "_adaptive_avg_pool3d.default",
)
def adaptive_avg_pool(g: GraphBuilder, x: Value, output: list[int]) -> Value:
    if all(s == 1 for s in output):
        rank = len(output)
        return g.op("mean", x, axes=tuple(range(len(x.shape) - rank, len(x.shape))), keepdim=True)
    return g.op("adaptive_pool", x, output=tuple(output), kind="mean")


@HANDLERS.handles("adaptive_max_pool1d.default", "adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(g: GraphBuilder, x: Value, output: list[int]) -> tuple[Value, ...]:
    return g.emit("adaptive_pool", x, output=tuple(output), kind="max", indices=True)
