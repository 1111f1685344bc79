"""Operators on complex tensors run through PyTorch, those around them in our kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.draws import draws
from tilewright.errors import NotCompiled
from tilewright.models import random_tensor


class Spectrum(nn.Module):
    """A linear layer, a filter in the frequency domain, and the spectrum itself in several forms."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, columns)
        self.filter = nn.Parameter(torch.randn(rows, columns // 2 + 1, dtype=torch.complex64))
        self.size = rows, columns

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        spectrum = torch.fft.rfft2(self.linear(x))
        product = spectrum * self.filter * 1j
        return torch.fft.irfft2(product, s=self.size) + x, spectrum, product.conj(), product.real, product.abs(), self.filter


class Rotary(nn.Module):
    """Rotary embedding by complex numbers, as in the first Llama."""

    def forward(self, x: Tensor, rotations: Tensor) -> tuple[Tensor, ...]:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotations).flatten(-2) * 2, rotations.conj(), rotations


class Doubled(nn.Module):
    """Changes its first input."""

    def forward(self, c: Tensor, x: Tensor) -> Tensor:
        c.mul_(2)
        return x * 2


def compiled(module: nn.Module, *inputs: Tensor) -> Any:
    with pytest.warns(NotCompiled, match="computes with c.*\n.*use operators that have kernels") as caught:
        executable = tilewright.compile(module.eval(), inputs)
    assert [warning.filename for warning in caught] == [__file__]
    return executable


def close(got: Any, want: Any) -> None:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, check_dtype=False)


@settings(max_examples=draws(5), deadline=None)
@given(batch=st.integers(1, 3), rows=st.integers(2, 7), columns=st.sampled_from([2, 4, 6, 10]))
def test_a_spectrum(batch: int, rows: int, columns: int) -> None:
    module, x = Spectrum(rows, columns), torch.randn(batch, rows, columns)
    executable = compiled(module, x)
    wide = Spectrum(rows, columns)
    wide.load_state_dict(module.state_dict())
    wide.linear.double()
    with torch.no_grad():
        close(executable(x), (value.to(ours.dtype) for value, ours in zip(wide(x.double()), executable(x), strict=True)))
    assert executable.verify(x).passed
    assert any(row.kernels for row in executable.plan.rows)


def test_inputs_in_any_memory() -> None:
    x, rotations = torch.randn(2, 3, 4, 8), random_tensor((4, 4), torch.complex64, torch.Generator())
    executable = compiled(Rotary(), x, rotations)
    for same in (rotations, rotations.conj(), rotations.t(), torch.randn(8, 4, dtype=torch.complex64)[::2]):
        close(executable(x, same), Rotary()(x, same))


def test_an_input_that_changes() -> None:
    c, x = torch.randn(4, dtype=torch.complex128), torch.randn(3)
    executable = compiled(Doubled(), c, x)
    before = c.clone()
    close([executable(c, x)], [x * 2])
    close([c], [before * 2])


def test_artifacts_hold_them(tmp_path: Path) -> None:
    module, x = Spectrum(4, 8), torch.randn(2, 4, 8)
    compiled(module, x).save(tmp_path / "spectrum.zip")
    with torch.no_grad():
        close(tilewright.load(tmp_path / "spectrum.zip")(x), module(x))
