"""Attention on tile registers (AMX) in the interpreter: results under any schedule against PyTorch in float64, and which problems it suits."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu_cases import Case, execute
from tests.test_attention import attend, operands
from tests.test_tensor_attention import CASES, ERRORS, case_of
from tilewright.hardware import machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.cpu.tile_attention.schema import TILE_ATTENTION
from tilewright.kernels.cpu.tile_attention.space import TileAttentionSchedule, tile_attention_space
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import form_of

XEON = machine("xeon-sapphire-rapids")
UNSUITABLE = {"odd sizes"}


def schedules_of(case: Case) -> list[TileAttentionSchedule]:
    form = form_of(TILE_ATTENTION, case.problem, XEON)
    assert not isinstance(form, Unsuitable), str(form)
    space, _ = tile_attention_space(form.facts, XEON)
    return [TileAttentionSchedule(int(vectors), int(keys)) for vectors, keys in zip(space["vectors"], space["keys"], strict=True)]


def check(case: Case, schedule: TileAttentionSchedule) -> None:
    """Interprets the region, and compares with the expected result, NaN included."""
    found = (execute(case, lower(case.problem, schedule, XEON)).astype(np.uint32) << 16).view(np.float32)
    scale = max(1.0, float(np.abs(case.expected[np.isfinite(case.expected)]).max(initial=0.0)))
    np.testing.assert_allclose(found.astype(np.float64), case.expected, rtol=0, atol=ERRORS["bf16"] * scale, err_msg=str(schedule))


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNSUITABLE])
def test_results_are_pytorchs(name: str) -> None:
    case = case_of(*CASES[name], "bf16")
    schedules = schedules_of(case)
    for number in range(2):
        check(case, Random(f"{name} {number}").choice(schedules))
