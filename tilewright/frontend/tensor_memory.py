"""Addresses of tensors, for code that reads their memory directly. A tensor may have the right shape, type and device but no memory: a fake tensor, a
wrapper (masked, or of a function transform), a zero tensor without storage, or one whose storage was released.
"""

from __future__ import annotations

import torch


def address_of(tensor: torch.Tensor) -> int:
    """The address of the first element, or 0 if there is none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # PyTorch raises this if there is no storage
        return 0


def is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements but no memory that holds them."""
    return not address_of(tensor) and bool(tensor.numel())


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if and only if they share a storage, also tensors without elements that can be read."""
    number: int = tensor.untyped_storage()._cdata
    return number
