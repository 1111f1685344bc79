"""Darknet-53."""

from __future__ import annotations

from functools import partial

from torch import nn

from tilewright.zoo.common import Residual, classifier, convolution_unit


def darknet53(num_classes: int = 1000) -> nn.Module:
    """Darknet-53, the trunk of YOLOv3, as a classifier. Input 256 x 256, leaky ReLU with slope 0.1.

    Source: Redmon, Farhadi, "YOLOv3: An Incremental Improvement", 2018, table 1.
    """
    unit = partial(convolution_unit, activation=partial(nn.LeakyReLU, 0.1, inplace=True))
    layers: list[nn.Module] = [unit(3, 32, 3)]
    channels = 32
    for depth in (1, 2, 8, 8, 4):
        layers.append(unit(channels, 2 * channels, 3, 2))
        channels *= 2
        for _ in range(depth):
            layers.append(Residual(nn.Sequential(unit(channels, channels // 2), unit(channels // 2, channels, 3))))
    return nn.Sequential(*layers, *classifier(channels, num_classes))
