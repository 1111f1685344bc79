"""Sizes that change on a GPU: planned for one that is absent, run in the interpreter, and called, profiled and through torch.compile on a real one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import tilewright
import tilewright.dynamo as dynamo
from tests.emulated_gpu import emulated
from tilewright.compile import compile as compile_model
from tilewright.dynamo_sizes import free_inputs
from tilewright.errors import IndexOutOfRange, NotCompiled, TargetNotPresent
from tilewright.runtime.builds import wait_for_all
from tilewright.runtime.dynamic import DynamicExecutable

BATCH = {"x": {0: "batch"}}


class Layers(nn.Module):
    """Products, a normalisation and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.norm(self.first(x)))), -1)


class Lookup(nn.Module):
    """A table, whose indices the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.table(x)) + 1


@pytest.fixture
def layers() -> Layers:
    torch.manual_seed(3)
    return Layers().eval()


def check(module: nn.Module, found: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found.double(), copy.deepcopy(module).double()(x.double() if x.is_floating_point() else x), rtol=1e-5, atol=1e-5)


def test_sizes_are_planned_for_an_absent_gpu(layers: Layers) -> None:
    executable = tilewright.compile(layers, torch.randn(4, 24), "h200", dynamic=BATCH, wait=0, threads=1)
    others = {size: executable.program(torch.randn(size, 24)) for size in (4, 64)}
    assert executable.sizes == ({"batch": 4}, {"batch": 64})
    for size, program in others.items():
        assert program.image.machine.is_gpu and program.image.binaries
        assert program.signature.inputs[0].shape == (size, 24)
        assert all(row.kind != "torch" for row in program.plan.rows)
    if not torch.cuda.is_available():
        for size in (4, 5):  # nothing runs eagerly in the place of a GPU
            with pytest.raises(TargetNotPresent, match="which is not here"):
                executable(torch.randn(size, 24))


def test_calls_use_the_kernels_of_their_sizes(layers: Layers) -> None:
    """The interpreter runs what a GPU would."""
    executable = tilewright.compile(layers, torch.randn(4, 24), "a100", dynamic=BATCH, wait=True)
    sizes = (4, 9, 1)
    programs = [executable.program(torch.randn(size, 24)) for size in sizes]
    kernels = {name: kernel for program in programs for name, kernel in program.image.kernels.items()}
    every: Any = SimpleNamespace(image=SimpleNamespace(kernels=kernels))
    with emulated(every) as driver:
        for size in sizes:
            x = torch.randn(size, 24)
            before = driver.launches
            check(layers, executable(x), x)
            assert driver.launches > before
        executable.synchronize()


def test_fractions_on_the_cpu_leave_a_graph_on_its_gpu(layers: Layers) -> None:
    """With dynamic=True Dynamo passes a norm's epsilon in a tensor that is on the CPU."""
    captured: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def capture(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        captured.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layers, backend=capture, dynamic=True)(torch.randn(5, 24))
    torch._dynamo.reset()
    ((graph, inputs),) = captured
    fractions = free_inputs(graph).fractions
    assert fractions
    with FakeTensorMode(), torch.no_grad():
        there = [torch.empty(x.shape, device="cuda") if isinstance(x, torch.Tensor) and i not in fractions else x for i, x in enumerate(inputs)]
        assert dynamo._reason_to_decline(graph, there) is None
        first = next(i for i, x in enumerate(there) if isinstance(x, torch.Tensor) and i not in fractions)
        there[first] = torch.empty(there[first].shape)
        why = dynamo._reason_to_decline(graph, there)
        assert why is not None and why.cause == "its inputs are on cpu, cuda"


# On a GPU


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.gpu
def test_sizes_change_on_a_gpu(layers: Layers) -> None:
    layers.cuda()
    with tilewright.compile(layers, torch.randn(4, 24, device="cuda"), dynamic=BATCH, wait=True) as executable:
        for size in (4, 7, 130, 7, 1):
            x = torch.randn(size, 24, device="cuda")
            check(layers, executable(x), x)
        assert [sizes["batch"] for sizes in executable.sizes] == [4, 130, 7, 1]
        assert executable.verify(torch.randn(7, 24, device="cuda")).passed
        executable.synchronize()


@pytest.mark.gpu
def test_a_call_on_a_gpu_runs_eagerly_until_its_program_is_ready(layers: Layers) -> None:
    layers.cuda()
    with tilewright.compile(layers, torch.randn(4, 24, device="cuda"), dynamic=BATCH, wait=0) as executable:
        x = torch.randn(9, 24, device="cuda")
        with pytest.warns(NotCompiled, match="batch = 9 run eagerly until"):
            check(layers, executable(x), x)
        wait_for_all()
        assert {"batch": 9} in executable.sizes
        check(layers, executable(x), x)


@pytest.mark.gpu
def test_indices_are_checked_in_all_programs_on_a_gpu() -> None:
    good, bad = torch.tensor([1, 2, 3], device="cuda"), torch.tensor([1, 2, 99], device="cuda")
    module = Lookup().eval().cuda()
    with tilewright.compile(module, good.repeat(2), dynamic=BATCH, wait=True) as executable:
        check(module, executable(good), good)
        executable.check = True
        for x in (bad, bad.repeat(2), bad.repeat(3)):
            with pytest.raises(IndexOutOfRange, match="99"):
                executable(x)
        executable.check = False
        executable(bad)
        with pytest.raises(IndexOutOfRange, match="99"):
            executable.synchronize()
        check(module, executable(good), good)


@pytest.mark.gpu
def test_profiles_on_a_gpu_are_of_the_program_of_a_call(layers: Layers) -> None:
    layers.cuda()
    with tilewright.compile(layers, torch.randn(4, 24, device="cuda"), dynamic=BATCH, wait=True) as executable:
        profile = executable.profile(torch.randn(33, 24, device="cuda"), repetitions=3)
        assert [region.name for region in profile.regions] == [row.name for row in executable.plan.rows]
        assert all(len(region.seconds) == 3 for region in profile.regions) and profile.hottest
        assert executable.sizes == ({"batch": 4}, {"batch": 33})


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_torch_compile_on_a_gpu(layers: Layers, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def recording(*arguments: Any, **keywords: Any) -> Any:
        made.append(compile_model(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(dynamo, "compile_model", recording)
    layers.cuda()
    run = torch.compile(layers, backend="tilewright", dynamic=dynamic, options={"wait": True})
    with torch.no_grad():
        for size in (5, 9, 12, 9):
            x = torch.randn(size, 24, device="cuda")
            found = run(x)
            assert found.is_cuda
            check(layers, found, x)
    assert len(made) == {None: 2, True: 1, False: 3}[dynamic]
    assert isinstance(made[-1], DynamicExecutable) == (dynamic is not False)
    assert all(row.kind != "torch" for executable in made for row in executable.plan.rows)
