"""Convolutions by transforms of blocks whose products are of pairs: kernels in the interpreter against float64, candidates, and compiled code."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bench.gpu_tensor_layers import layer_problem
from bench.pair_errors import UNIT
from tests.draws import draws
from tests.test_gpu_half import planned
from tests.test_gpu_warpgroup import ONE, compiles
from tests.test_tf32_pairs import H200, HALF_PAIRS, PAIRS, exact, picking, results
from tilewright.hardware import machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length, row
from tilewright.kernels.gpu.counts import HalfPairCounts, PairCounts
from tilewright.kernels.gpu.winograd_pairs.schema import WINOGRAD_PAIRS
from tilewright.kernels.gpu.winograd_pairs.space import PairedWinogradSchedule
from tilewright.kernels.schema import Numerics, Options, form_of
from tilewright.runtime.loadable import loadable_kernel
from tilewright.selection.choice import rank
from tilewright.tuning.trials import Job, Trials

ERROR = 64 * UNIT
"""Relative to the largest result: tiles of 4 x 4 results make errors larger (`test_gpu_winograd.py`)."""


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "schedule",
    [
        PairedWinogradSchedule(2, 64, 1, 16, 1, 2),
        PairedWinogradSchedule(4, 64, 4, 32, 2, 3),
        PairedWinogradSchedule(4, 64, 2, 64, 1, 3, staged=1, persistent=1),
        PairedWinogradSchedule(2, 256, 2, 32, 1, 2, cluster=2),
        PairedWinogradSchedule(4, 64, 1, 32, 1, 2, split=2),
        PairedWinogradSchedule(2, 64, 1, 16, 1, 2, pairs=2),
        PairedWinogradSchedule(4, 64, 1, 64, 2, 3, cluster=2, persistent=1, pairs=2),
        PairedWinogradSchedule(4, 64, 1, 32, 1, 2, split=2, pairs=2),
    ],
    ids=str,
)
def test_schedules(schedule: PairedWinogradSchedule) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(8, 72, 1), nn.Conv2d(72, 40, 3, padding=1), nn.ReLU()).eval(), (torch.randn(2, 8, 11, 9),)
    used: list[PairedWinogradSchedule] = []
    program = planned(module, inputs, ONE, picking(schedule, used))
    assert used == [schedule]
    expected = exact(module, inputs)
    assert (results(module, inputs, program).double() - expected).abs().max() <= ERROR * expected.abs().max()
    assert not any(loadable_kernel(kernel).tf32 for lowered in program.regions for kernel in lowered.kernels)
    compiles(program)


@settings(max_examples=draws(6), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31))
def test_any_candidate_is_as_accurate_as_in_float32(seed: int) -> None:
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels, outputs, taps = random.choice((64, 72, 100)), random.choice((20, 40, 72)), random.choice(((3, 3), (3, 3), (5, 5), (1, 3)))
        padding = random.choice(((0, 0), (taps[0] // 2, taps[1] // 2)))
        layer = nn.Conv2d(channels, outputs, taps, padding=padding, bias=random.random() < 0.5)
        module = nn.Sequential(nn.Conv2d(8, channels, 1), layer, nn.SiLU()).eval()
        inputs = (torch.randn(random.choice((1, 3)), 8, random.randint(7, 13), random.randint(7, 13)),)
    used: list[PairedWinogradSchedule] = []
    pick = picking(lambda count: random.randrange(max(count, 1)), used, WINOGRAD_PAIRS, random.choice((PAIRS, HALF_PAIRS)))
    program = planned(module, inputs, random.choice((H200, ONE)), pick)
    expected = exact(module, inputs)
    error = (results(module, inputs, program).double() - expected).abs().max()
    assert error <= 4 * ERROR * max(1.0, float(expected.abs().max())), used


@pytest.mark.parametrize(
    "schedule",
    [
        PairedWinogradSchedule(2, 64, 1, 16, 1, 2, pairs=2),
        PairedWinogradSchedule(4, 64, 1, 16, 1, 2, pairs=2),
        PairedWinogradSchedule(12, 64, 1, 16, 1, 2, filter_y=5, filter_x=5, fourier=1, pairs=2),
    ],
    ids=str,
)
def test_pairs_of_float16_have_the_range_of_the_input(schedule: PairedWinogradSchedule) -> None:
    """Points are larger than elements of the input: of all that are equal and in any signs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 72, 1, bias=False), nn.Conv2d(72, 16, schedule.filter_x, padding=1)).eval()
    module[0].weight.data = torch.eye(72, 8)[:, :, None, None]
    for x in (torch.ones(1, 8, 13, 12), torch.rand(1, 8, 13, 12).round() * 2 - 1):
        inputs, used = (x * 65_000,), list[PairedWinogradSchedule]()
        program = planned(module, inputs, H200, picking(schedule, used, numerics=HALF_PAIRS))
        assert used == [schedule]
        expected = exact(module, inputs)
        assert (results(module, inputs, program).double() - expected).abs().max() <= 4 * ERROR * expected.abs().max()


def test_candidates() -> None:
    problem = layer_problem("R9", 64, "fp32-tensor")
    form = form_of(WINOGRAD_PAIRS, problem, H200)
    assert not isinstance(form, Unsuitable)
    for numerics in (Numerics(), Numerics(tf32=True), Numerics(tf32=True, tf32_pairs=True), Numerics(tf32_pairs=True, winograd=False)):
        assert all(part.schema is not WINOGRAD_PAIRS for part in rank(problem, H200, numerics=numerics, learned=False).parts)
    candidates, _ = WINOGRAD_PAIRS.space(form.facts, H200, Options(numerics=PAIRS))
    assert length(candidates) and set(np.unique(candidates["output_tile"])) >= {2, 4}
    ranking = rank(problem, H200, numerics=PAIRS, learned=False)
    part = next(part for part in ranking.parts if part.schema is WINOGRAD_PAIRS)
    assert WINOGRAD_PAIRS.bound is not None
    assert isinstance(part.counts, PairCounts)
    bound = WINOGRAD_PAIRS.bound(part.facts, part.candidates, part.counts, H200, 1.0)
    assert (bound.seconds <= part.estimate.seconds).all() and (part.estimate.seconds > 0).all()
    half = next(part for part in rank(problem, H200, numerics=HALF_PAIRS, learned=False).parts if part.schema is WINOGRAD_PAIRS)
    assert type(half.counts) is HalfPairCounts and set(half.candidates["pairs"]) == {2} and half.estimate.seconds.min() < part.estimate.seconds.min()
    assert (WINOGRAD_PAIRS.bound(half.facts, half.candidates, half.counts, H200, 1.0).seconds <= half.estimate.seconds).all()
    a100 = rank(problem, machine("a100"), numerics=PAIRS, learned=False)
    assert all(part.schema is not WINOGRAD_PAIRS for part in a100.parts)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", [PAIRS, HALF_PAIRS], ids=["tf32", "f16"])
@pytest.mark.parametrize("name", ["D6", "R12"])
def test_candidates_on_a_gpu(name: str, numerics: Numerics) -> None:
    """The measuring process compares each with float64, with the tolerance of float32, before it times it."""
    here = machine("cuda")
    problem = layer_problem(name, 2, "fp32-tensor")
    part = next(part for part in rank(problem, here, numerics=numerics, learned=False).parts if part.schema is WINOGRAD_PAIRS)
    positions = Random(name).sample(range(length(part.candidates)), 12)
    with Trials(here) as trials:
        jobs = [Job(problem, part.schema.schedule_of(row(part.candidates, position), here), name) for position in positions]
        outcomes = list(trials.measure(jobs))
    assert not [(str(outcome.job.schedule), outcome.reason) for outcome in outcomes if outcome.status != "measured"]
