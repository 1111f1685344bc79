"""Every operator family compiled for this CPU and run over poisoned memory, against PyTorch in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings

from tests.compiled import check_native
from tests.operator_cases import FAMILIES, once, seeds

# A seed does not shrink: failures are reported by the case's name.

# Families of whole networks and large tensors: the operators in them are in other families.
LARGE = ("attentions", "convolution networks", "large maps and windows")


def check_family(family: str, seed: int, target: str = "native", calls: int = 1) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        check_native(FAMILIES[family](Random(seed)), target, calls)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in FAMILIES])
def test_family(family: str) -> None:
    """A fixed sample, whose kernels stay in the cache; two calls, the second on memory that the first used."""
    check_family(family, 1, calls=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(once, max_examples=5)
@given(seeds)
def test_family_at_random(family: str, seed: int) -> None:
    check_family(family, seed)


@pytest.mark.parametrize("family", ["products", "normalisations"])
@once
@given(seeds)
def test_one_at_random(family: str, seed: int) -> None:
    check_family(family, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_avx2(family: str) -> None:
    check_family(family, 2, "x86-avx2")
