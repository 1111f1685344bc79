"""Products by warpgroups: candidates over random layers in the interpreter, against PyTorch in float64; NVRTC compiles them; a GPU runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.on_device import cuda_binary
from tests.test_gpu_half import check, planned
from tests.test_half_modules import EACH_TYPE, TYPES, in_type
from tilewright.codegen.cuda import print_cuda
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.registry import SCHEMAS
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule
from tilewright.kernels.registry import registered
from tilewright.kernels.schema import Numerics, form_of
from tilewright.partition.plan import Chooser
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.tuning.problems import convolution_problem

H200, A100 = machine("h200"), machine("a100")


def with_schedule(pick: Callable[[int], int] | WarpgroupSchedule, used: list[WarpgroupSchedule]) -> Chooser:
    """Chooses for each region that has candidates of the schema a given one, or the one that `pick` picks of their number."""

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads)
        own = next((number for number, part in enumerate(ranking.parts) if part.schema is WARPGROUP), None)
        if own is None:
            return ranking.first()
        begin, end = map(int, ranking.starts[own : own + 2])
        choice = ranking.choice(begin + (0 if isinstance(pick, WarpgroupSchedule) else pick(end - begin)))
        used.append(pick if isinstance(pick, WarpgroupSchedule) else choice.schedule)
        return replace(choice, schedule=used[-1])

    return chooser


def program_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], pick: Callable[[int], int] | WarpgroupSchedule, used: list[WarpgroupSchedule]) -> Program:
    with registered(WARPGROUP, gpu=True):
        return planned(module, inputs, H200, with_schedule(pick, used))


def compiles(program: Program) -> None:
    kernels = {kernel.name: kernel for lowered in program.regions for kernel in lowered.kernels}
    passed, log = cuda_binary(print_cuda(list(kernels.values())))
    assert passed and "warning" not in log and "serialized" not in log, log
    assert log.count(" 0 bytes spill stores") == len(kernels), log


SCHEDULES = (
    WarpgroupSchedule(16, 1, 2),
    WarpgroupSchedule(64, 2, 3),
    WarpgroupSchedule(96, 1, 4),
    WarpgroupSchedule(256, 2, 3),
)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(200, 72), nn.GELU()), (3, 50, 200)),
    "1x1": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 40, 1), nn.ReLU()), (2, 16, 9, 8)),
    "3x3": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 72, 3, padding=1), nn.ReLU()), (2, 16, 9, 8)),
    "stride": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 24, 3, stride=2, padding=1)), (2, 16, 9, 8)),
    "dilation": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, (3, 2), padding=2, dilation=2)), (1, 16, 9, 8)),
    "1x1, stride": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, 1, stride=2)), (2, 16, 9, 8)),
    "1-D": (lambda: nn.Sequential(nn.Conv1d(16, 32, 1), nn.Conv1d(32, 24, 5, padding=2)), (2, 16, 30)),
    "3-D": (lambda: nn.Sequential(nn.Conv3d(16, 32, 1), nn.Conv3d(32, 24, 3, padding=1)), (1, 16, 4, 5, 6)),
}


@EACH_TYPE
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    module, inputs = make().to(dtype).eval(), (torch.randn(shape).to(dtype),)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, WarpgroupSchedule(32, 2, 3), used)
    assert used
    check(module, inputs, program)
    compiles(program)


@EACH_TYPE
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: WarpgroupSchedule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(16, 64, 1), nn.Conv2d(64, 72, 3, padding=1), nn.Hardswish()).to(dtype), (torch.randn(1, 16, 10, 9).to(dtype),)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, schedule, used)
    assert set(used) == {schedule}
    check(module, inputs, program)
    compiles(program)
