"""Depthwise convolutions on CPUs against PyTorch in float64: random shapes and schedules in the interpreter; problems that the schema rejects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilewright
from bench.instruction_counts import compiled, executed
from tests.compiled import without_chains
from tests.draws import draws
from tests.gpu_cases import check
from tilewright.analysis.cpu.caches import cache_misses
from tilewright.hardware import machine
from tilewright.ir.kernel import Allocate, For, statements
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length, row
from tilewright.kernels.cpu.depthwise.lower import depthwise_form
from tilewright.kernels.cpu.depthwise.schema import DEPTHWISE
from tilewright.kernels.cpu.depthwise.space import (
    MOST_PRODUCTS,
    CpuDepthwiseFacts,
    CpuDepthwiseSchedule,
    cpu_depthwise_space,
    filters_held,
    schedule_of,
)
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Options
from tilewright.selection.choice import rank
from tilewright.selection.ranking import estimated
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.trial_reference import reference_results

NEON, AVX2, AVX512 = machine("neoverse-n1"), machine("x86-avx2"), machine("x86-avx512")


def case_of(channels: int, size: tuple[int, int], filter_size: int, stride: int, seed: int = 0, outputs: int = 0, **more: int) -> Any:
    """A case as in `gpu_cases`: the region, random inputs, and its results in float64."""
    from tests.gpu_cases import Case

    problem = convolution_problem(outputs or channels, channels, *size, filter_size, stride, groups=channels, **more)
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: torch.randn(problem.values[name].shape, generator=generator) for name in problem.region.inputs}
    expected = reference_results(problem, inputs)[problem.region.outputs[0]]
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    return Case(problem.region, problem.layouts, problem.values, arrays, expected.numpy(), problem.constants)


DRAWN = dict(
    target=st.sampled_from([NEON, AVX2, AVX512]),
    vectors=st.integers(1, 3),
    size=st.tuples(st.integers(1, 9), st.integers(2, 17)),
    filter_size=st.sampled_from([1, 2, 3, 3, 5]),
    stride=st.sampled_from([1, 1, 2, 3]),
    dilation=st.sampled_from([1, 1, 2]),
    batch=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)


def examine(target: Any, vectors: Any, size: Any, filter_size: int, stride: int, dilation: Any, batch: int, seed: int) -> None:
    case = case_of(vectors * target.vector_lanes(), size, filter_size, stride, seed, dilation=dilation, batch=batch)
    try:
        _, problem = depthwise_form(case.problem, target)
    except Unsuitable:
        assert filter_size == 1  # no taps: a map
        return
    candidates, _ = cpu_depthwise_space(problem, target)
    position = int(np.random.default_rng(seed).integers(length(candidates)))
    check(case, lower(case.problem, schedule_of(target.vector_lanes(), **row(candidates, position)), target))


@settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(**DRAWN)
def test_random_shapes_and_schedules(**drawn: Any) -> None:
    examine(**drawn)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, phases=(Phase.generate,))
@given(**DRAWN)
def test_more_random_shapes_and_schedules(**drawn: Any) -> None:
    examine(**drawn)


@pytest.mark.parametrize("held", [True, False])
def test_the_filter_stays_in_registers_or_not(held: bool) -> None:
    case = case_of(32, (6, 11), 3, 1)
    schedule = CpuDepthwiseSchedule(1, 4, 1 if held else 2, 16, "c")
    lowered = lower(case.problem, schedule, AVX512)
    check(case, lowered)
    buffers = [s.buffer for s in statements(lowered.kernels[0].body) if isinstance(s, Allocate)]
    assert (9 * 16 in {buffer.size for buffer in buffers}) == held


@pytest.mark.parametrize("stride, dilation", [(1, 1), (2, 1), (1, 2)])
def test_rows_of_a_large_filter_are_a_loop(stride: int, dilation: int) -> None:
    case = case_of(16, (12, 15), 13, stride, dilation=dilation)
    lowered = lower(case.problem, CpuDepthwiseSchedule(1, 7, 1, 16, "y"), AVX512)
    assert 7 * 13 * 13 > MOST_PRODUCTS and any(
        isinstance(part, For) and part.kind == "serial" and part.variable.extent == 13 for part in statements(lowered.kernels[0].body)
    )
    check(case, lowered)
    _, facts = depthwise_form(case.problem, AVX512)
    candidates, _ = cpu_depthwise_space(facts, AVX512)
    products = candidates["tile_rows"] * candidates["tile_columns"] * 13 * 13
    assert (products > MOST_PRODUCTS).any() and (candidates["tile_rows"][products > MOST_PRODUCTS] == 1).all()


@pytest.mark.parametrize("changed, why", [(dict(channels=20), "whole vectors"), (dict(outputs=32), "whole vectors|one filter|in steps")])
def test_what_is_declined_stays_a_window(changed: dict[str, int], why: str) -> None:
    case = case_of(**{"channels": 16, "size": (5, 6), "filter_size": 3, "stride": 1, **changed})  # type: ignore[arg-type]
    case = replace(case, region=replace(case.region, kind="window"))
    with pytest.raises(Unsuitable, match=why):
        depthwise_form(case.problem, AVX512)
    assert str(rank(case.problem, AVX512, 2).first().schedule).startswith("loops")


def test_pooling_is_declined() -> None:
    case = case_of(16, (5, 6), 3, 1)
    pooled = replace(case.region.steps[0], combiner="max")
    with pytest.raises(Unsuitable, match="one sum"):
        depthwise_form(replace(case, region=replace(case.region, steps=(pooled, *case.region.steps[1:]))).problem, AVX512)


@pytest.mark.parametrize("channels, size, stride", [(32, 112, 1), (96, 56, 2), (144, 56, 1), (192, 28, 1), (384, 14, 1), (960, 7, 1)])
def test_the_space_of_a_typical_layer(channels: int, size: int, stride: int) -> None:
    facts = CpuDepthwiseFacts(
        1, size, size, channels // 16, (3, 3), (stride, 3), (stride, 3), 4 * channels * (size * stride) ** 2, 4 * channels * size**2
    )
    candidates, rejected = cpu_depthwise_space(facts, AVX512)
    assert length(candidates) >= 50 and rejected
    for number in range(length(candidates)):
        schedule = schedule_of(16, **row(candidates, number))
        assert schedule.tile_rows * schedule.tile_columns + 2 <= AVX512.vector_registers and facts.vectors % schedule.vectors == 0
    seconds = estimated(DEPTHWISE, facts, candidates, AVX512, Options(2)).estimate.seconds
    assert (seconds > 0).all() and len(np.unique(seconds)) > 10
    small = {"tile_rows": np.array([1]), "tile_columns": np.array([2]), "vectors": np.array([1]), "order": np.array([0])}
    assert filters_held(facts, small, AVX512).all() and not filters_held(facts, {**small, "vectors": np.array([2])}, AVX512).any()


@pytest.mark.slow
def test_a_whole_network_of_them() -> None:
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(32, 32, 3, 2, 1, groups=32), torch.nn.ReLU6(), torch.nn.Conv2d(32, 32, 5, 1, 4, dilation=2, groups=32), torch.nn.Sigmoid(),
        torch.nn.Conv2d(32, 64, 3, 1, 1, groups=32), torch.nn.Conv2d(64, 24, 1), torch.nn.Conv2d(24, 24, 3, 1, 1, groups=24),
    ]  # fmt: skip
    module = torch.nn.Sequential(*layers).eval()
    x = torch.randn(2, 32, 19, 22)
    with without_chains():
        apart = tilewright.compile(module, (x,))
    assert sum("depthwise" in region.schedule for region in apart.image.program.regions) >= 2
    results = [executable(x).double() for executable in (apart, tilewright.compile(module, (x,)))]
    expected = module.double()(x.double())
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_analysis_counts_its_kernels(stride: int, tmp_path: Path) -> None:
    """Multiply-adds of the assembly: one for each tap, pixel and vector; misses of a cache that holds everything: each line once."""
    case = case_of(32, (12, 14), 3, stride)
    (kernel,) = lower(case.problem, CpuDepthwiseSchedule(2, 7, 2, 16, "y"), AVX512).kernels
    found = cache_misses(kernel, AVX512).levels[-1]
    assert found.total == sum(found.footprint.values()) > 12 * 14 * 2
    counts = executed(kernel, compiled([kernel], AVX512, tmp_path), AVX512.architecture)
    assert counts.fma == 12 * 14 * 2 * 9
