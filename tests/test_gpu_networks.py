"""Zoo networks compiled for the GPU present and run over poisoned memory, in each precision, against PyTorch in float64; candidates for tensor cores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewright
from bench.gpu_tensor_layers import layer_problem, ranking_of
from tests.compiled import poison
from tilewright import zoo
from tilewright.hardware import machine
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.tuning.measure import as_list, double_precision_outputs, relative_error
from tilewright.tuning.trials import Job, Trials

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


@pytest.mark.parametrize("precision, tolerance", [("tf32", 1e-2), ("fp16", 1e-2), ("bf16", 8e-2)])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "bert_base"])
def test_network_in_a_lower_precision(name: str, precision: str, tolerance: float) -> None:
    module, inputs = zoo.build(name)
    inputs = tuple(x.cuda() for x in inputs)
    reference = double_precision_outputs(module.cuda(), inputs)
    with tilewright.compile(module, inputs, precision=precision, unsupported="error") as executable:
        assert any(row.schedule.startswith(("tensor cores", "warpgroups")) for row in executable.plan.rows)
        poison(executable)
        for _ in range(2):
            found = as_list(executable(*inputs))
            assert {x.dtype for x in found} == {x.dtype for x in as_list(module(*inputs))}
            assert relative_error(found, reference) < tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-2), (torch.bfloat16, 8e-2)])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "bert_base"])
def test_16_bit_network(name: str, dtype: torch.dtype, tolerance: float) -> None:
    module, inputs = zoo.build(name)
    module, inputs = module.cuda().to(dtype), tuple(x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in inputs)
    reference = double_precision_outputs(module, inputs)
    with tilewright.compile(module, inputs, unsupported="error") as executable:
        assert any(row.schedule.startswith(("tensor cores", "warpgroups")) for row in executable.plan.rows)
        poison(executable)
        assert relative_error(as_list(executable(*inputs)), reference) < tolerance


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_candidates_for_tensor_cores(precision: str) -> None:
    """The measuring process compares each with float64 before it times it."""
    here, jobs = machine("cuda"), []
    for name in ("D1", "R7", "R12"):
        problem = layer_problem(name, 2, precision)
        ranking = ranking_of(problem, here, precision)
        number = next(number for number, part in enumerate(ranking.parts) if part.schema is TENSOR_CORES)
        own = np.arange(*ranking.starts[number : number + 2])
        positions = np.random.default_rng(0).choice(own, min(20, len(own)), replace=False)
        jobs += [Job(problem, ranking.choice(int(position)).schedule, name) for position in positions]
    with Trials(here) as trials:
        wrong = [(str(outcome.job.schedule), outcome.reason) for outcome in trials.measure(jobs) if outcome.status != "measured"]
    assert not wrong
