"""Operators that the operator table knows nothing of, as ordinary PyTorch modules: those of DeepCuts (PLDI 2021), section 8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shift(nn.Module):
    """Moves channels to neighbouring pixels (Wu et al., CVPR 2018): as many groups of channels as a filter has taps, each moved by its tap's offset."""

    def __init__(self, channels: int, kernel: int = 3) -> None:
        super().__init__()
        self.kernel = kernel
        self.sizes = [len(part) for part in torch.arange(channels).tensor_split(kernel**2)]

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        parts = F.pad(x, [self.kernel // 2] * 4).split(self.sizes, 1)
        taps = (divmod(number, self.kernel) for number in range(self.kernel**2))
        return torch.cat([part[:, :, row : row + height, column : column + width] for part, (row, column) in zip(parts, taps, strict=True)], 1)


class ShiftConvolutions(nn.Module):
    """SC² module (Wu et al., CVPR 2018): shift, 1x1 convolution, shift, 1x1 convolution, with a residual."""

    def __init__(self, channels: int, expansion: int = 1, kernel: int = 3) -> None:
        super().__init__()
        inner = channels * expansion
        self.shift1, self.shift2 = Shift(channels, kernel), Shift(inner, kernel)
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(self.shift1(x))))
        return F.relu(self.norm2(self.conv2(self.shift2(y))) + x)


class OctaveConvolution(nn.Module):
    """Octave convolution (Chen et al., ICCV 2019): channels at full and at half resolution, each result the sum of a convolution of both."""

    def __init__(self, high: int, low: int, high_out: int, low_out: int, kernel: int = 3) -> None:
        super().__init__()
        self.high_high, self.low_high = (nn.Conv2d(channels, high_out, kernel, padding=kernel // 2) for channels in (high, low))
        self.high_low, self.low_low = (nn.Conv2d(channels, low_out, kernel, padding=kernel // 2) for channels in (high, low))

    def forward(self, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        detailed = self.high_high(high) + F.interpolate(self.low_high(low), scale_factor=2)
        coarse = self.low_low(low) + self.high_low(F.avg_pool2d(high, 2))
        return F.relu(detailed), F.relu(coarse)
