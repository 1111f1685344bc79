"""Tensors stored in layouts, and read from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ir.layout import Layout, permuted, row_major
from tilewright.runtime.packing import pack, unpack, write


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    order: list[tuple[int, int]] = [(dim, 0) for dim in draw(st.permutations(range(len(shape))))]
    for dim in range(len(shape)):
        for factor in draw(st.lists(st.sampled_from([2, 3, 4]), max_size=2)):
            after = max(i for i, (d, _) in enumerate(order) if d == dim) + 1
            order.insert(draw(st.integers(after, len(order))), (dim, factor))
    halo = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape)
    return Layout(shape, tuple(order), halo)


@settings(deadline=None)
@given(layouts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_packing_follows_the_layout(layout: Layout, dtype: torch.dtype) -> None:
    tensor = (torch.arange(1, math.prod(layout.shape) + 1).view(layout.shape) % 120).to(dtype)
    packed = pack(tensor, layout)
    assert packed.numel() == layout.size
    expected = torch.zeros(layout.size, dtype=dtype)
    for index in np.ndindex(*layout.shape):
        expected[int(layout.offset(index).value)] = tensor[index]  # type: ignore[union-attr]
    assert torch.equal(packed, expected)
    assert torch.equal(unpack(packed, layout), tensor)
    target = torch.zeros(layout.size, dtype=dtype)
    write(target, layout, tensor)
    assert torch.equal(target, expected)


def test_packing_refuses_another_size() -> None:
    with pytest.raises(ValueError, match="shape"):
        pack(torch.zeros(3), row_major((4,)))
    assert pack(torch.arange(6.0), permuted((2, 3), (1, 0))).tolist() == [0, 3, 1, 4, 2, 5]
