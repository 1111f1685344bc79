"""Depthwise convolutions and batched matrix products of networks, on which kernel choices are evaluated besides the twenty layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.tuning.tuning import distinct_problems
from tilewright.tuning.workloads import FP32, IMAGE_CHANNELS

DEPTHWISE = MappingProxyType({
    "W1": (32, 112, 3, 1), "W2": (96, 112, 3, 2), "W3": (144, 56, 3, 1), "W4": (192, 28, 3, 1), "W5": (384, 14, 3, 1), "W6": (576, 14, 3, 2),
    "W7": (960, 7, 3, 1), "W8": (240, 28, 5, 1), "W9": (672, 14, 5, 2), "W10": (96, 56, 7, 1),
})  # fmt: skip
"""Channels, height and width of the input, filter, stride: of MobileNetV2, then 5x5 of EfficientNet-B0 and 7x7 of ConvNeXt-T; batch 1, padding
filter // 2."""

PRODUCTS = MappingProxyType({
    "B1": (12, 128, 64, 128), "B2": (12, 128, 128, 64), "B3": (12, 384, 64, 384), "B4": (12, 384, 384, 64), "B5": (16, 197, 64, 197),
    "B6": (16, 197, 197, 64), "B7": (64, 49, 32, 49), "B8": (8, 512, 512, 512),
})  # fmt: skip
"""Batch, rows, reduced extent, columns: scores and sums of attention in BERT-base (sequences of 128 and 384), a vision transformer (197), windows of
Swin (49), then large products."""


class _Product(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.bmm(first, second)


class _ProductBetween(nn.Module):
    """A batched product between linear layers, so that a precision decides in which type its factors and its result are stored."""

    def __init__(self, reduced: int, columns: int) -> None:
        super().__init__()
        self.first, self.second, self.after = nn.Linear(8, reduced), nn.Linear(8, columns), nn.Linear(columns, 8)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(torch.bmm(self.first(x), self.second(z)))
        return y


def problem(name: str, machine: Machine, threads: int, precision: str = FP32) -> Problem:
    """The problem of an operator of DEPTHWISE or PRODUCTS."""
    kind, sizes = ("depthwise", DEPTHWISE[name]) if name in DEPTHWISE else ("product", PRODUCTS[name])
    return problem_of(kind, sizes, machine, threads, precision)


class _Block(nn.Module):
    """A convolution with bias and ReLU between pointwise ones, with an optional residual addition."""

    def __init__(self, outputs: int, channels: int, filter_size: int, stride: int, residual: bool) -> None:
        super().__init__()
        self.before = nn.Conv2d(8, channels, 1)
        self.branch = nn.Conv2d(8, outputs, 1, stride) if residual else None
        self.convolution = nn.Conv2d(channels, outputs, filter_size, stride, filter_size // 2)
        self.after = nn.Conv2d(outputs, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.relu(self.branch(-x)) if self.branch is not None else None
        result = self.convolution(torch.relu(self.before(x)))
        y: torch.Tensor = self.after(torch.relu(result if branch is None else result + branch))
        return y


def _depthwise(channels: int, size: int, filter_size: int, stride: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    depthwise = nn.Conv2d(channels, channels, filter_size, stride, filter_size // 2, groups=channels)
    return nn.Sequential(nn.Conv2d(8, channels, 1), depthwise, nn.ReLU6(), nn.Conv2d(channels, 8, 1)), (torch.zeros(1, 8, size, size),)


def _product(batch: int, rows: int, reduced: int, columns: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Product(), (torch.zeros(batch, rows, reduced), torch.zeros(batch, reduced, columns))


def _product_between(batch: int, rows: int, reduced: int, columns: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _ProductBetween(reduced, columns), (torch.zeros(batch, rows, 8), torch.zeros(batch, reduced, 8))


def _convolution(outputs: int, channels: int, height: int, width: int, filter_size: int, stride: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution between pointwise ones; one of few channels reads the network's input."""
    first = channels <= IMAGE_CHANNELS
    before = () if first else (nn.Conv2d(8, channels, 1), nn.ReLU())
    convolution = nn.Conv2d(channels, outputs, filter_size, stride, filter_size // 2, bias=False)
    return nn.Sequential(*before, convolution, nn.Conv2d(outputs, 8, 1)), (torch.zeros(1, channels if first else 8, height * stride, width * stride),)


def _block(outputs: int, channels: int, size: int, filter_size: int, stride: int, residual: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Block(outputs, channels, filter_size, stride, bool(residual)), (torch.zeros(1, 8, size * stride, size * stride),)


class _Linear(nn.Module):
    """A linear layer between two small ones, optionally followed by GELU or a residual addition, as in a transformer."""

    def __init__(self, reduced: int, columns: int, gelu: bool, residual: bool) -> None:
        super().__init__()
        self.before, self.linear, self.after = nn.Linear(8, reduced), nn.Linear(reduced, columns), nn.Linear(columns, 8)
        self.activation = nn.GELU() if gelu else nn.Identity()
        self.branch = nn.Linear(8, columns) if residual else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.branch(-x) if self.branch is not None else None  # of another input, so that it is no sibling
        result = self.activation(self.linear(self.before(x)))
        y: torch.Tensor = self.after(result if branch is None else result + branch)
        return y


def _linear(rows: int, reduced: int, columns: int, follows: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Linear(reduced, columns, follows == 1, follows == 2), (torch.zeros(rows, 8),)


MODULES: Mapping[str, Callable[..., tuple[nn.Module, tuple[torch.Tensor, ...]]]] = MappingProxyType(
    {"conv2d": _convolution, "depthwise": _depthwise, "product": _product, "block": _block, "linear": _linear}
)
"""The model around an operator, and its inputs, by kind."""


def problem_of(kind: str, sizes: Sequence[int], machine: Machine, threads: int, precision: str = FP32) -> Problem:
    """The region of an operator of the given sizes in a model partitioned for the machine: a "depthwise" convolution or a "product" (with sizes as in
    DEPTHWISE and PRODUCTS), a "block" (outputs, channels, height and width of the result, filter, stride, whether there is an addition), a "conv2d"
    (outputs, channels, height, width, filter, stride), or a "linear" layer (rows, reduced extent, columns, and what follows: 1 GELU, 2 an addition).
    Factors and results of a product are inputs and outputs of the model in float32, which keep their types, but not in other precisions.

    It is surrounded by small pointwise convolutions or linear layers, so that input and output have the layouts of a network; the operator does most
    of the work."""
    module, inputs = (_product_between if kind == "product" and precision != FP32 else MODULES[kind])(*sizes)
    graph, _ = simplify(read(module, inputs).graph)
    wanted = "window" if kind == "depthwise" else "contraction"
    found = [one for one in distinct_problems(graph, machine, threads, precision, chains=False) if one.region.kind == wanted]
    return max(found, key=lambda one: one.region.flops())
