"""VGG-16."""

from __future__ import annotations

from torch import nn


def vgg16(num_classes: int = 1000) -> nn.Module:
    """VGG-16, configuration D, without batch normalisation.

    Source: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015.
    """
    layers: list[nn.Module] = []
    in_channels = 3
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
            in_channels = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, num_classes),
    )  # fmt: skip
