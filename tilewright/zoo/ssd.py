"""SSD detectors over MobileNet-v2 and Inception-v2, up to the raw boxes and scores."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tilewright.zoo.common import convolution_unit
from tilewright.zoo.inception import inception_v2_trunk
from tilewright.zoo.mobilenet import mobilenet_v2_features

_ANCHORS = (3, 6, 6, 6, 6, 6)
_EXTRA_CHANNELS = (512, 256, 256, 128)


def _extra_level(in_channels: int, channels: int, depthwise: bool) -> nn.Sequential:
    """Halves the extents: 1 x 1, then 3 x 3 with stride two, the latter separable if `depthwise`."""
    unit = partial(convolution_unit, activation=nn.ReLU6)
    half = channels // 2
    if depthwise:
        return nn.Sequential(unit(in_channels, half), unit(half, half, 3, 2, groups=half), unit(half, channels))
    return nn.Sequential(unit(in_channels, half), unit(half, channels, 3, 2))


class SingleShotDetector(nn.Module):
    """Two trunk levels and four extra ones, each with a convolution for boxes and one for class scores.

    Input (N, 3, 300, 300); output boxes (N, 1917, 4) and scores (N, 1917, classes), before any decoding.
    """

    def __init__(self, first: nn.Module, second: nn.Module, channels: tuple[int, int], depthwise: bool, num_classes: int) -> None:
        super().__init__()
        levels: list[nn.Module] = [first, second]
        widths = list(channels)
        for width in _EXTRA_CHANNELS:
            levels.append(_extra_level(widths[-1], width, depthwise))
            widths.append(width)
        self.levels = nn.ModuleList(levels)
        self.boxes, self.scores = (
            nn.ModuleList(nn.Conv2d(w, a * values, 3, padding=1) for w, a in zip(widths, _ANCHORS, strict=True)) for values in (4, num_classes)
        )
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        boxes, scores = [], []
        for level, box, score in zip(self.levels, self.boxes, self.scores, strict=True):
            x = level(x)
            boxes.append(box(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
            scores.append(score(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.num_classes))
        return torch.cat(boxes, dim=1), torch.cat(scores, dim=1)


def ssd_mobilenet_v2(num_classes: int = 91) -> nn.Module:
    """SSD over MobileNet-v2 at 300 x 300: the first level is the expansion of the 14th inverted residual. The extra levels use separable
    convolutions, the predictors full ones.

    Source: Liu et al., "SSD: Single Shot MultiBox Detector", ECCV 2016; Huang et al., "Speed/accuracy trade-offs for
    modern convolutional object detectors", CVPR 2017, whose released COCO configuration this follows.
    """
    trunk = mobilenet_v2_features()
    layers = list(trunk)
    expansion, *rest = layers[14].children()
    first, second = nn.Sequential(*layers[:14], expansion), nn.Sequential(*rest, *layers[15:])
    return SingleShotDetector(first, second, (576, 1280), True, num_classes)


def ssd_inception_v2(num_classes: int = 91) -> nn.Module:
    """SSD over Inception-v2 at 300 x 300; the extra levels use full 3 x 3 convolutions.

    Source: as `ssd_mobilenet_v2`; trunk from Ioffe, Szegedy, "Batch Normalization", ICML 2015.
    """
    return SingleShotDetector(*inception_v2_trunk(), (576, 1024), False, num_classes)
