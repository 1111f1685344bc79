"""Zoo networks compiled for the GPU present and run over poisoned memory, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tests.compiled import poison
from tilewright import zoo
from tilewright.tuning.measure import as_list, double_precision_outputs, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_network_on_the_gpu(name: str) -> None:
    module, example = zoo.build(name)
    torch.manual_seed(5)
    inputs = tuple(x.cuda() for x in zoo.NETWORKS[name].example_inputs(1))
    reference = double_precision_outputs(module.cuda(), inputs)
    with tilewright.compile(module, tuple(x.cuda() for x in example), unsupported="error") as executable:
        poison(executable)
        for _ in range(2):
            assert relative_error(as_list(executable(*inputs)), reference) < 1e-3
