"""What tests of models for several batch sizes share."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tilewright.runtime.dynamic import DynamicExecutable


def check(module: nn.Module, executable: DynamicExecutable, x: torch.Tensor) -> None:
    """The executable's result for an input against PyTorch's in float64."""
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
    got = executable(x).double()
    assert (got - exact).abs().max() <= 1e-4 * exact.abs().max()
