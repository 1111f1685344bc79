"""DeepCAM: DeepLabv3+ with an Xception encoder, segmenting climate data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.zoo.common import Residual, convolution_unit, with_initial_scale


def _separable(in_channels: int, out_channels: int, stride: int = 1, dilation: int = 1) -> list[nn.Module]:
    """Depthwise 3 x 3 and pointwise convolution with nothing between them."""
    depthwise = nn.Conv2d(in_channels, in_channels, 3, stride, dilation, dilation, groups=in_channels, bias=False)
    return [with_initial_scale(depthwise, 1.0), nn.Conv2d(in_channels, out_channels, 1, bias=False)]


def _xception_block(in_channels: int, out_channels: int, depth: int, stride: int, last_relu: bool, extra: bool, grow_first: bool = True) -> nn.Module:
    """`depth` normalised separable convolutions, one more that has the stride (or `extra`), and the shortcut."""
    branch: list[nn.Module] = []
    for index in range(depth):
        grows_here = index == (0 if grow_first else depth - 1)
        before = out_channels if grow_first and index > 0 else in_channels
        after = out_channels if grow_first or grows_here else in_channels
        branch += [*_separable(before, after), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    branch.pop()
    if stride != 1 or extra:
        branch += _separable(out_channels, out_channels, stride)
    shortcut = None
    if stride != 1 or in_channels != out_channels:
        shortcut = convolution_unit(in_channels, out_channels, 1, stride, activation=None)
    return Residual(nn.Sequential(*branch), shortcut, nn.ReLU() if last_relu else None)


class DeepCam(nn.Module):
    """Encoder (output stride 16), atrous spatial pyramid pooling, and a decoder of transposed convolutions."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.entry = nn.Sequential(
            convolution_unit(in_channels, 32, 3, 2),
            convolution_unit(32, 64, 3),
            _xception_block(64, 128, depth=2, stride=2, last_relu=False, extra=False),
        )
        last = [nn.Sequential(*_separable(i, o, dilation=2), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
                for i, o in ((1024, 1536), (1536, 1536), (1536, 2048))]  # fmt: skip
        self.encoder = nn.Sequential(
            nn.ReLU(),
            _xception_block(128, 256, depth=2, stride=2, last_relu=True, extra=False),
            _xception_block(256, 728, depth=2, stride=2, last_relu=True, extra=True),
            *(_xception_block(728, 728, depth=3, stride=1, last_relu=True, extra=False) for _ in range(16)),
            _xception_block(728, 1024, depth=2, stride=1, last_relu=False, extra=True, grow_first=False),
            *last,
        )
        self.pyramid = nn.ModuleList([convolution_unit(2048, 256, 1), *(convolution_unit(2048, 256, 3, dilation=d) for d in (6, 12, 18))])
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), convolution_unit(2048, 256, 1))
        self.bottleneck = convolution_unit(1280, 256, 1)
        self.low_level = convolution_unit(128, 48, 1)
        self.upsample = nn.Sequential(*_upsampling(), *_upsampling())
        self.merge = nn.Sequential(convolution_unit(304, 256, 3), convolution_unit(256, 256, 3), nn.Conv2d(256, 256, 1), *_upsampling())
        self.last = nn.ConvTranspose2d(256, num_classes, 3, 2, 1, output_padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low = self.entry(x)
        high = self.encoder(low)
        pooled = F.interpolate(self.pooled(high), size=high.shape[2:], mode="bilinear", align_corners=True)
        x = self.bottleneck(torch.cat([*(branch(high) for branch in self.pyramid), pooled], dim=1))
        x = torch.cat([self.upsample(x), self.low_level(low)], dim=1)
        logits: Tensor = self.last(self.merge(x))
        return logits


def _upsampling() -> list[nn.Module]:
    deconvolution = nn.ConvTranspose2d(256, 256, 3, 2, 1, output_padding=1, bias=False)
    return [deconvolution, nn.BatchNorm2d(256), nn.ReLU(inplace=True)]


def deepcam(in_channels: int = 16, num_classes: int = 3) -> nn.Module:
    """DeepCAM: per-pixel classes of 16 climate fields. Height and width must be multiples of 16.

    The published data are 768 x 1152 pixels; the example inputs are a quarter of that in each direction.
    Source: Kurth et al., "Exascale Deep Learning for Climate Analytics", SC 2018, with the Xception encoder of the
    MLPerf HPC reference; Chen et al., "Encoder-Decoder with Atrous Separable Convolution", ECCV 2018.
    """
    return DeepCam(in_channels, num_classes)
