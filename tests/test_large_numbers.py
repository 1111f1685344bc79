"""Python numbers beyond float32: infinite in arithmetic on float32 and narrower types, as in PyTorch, in kernels and in folded constants alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import CompilerMissing, NotCompiled
from tilewright.ir.dtypes import FLOAT32_OVERFLOW
from tilewright.ir.expr import const

X = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-39])


class Function(nn.Module):
    """A function of its input and of a constant with the same elements."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("constant", X.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.constant, Tensor)
        return self.function(x), self.function(self.constant) + 0 * x.nan_to_num(0, 0, 0)


ACCEPTED: dict[str, Callable[[Tensor], Tensor]] = {
    "x * 1e39": lambda x: x * 1e39,
    "x * -1e300": lambda x: x * -1e300,
    "x + 1e39": lambda x: x + 1e39,
    "1e39 - x": lambda x: 1e39 - x,
    "x / 1e39": lambda x: x / 1e39,
    "1e39 / x": lambda x: 1e39 / x,
    "x * 1e39 * 1e-39": lambda x: x * 1e39 * 1e-39,
    "x < 1e39": lambda x: (x < 1e39).float(),
    "x >= 1e39": lambda x: (x >= 1e39).float(),
    "x == 1e39": lambda x: (x == 1e39).float(),
    "x > -1e39": lambda x: (x > -1e39).float(),
    "1e39 ** x": lambda x: 1e39**x,
    "fmod": lambda x: torch.fmod(x, 1e39),
    "nan_to_num": lambda x: torch.nan_to_num(x, 1e39, 1e39, -1e39),
    "cumsum": lambda x: (x * 1e39).cumsum(0),
    "bfloat16": lambda x: (x.bfloat16() + 1e39).float(),
    "float16": lambda x: (x.half() * 1e39).float(),
    "float64": lambda x: (x.double() * 1e39 * 1e-39).float(),
    "halfway": lambda x: x.abs() + FLOAT32_OVERFLOW,
    "below": lambda x: (x.abs() * 0).nan_to_num(0) + 3.4028235677973362e38,
}


def compiled(function: Callable[[Tensor], Tensor], target: str = "native") -> tilewright.Executable:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        return tilewright.compile(Function(function).eval(), (X,), target)


@pytest.mark.in_turns(10)
@pytest.mark.parametrize("name", ACCEPTED)
def test_numbers_that_pytorch_accepts(name: str, tmp_path: Path) -> None:
    executable = compiled(ACCEPTED[name])
    for got, expected in zip(executable(X), Function(ACCEPTED[name])(X), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    executable.save(tmp_path / "model.zip")
    for got, expected in zip(tilewright.load(tmp_path / "model.zip")(X), executable(X), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)


def infinite(function: Callable[[Tensor, float], Tensor]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return lambda x: function(x, 1e39), lambda x: function(x, float("inf"))


REFUSED = {
    "clamp(max)": infinite(lambda x, large: x.clamp(max=large)),
    "clamp": infinite(lambda x, large: x.clamp(-large, large)),
    "masked_fill": infinite(lambda x, large: x.masked_fill(x > 0, -large)),
    "softmax of masked_fill": infinite(lambda x, large: x.nan_to_num(0, 0, 0).masked_fill(x > 0, -large).softmax(0)),
    "where": infinite(lambda x, large: torch.where(x > 0, x, large)),
    "full_like": infinite(torch.full_like),
    "fill": infinite(lambda x, large: x.clone().fill_(large)),
    "pad": infinite(lambda x, large: nn.functional.pad(x, (1, 1), value=large)[1:-1].roll(1)),
    "alpha": infinite(lambda x, large: torch.add(x, x, alpha=large)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_pytorch_refuses_are_infinite_too(name: str) -> None:
    large, infinity = REFUSED[name]
    with pytest.raises(RuntimeError, match="without overflow"):
        large(X)
    torch.testing.assert_close(compiled(large)(X)[0], infinity(X), equal_nan=True)


@pytest.mark.parametrize("target", ["h200", "neoverse-n1", "x86-avx2"])
def test_kernels_for_other_targets_compile(target: str) -> None:
    try:
        compiled(lambda x: torch.where(x < 1e39, x * 1e39, x - 1e39).clamp(-1e39, 1e39), target)
    except CompilerMissing as missing:
        pytest.skip(str(missing))


def test_constants_are_infinite_from_where_they_round_to_infinity() -> None:
    largest = torch.finfo(torch.float32).max
    below = float.fromhex("0x1.fffffefffffffp127")
    assert const(FLOAT32_OVERFLOW, "f32").value == float("inf") and const(-1e39, "f32").value == float("-inf")
    assert torch.tensor([FLOAT32_OVERFLOW, below]).tolist() == [float("inf"), largest]
    assert const(below, "f32").value == below and const(1e39, "f64").value == 1e39
