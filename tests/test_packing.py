"""Tensors stored in layouts, and read from them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, permuted, row_major
from tilewright.ir.region import F16_PAIR, F16_SCALE, TF32, TF32_PAIR, Storage
from tilewright.runtime.packing import CUT_OFF, nearest_tf32, pack, prepared, unpack, write


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


def test_constants_are_rounded_to_tf32() -> None:
    ulp = 2.0**-10
    cases = {
        1.0: 1.0,
        1 + ulp / 2: 1 + ulp,
        -(1 + ulp / 2): -(1 + ulp),
        1 + ulp * 0.49: 1.0,
        3.0e38: 3.0e38,
        0.0: 0.0,
        math.inf: math.inf,
        -math.inf: -math.inf,
    }
    given = torch.tensor(list(cases), dtype=torch.float32)
    wanted = torch.tensor(list(cases.values()), dtype=torch.float32)
    assert torch.allclose(nearest_tf32(given), wanted, rtol=ulp / 2, atol=0) and torch.equal(nearest_tf32(given)[:4], wanted[:4])
    assert nearest_tf32(torch.tensor([math.nan])).isnan().all()
    random = torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,))
    rounded = nearest_tf32(random)
    assert ((rounded - random).abs() <= random.abs() * ulp / 2).all() and (rounded.view(torch.int32) & 0x1FFF == 0).all()
    storage = Storage(Value("w@x", (2, 500), "f32"), row_major((2, 500)), "w", ((2, 500), (1, 2), 0), numbers=TF32)
    assert torch.equal(prepared(random, storage), rounded.as_strided((2, 500), (1, 2)))
    high, low = prepared(random, replace(storage, value=Value("w@x", (2, 2, 500), "f32"), layout=row_major((2, 2, 500)), numbers=TF32_PAIR))
    view = random.as_strided((2, 500), (1, 2))
    assert torch.equal(high, rounded.as_strided((2, 500), (1, 2)))
    assert torch.equal(low, nearest_tf32((view.double() * (1 + CUT_OFF[TF32_PAIR] * 2.0**-24) - high.double()).float()))
    assert ((high.double() + low.double() - view.double()).abs() <= view.double().abs() * 2.0**-22).all()


@pytest.mark.parametrize("largest", [3e38, 60.0, 1.0, 0.01, 2.0**-126, 2.0**-136, 2.0**-149])
def test_pairs_of_float16(largest: float) -> None:
    """In a unit that follows from the largest element, of which they keep 2^-39, and of themselves 2^-22; parts are ready for products of two."""
    torch.manual_seed(0)
    random = torch.randn(4000) * 2.0 ** torch.randint(-30, 1, (4000,))
    random *= largest / random.abs().max()
    storage = Storage(Value("w@x", (3, 2, 2000), "f16"), row_major((3, 2, 2000)), "w", ((2, 2000), (1, 2), 0), numbers=F16_PAIR)
    raised, high, low = prepared(random, storage)
    (unit,) = prepared(random, replace(storage, value=Value("w@x@unit", (1,), "f32"), layout=row_major((1,)), numbers=F16_SCALE)).tolist()
    assert unit > 0 and raised.isfinite().all() and torch.equal(raised.double(), high.double() * 2**11) and math.frexp(unit)[0] == 0.5
    view = random.as_strided((2, 2000), (1, 2)).double()
    found = (high.double() * 2**11 + low.double()) * unit
    assert ((found - view).abs() <= view.abs() * 2.0**-22 + view.abs().max() * 2.0**-39).all()


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 2.0]])
def test_pairs_of_float16_that_are_zero_or_not_finite(values: list[float]) -> None:
    storage = Storage(Value("w@x", (3, 2), "f16"), row_major((3, 2)), "w", numbers=F16_PAIR)
    _, high, low = prepared(torch.tensor(values), storage)
    unit = prepared(torch.tensor(values), replace(storage, value=Value("unit", (1,), "f32"), layout=row_major((1,)), numbers=F16_SCALE))
    found = (high.double() * 2**11 + low.double()) * unit.double()
    assert 0 < float(unit) < math.inf and found[-1] == values[-1] * (1 + CUT_OFF[F16_PAIR] * 2.0**-24)
    assert (values[0] == 0) == bool(found[0] == 0)
