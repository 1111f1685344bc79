"""Whole programs in the interpreter, over poisoned buffers: right results, and no reports, for GPUs and CPUs."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings

from tests.interpreted import check_interpreted
from tests.operator_cases import FAMILIES, once, seeds
from tilewright.hardware import machine

# The quickest families, for fast test runs.
QUICK = ("products", "poolings", "resamplings", "other types")


def check(family: str, seed: int, target: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        check_interpreted(FAMILIES[family](Random(seed)), machine(target))


@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_gpu_program(family: str) -> None:
    check(family, 1, "h200")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(once, max_examples=3)
@given(seeds)
def test_gpu_program_at_random(family: str, seed: int) -> None:
    check(family, seed, "h200")


@pytest.mark.parametrize(
    "family",
    [name if name in ("products", "poolings") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "large reductions"],
)
def test_cpu_program(family: str) -> None:
    check(family, 3, "x86-avx512")
