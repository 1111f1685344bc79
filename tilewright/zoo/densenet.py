"""DenseNet-121."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewright.zoo.common import classifier


def _norm_convolution(in_channels: int, out_channels: int, kernel: int) -> list[nn.Module]:
    """Batch normalisation, ReLU, convolution: the pre-activation order."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True), convolution]


class DenseLayer(nn.Module):
    """Appends `growth` channels computed from all channels so far."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_norm_convolution(in_channels, 4 * growth, 1), *_norm_convolution(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.branch(x)], dim=1)


def densenet121(num_classes: int = 1000, growth: int = 32) -> nn.Module:
    """DenseNet-121 (bottleneck and compression, DenseNet-BC).

    Source: Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, table 1.
    """
    channels = 2 * growth
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, 2, 3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    for block, depth in enumerate((6, 12, 24, 16)):
        if block > 0:
            layers += [*_norm_convolution(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(depth):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(inplace=True), *classifier(channels, num_classes))
