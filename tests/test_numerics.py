"""The numerics that a caller allows: without Winograd's algorithm no plan uses it, and non-finite values appear only where direct sums have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.compiled import by_transforms
from tilewright.cli import main
from tilewright.errors import UnsupportedOption
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import USUAL, AnySchema, Numerics
from tilewright.selection.choice import rank
from tilewright.tuning import choices
from tilewright.tuning.problems import convolution_problem

DIRECT = Numerics(winograd=False)
PROBLEM, LARGE = convolution_problem(64, 64, 28, 28, 3), convolution_problem(64, 64, 28, 28, 7)


@pytest.mark.parametrize("problem", [PROBLEM, LARGE], ids=["winograd", "fourier"])
@pytest.mark.parametrize("target", ["h200", "v100", "x86-avx2", "x86-avx512", "cortex-a53"])
def test_no_candidate_transforms(target: str, problem: Problem) -> None:
    here = machine(target)
    assert any(part.schema.transforms for part in rank(problem, here).parts)
    ranking = rank(problem, here, numerics=DIRECT)
    assert ranking.candidates and not any(part.schema.transforms for part in ranking.parts)
    assert choices.place(problem, here, DIRECT) != choices.place(problem, here, USUAL)


def test_the_reason_is_said_where_nothing_else_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine("h200")
    only = tuple(schema for schema in schemas(here, "contraction") if schema.transforms)
    monkeypatch.setattr("tilewright.selection.choice.schemas", lambda machine, kind: only)
    assert rank(PROBLEM, here).candidates
    with pytest.raises(Unsuitable, match="transforms of blocks are not allowed"):
        rank(PROBLEM, here, numerics=DIRECT)


class Alone(nn.Module):
    """A convolution as case 0 of a bundle, because the tests refer to cases by number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Conv2d(64, 64, 3, padding=1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.parts[0](x)
        return result


def test_values_that_are_not_finite_stay_in_the_windows_that_read_them() -> None:
    module, x = Alone().eval(), torch.randn(1, 64, 28, 28)
    exact = module.double()(x.double()).detach()
    module.float()
    x[0, 5, 9, 9], x[0, 7, 20, 20] = torch.inf, torch.nan
    wanted = ~torch.isfinite(module(x))
    executable = tilewright.compile(module, (x,), target="native", winograd=False)
    assert not by_transforms(executable)
    found = executable(x)
    assert torch.equal(~torch.isfinite(found), wanted) and int(wanted.sum()) == 64 * 18
    assert (found - exact).abs()[~wanted].max() < 1e-5 * exact.abs().max()


def test_the_plan_names_the_cases_that_are_transformed(monkeypatch: pytest.MonkeyPatch) -> None:
    def transforming(machine: Machine, kind: str) -> tuple[AnySchema, ...]:
        return tuple(schema for schema in schemas(machine, kind) if schema.transforms or kind != "contraction")

    monkeypatch.setattr("tilewright.selection.choice.schemas", transforming)
    executable = tilewright.compile(Alone().eval(), (torch.randn(1, 64, 28, 28),), target="native")
    assert by_transforms(executable) == {0: 4}


def test_the_option_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedOption, match="winograd is"):
        tilewright.compile(nn.ReLU(), (torch.randn(3),), winograd="no")  # type: ignore[call-overload]
    compiled = torch.compile(Alone().eval(), backend="tilewright", options={"winograd": False})
    assert compiled(torch.randn(1, 64, 9, 9)).shape == (1, 64, 9, 9)
    assert main(["explain", "tests.test_numerics:model", "--no-winograd", "--target", "h200"]) == 0
    named = [line.strip() for line in capsys.readouterr().out.splitlines() if "winograd" in line]
    transforming = [schema.name for schema in schemas(machine("h200"), "contraction") if schema.transforms]
    assert transforming and sorted(named) == sorted(f"{name}: transforms of blocks are not allowed" for name in transforming)


def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Alone().eval(), (torch.randn(1, 64, 28, 28),)
