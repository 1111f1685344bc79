"""Parts that several networks share: convolution units, residual sums, parallel branches, weight initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS: dict[int, type[nn.BatchNorm2d | nn.BatchNorm3d]] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def convolution_unit(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, ...] = 1,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | None = None,
    dilation: int = 1,
    groups: int = 1,
    activation: Callable[[], nn.Module] | None = nn.ReLU,
    dimensions: int = 2,
    epsilon: float = 1e-5,
) -> nn.Sequential:
    """A convolution without bias, batch normalisation, and an activation unless it is None.

    `padding=None` keeps the extents when the stride is one (odd kernels).
    """
    extents = (kernel,) * dimensions if isinstance(kernel, int) else kernel
    if padding is None:
        padding = tuple(dilation * (extent - 1) // 2 for extent in extents)
    convolution = CONVOLUTIONS[dimensions](in_channels, out_channels, extents, stride, padding, dilation, groups=groups, bias=False)
    layers: list[nn.Module] = [convolution, BATCH_NORMS[dimensions](out_channels, eps=epsilon)]
    if activation is None:
        with_initial_scale(convolution, 1.0)  # no ReLU follows that would halve the second moment
    elif activation in (nn.ReLU, nn.ReLU6):
        layers.append(activation(inplace=True))
    else:
        layers.append(activation())
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """activation(branch(x) + shortcut(x)); by default the shortcut is the identity and there is no activation."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module | None = None, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut or nn.Identity()
        self.activation = activation or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.branch(x) + self.shortcut(x))
        return y


class Concatenated(nn.Module):
    """The outputs of parallel branches, concatenated over the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def classifier(channels: int, num_classes: int, dimensions: int = 2) -> nn.Sequential:
    """Global average pooling and one fully connected layer."""
    pool = nn.AdaptiveAvgPool2d(1) if dimensions == 2 else nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(pool, nn.Flatten(), nn.Linear(channels, num_classes))


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def with_initial_scale(module: AnyModule, scale: float) -> AnyModule:
    """The same module, marked so that `initialise` uses this scale for its weights."""
    setattr(module, "initial_scale", scale)  # noqa: B010  (a plain assignment would have to be a tensor for mypy)
    return module


@torch.no_grad()
def initialise(network: nn.Module) -> nn.Module:
    """Sets all weights from torch's random state so that the second moment of activations stays near one.

    Convolutions and matrix products follow He et al., "Delving Deep into Rectifiers", 2015, eq. 10 (fan in). A module's attribute `initial_scale`
    replaces the scale sqrt(2) if no ReLU follows. The last batch normalisation of every residual branch is scaled by 0.4, so that the sum grows
    slowly with depth. Statistics and offsets of normalisations are drawn around 0 and 1, since exact zeros and ones would hide wrong constant
    folding.
    """
    for module in network.modules():
        scale = getattr(module, "initial_scale", None)
        if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)):
            nn.init.normal_(module.weight, std=(scale or math.sqrt(2.0)) / math.sqrt(_fan_in(module)))
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.05)
        elif isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            nn.init.uniform_(module.weight, 0.9, 1.1)
            nn.init.normal_(module.bias, std=0.05)
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.25)
        elif isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.9, 1.1)
            nn.init.normal_(module.bias, std=0.05)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=scale or 1.0)
        elif isinstance(module, (nn.LSTM, nn.GRU)):
            for name, parameter in module.named_parameters():
                # Outputs of a recurrent layer are well below one: larger input weights keep signals in a deep stack from vanishing.
                std = 0.1 if name.startswith("bias") else (2.0 if "_ih_" in name else 1.0) / parameter.shape[1] ** 0.5
                nn.init.normal_(parameter, std=std)
    for module in network.modules():
        if isinstance(module, Residual):
            norms = [part for part in module.branch.modules() if isinstance(part, (nn.BatchNorm2d, nn.BatchNorm3d))]
            norms[-1].weight.mul_(0.4)
    return network


def _fan_in(module: nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.Linear) -> float:
    """The number of products summed into one output."""
    if isinstance(module, nn.ConvTranspose2d):
        return module.weight[:, 0].numel() / math.prod(module.stride)
    return module.weight[0].numel()
