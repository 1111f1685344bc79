"""Convolutions by warpgroups over patches: candidates over random layers in the interpreter, against PyTorch in float64; a GPU runs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.interpreted import run_program
from tests.test_gpu_half import check
from tests.test_gpu_warpgroup import FEW, ONE, TF32, Block, as_interpreted, check_infinite_group, compiles, drawn_by, in_turns, made_of, program_of
from tests.test_gpu_warpgroup_space import reason as reason_of
from tests.test_half_modules import EACH_TYPE, TYPES
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule, patch_rows
from tilewright.kernels.schema import Options, form_of
from tilewright.tuning.dataset import layer_problem
from tilewright.tuning.problems import convolution_problem

H200 = machine("h200")

SCHEDULES = (
    PatchSchedule(32, 1, 3, 1, 5, 9),
    PatchSchedule(96, 2, 3, 2, 10, 9),
    PatchSchedule(16, 4, 4, 2, 10, 9),
    PatchSchedule(64, 1, 2, 2, 4, 9, swapped=1),
    PatchSchedule(128, 2, 3, 1, 10, 9, swapped=1),
    PatchSchedule(32, 1, 2, 1, 5, 5, split=2),
    PatchSchedule(64, 1, 2, 1, 10, 3, swapped=1, split=2),
    PatchSchedule(32, 1, 3, 1, 4, 9, cluster=2),
    PatchSchedule(48, 1, 2, 2, 4, 5, swapped=1, split=2, cluster=2),
    PatchSchedule(48, 2, 2, 1, 10, 9, staged=1),
    PatchSchedule(128, 2, 3, 1, 10, 9, swapped=1, cluster=2, staged=1),
    PatchSchedule(32, 2, 3, 1, 10, 9, split=2, meeting=1),
    PatchSchedule(64, 1, 2, 1, 10, 3, swapped=1, split=2, meeting=1),
)
"""One patch and two, both orders of the factors, each number of consumers, tiles that do not divide the image, split channels, whose parts meet or not,
clusters, and sums through shared memory."""

IN_TURNS = (
    (PatchSchedule(128, 2, 3, 1, 10, 9, persistent=1), ONE),
    (PatchSchedule(96, 2, 8, 2, 10, 9, staged=1, persistent=1), ONE),
    (PatchSchedule(128, 2, 4, 2, 10, 9, swapped=1, cluster=2, staged=1, persistent=1), FEW),
)
"""Blocks that compute several tiles, one patch and two, and for which GPU."""


def tiled(dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution of several tiles."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(16, 72, 1), nn.Conv2d(72, 140, (3, 2), padding=1), nn.Hardswish()).to(dtype)
    return layers, (torch.randn(3, 16, 10, 9).to(dtype),)


@pytest.mark.in_turns(2)
@EACH_TYPE
@pytest.mark.parametrize("schedule, target", IN_TURNS, ids=lambda value: "" if isinstance(value, Machine) else str(value))
def test_tiles_in_turns(schedule: PatchSchedule, target: Machine, dtype: torch.dtype) -> None:
    module, inputs = tiled(dtype)
    made = program(module, inputs, schedule, [], target=target)
    in_turns(made)
    check(module, inputs, made)
    compiles(made)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3x3": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 72, 3, padding=1), nn.ReLU()), (2, 16, 9, 8)),
    "5x5": (lambda: nn.Sequential(nn.Conv2d(16, 40, 1), nn.Conv2d(40, 24, 5, padding=2)), (1, 16, 11, 10)),
    "1x7": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, (1, 7), padding=(0, 3))), (2, 16, 5, 12)),
    "no padding": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, 3)), (2, 16, 9, 8)),
    "dilation": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, (3, 2), padding=2, dilation=2)), (1, 16, 9, 8)),
    "1-D": (lambda: nn.Sequential(nn.Conv1d(16, 32, 1), nn.Conv1d(32, 24, 5, padding=2)), (2, 16, 30)),
    "3-D": (lambda: nn.Sequential(nn.Conv3d(16, 32, 1), nn.Conv3d(32, 24, 3, padding=1)), (1, 16, 4, 5, 6)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 40, 3, padding=1, groups=2), nn.ReLU()), (2, 16, 9, 8)),
}


def program(module: nn.Module, inputs: tuple[torch.Tensor, ...], pick: Any, used: list[PatchSchedule], **given: Any) -> Any:
    return program_of(module, inputs, pick, used, schema=WARPGROUP_PATCH, **given)


@pytest.mark.in_turns(3)
@EACH_TYPE
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS[layer], dtype)
    used: list[PatchSchedule] = []
    made = program(module, inputs, lambda count: count // 2, used)
    assert used
    check(module, inputs, made)
    compiles(made)


@pytest.mark.in_turns(5)
@EACH_TYPE
@pytest.mark.parametrize("groups", [1, 2], ids=["", "groups"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: PatchSchedule, groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    channels = 72 if groups == 1 else 192
    layers = nn.Conv2d(16, channels, 1), nn.Conv2d(channels, 40, (3, 2), padding=1, groups=groups), nn.Hardswish()
    module, inputs = nn.Sequential(*layers).to(dtype), (torch.randn(1, 16, 10, 9).to(dtype),)
    used: list[PatchSchedule] = []
    made = program(module, inputs, schedule, used)
    assert set(used) == {schedule}
    check(module, inputs, made)
    compiles(made)


def test_infinite_channels_of_a_group_stay_there() -> None:
    assert check_infinite_group(48, 3, PatchSchedule(16, 1, 2, 1, 3, 4), WARPGROUP_PATCH)


@pytest.mark.parametrize("layer", ["3x3", "1-D", "groups"])
def test_layers_in_tf32(layer: str) -> None:
    """10 bits of mantissa, cut off: an error of 2^-10 per factor."""
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    module, inputs = make().eval(), (torch.randn(shape),)
    used: list[PatchSchedule] = []
    made = program(module, inputs, lambda count: count // 3, used, numerics=TF32)
    assert used
    results, faults = run_program(made, {name: x.numpy() for name, x in zip(made.graph.inputs, inputs, strict=True)})
    assert not faults
    expected = module.double()(inputs[0].double()).detach().numpy()
    error = abs(results[made.graph.outputs[0]].reshape(expected.shape) - expected).max()
    assert 1e-7 < error < 4 * 2.0**-10 * abs(expected).max()


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_a_residual_that_is_a_view_of_a_concatenation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(16, 16, 1), Block(16)).to(dtype).eval(), (torch.randn(2, 16, 7, 9).to(dtype),)
    used: list[PatchSchedule] = []
    made = program(module, inputs, lambda count: count // 2, used)
    assert len(used) >= 2
    check(module, inputs, made)


def drawn(random: Random) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution of random sizes with stride 1 and an epilogue."""

    def size(*choices: int) -> int:
        return random.choice(choices)

    channels, outputs, taps = size(8, 40, 160, 150), size(5, 8, 24, 80), size(2, 3)
    options = {"dilation": size(1, 1, 2), "padding": size(0, 1, taps // 2), "groups": gcd(channels, outputs, size(1, 2, 5))}
    last = nn.Conv2d(channels, outputs, (taps, size(1, taps)), **options)  # type: ignore[arg-type]
    return nn.Sequential(nn.Conv2d(8, channels, 1), last, nn.ReLU()), (torch.randn(size(1, 2, 3), 8, size(9, 11), size(10, 13, 30)),)


@settings(max_examples=draws(10), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES))
def test_any_candidate_is_as_good_as_pytorch(seed: int, dtype: torch.dtype) -> None:
    random, module, inputs = drawn_by(drawn, seed, dtype)
    target, axis = random.choice((H200, FEW, ONE)), random.choice(("", "meeting"))
    check(module, inputs, program(module, inputs, random.randrange, [], target=target, axis=axis))


# --- what it is not for, and what is predicted ------------------------------------------------------------------------


reason = partial(reason_of, schema=WARPGROUP_PATCH)


def test_reasons() -> None:
    def convolution(**options: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 32, **options)).half()

    x = torch.randn(2, 16, 9, 8).half()
    assert "has no wgmma" in reason(convolution(kernel_size=3), (x,), target=machine("a100"))
    assert "no filter of several taps" in reason(convolution(kernel_size=1), (x,))
    assert "no filter of several taps" in reason(nn.Linear(64, 32).half(), (torch.randn(5, 64).half(),))
    assert "moves by more than one pixel" in reason(convolution(kernel_size=3, stride=2), (x,))
    assert reason(convolution(kernel_size=3), (x,)) == ""


def test_tiles_and_patches() -> None:
    """Tiles cover the output; the rows that products take from the last tap on are inside the patch, which is at most one line longer."""
    form = form_of(WARPGROUP_PATCH, convolution_problem(96, 64, 57, 30, 5, batch=1), H200)
    assert not isinstance(form, Unsuitable), form
    facts = form.facts
    candidates, _ = WARPGROUP_PATCH.space(facts, H200, Options(numerics=TF32))
    height, width = candidates["height"], candidates["width"]
    pitch = width + facts.spans[1]
    pixels = np.where(candidates["swapped"] > 0, candidates["columns"], 64 * candidates["consumers"])
    assert ((height - 1) * pitch + width <= pixels).all()
    last = pixels - 1 + facts.spans[0] * pitch + facts.spans[1]
    rows = patch_rows(facts, candidates)
    assert (last < rows).all() and (rows <= last + pitch).all()


@pytest.mark.parametrize("name", ["batch=2 channels=96 outputs=64 size=57x30 filter=5x5", "batch=16 channels=32 outputs=512 size=3159 filter=7"])
def test_no_candidate_is_twice_in_the_space(name: str) -> None:
    problem = layer_problem({"name": f"convolution {name} stride=1 dilation=1 groups=1 transposed=0 then=silu precision=fp16"})
    form = form_of(WARPGROUP_PATCH, problem, H200)
    assert not isinstance(form, Unsuitable), form
    candidates, _ = WARPGROUP_PATCH.space(form.facts, H200, Options())
    schedules = np.stack([np.broadcast_to(column, length(candidates)) for column in candidates.values()])
    assert len(np.unique(schedules, axis=1).T) == length(candidates) > 100


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@EACH_TYPE
@pytest.mark.parametrize("layer", ["3x3", "5x5", "dilation", "no padding", "groups"])
def test_layers_on_the_gpu(layer: str, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS[layer], dtype)
    for number in range(0, 12):
        as_interpreted(program(module, inputs, lambda count, part=number / 12: int(count * part), []))


@pytest.mark.gpu
@EACH_TYPE
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_on_the_gpu(schedule: PatchSchedule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 72, 1), nn.Conv2d(72, 40, (3, 2), padding=1), nn.Hardswish()
    module, inputs = nn.Sequential(*layers).to(dtype), (torch.randn(1, 16, 10, 9).to(dtype),)
    as_interpreted(program(module, inputs, schedule, []))


@pytest.mark.gpu
@EACH_TYPE
def test_tiles_in_turns_on_the_gpu(dtype: torch.dtype) -> None:
    module, inputs = tiled(dtype)
    for schedule, target in IN_TURNS:
        as_interpreted(program(module, inputs, schedule, [], target=target))
