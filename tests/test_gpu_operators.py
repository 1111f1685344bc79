"""Every operator family compiled for the GPU present and run over poisoned memory, against PyTorch in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.compiled import check_native
from tests.operator_cases import FAMILIES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_family_on_the_gpu(family: str, seed: int) -> None:
    torch.manual_seed(1000 + seed)
    check_native(FAMILIES[family](Random(1000 + seed)), target="cuda", calls=2)
