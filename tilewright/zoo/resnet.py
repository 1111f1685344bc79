"""Residual networks: ResNet-18, ResNet-50, the 3-D ResNet-34, and the dilated DRN-C-26."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from tilewright.zoo.common import Residual, classifier, convolution_unit


def _shortcut(in_channels: int, out_channels: int, stride: int, dimensions: int) -> nn.Module | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return convolution_unit(in_channels, out_channels, 1, stride, activation=None, dimensions=dimensions)


def basic_block(in_channels: int, channels: int, stride: int, dimensions: int = 2, dilation: int = 1, residual: bool = True) -> nn.Module:
    """Two convolutions of extent three, and, unless `residual` is false, the sum with the (projected) input."""
    first = convolution_unit(in_channels, channels, 3, stride, dilation=dilation, dimensions=dimensions)
    if not residual:
        return nn.Sequential(first, convolution_unit(channels, channels, 3, dilation=dilation, dimensions=dimensions))
    second = convolution_unit(channels, channels, 3, dilation=dilation, activation=None, dimensions=dimensions)
    shortcut = _shortcut(in_channels, channels, stride, dimensions)
    return Residual(nn.Sequential(first, second), shortcut, nn.ReLU(inplace=True))


def bottleneck_block(in_channels: int, channels: int, stride: int, dimensions: int = 2) -> nn.Module:
    """1, 3, 1 convolutions; the stride is in the middle one, and four times `channels` come out."""
    branch = nn.Sequential(
        convolution_unit(in_channels, channels, 1, dimensions=dimensions),
        convolution_unit(channels, channels, 3, stride, dimensions=dimensions),
        convolution_unit(channels, 4 * channels, 1, activation=None, dimensions=dimensions),
    )
    shortcut = _shortcut(in_channels, 4 * channels, stride, dimensions)
    return Residual(branch, shortcut, nn.ReLU(inplace=True))


def _resnet(block: Callable[..., nn.Module], expansion: int, depths: Sequence[int], num_classes: int, dimensions: int = 2) -> nn.Module:
    pool = nn.MaxPool2d(3, 2, 1) if dimensions == 2 else nn.MaxPool3d(3, 2, 1)
    stem_stride = (1, 2, 2)[-dimensions:]  # the stem of a video network does not reduce the number of frames
    layers: list[nn.Module] = [convolution_unit(3, 64, 7, stem_stride, dimensions=dimensions), pool]
    in_channels = 64
    for level, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if level > 0 and index == 0 else 1
            layers.append(block(in_channels, 64 << level, stride, dimensions))
            in_channels = (64 << level) * expansion
    return nn.Sequential(*layers, *classifier(in_channels, num_classes, dimensions))


def resnet18(num_classes: int = 1000) -> nn.Module:
    """ResNet-18. Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1."""
    return _resnet(basic_block, 1, (2, 2, 2, 2), num_classes)


def resnet50(num_classes: int = 1000) -> nn.Module:
    """ResNet-50 with the stride in the 3 x 3 convolutions (v1.5).

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1.
    """
    return _resnet(bottleneck_block, 4, (3, 4, 6, 3), num_classes)


def resnet34_3d(num_classes: int = 400) -> nn.Module:
    """3-D ResNet-34 for clips of 16 frames, with projected shortcuts (type B).

    Source: Hara et al., "Can Spatiotemporal 3D CNNs Retrace the History of 2D CNNs and ImageNet?", CVPR 2018.
    """
    return _resnet(basic_block, 1, (3, 4, 6, 3), num_classes, dimensions=3)


def drn_c_26(num_classes: int = 1000) -> nn.Module:
    """DRN-C-26: dilation instead of the last strides, and two final levels without residual connections.

    Source: Yu, Koltun, Funkhouser, "Dilated Residual Networks", CVPR 2017, figure 5.
    """
    layers: list[nn.Module] = [convolution_unit(3, 16, 7)]
    in_channels = 16
    # channels, blocks, stride, dilation, residual
    for channels, depth, stride, dilation, residual in (
        (16, 1, 1, 1, True), (32, 1, 2, 1, True), (64, 2, 2, 1, True), (128, 2, 2, 1, True),
        (256, 2, 1, 2, True), (512, 2, 1, 4, True), (512, 1, 1, 2, False), (512, 1, 1, 1, False),
    ):  # fmt: skip
        for index in range(depth):
            block_stride = stride if index == 0 else 1
            layers.append(basic_block(in_channels, channels, block_stride, dilation=dilation, residual=residual))
            in_channels = channels
    head = nn.Conv2d(in_channels, num_classes, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), head, nn.Flatten())
