"""Depthwise convolutions and batched matrix products of networks, by which choices of their kernels are judged beside those of the twenty layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn

from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware.machine import Machine
from tilewright.runtime.problems import Problem
from tilewright.runtime.tuning import distinct_problems

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


def problem(name: str, machine: Machine, threads: int) -> Problem:
    """What is measured of an operator of DEPTHWISE or PRODUCTS."""
    kind, sizes = ("depthwise", DEPTHWISE[name]) if name in DEPTHWISE else ("product", PRODUCTS[name])
    return problem_of(kind, sizes, machine, threads)


def problem_of(kind: str, sizes: Sequence[int], machine: Machine, threads: int) -> Problem:
    """The region of a "depthwise" convolution or a "product" of such sizes (as DEPTHWISE and PRODUCTS have them), as a model of that operator alone
    is partitioned for the machine. A depthwise convolution stands between two pointwise ones, so that its input and output lie as in a network."""
    module: nn.Module
    if kind == "depthwise":
        channels, size, filter_size, stride = sizes
        depthwise = nn.Conv2d(channels, channels, filter_size, stride, filter_size // 2, groups=channels)
        module = nn.Sequential(nn.Conv2d(8, channels, 1), depthwise, nn.ReLU6(), nn.Conv2d(channels, 8, 1))
        inputs: tuple[torch.Tensor, ...] = (torch.zeros(1, 8, size, size),)
    else:
        batch, rows, reduced, columns = sizes
        module, inputs = _Product(), (torch.zeros(batch, rows, reduced), torch.zeros(batch, reduced, columns))
    graph, _ = simplify(read(module, inputs).graph)
    wanted = "window" if kind == "depthwise" else "contraction"
    found = [one for one in distinct_problems(graph, machine, threads) if one.region.kind == wanted]
    assert len(found) == 1, f"{kind} {sizes} has {len(found)} regions"
    return found[0]
