"""Where tensors lie, for what reads their memory without asking PyTorch.

A tensor may be of the right shape, type and device and have no memory: a fake one, one that wraps others (masked, or of a transformation of
functions), zeros that are nowhere, one whose storage was released.
"""

from __future__ import annotations

import torch


def address_of(tensor: torch.Tensor) -> int:
    """Of the first element; 0 where there is none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a word of PyTorch's for the same
        return 0


def is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether it has elements and no memory that holds them."""
    return not address_of(tensor) and bool(tensor.numel())
