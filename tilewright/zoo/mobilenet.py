"""MobileNet-v2."""

from __future__ import annotations

from torch import nn

from tilewright.zoo.common import Residual, classifier, convolution_unit


def inverted_residual(in_channels: int, out_channels: int, stride: int, expansion: int) -> nn.Module:
    """Expansion, depthwise 3 x 3 and linear projection; a residual sum if the shapes allow it."""
    hidden = in_channels * expansion
    layers: list[nn.Module] = []
    if expansion != 1:
        layers.append(convolution_unit(in_channels, hidden, 1, activation=nn.ReLU6))
    layers.append(convolution_unit(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6))
    layers.append(convolution_unit(hidden, out_channels, 1, activation=None))
    branch = nn.Sequential(*layers)
    return Residual(branch) if stride == 1 and in_channels == out_channels else branch


def mobilenet_v2_features() -> nn.Sequential:
    """The convolution part: index 0 is the stem, 1 to 17 the inverted residuals, 18 the last 1 x 1 convolution."""
    layers: list[nn.Module] = [convolution_unit(3, 32, 3, 2, activation=nn.ReLU6)]
    in_channels = 32
    # expansion, channels, blocks, stride of the first block
    for expansion, channels, depth, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for index in range(depth):
            layers.append(inverted_residual(in_channels, channels, stride if index == 0 else 1, expansion))
            in_channels = channels
    return nn.Sequential(*layers, convolution_unit(in_channels, 1280, 1, activation=nn.ReLU6))


def mobilenet_v2(num_classes: int = 1000) -> nn.Module:
    """MobileNet-v2, width 1.

    Source: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, table 2.
    """
    return nn.Sequential(*mobilenet_v2_features(), *classifier(1280, num_classes))
