"""Operands of results that are read before the products (`block_result.EARLY`), or ahead of guards: kernels in the interpreter, and where they read."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from tests.test_gpu_half import check, planned
from tests.test_gpu_tensor_cores import with_schedule as with_tensor_cores
from tests.test_gpu_warpgroup import H200, ONE, Block, compiles, program_of, with_schedule
from tests.test_half_modules import EACH_TYPE
from tilewright.codegen.cuda import print_cuda
from tilewright.ir.expr import Load, walk
from tilewright.ir.kernel import Allocate, If, Invoke, Kernel, Store, expressions, statements
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm import block_result
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule
from tilewright.kernels.gpu.warpgroup.results import STAGED
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule
from tilewright.kernels.schema import AnySchema

SCHEDULES = (
    WarpgroupSchedule(16, 1, 2),
    WarpgroupSchedule(16, 1, 3, 1),
    WarpgroupSchedule(16, 1, 2, 1, persistent=1),
    WarpgroupSchedule(16, 2, 2, 1, cluster=2),
    WarpgroupSchedule(16, 1, 2, split=2, meeting=1),
    WarpgroupSchedule(32, 1, 2, 1, split=2, meeting=1),
    PatchSchedule(32, 1, 2, 2, 2, 9, swapped=1),
    PatchSchedule(32, 1, 3, 1, 5, 9),
    PatchSchedule(32, 2, 3, 1, 5, 9, split=2, meeting=1),
    TensorCoreSchedule(32, 32, 16, 2, 2, 2),
    TensorCoreSchedule(32, 32, 16, 2, 2, 2, staged=1),
    TensorCoreSchedule(32, 32, 16, 2, 2, 2, 2, 1),
)


def reads_behind_products(kernel: Kernel) -> set[str]:
    """The parameters that are read behind the last product."""
    ordered = list(statements(kernel.body))
    products = [at for at, one in enumerate(ordered) if isinstance(one, Invoke) and one.intrinsic.key.startswith(("mma.", "wgmma.m"))]
    parameters = {parameter.name for parameter in kernel.parameters}
    behind = (node for one in ordered[products[-1] :] for node in walk(*expressions(one)) if isinstance(node, Load)) if products else ()
    return {node.buffer for node in behind} & parameters


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns end within tiles; a residual is a part of a larger value."""
    monkeypatch.setattr(block_result, "EARLY", True)
    torch.manual_seed(0)
    channels = 32 if isinstance(schedule, TensorCoreSchedule) and schedule.cluster else 40  # clusters divide the steps evenly
    module, inputs = Block(channels).half().eval(), (torch.randn(2, channels, 7, 9).half(),)
    used: list[Any] = []
    schema = WARPGROUP_PATCH if isinstance(schedule, PatchSchedule) else WARPGROUP
    chooser = with_tensor_cores(schedule, used) if isinstance(schedule, TensorCoreSchedule) else with_schedule(schedule, used, schema=schema)
    program = planned(module, inputs, ONE if getattr(schedule, "persistent", 0) else H200, chooser)
    taken = set(map(str, used))
    kernels = [kernel for lowered in program.regions if lowered.schedule in taken for kernel in lowered.kernels]
    assert kernels and not any(reads_behind_products(kernel) for kernel in kernels)
    check(module, inputs, program)
    compiles(program)


@pytest.mark.parametrize("schema", [GEMM, DIRECT])
def test_products_on_cuda_cores(schema: AnySchema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32: small tiles, of which threads have registers enough, with clusters and without."""
    monkeypatch.setattr(block_result, "EARLY", True)
    torch.manual_seed(0)
    module, inputs = Block(16).eval(), (torch.randn(2, 16, 7, 9),)
    early = 0
    for number in range(6):
        used: list[Any] = []
        program = planned(module, inputs, H200, with_schedule(Random(number).randrange, used, schema=schema))
        check(module, inputs, program)
        compiles(program)
        early += sum("early0" in print_cuda([kernel]) for lowered in program.regions for kernel in lowered.kernels)
    assert early


def test_sums_alone_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the sum is that of the result then, which is not read."""
    monkeypatch.setattr(block_result, "EARLY", True)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 40, 3, bias=False)).half().eval()
    used: list[Any] = []
    inputs = (torch.randn(2, 8, 7, 9).half(),)
    for schedule in (WarpgroupSchedule(16, 1, 2), TensorCoreSchedule(32, 32, 16, 2, 2, 2)):
        chooser = with_tensor_cores(schedule, used) if isinstance(schedule, TensorCoreSchedule) else with_schedule(schedule, used)
        check(module, inputs, planned(module, inputs, H200, chooser))


def test_what_takes_too_many_registers_is_read_when_the_sums_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_result, "EARLY", True)
    layers = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 256, 1), nn.ReLU()
    module, inputs = nn.Sequential(*layers).half().eval(), (torch.zeros(2, 8, 9, 9).half(),)
    for columns, behind in ((64, False), (256, True)):
        used: list[Any] = []
        program = planned(module, inputs, H200, with_schedule(WarpgroupSchedule(columns, 1, 2), used))
        kernel = next(kernel for lowered in program.regions if lowered.schedule == str(used[-1]) for kernel in lowered.kernels)
        assert bool(reads_behind_products(kernel)) == behind


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("persistent", [0, 1])
@EACH_TYPE
def test_operands_of_staged_results_are_read_ahead_of_guards(persistent: int, dtype: torch.dtype) -> None:
    """Rows and columns end within a tile: nothing but the store is behind a branch."""
    torch.manual_seed(0)
    module, inputs = Block(40).to(dtype).eval(), (torch.randn(2, 40, 7, 9).to(dtype),)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, WarpgroupSchedule(32, 1, 3, staged=1, persistent=persistent), used, target=ONE if persistent else H200)
    staged = 0
    for kernel in (kernel for lowered in program.regions for kernel in lowered.kernels):
        inside = list(statements(kernel.body))
        if not any(isinstance(one, Allocate) and one.buffer.name == STAGED for one in inside):
            continue
        staged += 1
        guarded = [id(one.then) for one in inside if isinstance(one, If)]
        assert all(id(one) in guarded for one in inside if isinstance(one, Store) and one.buffer in {buffer.name for buffer in kernel.parameters})
    assert staged == len(used) > 1
    check(module, inputs, program)
