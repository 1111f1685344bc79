"""Everything that a caller may do with an executable on a GPU: streams, threads, clones, odd inputs, mutation, artifacts, PyTorch nodes."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tilewright.errors import ExecutableClosed, InvalidInput

pytestmark = pytest.mark.gpu


class Single(nn.Module):
    """One kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x * 2 + 1)


class Chain(nn.Module):
    """A chain of kernels that reuse memory, with a branch and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(F.relu(layer(x)) + x)
            middle = x if index == 2 else middle
        return x, F.softmax(middle, -1)


class Recurrent(nn.Module):
    """Many nodes that use the input and the output, which are copied instead of updating every node."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0]


class ThroughPyTorch(nn.Module):
    """Operators that run through PyTorch between kernels."""

    def forward(self, x: Tensor) -> Tensor:
        rising, _ = torch.cummax(F.relu(x) + x * 3, -1)
        values = torch.tanh(rising * 0.1) * 2
        return torch.cummax(values.flip(-1), 0)[0].sum(-1)


MODULES = {"single": Single, "chain": Chain, "recurrent": Recurrent, "through PyTorch": ThroughPyTorch}
SHAPE = (40, 64)


class Subject:
    """A module, its executable, and its results in float64."""

    def __init__(self, module: nn.Module) -> None:
        module.cuda()
        self.exact = copy.deepcopy(module).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.executable = tilewright.compile(module, (torch.randn(SHAPE, device="cuda"),), target="cuda")

    def check(self, found: Any, x: Tensor) -> None:
        with torch.no_grad():
            expected = self.exact(x.double())
        for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=MODULES)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    torch.manual_seed(2)
    made = Subject(MODULES[request.param]().eval())
    yield made
    made.executable.close()


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Runs `work` in threads and raises the errors of any."""
    failures: list[str] = []

    def guarded(which: int) -> None:
        try:
            work(which)
        except Exception:  # raised below, in the thread of the test
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_results_are_fresh_and_inputs_may_move(subject: Subject) -> None:
    pairs = []
    for _ in range(6):
        x = torch.randn(SHAPE, device="cuda")
        pairs.append((x, subject.executable(x)))
    for x, found in pairs:
        subject.check(found, x)
    assert len({torch.utils._pytree.tree_leaves(found)[0].data_ptr() for _, found in pairs}) == len(pairs)


def test_strided_and_misaligned_inputs(subject: Subject) -> None:
    base = torch.randn(SHAPE[0] * SHAPE[1] + 1, device="cuda")
    for x in (
        torch.randn((*SHAPE, 2), device="cuda")[..., 1],
        torch.randn((SHAPE[1], SHAPE[0]), device="cuda").T,
        base[1:].view(SHAPE),
        torch.randn((1, SHAPE[1]), device="cuda").expand(SHAPE),
    ):
        subject.check(subject.executable(x), x)


def test_streams_in_turn(subject: Subject) -> None:
    """Calls on several streams without synchronisation share one arena."""
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
    inputs = [torch.randn(SHAPE, device="cuda") for _ in range(40)]
    torch.cuda.synchronize()
    found = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 4]):
            found.append(subject.executable(x))
    torch.cuda.synchronize()
    for x, result in zip(inputs, found, strict=True):
        subject.check(result, x)


def test_a_stream_of_another_library_may_end(subject: Subject) -> None:
    """A stream that PyTorch does not own is destroyed between calls."""
    library = ctypes.CDLL("libcuda.so.1")
    for _ in range(3):
        handle = ctypes.c_void_p()
        assert library.cuStreamCreate(ctypes.byref(handle), 1) == 0
        x = torch.randn(SHAPE, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            found = subject.executable(x)
        torch.cuda.synchronize()
        assert library.cuStreamDestroy_v2(handle) == 0
        subject.check(found, x)
        subject.check(subject.executable(x), x)


def test_threads_share_an_executable_and_its_clone(subject: Subject) -> None:
    both = [subject.executable, subject.executable.clone()]

    def work(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                x = torch.randn(SHAPE, device="cuda")
                subject.check(both[which % 2](x), x)

    in_threads(work)
    both[1].close()
    with pytest.raises(ExecutableClosed):
        both[1](torch.randn(SHAPE, device="cuda"))
    x = torch.randn(SHAPE, device="cuda")
    subject.check(subject.executable(x), x)


def test_a_clone_outlives_its_original() -> None:
    subject = Subject(Chain().eval())
    clone = subject.executable.clone()
    subject.executable.close()
    x = torch.randn(SHAPE, device="cuda")
    subject.check(clone(x), x)
    clone.close()


def test_calls_in_a_thread_without_a_context(subject: Subject) -> None:
    x = torch.randn(SHAPE, device="cuda")
    found: list[Any] = []
    in_threads(lambda _: found.append(subject.executable(x)), 1)
    torch.cuda.synchronize()
    subject.check(found[0], x)


def test_every_region_agrees_with_the_reference(subject: Subject) -> None:
    report = subject.executable.verify(torch.randn(SHAPE, device="cuda"))
    assert report.passed, str(report)


def test_wrong_inputs_are_refused(subject: Subject) -> None:
    exe = subject.executable
    with pytest.raises(InvalidInput, match=r"expected a float32 tensor of shape \[40, 64\] on cuda:0, got a float32 tensor .* on cpu"):
        exe(torch.randn(SHAPE))
    with pytest.raises(InvalidInput, match="float64"):
        exe(torch.randn(SHAPE, device="cuda", dtype=torch.float64))
    with pytest.raises(InvalidInput, match=r"\[64, 40\]"):
        exe(torch.randn(SHAPE[::-1], device="cuda"))
    with pytest.raises(InvalidInput, match="requires gradients"):
        exe(torch.randn(SHAPE, device="cuda", requires_grad=True))
    with pytest.raises(InvalidInput):
        exe(torch.randn(SHAPE, device="cuda"), torch.randn(SHAPE, device="cuda"))
    x = torch.randn(SHAPE, device="cuda")  # a refused call has no effect
    subject.check(exe(x), x)


def test_a_call_is_captured_into_a_graph(subject: Subject) -> None:
    if any(region.kind == "torch" for region in subject.executable.image.program.regions):
        pytest.skip("PyTorch's operators allocate while captured")
    x = torch.randn(SHAPE, device="cuda")
    subject.executable(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = subject.executable(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        subject.check(found, x)
    x.normal_()
    subject.check(subject.executable(x), x)


def test_artifacts_made_without_a_gpu(tmp_path: Path) -> None:
    """Compiled for the catalogue's GPU in a process that sees none, loaded and run here."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the artifact is for an H200")
    code = (
        "import sys, torch, tilewright\n"
        "assert not torch.cuda.is_available()\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_gpu_executable import MODULES, SHAPE\n"
        "for name in ('single', 'chain', 'recurrent'):\n"
        "    torch.manual_seed(4)\n"
        "    module = MODULES[name]().eval()\n"
        "    torch.save(module.state_dict(), f'{sys.argv[2]}/{name}.pt')\n"
        "    tilewright.compile(module, (torch.randn(SHAPE),), target='h200').save(f'{sys.argv[2]}/{name}.tw.zip')\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    for name in ("single", "chain", "recurrent"):
        subject = Subject.__new__(Subject)
        module = MODULES[name]().eval()
        module.load_state_dict(torch.load(tmp_path / f"{name}.pt", weights_only=True))
        subject.exact = module.double().cuda()
        with tilewright.load(tmp_path / f"{name}.tw.zip") as executable:
            for _ in range(2):
                x = torch.randn(SHAPE, device="cuda")
                subject.check(executable(x), x)


class Counting(nn.Module):
    """Changes its buffer and its input."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))
        y.mul_(2).add_(x)
        return y + self.seen


def test_buffers_and_inputs_are_changed_as_pytorch_does() -> None:
    module = Counting().cuda()
    twin = copy.deepcopy(module)
    executable = tilewright.compile(module, (torch.randn(5, 8, device="cuda"), torch.randn(5, 8, device="cuda")))
    for _ in range(3):
        x, y = torch.randn(5, 8, device="cuda"), torch.randn(5, 8, device="cuda")
        z = y.clone()
        torch.testing.assert_close(executable(x, y), twin(x, z))
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(module.seen, twin.seen)
    executable.close()


def test_nothing_in_and_nothing_out() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
            return [x * 2, x.sum(0) + 1, torch.cat([x, y]) * 3, y[:0] + 1]

    executable = tilewright.compile(Empty(), (torch.randn(0, 3, device="cuda"), torch.randn(2, 3, device="cuda")))
    y = torch.randn(2, 3, device="cuda")
    found = executable(torch.randn(0, 3, device="cuda"), y)
    for ours, theirs in zip(found, [torch.zeros(0, 3), torch.ones(3), y.cpu() * 3, torch.zeros(0, 3)], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    executable.close()


def test_inference_mode_and_keywords(subject: Subject) -> None:
    with torch.inference_mode():
        x = torch.randn(SHAPE, device="cuda")
        found = subject.executable(x=x)
    subject.check(found, x.clone())


def test_memory_is_released() -> None:
    x = torch.randn(SHAPE, device="cuda")
    held = []
    for _ in range(8):
        subject = Subject(Chain().eval())
        subject.check(subject.executable(x), x)
        subject.executable.close()
        del subject
        gc.collect()  # export leaves reference cycles, and keeps the last module for a while
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= max(held[:4]), held  # a leak would grow with every round
