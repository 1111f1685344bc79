"""Convolutions by transforms of blocks on CPUs against PyTorch in float64: random shapes and schedules in the interpreter, whole layers as compiled code."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.compiled import Case as ModuleCase
from tests.compiled import check_native
from tests.draws import draws
from tests.gpu_cases import check, convolution_case
from tilewright.hardware import machine
from tilewright.ir.layout import row_major
from tilewright.ir.region import Unsuitable
from tilewright.kernels.block_transforms import of_each, transforms_of, works
from tilewright.kernels.columns import length, row
from tilewright.kernels.cpu.winograd.lower import cpu_winograd_form
from tilewright.kernels.cpu.winograd.schema import WINOGRAD
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts, CpuWinogradSchedule, cpu_winograd_space, schedule_of, working_bytes
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Options
from tilewright.kernels.winograd_transform import Winograd
from tilewright.selection.choice import rank
from tilewright.selection.ranking import estimated

NEON, AVX2 = machine("neoverse-n1"), machine("x86-avx2")


def random_schedule(facts: CpuWinogradFacts, target: Any, threads: int, seed: int) -> CpuWinogradSchedule | None:
    """A schedule with a random transform among those that have any."""
    candidates, _ = cpu_winograd_space(facts, target, threads)
    if not length(candidates):
        return None
    generator = np.random.default_rng(seed)
    masks = [which for which, _ in of_each(candidates)]
    position = int(generator.choice(np.flatnonzero(masks[generator.integers(len(masks))])))
    return schedule_of(target.vector_lanes(), **row(candidates, position))


FILTERS = (*((size, size) for size in (3, 3, 5, 7, 9, 11, 6)), (1, 3), (3, 1), (1, 5), (5, 1), (1, 7), (7, 1), (3, 5))
DRAWN = dict(
    target=st.sampled_from([NEON, AVX2]),
    batch=st.sampled_from([1, 2, 3]),
    channels=st.sampled_from([1, 2, 3]),
    outputs=st.sampled_from([1, 2, 3, 5]),
    filter_shape=st.sampled_from(FILTERS),
    size=st.tuples(st.integers(3, 13), st.integers(3, 13)),
    padding=st.sampled_from([0, 1, 1, 2]),
    epilogue=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)


def examine(
    target: Any, batch: int, channels: int, outputs: int, filter_shape: Any, size: Any, padding: int, epilogue: Any, threads: int, seed: int
) -> None:
    """Checks a random schedule; `channels` and `outputs` are numbers of vectors."""
    lanes = target.vector_lanes()
    size = tuple(max(extent, taps + 2 - 2 * padding) for extent, taps in zip(size, filter_shape, strict=True))  # no outputs of one row
    sizes: dict[str, Any] = dict(channels=channels * lanes, outputs=outputs * lanes, filter_size=filter_shape, size=size, padding=padding)
    case = convolution_case(batch=batch, **sizes, epilogue=epilogue, seed=seed)
    _, problem = cpu_winograd_form(case.problem, target)
    schedule = random_schedule(problem, target, threads, seed)
    if schedule is not None:
        check(case, lower(case.problem, schedule, target))


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(**DRAWN)
def test_random_convolutions_and_schedules(**drawn: Any) -> None:
    examine(**drawn)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, phases=(Phase.generate,))
@given(**DRAWN)
def test_more_random_convolutions_and_schedules(**drawn: Any) -> None:
    examine(**drawn)


MEMBERS = [(2, 3, 3, 0), (4, 3, 3, 0), (2, 5, 5, 0), (4, 5, 5, 0), (8, 5, 5, 1), (10, 7, 7, 1), (4, 3, 5, 0), (6, 1, 3, 0), (4, 1, 7, 0)]
"""Transforms as fields of schedules: output tile, taps of the filter down and across, Fourier."""


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("member", MEMBERS)
def test_the_output_may_have_a_halo(member: tuple[int, int, int, int]) -> None:
    size, filter_y, filter_x, fourier = member
    case = convolution_case(channels=8, outputs=16, size=(6, 9), filter_size=(filter_y, filter_x), padding=(filter_y // 2, filter_x // 2))
    layouts = dict(case.layouts) | {"out": case.layouts["out"].with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))}
    case = replace(case, layouts=layouts)
    check(case, lower(case.problem, CpuWinogradSchedule(size, 2, 2, 2, 2, 1, 8, filter_y, filter_x, fourier), AVX2))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("epilogue", [False, True])
def test_the_output_may_be_row_major(member: tuple[int, int, int, int], epilogue: bool) -> None:
    size, filter_y, filter_x, fourier = member
    sizes: dict[str, Any] = dict(channels=8, outputs=24, size=(7, 10), filter_size=(filter_y, filter_x), padding=(filter_y // 2, filter_x // 2))
    case = convolution_case(batch=2, **sizes, epilogue=epilogue)
    case = replace(case, layouts=dict(case.layouts) | {"out": row_major(case.values["out"].shape)})
    check(case, lower(case.problem, CpuWinogradSchedule(size, 3, 2, 2, 1, 2, 8, filter_y, filter_x, fourier), AVX2))


@pytest.mark.parametrize(
    "changed, why",
    [
        (dict(stride=2), "stride 1"),
        (dict(filter_size=1, padding=0), "two dimensions"),
        (dict(filter_size=2), "no transform for the filters of 2 x 2"),
        (dict(channels=12), "no multiple of 8"),
        (dict(outputs=20), "no multiple of 8"),
        (dict(constant=False), "constant filters"),
        (dict(halo=False), "guarded"),
    ],
)
def test_what_is_no_case_for_it(changed: dict[str, int], why: str) -> None:
    options: dict[str, Any] = {"channels": 16, "outputs": 16, **changed}
    case = convolution_case(**options)
    with pytest.raises(Unsuitable, match=why):
        cpu_winograd_form(case.problem, AVX2)
    assert len(rank(case.problem, AVX2, 2).parts) == 1


def test_the_space_keeps_its_rules() -> None:
    facts = CpuWinogradFacts(1, 28, 28, 128, 96)
    candidates, rejected = cpu_winograd_space(facts, AVX2, 2)
    assert length(candidates) and rejected
    for number in range(length(candidates)):
        schedule = schedule_of(8, **row(candidates, number))
        assert (schedule.tile + 1) * schedule.vectors < AVX2.vector_registers
        assert schedule.tile_parts * schedule.panel_parts == 2
        assert (schedule.blocks - 1) * schedule.tile < facts.tiles(candidates)[number]
    level_2 = AVX2.cache(2)
    assert level_2 is not None and working_bytes(facts, candidates, 8).max() <= 0.75 * level_2.bytes


def test_operations_of_the_transforms() -> None:
    """Lavin and Gray, section 4.1: 32 additions for an input tile of F(2x2, 3x3), 24 for the output transform."""
    assert [work.arithmetic for work in works(Winograd(2, (3, 3)))] == [32, 24]
    assert works(Winograd(4, (3, 3)))[0].arithmetic < 6 * 6 * 12
    for filter_size in (5, 7, 9, 11):
        for transform in transforms_of((filter_size, filter_size)):
            # below the products with the matrix of the transform, and for the outputs less than for the inputs
            inputs, outputs = works(transform)
            assert outputs.arithmetic < inputs.arithmetic < prod(transform.span) * 24
            assert inputs.fused < inputs.arithmetic and (inputs.scratch > 0) == (transform.scratch > 0)


def test_predictions_grow_with_the_work() -> None:
    small, large = CpuWinogradFacts(1, 28, 28, 64, 64), CpuWinogradFacts(1, 28, 28, 128, 128)
    candidates, _ = cpu_winograd_space(small, AVX2, 2)
    first, second = (estimated(WINOGRAD, problem, candidates, AVX2, Options(2)).estimate for problem in (small, large))
    assert (second.seconds > first.seconds).all() and (first.seconds > 0).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_of_networks_as_compiled_code(threads: int) -> None:
    """The models' choice as compiled code, with the epilogue of a residual block."""

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
            self.norm = nn.BatchNorm2d(channels)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.norm(self.second(torch.relu(self.first(x)))))

    module = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), Block(64), nn.Conv2d(64, 96, 3)).eval()
    x = torch.randn(2, 3, 27, 38)
    executable = tilewright.compile(module, (x,), target="native", threads=threads)
    schedules = [region.schedule for region in executable.image.program.regions]
    executable.close()
    assert sum(schedule.startswith("winograd") for schedule in schedules) == 3, schedules
    check_native([ModuleCase("block", module, (x,), 3e-5)])
