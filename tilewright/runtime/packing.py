"""Conversion between tensors and stored layouts: packing constants, and viewing a flat buffer as the value stored in it."""

from __future__ import annotations

from math import prod

import torch

from tilewright.ir import dtypes
from tilewright.ir.layout import Layout
from tilewright.ir.region import F16_PAIR, F16_SCALE, F16_STEP, NUMBERS, TF32, TF32_PAIR, Storage

F16_EXPONENT = 4
"""Of two, for the largest high part of a constant."""
LEAST_FLOAT32 = 2.0**-149
"""The smallest unit: of constants all below 2^-134, which have fewer of them."""

CUT_OFF = {TF32_PAIR: 1.2, F16_PAIR: 0.75}
"""By how much weights of pairs are enlarged, in units of 2^-24, to make good what tensor cores cut off the sums of their products: 1.36 and 0.97 in
the mean of random layers on an H200, 0.8 and 0.6 where sums have few products (`bench.pair_bias`); of a sum that is cut off once to float32 it is
1 / (2 ln 2) = 0.72. The constants are between these, so that no results become much too large. With them cutting off is about rounding."""


def torch_dtype(name: str) -> torch.dtype:
    """The `torch.dtype` of an element type's name."""
    dtype: torch.dtype = getattr(torch, dtypes.ELEMENT_TYPES[name].torch)
    return dtype


def prepared(constant: torch.Tensor, storage: Storage) -> torch.Tensor:
    """The contents of a packed copy of a constant: the part given by `view`, multiplied by `matrix` in float64 and rounded once, as `numbers`; in the
    type of the value, or where that depends on the numbers in float32 until these are made.

    Raises:
        ValueError: if the number of elements of that part does not match the matrix and the value.
    """
    constant = constant.to(torch.float32 if storage.numbers else torch_dtype(storage.value.dtype))
    if storage.view is not None:
        constant = constant.contiguous().as_strided(*storage.view)
    if storage.matrix is not None:
        matrix = torch.tensor(storage.matrix, dtype=torch.float64)
        columns = matrix.shape[1]
        mapped = matrix @ constant.detach().cpu().double().reshape(columns, -1)
        if storage.numbers != F16_SCALE:
            shape = storage.value.shape[1:] if NUMBERS[storage.numbers] else storage.value.shape
            if mapped.numel() != prod(shape):
                raise ValueError(f"a constant of shape {tuple(constant.shape)} mapped by {tuple(matrix.shape)} as shape {shape}")
            mapped = mapped.reshape(shape)
        constant = mapped.to(constant.dtype)
    return _AS[storage.numbers](constant.detach()) if storage.numbers else constant


def nearest_tf32(values: torch.Tensor) -> torch.Tensor:
    """Float32 values rounded to TF32 (`ir.dtypes.nearest_tf32`), in CPU memory."""
    return torch.from_numpy(dtypes.nearest_tf32(values.detach().cpu().contiguous().numpy()))


def pair_of_tf32(values: torch.Tensor) -> torch.Tensor:
    """The high and the low parts, whose sums are the enlarged values."""
    high = nearest_tf32(values)
    return torch.stack([high, nearest_tf32((_enlarged(values, TF32_PAIR) - high.double()).float())])


def _enlarged(values: torch.Tensor, numbers: str) -> torch.Tensor:
    """Constants, in float64, enlarged by what the sums of their products lose in the mean."""
    return values.double().cpu() * (1 + CUT_OFF[numbers] * 2.0**-24)


def pair_of_f16(values: torch.Tensor) -> torch.Tensor:
    """In units of `f16_scale` times 2^11: the high parts times 2^11, as they are, and the low parts times 2^11. The largest of the values has 2^3 to
    2^4 such units, so that 2^11 times as many are within the range of float16."""
    whole = _enlarged(values, F16_PAIR) / (f16_scale(values).double() * F16_STEP)
    high = whole.half()
    return torch.stack([(high.double() * F16_STEP).half(), high, ((whole - high.double()) * F16_STEP).half()])


def f16_scale(values: torch.Tensor) -> torch.Tensor:
    """The unit of products with the values as an `f16 pair`, a power of two: [1]."""
    finite = values.double().cpu().abs().nan_to_num(0.0, 0.0, 0.0)
    _, exponent = torch.frexp(finite.max() if finite.numel() else torch.zeros((), dtype=torch.float64))
    unit = torch.ldexp(torch.tensor([1 / F16_STEP], dtype=torch.float64), exponent - F16_EXPONENT)
    return unit.clamp(min=LEAST_FLOAT32).float()


_AS = {TF32: nearest_tf32, TF32_PAIR: pair_of_tf32, F16_PAIR: pair_of_f16, F16_SCALE: f16_scale}


def _factors(layout: Layout) -> list[list[int]]:
    """For each dimension, the positions in `layout.order` of its outer part and then of its factors, most significant first."""
    entries: list[list[int]] = [[] for _ in layout.shape]
    for position, (dim, factor) in enumerate(layout.order):
        if factor and not entries[dim]:
            raise ValueError(f"layout {layout}: dimension {dim} has a factor before its outer part")
        entries[dim].append(position)
    return entries


def pack(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The flat storage of a tensor in a layout, in fresh CPU memory; halo and rounding are zero.

    Raises:
        ValueError: if the tensor's number of elements differs from the layout's.
    """
    if tensor.numel() != prod(layout.shape):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is packed as shape {layout.shape}")
    tensor = tensor.detach().cpu().reshape(layout.shape)
    entries, extents = _factors(layout), layout.extents
    padded = [prod(extents[p] for p in positions) for positions in entries]
    if padded != list(layout.shape):
        whole = tensor.new_zeros(padded)
        place = whole
        for dim, extent in enumerate(layout.shape):
            place = place.narrow(dim, layout.halo[dim][0], extent)
        place.copy_(tensor)
        tensor = whole
    split = [position for positions in entries for position in positions]
    parts = tensor.reshape([extents[position] for position in split])
    flat = torch.empty(layout.size, dtype=tensor.dtype)
    flat.view(extents).copy_(parts.permute([split.index(position) for position in range(len(split))]))
    return flat


def unpack(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The logical tensor stored in a flat buffer: a view if no dimension is split, else a copy."""
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
    """Stores a logical tensor in a flat buffer; a halo is left unchanged (in a split layout it is zeroed)."""
    if layout.dense_strides() is not None:
        unpack(flat, layout).copy_(value)
        return
    flat.copy_(pack(value, layout))
