"""Random modules of every operator family, in float32, for tests of compiled programs.

Each family is a function from a source of randomness to cases; hypothesis supplies that source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.compiled import Case


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def case(name: str, function: Callable[..., Any], *inputs: Tensor, tolerance: float = 3e-5, fixed: bool = False) -> Case:
    module = function if isinstance(function, nn.Module) else Function(function)
    return Case(name, module, inputs, tolerance, fixed)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def randomised(module: nn.Module) -> nn.Module:
    """The module with non-trivial normalisation statistics and factors."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            if part.running_mean is not None:
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            if part.affine:
                nn.init.uniform_(part.weight, 0.5, 1.5)
                nn.init.normal_(part.bias)
        elif isinstance(part, (nn.LayerNorm, nn.GroupNorm)) and part.weight is not None:
            nn.init.uniform_(part.weight, 0.5, 1.5)
            if part.bias is not None:
                nn.init.normal_(part.bias)
    return module.eval()


# --- convolution ------------------------------------------------------------------------------------------------------

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FusedConvolution(nn.Module):
    """prologue, convolution, epilogue: each part chosen at random."""

    def __init__(self, random: Random, rank: int) -> None:
        super().__init__()
        pick = random.choice
        self.rank = rank
        self.prologue = pick(("none", "none", "none", "cat", "pad", "upsample", "shuffle", "pixel", "relu", "convolution", "pool"))
        if rank != 2 and self.prologue in ("pixel", "upsample", "pool"):
            self.prologue = "none"
        groups = pick((1, 1, 1, 2, 3))
        kind = pick(("plain", "plain", "plain", "depthwise", "transposed"))
        channels = groups * pick((1, 2, 3, 8))
        outputs = groups * pick((1, 2, 5, 16, 17))
        if kind == "depthwise":
            groups = channels = pick((3, 8, 17, 20))
            outputs = channels * pick((1, 2))
        self.channels = channels
        sizes = [pick((1, 2, 3, 3)) for _ in range(rank)]
        stride = [pick((1, 1, 2, 3)) for _ in range(rank)]
        dilation = [pick((1, 1, 2)) for _ in range(rank)]
        bias = pick((True, False))
        if kind == "transposed":
            padding = [random.randint(0, min(1, d * (s - 1))) for s, d in zip(sizes, dilation, strict=True)]
            extra = [random.randint(0, s - 1) for s in stride]
            self.convolution: nn.Module = TRANSPOSED[rank - 1](channels, outputs, sizes, stride, padding, extra, groups, bias, dilation)
        else:
            padding = [pick((0, 1, 1, 2)) for _ in range(rank)]
            mode = pick((padding, padding, "same" if max(stride) == 1 else padding))
            self.convolution = CONVOLUTIONS[rank - 1](channels, outputs, sizes, stride, mode, dilation, groups, bias)
        self.first = CONVOLUTIONS[rank - 1](channels, channels, 3, padding=1)
        self.norm = BATCH_NORMS[rank - 1](outputs)
        self.epilogue = [e for e in ("norm", "residual", "relu", "gelu", "scale", "bias_of_channel") if pick((True, False))]
        self.other_reader = pick((False, False, True))
        self.description = f"{rank}-D {kind} {self.prologue} {self.convolution} {self.epilogue} {self.other_reader}"

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        if self.prologue == "cat":
            x = torch.cat([x[:, :1] * 2, x[:, 1:]], 1)
        elif self.prologue == "pad":
            x = F.pad(x, (1, 2) + (0, 1) * (self.rank - 1))
        elif self.prologue == "upsample":
            x = F.interpolate(x, scale_factor=2)
        elif self.prologue == "shuffle":
            n, c = x.shape[:2]
            factor = next(f for f in (3, 2, 1) if c % f == 0)
            x = x.reshape(n, factor, c // factor, *x.shape[2:]).transpose(1, 2).reshape(n, c, *x.shape[2:])
        elif self.prologue == "pixel":
            x = F.pixel_shuffle(x.repeat_interleave(4, 1), 2)
        elif self.prologue == "relu":
            x = F.relu(x)
        elif self.prologue == "convolution":
            x = F.relu(self.first(x))
        elif self.prologue == "pool":
            x = F.max_pool2d(x, 2, 1)
        y = self.convolution(x)
        first = y
        for step in self.epilogue:
            if step == "norm":
                y = self.norm(y)
            elif step == "residual":
                y = y + residual * y.shape[1]
            elif step == "relu":
                y = F.relu(y)
            elif step == "gelu":
                y = F.gelu(y)
            elif step == "scale":
                y = y * torch.sigmoid(y)
            else:
                y = y + residual.mean()
        return (y, first.amax(1)) if self.other_reader else y


def convolutions(random: Random, count: int = 6) -> list[Case]:
    result = []
    for _ in range(count):
        rank = random.choice((1, 2, 2, 3))
        module = randomised(FusedConvolution(random, rank))
        x = normal(random.choice((1, 2, 3)), module.channels, *(random.randint(6, 10) for _ in range(rank)))  # type: ignore[arg-type]
        residual = normal(*([1] * (rank + 1)), random.choice((1,)))
        result.append(case(module.description, module, x, residual))  # type: ignore[arg-type]
    return result


class SharedHalo(nn.Module):
    """One value read by convolutions with different paddings, a pool and the result: the halo must serve all or none."""

    def __init__(self, returned: bool, channels: int) -> None:
        super().__init__()
        self.returned = returned
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.same = nn.Conv2d(channels, 5, 3, padding=1)
        self.wide = nn.Conv2d(channels, 6, 5, padding=(2, 1))
        self.bare = nn.Conv2d(channels, 17, 3)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = F.relu(self.first(x))
        results = [self.same(y), self.wide(y), self.bare(y), self.depthwise(y), F.max_pool2d(y, 3, 2, 1), F.avg_pool2d(y, 3, 2, 1), y.sum((2, 3))]
        results.append(F.conv2d(F.pad(y, (1, 0, 0, 2)), self.bare.weight))
        return [*results, y] if self.returned else results


class Residual(nn.Module):
    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b, self.norm_c = (nn.BatchNorm2d(outputs) for _ in range(3))
        self.short = nn.Conv2d(channels, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_a(self.a(x)))
        return F.relu(self.norm_b(self.b(y)) + self.norm_c(self.short(x)))


class Inverted(nn.Module):
    """MobileNet's block: expand, depthwise, project, squeeze and excite."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.norms = nn.ModuleList([nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(channels)])
        self.squeeze, self.excite = nn.Conv2d(inner, 4, 1), nn.Conv2d(4, inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norms[0](self.expand(x)))
        y = F.hardswish(self.norms[1](self.depthwise(y)))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.norms[2](self.project(y))


class Dense(nn.Module):
    """DenseNet's block: convolutions over growing concatenations."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels + i * growth) for i in range(layers))
        self.layers = nn.ModuleList(nn.Conv2d(channels + i * growth, growth, 3, padding=1) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return F.avg_pool2d(x, 2)


def convolution_networks(random: Random) -> list[Case]:
    channels = random.choice((4, 16, 19))
    size = random.randint(6, 13)
    parts = [
        case("shared halo", SharedHalo(False, channels), normal(2, 3, size, size + 1)),
        case("shared halo, returned", SharedHalo(True, channels), normal(1, 3, size, size + 1)),
        case("input read and returned", Function(lambda x: (x + 0, F.conv2d(x, x.new_ones(2, 3, 3, 3), padding=1))), normal(1, 3, size, size)),
        case("residual", nn.Sequential(Residual(3, channels, 1), Residual(channels, 8, 2)), normal(2, 3, size, size)),
        case("inverted", Inverted(6, 24), normal(2, 6, size, size)),
        case("dense", Dense(5, 4, 3), normal(2, 5, size, size)),
    ]
    for part in parts:
        randomised(part.module)
    return parts


# --- products ---------------------------------------------------------------------------------------------------------


def products(random: Random, count: int = 6) -> list[Case]:
    result = []
    sizes = (1, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 70)
    for _ in range(count):
        m, n, k = (random.choice(sizes) for _ in range(3))
        batch, other = random.choice(
            (((), ()), ((2,), (2,)), ((3,), ()), ((), (3,)), ((2, 1), (3,)), ((2, 3), (1, 3)), ((2, 3), (2, 3)), ((1,), (4,)))
        )
        transposed_a, transposed_b, constant = (random.random() < 0.4 for _ in range(3))
        a = normal(*batch, k, m) if transposed_a else normal(*batch, m, k)
        b = normal(*other, n, k) if transposed_b else normal(*other, k, n)
        after = random.choice(("none", "relu", "bias", "transpose", "scale", "softmax"))

        class Product(nn.Module):
            def __init__(self, constant: Tensor | None, options: tuple[bool, bool, str]) -> None:
                super().__init__()
                self.weight = None if constant is None else nn.Parameter(constant)
                self.options = options

            def forward(self, a: Tensor, b: Tensor) -> Tensor:
                transposed_a, transposed_b, after = self.options
                right = b if self.weight is None else self.weight
                y = (a.mT if transposed_a else a) @ (right.mT if transposed_b else right)
                if after == "relu":
                    return F.relu(y)
                if after == "bias":
                    return y + y.new_ones(y.shape[-1]) * b.sum()
                if after == "transpose":
                    return y.transpose(-1, -2) * 2
                if after == "scale":
                    return y / k**0.5
                return F.softmax(y, -1) if after == "softmax" else y

        module = Product(b.clone() if constant else None, (transposed_a, transposed_b, after))
        result.append(case(f"{m}x{n}x{k} batch {batch} {other} {transposed_a} {transposed_b} constant {constant} {after}", module, a, b))
    return result


def product_forms(random: Random) -> list[Case]:
    m, n, k = (random.choice((1, 2, 5, 16, 19)) for _ in range(3))
    features = random.choice((1, 3, 16, 37))
    return [
        case("vectors", lambda a, v: [a @ v, v @ a.T, v @ v, torch.outer(v, v), torch.dot(v, v)], normal(m, k), normal(k)),
        case(
            "einsum",
            lambda a, b: [torch.einsum("bij,bkj->bik", a, b), torch.einsum("bij,bij->", a, a), torch.einsum("bij,bkj->kbi", a, b)],
            normal(2, m, k),
            normal(2, n, k),
        ),  # fmt: skip
        case("addmm", lambda a, b, c: [torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2)], normal(m, k), normal(k, n), normal(n)),
        case("linear", nn.Linear(k, features), normal(2, m, k)),
        case("linear without bias", nn.Linear(k, features, bias=False), normal(k)),
        case("perceptron", nn.Sequential(nn.Linear(k, 33), nn.GELU(), nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, features)), normal(m, k)),
        case("bilinear", nn.Bilinear(3, 4, 5), normal(m, 3), normal(m, 4)),
        case("heads", lambda x: x.view(2, m, 4, 8).transpose(1, 2) @ x.view(2, m, 4, 8).transpose(1, 2).mT, normal(2, m, 32)),
        case("times itself", lambda x: x @ x.mT, normal(2, m, k)),
    ]


# --- normalisation and attention --------------------------------------------------------------------------------------


def normalisations(random: Random) -> list[Case]:
    shape = [random.choice((1, 2, 3, 5, 7)) for _ in range(2)] + [random.choice((1, 5, 16, 33, 65, 130))]
    channels = random.choice((4, 8, 12))
    size = random.randint(1, 7)
    image = normal(2, channels, size, size + 2)
    return [
        *(
            case(f"softmax {d} {shape}", lambda x, d=d: [F.softmax(x, d), F.log_softmax(x * 3, d), torch.logsumexp(x, d)], normal(*shape))
            for d in (0, 1, 2)
        ),
        case("logsumexp", lambda x: torch.logsumexp(x, (0, 2)), normal(*shape)),
        case("layer norm", randomised(nn.LayerNorm(shape[2:])), normal(*shape)),
        case("layer norm 2", randomised(nn.LayerNorm(shape[1:])), normal(*shape)),
        case("layer norm of sum", lambda a, b: F.layer_norm(a + b * 2, a.shape[-1:]), normal(*shape), normal(*shape)),
        case("layer norm of channels", lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2), image),
        case("group norm", randomised(nn.GroupNorm(2, channels)), image),
        case("group norm 1", randomised(nn.GroupNorm(1, channels)), image),
        case("group norm relu", nn.Sequential(nn.Conv2d(channels, 8, 1), randomised(nn.GroupNorm(4, 8)), nn.ReLU()), image),
        case("instance norm", randomised(nn.InstanceNorm2d(channels, affine=True)), image),
        case("batch norm", randomised(nn.BatchNorm2d(channels)), image),
        case("rms norm", nn.RMSNorm(shape[2:], eps=1e-5), normal(*shape)),
        case("local response", nn.LocalResponseNorm(3), image),
        case("normalize", lambda x: [F.normalize(x, dim=1), F.normalize(x, dim=-1)], image),
        case("distances", lambda a, b: [F.cosine_similarity(a, b), F.pairwise_distance(a, b)], normal(*shape), normal(*shape)),
    ]


def attentions(random: Random) -> list[Case]:
    heads, queries, keys, width = random.choice((1, 2, 4)), random.choice((1, 3, 17)), random.choice((1, 5, 18, 70)), random.choice((4, 8, 16))
    q, k, v = normal(2, heads, queries, width), normal(2, heads, keys, width), normal(2, heads, keys, 6)
    mask, bias = torch.rand(queries, keys) > 0.3, normal(2, 1, queries, keys)
    mask[0, :] = False
    attend = F.scaled_dot_product_attention
    return [
        case("attention", lambda q, k, v: [attend(q, k, v), attend(q, k, v, scale=0.3)], q, k, v),
        case("biased", lambda q, k, v, b: attend(q, k, v, b), q, k, v, bias),
        case("masked", lambda q, k, v, m: attend(q, k, v, m), q, k, v, mask),
        case("causal", lambda q, k: attend(q, k, k, is_causal=True), q, k),
        case("grouped", lambda q, k: attend(q, k, k, enable_gqa=True), normal(1, 4, 3, 8), normal(1, 2, 5, 8)),
        case("multi-head", nn.MultiheadAttention(8, 2, batch_first=True), *[normal(2, queries, 8)] * 3),
        case("encoder", nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), normal(2, queries, 16)),
        case("encoder, norm first", nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=True, activation="gelu"), normal(2, keys, 16)),
        case("decoder", nn.TransformerDecoderLayer(16, 2, 24, batch_first=True), normal(2, queries, 16), normal(2, keys, 16)),
    ]


# --- pooling and resampling -------------------------------------------------------------------------------------------


def poolings(random: Random) -> list[Case]:
    rank = random.randint(1, 3)
    window, stride = random.randint(1, 3), random.randint(1, 3)
    padding, ceil, dilation = random.randint(0, window // 2), random.random() < 0.5, random.randint(1, 2)
    output = random.randint(1, 4)
    greatest = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    adaptive = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[rank - 1]
    adaptive_greatest = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[rank - 1]
    channels = random.choice((1, 3, 16, 20))
    x = normal(2, channels, *(random.randint(6, 9) for _ in range(rank)))
    convolution = CONVOLUTIONS[rank - 1](channels, 17, 1)
    name = f"rank {rank} window {window} stride {stride} padding {padding} ceil {ceil} dilation {dilation} output {output}"
    return [
        case(f"max {name}", lambda x: greatest(x, window, stride, padding, dilation, ceil), x),
        case(f"max with indices {name}", lambda x: greatest(x, window, stride, padding, 1, ceil, return_indices=True), x),
        case(f"mean {name}", lambda x: mean(x, window, stride, padding, ceil), x),
        case(f"mean without padding {name}", lambda x: F.relu(mean(x, window, stride, padding, ceil, False)), x),
        case(f"adaptive {name}", lambda x: [adaptive(x, output), adaptive(x, 1), adaptive_greatest(x, output)], x),
        case(f"after convolution {name}", nn.Sequential(convolution, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1](2, 2)), x),
    ]


def resamplings(random: Random) -> list[Case]:
    size, output, align = random.randint(2, 6), random.randint(2, 9), random.random() < 0.5
    x = normal(1, random.choice((2, 16)), size, size + 1)
    return [
        case("nearest", lambda x: [F.interpolate(x, (output, output)), F.interpolate(x, scale_factor=2)], x),
        case("bilinear", lambda x: F.interpolate(x, (output, output + 1), mode="bilinear", align_corners=align), x),
        case("bicubic", lambda x: F.interpolate(x, (output, output), mode="bicubic", align_corners=align), x, tolerance=2e-4),
        case("linear", lambda x: F.interpolate(x[0], output, mode="linear", align_corners=align), x),
        case("trilinear", lambda x: F.interpolate(x[None], (2, output, output), mode="trilinear", align_corners=align), x),
        case("pixel shuffle", lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 2), x),
    ]


# --- reductions -------------------------------------------------------------------------------------------------------


def reductions(random: Random) -> list[Case]:
    shape = [random.choice((1, 2, 3, 5, 9, 17, 70)) for _ in range(3)]
    dims = random.choice(((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)))
    keep = random.random() < 0.5
    dim = random.randint(0, 2)
    x = normal(*shape)
    ties = torch.randint(-2, 3, tuple(shape)).float()
    holes = torch.where(torch.rand(shape) < 0.05, torch.nan, x)
    name = f"{shape} {dims} {dim}"
    return [
        case(
            f"sums {name}",
            lambda x: [x.sum(dims, keep), x.mean(dims, keep), x.var(dims, correction=0, keepdim=keep), torch.linalg.vector_norm(x, 2, dims)],
            x,
            tolerance=1e-4,
        ),
        case(f"extremes {name}", lambda x: [x.amax(dims, keep), x.amin(dims, keep), x.max(dim), x.min(dim, keep), x.argmax(dim), x.argmin()], x),
        case(f"ties {name}", lambda x: [x.argmax(dim), x.argmin(dim, keep), x.max(dim), x.argmax()], ties, fixed=True),
        case(f"NaN {name}", lambda x: [x.amax(dims), x.amin(), x.argmax(dim), x.min(dim), x.sum(dim), x.max()], holes, fixed=True),
        case(f"logical {name}", lambda x: [(x > 0).any(dim), (x > -1).all(dim, keep), (x > 0).all(), (x > 0).sum(dim)], x),
        case(
            f"integers {name}",
            lambda x: [x.int().sum(dims), x.int().amax(dims), x.long().prod(dim), x.int().cumsum(dim), x.long().argmax(dim)],
            ties,
            fixed=True,
        ),
        case(f"products {name}", lambda x: [(1 + x * 0.01).prod(dim), x.cumsum(dim), (1 + x * 0.01).cumprod(dim)], x, tolerance=1e-4),
        case(
            f"of views {name}",
            lambda x: [x.permute(2, 0, 1).sum(dim), x.flip(0).amax(dims), x.reshape(-1, shape[1]).sum(0), x[..., None].sum(dim)],
            x,
        ),
        case(f"moments {name}", lambda x: [torch.var_mean(x, dims, correction=0), x.std(correction=0)], x, tolerance=1e-4),
        case(
            f"fused {name}",
            lambda x, y: [F.relu(x * y).sum(dims, keep), torch.exp((x - y).mean(dim)) + 1, (x * y).sum(), (x + 1).amax(dim) * 2],
            x,
            normal(*shape),
        ),
    ]


def large_reductions(random: Random) -> list[Case]:
    return [
        case("large sums", lambda x: [x.sum(), x.mean((1, 2)), x.sum((0, 1)), x.amax(0), x.argmax(), x.max()], normal(7, 129, 301), tolerance=2e-4),
        case("large rows", lambda x: [F.softmax(x, 1), F.softmax(x, 0), F.layer_norm(x, x.shape[1:])], normal(40, 1000), tolerance=1e-4),
        case("large scans", lambda x: [x.cumsum(0), x.cumsum(1)], normal(50, 2000), tolerance=2e-4),
    ]


def large_maps_and_windows(random: Random) -> list[Case]:
    """Enough work for several threads: loops in chunks, collapsed loops, blocks of lanes with a remainder."""
    channels = random.choice((7, 16, 33, 64, 70))
    size = random.randint(19, 30)
    rows, columns = random.randint(3, 40), random.randint(600, 2500)
    image, matrix = normal(2, channels, size, size + 3), normal(rows, columns)
    chained = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
    return [
        case(
            f"map {rows} {columns}", lambda x: [torch.tanh(x) * 2 + 1, x.T.contiguous() + 1, x.flatten() * 3, x[:, ::3] + x[:, 1::3][:, :1]], matrix
        ),
        case("long map", lambda x: F.relu(x.flatten()[: rows * columns - 5]) + 1, matrix),
        case(
            f"last dimension first {image.shape}", lambda x: [x.permute(0, 2, 3, 1) * 2, x.permute(3, 1, 0, 2) + 1, x.permute(1, 0, 2, 3) + 2], image
        ),
        case(
            f"pools {image.shape}", lambda x: [F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 2, count_include_pad=False)], image
        ),
        case(f"depthwise {image.shape}", nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(), chained, nn.ReLU6(), nn.MaxPool2d(2)), image),
        case(f"products {rows}", lambda x: [x @ x.T, x[:, :50].T @ x[:, :70], F.gelu(x[:, :33] @ x[:, :33].T)], matrix, tolerance=1e-4),
        case(
            f"convolution {image.shape}",
            nn.Sequential(nn.Conv2d(channels, 40, 3, 2, 1), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 17, (1, 3))),
            image,
        ),
        case(f"rows {rows} {columns}", lambda x: [F.softmax(x, 0), F.softmax(x, 1), x.argmax(0), x.sum(0), x.cumsum(0)], matrix, tolerance=1e-4),
        case("group norm", randomised(nn.GroupNorm(channels, channels)), image),
        case(
            "over channels",
            lambda x: [F.softmax(x, 1), x.mean(1), x.amax((0, 2, 3)), x.argmax(1), F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],))],
            image,
        ),
    ]


# --- elementwise, shapes, indices -------------------------------------------------------------------------------------


def elementwise(random: Random) -> list[Case]:
    from tests.pointwise_functions import ANYWHERE, BINARY, INTEGER, WITHIN_ONE

    shape = [random.choice((1, 2, 3, 17)) for _ in range(random.randint(1, 3))] + [4 * random.choice((1, 2, 5))]
    shapes = random.choice((((3, 4), (3, 4)), ((3, 1), (1, 4)), ((2, 3, 4), (3, 4)), ((2, 1, 4), (3, 1)), ((17,), (5, 17)), ((40, 1), (1, 33))))
    dtype = random.choice((torch.int64, torch.int32))
    a, b = torch.randint(-9, 9, (3, 5), dtype=dtype), torch.randint(1, 9, (5,), dtype=dtype) * torch.tensor([1, -1, 1, -1, 1], dtype=dtype)
    within = torch.rand(shape) * 0.8 + 0.1

    def select(functions: Any, share: float) -> list[Any]:
        return [f for f in functions if random.random() < share]

    unary, domain, binary, integer = select(ANYWHERE, 0.4), select(WITHIN_ONE, 0.5), select(BINARY, 0.5), select(INTEGER, 0.5)
    return [
        case(f"unary {shape}", lambda x: [f(x) for f in unary], normal(*shape), tolerance=1e-4),
        case(f"within one {shape}", lambda x: [f(x) for f in domain], within, tolerance=1e-4, fixed=True),
        case(f"binary {shapes}", lambda x, y: [f(x, y) for f in binary], normal(*shapes[0]), normal(*shapes[1]), tolerance=1e-4),
        case(f"integers {dtype}", lambda x, y: [f(x, y) for f in integer], a, b, fixed=True, tolerance=1e-4),
        case(f"chain {shape}", lambda x: torch.tanh(F.gelu(x * 2 + 1)) * torch.sigmoid(x) - x.clamp(-1, 1) ** 2, normal(*shape)),
    ]


def shapes(random: Random) -> list[Case]:
    a, b, c = (random.choice((1, 2, 3, 6)) for _ in range(3))
    x = normal(2 * a, 3 * b, 4 * c)
    begin, end = random.randint(0, 2), random.randint(-1, 3)
    return [
        case(
            "views",
            lambda x: [
                y * 2 for y in (x.reshape(-1, 6), x.flatten(1), x.permute(2, 0, 1), x.transpose(0, 2), x[None, :, None], x[:, 1:], x[..., ::2])
            ],
            x,
        ),
        case(
            "joined",
            lambda x: [torch.cat([x, x * 2, x[:, :1]], 1), torch.stack([x, x + 1], -1), torch.cat([x[:0], x]), torch.cat([F.relu(x), x.flip(0)], 0)],
            x,
        ),
        case("parts", lambda x: [y + 1 for y in (*x.split(2, 2), *x.chunk(3, 1), *x.unbind(0))], x),
        case(
            f"padded {begin} {end}",
            lambda x: [
                F.pad(x, (begin, end)),
                F.pad(x, (1, -1, 0, 2), value=3.0),
                F.pad(x, (2, 1), mode="reflect"),
                F.pad(x, (1, 1), mode="replicate"),
                F.pad(x, (2, 1), mode="circular"),
            ],
            x,
        ),
        case(
            "turned",
            lambda x: [
                x.flip(0, 2),
                x.roll(1, 0),
                x.roll((1, -2), (1, 2)),
                x.tril(),
                x.triu(1),
                x.repeat(2, 1, 2),
                x.repeat_interleave(2, 1),
                x.diagonal(0, 1, 2),
                x.unfold(2, 2, 1),
            ],
            x,
        ),
        case("made", lambda x: [torch.arange(5) + x.shape[0], torch.eye(3), torch.full((2, 3), 7.0), torch.ones_like(x) * 2, x.new_zeros(3)], x),
        case("unfolded", lambda x: F.unfold(x[None], (2, 2), 1, 1, (1, 2)), x),
        case("folded into a sum", lambda x: (x.reshape(2, a, 3, b, 4, c).permute(0, 2, 4, 1, 3, 5) * 2).sum(2), x),
        case("nothing", lambda x: [x[:0] * 2, x[:0].sum(0), x[:, :0].sum(1), torch.cat([x[:, :0], x], 1).mean(0)], x),
        case("no dimensions", lambda x, s: [x[0, 0, 0] * 2 + s, s.exp(), x * s, s.sum(), x.sum() + s, torch.stack([s, s])], x, normal()),
        case("written through views", Function(written), x),
    ]


def written(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 0
    y[0, :, ::2] += 1
    y[:, 1:3].mul_(3)
    return y


def indexings(random: Random) -> list[Case]:
    rows, width = random.choice((3, 9)), random.choice((2, 4, 16, 17))
    index = torch.randint(-rows, rows, (2, random.randint(1, 3)))
    inside = torch.randint(0, rows, (2, random.randint(1, 3)))
    x = normal(rows, rows, width)
    return [
        case("index", lambda x, i, j: [x[i], x[:, i], x[i, i], x[:, i, :2], x[i[0], :, i[1] % 2]], x, index, inside),
        case(
            "gather",
            lambda x, j: [torch.gather(x, 0, j[:, :, None] % 2), x.index_select(1, j[0]), torch.take_along_dim(x[0], j[:, :1], 0)],
            x,
            inside,
        ),
        case("embedding", nn.Embedding(rows, width), inside),
        case("embedding, projected", nn.Sequential(nn.Embedding(rows, width), nn.LayerNorm(width), nn.Linear(width, 5)), inside),
        case("bag", nn.EmbeddingBag(rows, width, mode="sum"), inside),
        case("bag mean", nn.EmbeddingBag(rows, width, mode="mean"), inside),
        *_writes(rows, width, x, index, inside),
        case("one hot", lambda j: F.one_hot(j, rows + 1), inside),
    ]


def _writes(rows: int, width: int, x: torch.Tensor, index: torch.Tensor, inside: torch.Tensor) -> list[Case]:
    """Operators that write to positions that data give; equal indices write equal values, because PyTorch leaves the order open."""
    order = torch.randperm(rows)[: inside.shape[1]]
    several, wide = normal(rows, len(order), width), normal(rows, rows, width)
    columns = torch.stack([torch.randperm(rows) for _ in range(width)], 1).expand(rows, rows, width).contiguous()
    apart = normal(len(order), rows)
    return [
        case("index copy", lambda x, j, v: [x.index_copy(1, j, v), x.index_copy(1, j[:1], v[:, :1]), x.index_fill(0, j, 2.5)], x, order, several),
        case("index add", lambda x, j, v: x.index_add(1, j, v, alpha=2), x, order, several),
        case(
            "index put", lambda x, j, v: [x.index_put((j,), v[0, 0]), _assigned(x, (slice(None), j), v), x.index_put((j, j), v[0])], x, order, several
        ),
        case("index put, apart", lambda x, j, v: _assigned(x, (j, slice(None), j % width), v), x, order, apart),
        case("index put, negative", lambda x, i: x.index_put((i,), x[0, 0], accumulate=True), x, index),
        case("index put, masked", lambda x, m, v: x.index_put((m,), v[0, 0]), x, torch.rand(rows, rows) > 0.5, wide),
        case("scatter", lambda x, j, v: [x.scatter(1, j, v), x.scatter(1, j[:, :1], 0.25), x.scatter_add(0, j[:1, :, :3], v)], x, columns, wide),
        case("cache", _cached, x, order[:1], several),
    ]


def _assigned(x: torch.Tensor, index: tuple[Any, ...], values: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[index] = values
    return y


def _cached(cache: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """A step of a model that keeps keys in a cache, and another that lets it grow."""
    kept = cache.clone()
    kept[:, position] = token[:, :1]
    kept[:, :1].copy_(token[:, -1:])
    return torch.cat([kept, token], 1) @ token.transpose(1, 2)


class DoublePrecision(nn.Module):
    """A module whose own type is float64."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3, padding=1).double()
        self.linear = nn.Linear(5, 7).double()

    def forward(self, x: Tensor, i: Tensor) -> list[Tensor]:
        y = F.relu(self.convolution(x))
        return [y, self.linear(y.mean((2, 3))), F.softmax(y, 1), y.amax(1), y.float() + i, i * 2, i > 1, y.cumsum(2)]


def other_types(random: Random) -> list[Case]:
    size = random.randint(3, 8)
    return [
        case("float64", DoublePrecision(), normal(2, 3, size, size).double(), torch.randint(0, 3, (size,)), tolerance=1e-6),
        case(
            "booleans", lambda m, x: [m & (x > 0), ~m, m.any(1), m.sum(), torch.where(m, x, 0.0), m.int() * 2], torch.rand(3, 5) > 0.5, normal(3, 5)
        ),
        case(
            "small integers",
            lambda x: [x + 1, x.float() / 3, x.sum(), x.amax(0), x.to(torch.int64) * 2],
            torch.randint(0, 100, (4, 5), dtype=torch.uint8),
        ),
        case("bytes", lambda x: [x * 3, -x, x.sum(1), x < 0], torch.randint(-100, 100, (4, 5), dtype=torch.int8)),
        case("16 bits", lambda x: [x * 3, x.sum(1), x // 3], torch.randint(-100, 100, (4, 5), dtype=torch.int16)),
    ]


def special_values(random: Random) -> list[Case]:
    """NaN and infinities affect only the elements that depend on them, not others through the padding of tiles and halos."""
    size, channels, outputs = random.randint(5, 9), random.choice((3, 5, 16)), random.choice((5, 17))

    def spoilt(*shape: int) -> Tensor:
        x = normal(*shape)
        flat = x.view(-1)
        for value in (torch.inf, -torch.inf, torch.nan):
            flat[random.randrange(flat.numel())] = value
        flat[0], flat[-1] = torch.inf, torch.nan
        return x

    image, matrix = spoilt(2, channels, size, size), spoilt(7, channels + 2)
    low = torch.where(torch.rand(6, 11) < 0.3, -torch.inf, normal(6, 11))
    low[:, 0] = 1
    return [
        case("convolution", nn.Sequential(nn.Conv2d(channels, outputs, 3, 1, 1), nn.ReLU()), image, fixed=True),
        case("strided convolution", nn.Conv2d(channels, outputs, 3, 2, 2), image, fixed=True),
        case("depthwise", nn.Conv2d(channels, channels, 3, 1, 1, groups=channels), image, fixed=True),
        case("two convolutions", nn.Sequential(nn.Conv2d(channels, 6, 1), nn.Conv2d(6, outputs, 3, 1, 1)), image, fixed=True),
        case("linear", nn.Linear(channels + 2, outputs), matrix, fixed=True),
        case("product", lambda x, y: [x @ y, y.T @ x.T, (y * 2).T @ y], matrix, spoilt(channels + 2, outputs), fixed=True),
        case(
            "pools",
            lambda x: [F.max_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2), F.max_pool2d(x, 2, return_indices=True)],
            image,
            fixed=True,
        ),
        case("rows", lambda x: [F.softmax(x, 1), F.layer_norm(x, x.shape[1:]), x.sum(0), x.amax(1), x.argmin(0), x.cumsum(1)], matrix, fixed=True),
        case("masked softmax", lambda x: [F.softmax(x, 1), F.log_softmax(x, 1), torch.logsumexp(x, 1)], low, fixed=True),
        case(
            "maps",
            lambda x: [F.relu(x), x.clamp(-1, 1), F.gelu(x), torch.sigmoid(x), torch.tanh(x), F.hardswish(x), x > 0, F.silu(x), F.softplus(x)],
            matrix,
            fixed=True,
        ),
        case("resampled", lambda x: [F.interpolate(x, scale_factor=2), F.pad(x, (1, 1)), x.tril()], image, fixed=True),
    ]


# --- recurrent networks -----------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(20, 6), nn.LSTM(6, 9, bidirectional=True, batch_first=True), nn.Linear(18, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.lstm(self.embedding(tokens))[0]), -1)


def recurrent(random: Random) -> list[Case]:
    result = []
    length, batch, features, hidden = random.choice((1, 2, 5)), random.choice((1, 2, 3)), random.choice((1, 3, 16)), random.choice((1, 4, 16, 19))
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        options = {
            "num_layers": random.choice((1, 1, 2)),
            "bidirectional": random.random() < 0.5,
            "batch_first": random.random() < 0.5,
            "bias": random.random() < 0.7,
        }
        x = normal(batch, length, features) if options["batch_first"] else normal(length, batch, features)
        result.append(case(f"{kind.__name__} {options} {length} {batch} {features} {hidden}", kind(features, hidden, **options), x))
    states = normal(1, batch, hidden)
    lstm = nn.LSTM(features, hidden)

    class WithStates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
            return self.lstm(x, (h, c))

    result.append(case("LSTM with states", WithStates(), normal(length, batch, features), states, states.clone()))
    result.append(case("tagger", Tagger(), torch.randint(0, 20, (batch, length))))
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        result.append(case(cell.__name__, cell(features, hidden), normal(batch, features)))
    return result


FAMILIES: Mapping[str, Callable[[Random], list[Case]]] = {
    "convolutions": convolutions,
    "convolution networks": convolution_networks,
    "products": products,
    "product forms": product_forms,
    "normalisations": normalisations,
    "attentions": attentions,
    "poolings": poolings,
    "resamplings": resamplings,
    "reductions": reductions,
    "large reductions": large_reductions,
    "large maps and windows": large_maps_and_windows,
    "elementwise": elementwise,
    "shapes": shapes,
    "indexings": indexings,
    "other types": other_types,
    "special values": special_values,
    "recurrent": recurrent,
}


seeds = st.integers(0, 2**32 - 1)
once = settings(max_examples=1, phases=(Phase.explicit, Phase.generate), deadline=None, suppress_health_check=list(HealthCheck), database=None)


def samples() -> torch.Tensor:
    """Float32 numbers that test rounding: every bfloat16, the midpoint to the next one and its neighbours, NaN of all kinds, infinities, subnormal
    numbers, and random bits."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = [high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(np.concatenate([*bits, drawn]).view(np.float32).copy())


class Applied(nn.Module):
    """A module that calls a function on its inputs and the results of its parts."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.parts, *inputs)


def after(function: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda part, x: function(part(x))
