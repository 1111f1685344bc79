"""Small plain convolution networks: LeNet-5 and a DefoNet-like stack."""

from __future__ import annotations

from torch import nn


def lenet5() -> nn.Module:
    """LeNet-5 for 28 x 28 digits, with all C3 connections present.

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, section II.B.
    """
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.Tanh(),
        nn.Linear(120, 84), nn.Tanh(),
        nn.Linear(84, 10),
    )  # fmt: skip


def defonet(num_classes: int = 10) -> nn.Module:
    """Six 3 x 3 convolutions at 108, 54 and 27 pixels: the layers D1 to D6 of the CNNOpt evaluation, and a small head.

    Source: layer sizes of DefoNet in the CNNOpt paper, PACT 2022; the head is ours, as none is published.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
