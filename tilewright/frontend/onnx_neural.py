"""ONNX's convolutions, matrix products, normalisations, pooling and attention in terms of the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.frontend.aten_neural import biased
from tilewright.frontend.aten_neural import matmul as matrix_product
from tilewright.frontend.aten_reduction import attention as dot_product_attention
from tilewright.frontend.aten_reduction import einsum as contraction
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, axis_of, through_torch
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Window:
    """The sliding window of a convolution or pooling; `padding` is (before, after) of each spatial dimension."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Pairs


def window_of(call: NodeCall, x: Value, shape: Sequence[int]) -> Window:
    """The window of a node over x [N, C, ...]."""
    stride, dilation = _spatial(call, "strides", len(shape)), _spatial(call, "dilations", len(shape))
    return Window(tuple(shape), stride, dilation, _window_padding(call, x.shape[2:], shape, stride, dilation))


def _window_padding(call: NodeCall, sizes: Sequence[int], window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Pairs:
    """(before, after) of each spatial dimension, from `pads` or `auto_pad`."""
    rank, mode = len(window), call.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        return ((0, 0),) * rank
    if mode == "NOTSET":
        pads = call.attribute("pads") or [0] * (2 * rank)
        return tuple(zip(pads[:rank], pads[rank:], strict=True))
    pairs = []
    for size, f, s, d in zip(sizes, window, stride, dilation, strict=True):
        total = max((-(-size // s) - 1) * s + d * (f - 1) + 1 - size, 0)
        pairs.append(_split(total, mode))
    return tuple(pairs)


def _split(total: int, mode: str) -> tuple[int, int]:
    """Padding before and after: SAME_UPPER puts an odd element after the data, SAME_LOWER before it."""
    small, large = total // 2, total - total // 2
    return (small, large) if mode == "SAME_UPPER" else (large, small)


def _spatial(call: NodeCall, name: str, rank: int) -> tuple[int, ...]:
    return tuple(call.attribute(name) or (1,) * rank)


# --- convolution ------------------------------------------------------------------------------------------------------


@HANDLERS.handles("Conv")
def conv(call: NodeCall) -> Value:
    g, x, w = call.g, call.value(0), call.value(1)
    window = window_of(call, x, w.shape[2:])
    groups = call.attribute("group", 1)
    result = g.op("convolution", x, w, stride=window.stride, padding=window.padding, dilation=window.dilation, groups=groups)
    return biased(g, result, call.optional(2), 1)


@HANDLERS.handles("ConvTranspose")
def conv_transpose(call: NodeCall) -> Value:
    """Asymmetric padding is expressed by the extent of the output."""
    g, x, w = call.g, call.value(0), call.value(1)
    rank = len(w.shape) - 2
    stride, dilation = _spatial(call, "strides", rank), _spatial(call, "dilations", rank)
    extra = tuple(call.attribute("output_padding") or (0,) * rank)
    mode, wanted = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    full = [(n - 1) * s + (f - 1) * d + 1 + e for n, s, f, d, e in zip(x.shape[2:], stride, w.shape[2:], dilation, extra, strict=True)]
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
    if wanted is not None:
        wanted = wanted[-rank:]
        totals = [f - o for f, o in zip(full, wanted, strict=True)]
        padding: Pairs = tuple((max(t, 0) // 2, max(t, 0) - max(t, 0) // 2) if mode == "SAME_UPPER" else _split(max(t, 0), mode) for t in totals)
        extra = tuple(e + max(-t, 0) for e, t in zip(extra, totals, strict=True))
    else:
        padding = _window_padding(call, x.shape[2:], w.shape[2:], stride, dilation)
    result = g.op(
        "transposed_convolution", x, w, stride=stride, padding=tuple(before for before, _ in padding), dilation=dilation,
        output_padding=tuple(e + before - after for e, (before, after) in zip(extra, padding, strict=True)), groups=call.attribute("group", 1),
    )  # fmt: skip
    return biased(g, result, call.optional(2), 1)


# --- matrix products --------------------------------------------------------------------------------------------------


@HANDLERS.handles("Gemm")
def gemm(call: NodeCall) -> Value:
    """alpha A' B' + beta C"""
    g, a, b = call.g, call.value(0), call.value(1)
    a = g.transpose(a, 0, 1) if call.attribute("transA", 0) else a
    y = g.op("linear", a, b) if call.attribute("transB", 0) else g.op("matmul", a, b)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if alpha != 1:
        y = g.pointwise("mul", y, alpha)
    c = call.optional(2)
    if c is None or beta == 0:
        return y
    return g.pointwise("add", y, c if beta == 1 else g.pointwise("mul", c, beta))


@HANDLERS.handles("MatMul")
def matmul(call: NodeCall) -> Value:
    return matrix_product(call.g, call.value(0), call.value(1))


@HANDLERS.handles("Einsum")
def einsum(call: NodeCall) -> Value:
    """Before contraction an ellipsis is replaced by letters, and a repeated letter by a diagonal."""
    g = call.g
    operands = [call.value(i) for i in range(len(call.inputs))]
    equation = call.attribute("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"{len(operands)} operands for the equation {equation}")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    longest = max((len(x.shape) - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True) if "..." in t), default=0)
    dots = "".join(spare[:longest])
    if not arrow:
        letters = "".join(terms).replace("...", "")
        right = ("..." if dots else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    for k, (term, x) in enumerate(zip(terms, operands, strict=True)):
        missing = len(x.shape) - len(term.replace("...", ""))
        term = term.replace("...", dots[len(dots) - missing :] if missing else "")
        _check_extents(equation, term, x, terms[:k], operands[:k])
        terms[k], operands[k] = _without_diagonals(g, term, x)
    return contraction(g, f"{','.join(terms)}->{right.replace('...', dots)}", operands)


def _check_extents(equation: str, term: str, x: Value, terms: Sequence[str], operands: Sequence[Value]) -> None:
    """Raises Unsupported if a letter stands for different extents: einsum then broadcasts a dimension."""
    extents = {c: size for t, other in zip(terms, operands, strict=True) for c, size in zip(t, other.shape, strict=True)}
    if any(extents.get(c, size) != size for c, size in zip(term, x.shape, strict=True)):
        raise Unsupported(f"einsum {equation} that broadcasts a dimension")


def _without_diagonals(g: GraphBuilder, term: str, x: Value) -> tuple[str, Value]:
    for c in dict.fromkeys(term):
        while term.count(c) > 1:
            first = term.index(c)
            second = term.index(c, first + 1)
            x = g.op("diagonal", x, offset=0, first=first, second=second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + c
    return term, x


# --- normalisation ----------------------------------------------------------------------------------------------------


@HANDLERS.handles("BatchNormalization")
def batch_norm(call: NodeCall) -> tuple[Value, ...]:
    """In training the statistics are those of the batch, and the running ones, which are results too, move towards them."""
    g = call.g
    x, scale, bias, mean, variance = (call.value(i) for i in range(5))
    running: list[Value] = []
    if call.attribute("training_mode", 0):
        axes, kept = (0, *range(2, len(x.shape))), call.attribute("momentum", 0.9)
        batch = [g.op("mean", x, axes=axes, keepdim=False), g.op("variance", x, axes=axes, correction=0.0, keepdim=False)]
        for old, new in zip((mean, variance), batch, strict=True):
            running.append(g.pointwise("add", g.pointwise("mul", old, kept), g.pointwise("mul", g.cast(new, old.dtype), 1 - kept)))
        mean, variance = batch
    parameters = [g.cast(v, x.dtype) for v in (mean, variance, scale, bias)]
    return g.op("batch_norm", x, *parameters, epsilon=call.attribute("epsilon", 1e-5)), *running


@HANDLERS.handles("InstanceNormalization")
def instance_norm(call: NodeCall) -> Value:
    x = call.value(0)
    return call.g.op("group_norm", x, call.value(1), call.value(2), groups=x.shape[1], epsilon=call.attribute("epsilon", 1e-5))


@HANDLERS.handles("GroupNormalization")
def group_norm(call: NodeCall) -> Value:
    """Scale and bias have one element per group before opset 21, one per channel since."""
    g, x, groups = call.g, call.value(0), call.attribute("num_groups")
    channels = x.shape[1]

    def by_channel(parameter: Value) -> Value:
        if parameter.elements == channels:
            return parameter
        wide = g.expand(g.reshape(parameter, (groups, 1)), (groups, channels // groups))
        return g.reshape(wide, (channels,))

    return g.op("group_norm", x, by_channel(call.value(1)), by_channel(call.value(2)), groups=groups, epsilon=call.attribute("epsilon", 1e-5))


@HANDLERS.handles("LayerNormalization")
def layer_norm(call: NodeCall) -> tuple[Value | None, ...]:
    g, x, scale, bias = call.g, call.value(0), call.value(1), call.optional(2)
    rank, epsilon = len(x.shape) - axis_of(call.attribute("axis", -1), len(x.shape)), call.attribute("epsilon", 1e-5)
    y = _normalised(g, "layer_norm", x, [scale] if bias is None else [scale, bias], rank, epsilon)
    axes = tuple(range(len(x.shape) - rank, len(x.shape)))
    mean = inverse = None
    if any(call.used[1:]):
        mean = g.op("mean", x, axes=axes, keepdim=True)
        variance = g.op("variance", x, axes=axes, correction=0.0, keepdim=True)
        inverse = g.pointwise("rsqrt", g.pointwise("add", variance, epsilon))
    return y, mean, inverse


@HANDLERS.handles("RMSNormalization")
def rms_norm(call: NodeCall) -> Value:
    x = call.value(0)
    rank = len(x.shape) - axis_of(call.attribute("axis", -1), len(x.shape))
    return _normalised(call.g, "rms_norm", x, [call.value(1)], rank, call.attribute("epsilon", 1e-5))


def _normalised(g: GraphBuilder, operator: str, x: Value, parameters: Sequence[Value], rank: int, epsilon: float) -> Value:
    """A norm with weight and bias; these may be of any shape that broadcasts to the normalised dimensions."""
    wanted = x.shape[len(x.shape) - rank :]
    if all(p.shape == wanted and p.dtype == x.dtype for p in parameters):
        return g.op(operator, x, *parameters, rank=rank, epsilon=epsilon)
    y = g.op(operator, x, rank=rank, epsilon=epsilon)
    for scalar, p in zip(("mul", "add"), parameters, strict=False):
        y = g.pointwise(scalar, y, p)
    return y


@HANDLERS.handles("MeanVarianceNormalization")
def mean_variance_normalization(call: NodeCall) -> Value:
    """(x - mean) / (standard deviation + 1e-9) over the axes, as the standard defines it."""
    g, x = call.g, call.value(0)
    axes = tuple(sorted(a % len(x.shape) for a in call.attribute("axes", [0, 2, 3])))
    deviation = g.op("variance", x, axes=axes, correction=0.0, keepdim=True, root=True)
    centred = g.pointwise("sub", x, g.op("mean", x, axes=axes, keepdim=True))
    return g.pointwise("div", centred, g.pointwise("add", deviation, 1e-9))


@HANDLERS.handles("LRN")
def local_response_norm(call: NodeCall) -> Value:
    """x / (bias + alpha / size * sum of squares of `size` neighbouring channels) ** beta"""
    g, x, size = call.g, call.value(0), call.attribute("size")
    alpha, beta, bias = call.attribute("alpha", 1e-4), call.attribute("beta", 0.75), call.attribute("bias", 1.0)
    squares = g.reshape(g.pointwise("mul", x, x), (x.shape[0], x.shape[1], prod(x.shape[2:])))
    mean = g.op(
        "average_pool", squares, window=(size, 1), stride=(1, 1), padding=((((size - 1) // 2), size - 1 - (size - 1) // 2), (0, 0)), divisor=size
    )
    scale = g.pointwise("pow", g.pointwise("add", g.pointwise("mul", g.reshape(mean, x.shape), alpha), bias), beta)
    return g.pointwise("div", x, scale)


@HANDLERS.handles("GridSample")
def grid_sample(call: NodeCall) -> tuple[Value, ...]:
    x, grid = call.value(0), call.value(1)
    modes = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}
    mode = modes[call.attribute("mode", "linear")]
    if len(x.shape) not in (4, 5) or (len(x.shape) == 5 and mode == 2):
        raise Unsupported(f"this interpolation of {len(x.shape) - 2} dimensions")
    padding = {"zeros": 0, "border": 1, "reflection": 2}[call.attribute("padding_mode", "zeros")]
    return through_torch(call.g, f"aten.grid_sampler_{len(x.shape) - 2}d.default", (x, grid, mode, padding, bool(call.attribute("align_corners", 0))))


@HANDLERS.handles("Det")
def determinant(call: NodeCall) -> tuple[Value, ...]:
    return through_torch(call.g, "aten.linalg_det.default", (call.value(0),))


# --- attention --------------------------------------------------------------------------------------------------------


def _is_plain_attention(call: NodeCall) -> bool:
    """Whether `attention` computes this node; others are expanded by the standard's function definition."""
    along = -2 if len(call.value(0).shape) == 4 else 1
    queries, keys = call.value(0).shape[along], call.value(1).shape[along]
    past = call.value(4).shape[-2] if call.has(4) else 0
    shifted = call.attribute("is_causal", 0) and (past or queries != keys)
    short_mask = call.has(3) and call.value(3).shape[-1] != keys + past
    return not (call.has(6) or call.attribute("softcap", 0.0) or any(call.used[3:]) or shifted or short_mask)


@HANDLERS.handles("Attention")
def attention(call: NodeCall) -> tuple[Value | None, ...]:
    """softmax(Q K^T scale + mask) V over heads; 3-D operands are split into heads and joined again."""
    if not _is_plain_attention(call):
        raise Unsupported("attention with a soft cap, padded keys, a shifted causal mask, or the scores as a result")
    g, q, k, v = call.g, call.value(0), call.value(1), call.value(2)
    flat = len(q.shape) == 3
    if flat:
        heads, shared = call.attribute("q_num_heads"), call.attribute("kv_num_heads")
        q, k, v = (g.transpose(g.reshape(x, (*x.shape[:2], n, -1)), 1, 2) for x, n in ((q, heads), (k, shared), (v, shared)))
    if call.has(4) and call.has(5):
        k, v = g.concatenate([call.value(4), k], 2), g.concatenate([call.value(5), v], 2)
    causal, scale = bool(call.attribute("is_causal", 0)), call.attribute("scale")
    y = dot_product_attention(g, q, k, v, call.optional(3), 0.0, causal, scale, True)
    if flat:
        n, heads, length, size = y.shape
        y = g.reshape(g.transpose(y, 1, 2), (n, length, heads * size))
    return y, k, v
