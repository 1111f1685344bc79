"""Inception networks: Inception-v3, Inception-v4, and the Inception-v2 trunk that SSD uses."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import nn

from tilewright.zoo.common import Concatenated, classifier, convolution_unit, with_initial_scale

Kernel = int | tuple[int, int]

_unit = partial(convolution_unit, epsilon=1e-3)
_ROW, _COLUMN = (1, 7), (7, 1)


def _chain(channels: tuple[int, ...], kernels: tuple[Kernel, ...], last_stride: int = 1) -> nn.Sequential:
    """Units through the given channel counts; with stride two the last one has no padding."""
    units = [_unit(i, o, kernel) for (i, o), kernel in zip(pairwise(channels), kernels, strict=True)]
    if last_stride != 1:
        units[-1] = _unit(channels[-2], channels[-1], kernels[-1], last_stride, padding=0)
    return nn.Sequential(*units)


def _pool_unit(in_channels: int, out_channels: int, count_include_pad: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=count_include_pad), _unit(in_channels, out_channels))


def _fork(in_channels: int, out_channels: int) -> Concatenated:
    """A 1 x 3 and a 3 x 1 convolution in parallel."""
    return Concatenated(_unit(in_channels, out_channels, (1, 3)), _unit(in_channels, out_channels, (3, 1)))


def inception_v3(num_classes: int = 1000) -> nn.Module:
    """Inception-v3 without the auxiliary classifier, which does nothing in inference. Input 299 x 299.

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016, table 1; channel
    counts as in the authors' released model.
    """

    def grid35(channels: int, pooled: int) -> nn.Module:
        return Concatenated(
            _unit(channels, 64),
            _chain((channels, 48, 64), (1, 5)),
            _chain((channels, 64, 96, 96), (1, 3, 3)),
            _pool_unit(channels, pooled),
        )

    def grid17(inner: int) -> nn.Module:
        return Concatenated(
            _unit(768, 192),
            _chain((768, inner, inner, 192), (1, _ROW, _COLUMN)),
            _chain((768, inner, inner, inner, inner, 192), (1, _COLUMN, _ROW, _COLUMN, _ROW)),
            _pool_unit(768, 192),
        )

    def grid8(channels: int) -> nn.Module:
        return Concatenated(
            _unit(channels, 320),
            nn.Sequential(_unit(channels, 384), _fork(384, 384)),
            nn.Sequential(_chain((channels, 448, 384), (1, 3)), _fork(384, 384)),
            _pool_unit(channels, 192),
        )

    reduction35 = Concatenated(_unit(288, 384, 3, 2, padding=0), _chain((288, 64, 96, 96), (1, 3, 3), last_stride=2), nn.MaxPool2d(3, 2))
    reduction17 = Concatenated(
        _chain((768, 192, 320), (1, 3), last_stride=2),
        _chain((768, 192, 192, 192, 192), (1, _ROW, _COLUMN, 3), last_stride=2),
        nn.MaxPool2d(3, 2),
    )
    return nn.Sequential(
        _unit(3, 32, 3, 2, padding=0), _unit(32, 32, 3, padding=0), _unit(32, 64, 3), nn.MaxPool2d(3, 2),
        _unit(64, 80), _unit(80, 192, 3, padding=0), nn.MaxPool2d(3, 2),
        grid35(192, 32), grid35(256, 64), grid35(288, 64), reduction35,
        grid17(128), grid17(160), grid17(160), grid17(192), reduction17,
        grid8(1280), grid8(2048), *classifier(2048, num_classes),
    )  # fmt: skip


def inception_v4(num_classes: int = 1000) -> nn.Module:
    """Inception-v4. Input 299 x 299. The average pooling of the branches does not count the padding.

    Source: Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning", AAAI
    2017, figures 3 to 9.
    """

    def grid35() -> nn.Module:
        return Concatenated(
            _unit(384, 96),
            _chain((384, 64, 96), (1, 3)),
            _chain((384, 64, 96, 96), (1, 3, 3)),
            _pool_unit(384, 96, count_include_pad=False),
        )

    def grid17() -> nn.Module:
        return Concatenated(
            _unit(1024, 384),
            _chain((1024, 192, 224, 256), (1, _ROW, _COLUMN)),
            _chain((1024, 192, 192, 224, 224, 256), (1, _COLUMN, _ROW, _COLUMN, _ROW)),
            _pool_unit(1024, 128, count_include_pad=False),
        )

    def grid8() -> nn.Module:
        return Concatenated(
            _unit(1536, 256),
            nn.Sequential(_unit(1536, 384), _fork(384, 256)),
            nn.Sequential(_chain((1536, 384, 448, 512), (1, (3, 1), (1, 3))), _fork(512, 256)),
            _pool_unit(1536, 256, count_include_pad=False),
        )

    stem = (
        _unit(3, 32, 3, 2, padding=0), _unit(32, 32, 3, padding=0), _unit(32, 64, 3),
        Concatenated(nn.MaxPool2d(3, 2), _unit(64, 96, 3, 2, padding=0)),
        Concatenated(
            nn.Sequential(_unit(160, 64), _unit(64, 96, 3, padding=0)),
            nn.Sequential(_chain((160, 64, 64, 64), (1, _ROW, _COLUMN)), _unit(64, 96, 3, padding=0)),
        ),
        Concatenated(_unit(192, 192, 3, 2, padding=0), nn.MaxPool2d(3, 2)),
    )  # fmt: skip
    reduction35 = Concatenated(_unit(384, 384, 3, 2, padding=0), _chain((384, 192, 224, 256), (1, 3, 3), last_stride=2), nn.MaxPool2d(3, 2))
    reduction17 = Concatenated(
        _chain((1024, 192, 192), (1, 3), last_stride=2),
        _chain((1024, 256, 256, 320, 320), (1, _ROW, _COLUMN, 3), last_stride=2),
        nn.MaxPool2d(3, 2),
    )
    return nn.Sequential(
        *stem, *(grid35() for _ in range(4)), reduction35, *(grid17() for _ in range(7)), reduction17,
        *(grid8() for _ in range(3)), *classifier(1536, num_classes),
    )  # fmt: skip


def inception_v2_trunk() -> tuple[nn.Sequential, nn.Sequential]:
    """The two parts of the Inception-v2 trunk: to 576 channels at stride 16, and on to 1024 channels at stride 32.

    Source: Ioffe, Szegedy, "Batch Normalization", ICML 2015, figure 5, with the separable first convolution of the
    released model that SSD starts from.
    """

    def mixed(channels: int, single: int, double: tuple[int, int], triple: tuple[int, int], pooled: int) -> nn.Module:
        pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        return Concatenated(
            _unit(channels, single),
            _chain((channels, *double), (1, 3)),
            _chain((channels, *triple, triple[1]), (1, 3, 3)),
            nn.Sequential(pool, _unit(channels, pooled)),
        )

    def reduction(channels: int, double: tuple[int, int], triple: tuple[int, int]) -> nn.Module:
        return Concatenated(
            nn.Sequential(_unit(channels, double[0]), _unit(*double, 3, 2)),
            nn.Sequential(_chain((channels, *triple), (1, 3)), _unit(triple[1], triple[1], 3, 2)),
            nn.MaxPool2d(3, 2, 1),
        )

    depthwise = with_initial_scale(nn.Conv2d(3, 24, 7, 2, 3, groups=3, bias=False), 1.0)
    first = nn.Sequential(
        depthwise, _unit(24, 64), nn.MaxPool2d(3, 2, 1), _unit(64, 64), _unit(64, 192, 3), nn.MaxPool2d(3, 2, 1),
        mixed(192, 64, (64, 64), (64, 96), 32), mixed(256, 64, (64, 96), (64, 96), 64),
        reduction(320, (128, 160), (64, 96)),
        mixed(576, 224, (64, 96), (96, 128), 128), mixed(576, 192, (96, 128), (96, 128), 128),
    )  # fmt: skip
    second = nn.Sequential(
        mixed(576, 160, (128, 160), (128, 160), 96), mixed(576, 96, (128, 192), (160, 192), 96),
        reduction(576, (128, 192), (192, 256)),
        mixed(1024, 352, (192, 320), (160, 224), 128), mixed(1024, 352, (192, 320), (192, 224), 128),
    )  # fmt: skip
    return first, second
