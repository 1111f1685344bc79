"""The operators of random graphs: each proposes a node over existing values, or None if none suits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_graphs import MOST_PRODUCTS, Call, Growth, Node, Value

Proposal = Callable[[Growth], Node | None]
PROPOSALS: list[tuple[float, Proposal]] = []

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 19, 28)


def weighted(weight: float) -> Callable[[Proposal], Proposal]:
    """Decorator that sets how often the operator is proposed, relative to others."""

    def register(proposal: Proposal) -> Proposal:
        PROPOSALS.append((weight, proposal))
        return proposal

    return register


def propose(g: Growth) -> Node | None:
    weights, proposals = zip(*PROPOSALS, strict=True)
    return g.random.choices(proposals, weights)[0](g)


def call(text: str, values: Sequence[Value], function: Callable[..., Tensor], keeps: bool = False) -> Node:
    return Node(text, tuple(v.number for v in values), Call(function), keeps)


def module(part: nn.Module, *values: Value) -> Node:
    for inner in part.modules():
        if isinstance(inner, nn.modules.batchnorm._NormBase) and inner.running_mean is not None:
            inner.running_mean.normal_()
            inner.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        if isinstance(inner, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)) and inner.weight is not None:
            nn.init.uniform_(inner.weight, 0.5, 1.5)
            if inner.bias is not None:
                nn.init.normal_(inner.bias)
    return Node(repr(part).replace("\n", " "), tuple(v.number for v in values), part.eval())


# --- inputs -----------------------------------------------------------------------------------------------------------


def first_inputs(g: Growth) -> None:
    """One to three inputs: images, sequences, matrices, volumes; sometimes indices or truth values."""
    rank = g.pick((1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 5))
    g.add_input(contents(g, input_shape(g, rank)))
    if g.chance(0.4):
        shape = g.values[0].shape if g.chance(0.7) else input_shape(g, g.pick((1, 2, 3, 4)))
        g.add_input(contents(g, shape))
    if g.chance(0.12):
        g.add_input(torch.randint(0, 5, input_shape(g, g.pick((1, 2, 2)))[-2:], dtype=g.pick((torch.int64, torch.int64, torch.int32))))
    if g.chance(0.08):
        g.add_input(torch.rand(g.values[0].shape) > 0.4)


def input_shape(g: Growth, rank: int) -> tuple[int, ...]:
    while True:
        lead = {1: (), 2: (), 3: (g.pick((1, 1, 2, 3)),)}.get(rank, (g.pick((1, 1, 2, 3)), g.pick(CHANNELS)))
        shape = (*lead, *(g.pick(EXTENTS if rank < 5 else EXTENTS[:7]) for _ in range(rank - len(lead))))
        if rank < 3 and g.chance(0.3):
            shape = (*shape[:-1], g.pick((33, 65, 130, 257)))
        if prod(shape) <= 8_000:
            return shape


def contents(g: Growth, shape: tuple[int, ...]) -> Tensor:
    kind = g.pick(("normal",) * 8 + ("rows", "constant", "integers", "shifted", "ties"))
    if kind == "rows":  # each row has its own constant
        return (torch.randn(shape[:-1]) * g.pick((1, 1, 300)))[..., None].expand(shape).contiguous()
    if kind == "constant":
        return torch.full(shape, g.pick((0.0, 1.0, 0.1, -3.3, 1000.1)))
    if kind == "integers":
        return torch.randint(-4, 5, shape).float()
    if kind == "ties":
        return torch.randint(0, 3, shape) * 0.7 - 0.7
    return torch.randn(shape) + (5 if kind == "shifted" else 0)


# --- sums of products -------------------------------------------------------------------------------------------------


@weighted(10)
def convolution(g: Growth) -> Node | None:
    x = g.floats(3, 4, 4, 4, 5)
    if x is None:
        return None
    rank, channels = x.rank - 2, x.shape[1]
    divisors = [d for d in (1, 1, 1, 2, 3, 4, channels) if channels % d == 0]
    groups = g.pick(divisors)
    outputs = groups * g.pick((1, 1, 2, 3) if groups > 1 else (1, 1, 2, 3, 5, 8, 16, 17, 32))
    if g.chance(0.5):
        kernel, stride, dilation, padding = [[value] * rank for value in (g.pick((1, 1, 2, 3, 3, 3, 5, 7)), g.pick((1, 1, 1, 2, 3)), 1, 0)]
        padding = [g.pick((0, kernel[0] // 2, g.random.randint(0, kernel[0] - 1)))] * rank
    else:
        kernel, stride, dilation = ([g.pick(of) for _ in range(rank)] for of in ((1, 2, 3, 4, 5), (1, 1, 2, 3), (1, 1, 2)))
        padding = [g.random.randint(0, k // 2 + 1) for k in kernel]
    bias = g.chance(0.6)
    spatial = x.shape[2:]
    if g.chance(0.2):
        padding = [g.random.randint(0, min(p, d * (k - 1))) for p, d, k in zip(padding, dilation, kernel, strict=True)]
        extra = [g.random.randint(0, s - 1) for s in stride]
        after = [
            (e - 1) * s - 2 * p + d * (k - 1) + o + 1 for e, s, p, d, k, o in zip(spatial, stride, padding, dilation, kernel, extra, strict=True)
        ]
        if min(after) < 1 or x.exact.numel() * prod(kernel) * outputs // groups > MOST_PRODUCTS:
            return None
        return module(TRANSPOSED[rank - 1](channels, outputs, kernel, stride, padding, extra, groups, bias, dilation), x)
    after = [(e + 2 * p - d * (k - 1) - 1) // s + 1 for e, s, p, d, k in zip(spatial, stride, padding, dilation, kernel, strict=True)]
    if min(after) < 1 or x.shape[0] * prod(after) * outputs * (channels // groups) * prod(kernel) > MOST_PRODUCTS:
        return None
    mode = "zeros"
    if g.chance(0.1) and all(p < e for p, e in zip(padding, spatial, strict=True)):
        mode = g.pick(("reflect", "replicate", "circular"))
    return module(CONVOLUTIONS[rank - 1](channels, outputs, kernel, stride, padding, dilation, groups, bias, padding_mode=mode), x)


@weighted(5)
def linear(g: Growth) -> Node | None:
    x = g.value(lambda v: v.is_float and v.rank >= 1 and v.exact.numel() > 0)
    if x is None:
        return None
    features = g.pick((1, 2, 3, 5, 10, 16, 17, 33, 64))
    return module(nn.Linear(x.shape[-1], features, bias=g.chance(0.7)), x) if x.exact.numel() * features < MOST_PRODUCTS else None


@weighted(4)
def product_of_two(g: Growth) -> Node | None:
    x = g.value(lambda v: v.is_float and v.rank >= 2 and v.exact.numel() > 0)
    if x is None:
        return None
    y = g.value(lambda v: v.is_float and v.rank >= 2 and v.shape[-1] == x.shape[-1] and _broadcast(v.shape[:-2], x.shape[:-2]))
    z = g.value(lambda v: v.is_float and v.rank >= 2 and v.shape[-2] == x.shape[-1] and _broadcast(v.shape[:-2], x.shape[:-2]))
    scale = x.shape[-1] ** -0.5
    if z is not None and g.chance(0.6):
        return call("a @ b", (x, z), lambda a, b: a @ b * scale) if x.exact.numel() * z.shape[-1] < MOST_PRODUCTS else None
    if y is None or x.exact.numel() * y.shape[-2] > MOST_PRODUCTS:
        return None
    if g.chance(0.3):
        return call("softmax(a @ b.mT)", (x, y), lambda a, b: torch.softmax(a @ b.mT * scale, -1))
    return call("a @ b.mT", (x, y), lambda a, b: a @ b.mT * scale)


@weighted(2)
def attention(g: Growth) -> Node | None:
    x = g.floats(3)
    if x is None or x.shape[1] > 40:
        return None
    heads = g.pick([h for h in (1, 2, 4) if x.shape[2] % h == 0])
    causal = g.chance(0.3)

    def attend(x: Tensor) -> Tensor:
        n, length, width = x.shape
        split = x.view(n, length, heads, width // heads).transpose(1, 2) if x.is_contiguous() else x.reshape(n, length, heads, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(split, split * 0.5, split, is_causal=causal).transpose(1, 2).reshape(n, length, width)

    return call(f"attention heads={heads} causal={causal}", (x,), attend)


@weighted(0.4)
def encoder(g: Growth) -> Node | None:
    x = g.floats(3)
    if x is None or x.shape[1] > 20 or x.shape[2] % 2:
        return None
    if g.chance(0.5):
        return module(nn.TransformerEncoderLayer(x.shape[2], 2, 12, batch_first=True, norm_first=g.chance(0.5)), x)
    return module(First(g.pick((nn.LSTM, nn.GRU, nn.RNN))(x.shape[2], g.pick((1, 3, 8)), batch_first=True)), x)


class First(nn.Module):
    """The first result of a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)[0]


# --- windows, resampling ----------------------------------------------------------------------------------------------


@weighted(4)
def pooling(g: Growth) -> Node | None:
    x = g.floats(3, 4, 4, 5)
    if x is None:
        return None
    rank = x.rank - 2
    greatest = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    adaptive = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[rank - 1]
    window, stride, ceil = g.random.randint(1, 4), g.random.randint(1, 3), g.chance(0.3)
    padding = g.random.randint(0, window // 2)
    if g.chance(0.25):
        output = g.pick((1, 1, 2, 3))
        return call(f"adaptive_avg_pool {output}", (x,), lambda x: adaptive(x, output))
    if min(x.shape[2:]) + (2 * padding if rank < 3 else 0) < window:
        return None
    options = f"window {window} stride {stride} padding {padding} ceil {ceil}"
    if g.chance(0.5):
        if g.chance(0.2):
            return call(f"positions of max_pool {options}", (x,), lambda x: greatest(x, window, stride, padding, 1, ceil, True)[1])
        return call(f"max_pool {options}", (x,), lambda x: greatest(x, window, stride, padding, 1, ceil), True)
    inside = g.chance(0.5)
    return call(f"avg_pool {options} include_pad {inside}", (x,), lambda x: mean(x, window, stride, padding, ceil, inside))


@weighted(4)
def resampling(g: Growth) -> Node | None:
    x = g.floats(3, 4, 4, 4, 5)
    if x is None or x.exact.numel() > 4000:
        return None
    factor = g.pick((2, 2, 3))
    if g.chance(0.5):
        return call(f"nearest by {factor}", (x,), lambda x: F.interpolate(x, scale_factor=factor), True)
    if x.rank == 4 and g.chance(0.2) and x.shape[1] % 4 == 0:
        return call("pixel_shuffle 2", (x,), lambda x: F.pixel_shuffle(x, 2), True)
    modes = {3: ("linear",), 4: ("bilinear", "bilinear", "bicubic"), 5: ("trilinear",)}[x.rank]
    mode, align = g.pick(modes), g.chance(0.4)
    size = [g.pick((e, 2 * e, e + 1, 2 * e + 1, max(1, e - 1), 3 * e)) for e in x.shape[2:]]
    return call(f"{mode} to {size} align {align}", (x,), lambda x: F.interpolate(x, size, mode=mode, align_corners=align))


# --- normalisation ----------------------------------------------------------------------------------------------------


@weighted(6)
def normalisation(g: Growth) -> Node | None:
    x = g.value(lambda v: v.is_float and v.rank >= 1 and v.exact.numel() > 0)
    if x is None:
        return None
    kind = g.pick(("layer", "layer", "batch", "group", "instance", "rms", "unit"))
    spatial, channels = x.rank - 2, x.shape[1] if x.rank > 1 else 1
    if kind == "layer":
        return module(nn.LayerNorm(x.shape[-g.random.randint(1, min(2, x.rank)) :], elementwise_affine=g.chance(0.6)), x)
    if kind == "rms":
        return module(nn.RMSNorm(x.shape[-1:], eps=1e-5), x)
    if kind == "unit":
        dim = g.random.randrange(x.rank)
        return call(f"normalize {dim}", (x,), lambda x: F.normalize(x, dim=dim, eps=1e-2))
    if not 1 <= spatial <= 3:
        return None
    if kind == "batch":
        return module(BATCH_NORMS[spatial - 1](channels), x)
    if kind == "group":
        groups = g.pick([d for d in (1, 2, 3, 4, channels) if channels % d == 0])
        return module(nn.GroupNorm(groups, channels), x) if x.exact.numel() > groups else None
    return module(INSTANCE_NORMS[spatial - 1](channels, affine=g.chance(0.5)), x) if prod(x.shape[2:]) > 1 else None


@weighted(4)
def softmax(g: Growth) -> Node | None:
    x = g.value(lambda v: v.is_float and v.rank >= 1 and v.exact.numel() > 0)
    if x is None:
        return None
    dim, kind = g.random.randrange(x.rank), g.pick((F.softmax, F.softmax, F.log_softmax, torch.logsumexp))
    return call(f"{kind.__name__} {dim}", (x,), lambda x: kind(x, dim))


# --- maps -------------------------------------------------------------------------------------------------------------

KEEPING = (F.relu, torch.abs, torch.neg, F.relu6)
ACTIVATIONS = (
    F.relu, F.relu, F.gelu, torch.sigmoid, torch.tanh, F.silu, F.hardswish, F.leaky_relu, F.elu, F.softplus, F.mish, F.relu6, torch.abs, torch.neg,
    F.hardsigmoid, F.selu, torch.square, torch.sin, torch.cos, torch.erf, F.softsign, F.tanhshrink, torch.atan,
)  # fmt: skip


@weighted(8)
def activation(g: Growth) -> Node | None:
    x = g.floats()
    if x is None:
        return None
    function = g.pick(ACTIVATIONS)
    return call(function.__name__, (x,), lambda x: function(x), function in KEEPING)


@weighted(4)
def with_number(g: Growth) -> Node | None:
    x = g.floats()
    if x is None:
        return None
    name = g.pick(("scale", "shift", "clamp", "root", "exp", "log", "power", "reciprocal"))
    number = g.pick((-2.0, 0.5, 3.0, 0.25))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "scale": lambda x: x * number,
        "shift": lambda x: 1 - x,
        "clamp": lambda x: x.clamp(-0.5, 1.25),
        "root": lambda x: torch.sqrt(x.abs() + 0.5),
        "exp": lambda x: torch.exp(x.clamp(-8, 4)),
        "log": lambda x: torch.log(x.abs() + 0.5),
        "power": lambda x: (x.abs() + 0.5) ** number,
        "reciprocal": lambda x: 1 / (1 + x * x),
    }
    return call(f"{name} {number}", (x,), functions[name], name == "clamp" or (name == "scale" and number in (-2.0, 0.5, 0.25)))


def _broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


@weighted(9)
def of_two(g: Growth) -> Node | None:
    x = g.floats()
    if x is None:
        return None
    y = g.value(lambda v: v.is_float and v.number != x.number and _broadcast(v.shape, x.shape)) or x
    name = g.pick(("add", "add", "add", "mul", "sub", "maximum", "minimum", "div", "gate", "lerp"))
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda x, y: x + y,
        "mul": lambda x, y: x * y,
        "sub": lambda x, y: x - y,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "div": lambda x, y: x / (1.5 + y.abs()),
        "gate": lambda x, y: x * torch.sigmoid(y),
        "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    }
    return call(name, (x, y), functions[name], name in ("maximum", "minimum"))


class Added(nn.Module):
    """Adds (or multiplies by) a parameter that broadcasts."""

    def __init__(self, shape: Sequence[int], times: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tuple(shape)))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.times else x + self.weight


@weighted(2)
def of_a_parameter(g: Growth) -> Node | None:
    x = g.floats()
    if x is None:
        return None
    shape = [extent if g.chance(0.5) else 1 for extent in x.shape]
    times = g.chance(0.5)
    return replace_text(module(Added(shape, times), x), f"{'times' if times else 'plus'} parameter {shape}")


def replace_text(node: Node, text: str) -> Node:
    return Node(text, node.inputs, node.part, node.keeps)


# --- shapes -----------------------------------------------------------------------------------------------------------


@weighted(5)
def joined(g: Growth) -> Node | None:
    x = g.value(lambda v: v.is_float and v.rank >= 1)
    if x is None:
        return None
    dim = g.random.randrange(x.rank)
    fits = (
        g.value(
            lambda v: (
                v.is_float
                and v.rank == x.rank
                and v.number != x.number
                and all(a == b or i == dim for i, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)))
            )
        )
        or x
    )
    if fits.shape == x.shape and g.chance(0.2):
        return call(f"stack {dim}", (x, fits), lambda a, b: torch.stack([a, b], dim), True)
    way = g.pick(("two", "two", "part", "activated"))
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "two": lambda a, b: torch.cat([a, b], dim),
        "part": lambda a, b: torch.cat([a, b.narrow(dim, 0, 1), a], dim),
        "activated": lambda a, b: torch.cat([F.relu(a), -b], dim),
    }
    return call(f"cat {dim} {way}", (x, fits), functions[way], True)


@weighted(8)
def view(g: Growth) -> Node | None:
    x = g.value(lambda v: v.rank >= 1 and v.exact.numel() > 0)
    if x is None:
        return None
    dim, other = g.random.randrange(x.rank), g.random.randrange(x.rank)
    extent = x.shape[dim]
    start, order = g.random.randrange(extent), g.random.sample(range(x.rank), x.rank)
    divisors = [d for d in (2, 3, 4, 7) if extent % d == 0 and extent > d]
    divisor, times, shift = g.pick(divisors or [extent]), g.pick((2, 3)), g.random.randint(-2, 2)
    step = g.pick((1, 2, 3))
    ways: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
        f"permute {order}": (True, lambda x: x.permute(order)),
        f"transpose {dim} {other}": (True, lambda x: x.transpose(dim, other)),
        f"flatten {min(dim, other)} {max(dim, other)}": (x.rank > 1, lambda x: x.flatten(min(dim, other), max(dim, other))),
        f"unflatten {dim} {divisor}": (bool(divisors) and x.rank < 5, lambda x: x.unflatten(dim, (-1, divisor))),
        f"shuffle {dim} {divisor}": (bool(divisors), lambda x: x.unflatten(dim, (-1, divisor)).transpose(dim, dim + 1).flatten(dim, dim + 1)),
        f"reshape (-1, {extent})": (x.rank > 1, lambda x: x.reshape(-1, extent)),
        f"select {dim} {start}": (x.rank > 1, lambda x: x.select(dim, start)),
        f"narrow {dim} {start}": (extent > 1, lambda x: x.narrow(dim, start, extent - start)),
        f"every {step} of {dim}": (extent > 1, lambda x: x.transpose(0, dim)[::step].transpose(0, dim)),
        f"unsqueeze {dim}": (x.rank < 5, lambda x: x.unsqueeze(dim)),
        "squeeze": (1 in x.shape and x.rank > 1, lambda x: x.squeeze(x.shape.index(1))),
        f"flip {dim}": (True, lambda x: x.flip(dim)),
        f"roll {shift} {dim}": (True, lambda x: x.roll(shift, dim)),
        f"repeat {times} {dim}": (x.exact.numel() < 4000, lambda x: x.repeat(*[times if i == dim else 1 for i in range(x.dim())])),
        f"repeat_interleave {times} {dim}": (x.exact.numel() < 4000, lambda x: x.repeat_interleave(times, dim)),
        f"expand {times} {dim}": (extent == 1, lambda x: x.expand(*[times if i == dim else -1 for i in range(x.dim())])),
        f"tril {shift}": (x.rank > 1 and x.is_float, lambda x: x.tril(shift)),
        f"unfold {dim}": (extent > 2 and x.rank < 5, lambda x: x.unfold(dim, 2, 1)),
        f"chunk {dim}": (extent > 1, lambda x: x.chunk(2, dim)[-1]),
    }
    text, (_, function) = g.pick([(text, way) for text, way in ways.items() if way[0]])
    return call(text, (x,), function, True)


@weighted(3)
def padding(g: Growth) -> Node | None:
    x = g.floats(2, 3, 4, 4)
    if x is None:
        return None
    mode = g.pick(("constant", "constant", "reflect", "replicate", "circular")) if x.rank in (3, 4) else "constant"
    amount = [g.random.randint(0, 2) for _ in range(2 * (x.rank - 2 or 1))]
    if mode == "constant":
        amount[0] = g.random.randint(-1, 2) if x.shape[-1] > 2 else amount[0]
        value = g.pick((0.0, 0.0, 1.5))
        return call(f"pad {amount} {value}", (x,), lambda x: F.pad(x, amount, value=value), True)
    if min(x.shape[2:], default=0) < 3:
        return None
    return call(f"pad {amount} {mode}", (x,), lambda x: F.pad(x, amount, mode=mode), True)


# --- reductions -------------------------------------------------------------------------------------------------------


@weighted(6)
def reduction(g: Growth) -> Node | None:
    x = g.value(lambda v: v.is_float and v.rank >= 1 and v.exact.numel() > 0)
    if x is None:
        return None
    dims = tuple(sorted(g.random.sample(range(x.rank), g.random.randint(1, min(2, x.rank)))))
    dim, keep, unbiased = dims[0], g.chance(0.5), g.chance(0.5)
    points = prod(x.shape[d] for d in dims)
    name = g.pick(("sum", "mean", "mean", "amax", "amin", "var", "std", "norm", "cumsum", "largest", "centred"))
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(dims, keep),
        "mean": lambda x: x.mean(dims, keep),
        "amax": lambda x: x.amax(dims, keep),
        "amin": lambda x: x.amin(dims, keep),
        "var": lambda x: x.var(dims, correction=int(unbiased), keepdim=keep),
        "std": lambda x: x.std(dims, correction=int(unbiased), keepdim=keep),
        "norm": lambda x: torch.linalg.vector_norm(x, 2, dims, keep),
        "cumsum": lambda x: x.cumsum(dim),
        "largest": lambda x: x.max(dim, keep)[0],
    }
    if name in ("var", "std") and points < 2:
        return None
    if name == "centred":
        mean = call(f"mean {dims} keep True", (x,), lambda x: x.mean(dims, True))
        return call("sub", (x, g.values[-1]), lambda x, mean: x - mean) if g.add(mean) else None
    return call(f"{name} {dims} keep {keep} unbiased {unbiased}", (x,), ways[name], name in ("amax", "amin", "largest"))


# --- integers, truth values, indices ----------------------------------------------------------------------------------


@weighted(1.5)
def comparison(g: Growth) -> Node | None:
    x = g.floats()
    if x is None:
        return None
    threshold = g.pick((0.0, 0.25, -0.5, 0.625))
    name = g.pick(("gt", "le", "ne"))
    return call(f"{name} {threshold}", (x,), lambda x: getattr(torch, name)(x, threshold))


@weighted(1.5)
def position(g: Growth) -> Node | None:
    x = g.value(lambda v: v.rank >= 1 and v.exact.numel() > 0 and v.exact.dtype != torch.bool)
    if x is None:
        return None
    dim, keep, name = g.random.randrange(x.rank), g.chance(0.5), g.pick(("argmax", "argmin", "whole"))
    if name == "whole":
        return call("argmax", (x,), lambda x: x.argmax())
    return call(f"{name} {dim} keep {keep}", (x,), lambda x: getattr(x, name)(dim, keep))


@weighted(1)
def rounded(g: Growth) -> Node | None:
    x = g.floats()
    if x is None or _large(x):
        return None
    kind = g.pick((torch.int64, torch.int32))
    name = g.pick(("floor", "round", "trunc"))
    return call(f"{name} to {str(kind)[6:]}", (x,), lambda x: getattr(torch, name)(x * 2).to(kind))


def _large(x: Value) -> bool:
    return not x.exact.numel() or float(x.exact.abs().max()) > 1e4


@weighted(3)
def of_integers(g: Growth) -> Node | None:
    x = g.value(lambda v: v.exact.dtype in (torch.int64, torch.int32) and v.exact.numel() > 0)
    if x is None:
        return None
    axis = g.random.randrange(x.rank) if x.rank else 0
    y = g.value(lambda v: v.exact.dtype == x.exact.dtype and _broadcast(v.shape, x.shape)) or x
    ways: dict[str, Callable[..., Tensor]] = {
        "plus": lambda x, y: x + y * 3,
        "minus": lambda x, y: x - y,
        "mod": lambda x, y: x % 3,
        "floordiv": lambda x, y: torch.div(x, 2, rounding_mode="floor"),
        "square": lambda x, y: x * x,
        "even": lambda x, y: x % 2 == 0,
        "less": lambda x, y: x < y,
        "clamped": lambda x, y: x.clamp(-2, 3),
        "total": lambda x, y: x.sum(),
        "running": lambda x, y: x.cumsum(axis) if x.dim() else x + 1,
        "one hot": lambda x, y: F.one_hot(x.long() % 5, 5),
    }
    name = g.pick(list(ways))
    if name in ("square", "plus") and float(x.exact.abs().max()) > 1e4:
        return None
    return call(f"integers {name} {axis}", (x, y), ways[name])


@weighted(3)
def of_truth_values(g: Growth) -> Node | None:
    m = g.value(lambda v: v.exact.dtype == torch.bool and v.exact.numel() > 0)
    if m is None:
        return None
    x = g.value(lambda v: v.is_float and _broadcast(v.shape, m.shape))
    n = g.value(lambda v: v.exact.dtype == torch.bool and _broadcast(v.shape, m.shape)) or m
    dim = g.random.randrange(m.rank) if m.rank else None
    name = g.pick(("where", "fill", "times") if x is not None and g.chance(0.6) else ("not", "and", "xor", "any", "all", "count", "numbers"))
    if name in ("where", "fill", "times"):
        assert x is not None
        with_numbers: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "where": lambda m, x: torch.where(m, x, -0.5),
            "fill": lambda m, x: (x + torch.zeros_like(m) if m.dim() > x.dim() else x).masked_fill(m, 2.0),
            "times": lambda m, x: x * m,
        }
        return call(name, (m, x), with_numbers[name], True)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "not": lambda m, n: ~m,
        "and": lambda m, n: m & ~n,
        "xor": lambda m, n: m ^ n,
        "any": lambda m, n: m.any() if dim is None else m.any(dim),
        "all": lambda m, n: m.all() if dim is None else m.all(dim, True),
        "count": lambda m, n: m.sum() if dim is None else m.sum(dim),
        "numbers": lambda m, n: m.to(torch.int64) * 2,
    }
    return call(f"{name} {dim}", (m, n), ways[name])


@weighted(3)
def looked_up(g: Growth) -> Node | None:
    i = g.value(lambda v: v.exact.dtype in (torch.int64, torch.int32) and v.exact.numel() > 0 and v.exact.numel() < 600)
    if i is None:
        return None
    x = g.value(lambda v: v.is_float and v.rank >= 1 and v.exact.numel() > 0)
    if x is None or g.chance(0.4):
        rows = g.pick((1, 3, 9))
        part = Looked(nn.Embedding(rows, g.pick((1, 2, 8, 17))))
        return replace_text(Node("", (i.number,), part, True), f"embedding {rows}")
    dim = g.random.randrange(x.rank)
    extent = x.shape[dim]
    if x.rank == i.rank and all(a <= b or k == dim for k, (a, b) in enumerate(zip(i.shape, x.shape, strict=True))):
        return call(f"gather {dim}", (x, i), lambda x, i: torch.gather(x, dim, i.long() % extent), True)
    if i.rank < 2:
        return call(f"index_select {dim}", (x, i), lambda x, i: torch.index_select(x, dim, i.long().reshape(-1) % extent), True)
    return call("index", (x, i), lambda x, i: x[i.long() % x.shape[0]], True) if i.rank + x.rank <= 6 else None


class Looked(nn.Module):
    """A table look-up with indices that wrap around."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index.long() % self.table.num_embeddings)


@weighted(0.5)
def uncovered(g: Growth) -> Node | None:
    """Operators that run through PyTorch, sorts where rows are long."""
    x = g.value(lambda v: v.is_float and v.rank >= 1 and v.exact.numel() > 0)
    if x is None:
        return None
    dim, name = g.random.randrange(x.rank), g.pick(("sort", "topk", "cummax"))
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "sort": lambda x: torch.sort(x, dim)[0],
        "topk": lambda x: torch.topk(x, 1, dim)[0],
        "cummax": lambda x: torch.cummax(x, dim)[0],
    }
    return call(f"{name} {dim}", (x,), ways[name], True)
