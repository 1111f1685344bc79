"""Zoo networks compiled whole: for this CPU, run over poisoned memory against PyTorch in float64; for an H200, planned and compiled."""

from __future__ import annotations

import warnings

import pytest
import torch

import tilewright
from tests.compiled import poison
from tilewright import zoo
from tilewright.compile import read, source_files
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program
from tilewright.toolchain import Binary, compile_kernels
from tilewright.tuning.measure import as_list, double_precision_outputs, relative_error

SMALL = ("lenet5", "dlrm")
EVERY = [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in zoo.NETWORKS]
SAMPLE = 12  # kernels per network that NVRTC compiles here


@pytest.mark.parametrize("name", EVERY)
def test_network_on_this_cpu(name: str) -> None:
    module, example = zoo.build(name)
    with tilewright.compile(module, example, "native", unsupported="error") as executable:
        assert not [region.name for region in executable.image.program.regions if region.kind == "torch"]
        poison(executable)
        results = []
        for seed in (1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                inputs = zoo.NETWORKS[name].example_inputs(1)
            results.append((inputs, as_list(executable(*inputs))))
    for inputs, found in results:  # results of the first call survive the second
        assert relative_error(found, double_precision_outputs(module, inputs)) < 1e-4


@pytest.mark.parametrize("name", EVERY)
def test_network_for_a_gpu_that_is_not_here(name: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, example = zoo.build(name)
    target = machine("h200")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(read(module, example).graph)
    program = plan_program(graph, target, 1)
    sources = source_files(program, target)
    every = max(1, len(sources) // SAMPLE)
    failures = [result for result in compile_kernels(sources[::every], target) if not isinstance(result, Binary)]
    assert not failures, failures[0]
