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


Location = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Address, shape, strides and type: what tensors have in common that are the same elements in memory."""


def location_of(tensor: torch.Tensor) -> Location:
    """Where the elements of a tensor that has some are."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors on one device have the same type, shape and bits: zeros of different signs differ, and NaN equals itself."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    return parts.view(_INTEGERS[parts.dtype.itemsize])
