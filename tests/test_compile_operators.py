"""Every operator family compiled for this CPU and run over poisoned memory, against PyTorch in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings

from tests.compiled import check_native
from tests.draws import IN_THIRDS
from tests.operator_cases import FAMILIES, once, seeds

# A seed does not shrink: failures are reported by the case's name.


def check_family(family: str, seed: int, target: str = "native", calls: int = 1, some: slice = slice(None)) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        check_native(FAMILIES[family](Random(seed))[some], target, calls)


@IN_THIRDS
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, third: int) -> None:
    """A fixed sample, whose kernels stay in the cache; two calls, the second on memory that the first used."""
    check_family(family, 1, calls=2, some=slice(third, None, 3))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(once, max_examples=5)
@given(seeds)
def test_family_at_random(family: str, seed: int) -> None:
    check_family(family, seed)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("family", ["products", "normalisations"])
@once
@given(seeds)
def test_one_at_random(family: str, seed: int) -> None:
    check_family(family, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_avx2(family: str) -> None:
    check_family(family, 2, "x86-avx2")
