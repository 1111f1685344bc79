"""Between tensors and stored layouts: packing constants, and viewing a flat buffer as the value stored in it."""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from tilewright.ir.layout import Layout
from tilewright.ir.region import Storage


def prepared(constant: torch.Tensor, storage: Storage) -> torch.Tensor:
    """What a packed copy of a constant holds: the part of it that `view` names, mapped by `matrix` in float64 and rounded once.

    Raises:
        ValueError: where the part does not have as many elements as the matrix and the value say.
    """
    if storage.view is not None:
        constant = constant.contiguous().as_strided(*storage.view)
    if storage.matrix is None:
        return constant
    matrix = torch.tensor(storage.matrix, dtype=torch.float64)
    columns = matrix.shape[1]
    if constant.numel() * matrix.shape[0] != storage.value.elements * columns:
        raise ValueError(f"a constant of shape {tuple(constant.shape)} mapped by {tuple(matrix.shape)} as shape {storage.value.shape}")
    mapped = matrix @ constant.detach().cpu().double().reshape(columns, -1)
    return mapped.reshape(storage.value.shape).to(constant.dtype)


def _factors(layout: Layout) -> list[list[int]]:
    """Of each dimension the positions in `layout.order` of its outer part and then of its factors, from the most
    significant."""
    entries: list[list[int]] = [[] for _ in layout.shape]
    for position, (dim, factor) in enumerate(layout.order):
        if factor and not entries[dim]:
            raise ValueError(f"layout {layout}: dimension {dim} has a factor before its outer part")
        entries[dim].append(position)
    return entries


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type; the bits are enough to move them
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def pack(tensor: torch.Tensor, layout: Layout) -> np.ndarray:
    """The flat storage of a tensor in a layout; halo and rounding are zero. bfloat16 comes as the int16 of its bits.

    Raises:
        ValueError: where the tensor's number of elements is not the layout's.
    """
    array = _as_array(tensor)
    if array.size != prod(layout.shape):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is packed as shape {layout.shape}")
    array = array.reshape(layout.shape)
    entries, extents = _factors(layout), layout.extents
    padding = []
    for dim, positions in enumerate(entries):
        before = layout.halo[dim][0]
        padding.append((before, prod(extents[p] for p in positions) - before - layout.shape[dim]))
    if any(map(any, padding)):
        array = np.pad(array, padding)
    split = [position for positions in entries for position in positions]
    array = array.reshape([extents[position] for position in split])
    return np.ascontiguousarray(array.transpose(np.argsort(split))).reshape(-1)


def unpack(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The logical tensor stored in a flat buffer: a view of it where no dimension is split, else a copy."""
    if layout.is_row_major:
        return flat.view(layout.shape)
    strides = layout.dense_strides()
    if strides is not None:
        return flat.as_strided(layout.shape, strides, flat.storage_offset() + layout.start())
    entries, extents = _factors(layout), layout.extents
    split = [position for positions in entries for position in positions]
    whole = flat.view(extents).permute(split).reshape([prod(extents[p] for p in positions) for positions in entries])
    for dim, extent in enumerate(layout.shape):
        whole = whole.narrow(dim, layout.halo[dim][0], extent)
    return whole


def write(flat: torch.Tensor, layout: Layout, value: torch.Tensor) -> None:
    """Store a logical tensor in a flat buffer; a halo is left as it is (of a split layout it is zeroed)."""
    if layout.dense_strides() is not None:
        unpack(flat, layout).copy_(value)
        return
    packed = torch.from_numpy(pack(value, layout))
    flat.copy_(packed.view(torch.bfloat16) if value.dtype == torch.bfloat16 else packed)
