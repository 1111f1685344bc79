"""Library kernels on GPUs: nodes of the same CUDA graph as ours. Most tests run here, with kernels in the interpreter and the libraries of this CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tests.compiled import poison, with_layers_by_libraries
from tests.emulated_gpu import EmulatedServer, emulated
from tests.stand_ins import OTHER, record_libraries
from tests.test_gpu_runtime import FakeLibrary
from tilewright.errors import UnsupportedOption
from tilewright.hardware import machine
from tilewright.ir.library import LibraryCall
from tilewright.kernels.registry import library
from tilewright.runtime import captured as captured_module
from tilewright.runtime.accesses import dependencies
from tilewright.runtime.captured import captured
from tilewright.runtime.driver import SET_CAPTURE_DEPENDENCIES, Driver
from tilewright.runtime.executable import Executable
from tilewright.tuning import trial_worker
from tilewright.tuning.records import Records
from tilewright.zoo.bert import EncoderLayer

H200 = machine("h200")


class Convolutions(nn.Module):
    """Convolutions of an input that one reads as it is, with a padding, groups, a stride, a sum, and products after them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.point, self.first = nn.Conv2d(8, width, 1), nn.Conv2d(8, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, 2, 1, groups=width)
        self.last, self.classes = nn.Conv2d(width, width, 1, bias=False), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.first(x)) + self.point(x)
        y = self.last(nn.functional.hardswish(self.depthwise(y)))
        return y, torch.softmax(self.classes(y.mean((2, 3))), -1)


class Windows(nn.Module):
    """Greatest elements and means of windows, and causal attention of queries that share keys over what they leave, with what follows each."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, size = heads, shared, width // heads
        self.first, self.greatest, self.mean = nn.Conv2d(3, width, 3, 2, 1), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, 1, 1)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, shared * size), nn.Linear(width, shared * size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.greatest(torch.relu(self.first(x)))
        pooled = torch.sigmoid(self.mean(y))
        rows = pooled.flatten(2).transpose(1, 2)
        parts = zip((self.q, self.k, self.v), (self.heads, self.shared, self.shared), strict=True)
        q, k, v = (layer(rows).unflatten(2, (count, -1)).transpose(1, 2) for layer, count in parts)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2) + rows, torch.log_softmax(y, 1)


class Recurrent(nn.Module):
    """Recurrent layers of one and of both directions, one after another, with final states of the second, and a product after them."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(inputs, units, bidirectional=True), nn.LSTM(2 * units, units)
        self.third, self.last = nn.GRU(units, units, batch_first=True, bidirectional=True), nn.Linear(2 * units, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, cells) = self.second(torch.relu(self.first(x)[0]))
        return self.last(self.third(y.transpose(0, 1))[0]), cells


CASES: dict[str, Callable[[bool], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "convolutions": lambda small: (Convolutions(16 if small else 96), (torch.randn(2, 8, 6, 5) if small else torch.randn(4, 8, 56, 56),)),
    "windows and attention": lambda small: (
        (Windows(16, 4, 2), (torch.randn(2, 3, 14, 18),)) if small else (Windows(512, 8, 2), (torch.randn(2, 3, 64, 64),))
    ),
    "recurrent layers": lambda small: (Recurrent(12, 8), (torch.randn(5, 3, 12),)) if small else (Recurrent(256, 512), (torch.randn(64, 16, 256),)),
    "BERT layer": lambda small: (
        (EncoderLayer(16, 2, 32), (torch.randn(2, 5, 16),)) if small else (EncoderLayer(768, 12, 3072), (torch.randn(4, 128, 768),))
    ),
}
"""Modules and inputs, small or as large as usual."""


def case(name: str, small: bool = True, device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    module, inputs = CASES[name](small)
    return module.eval().to(device), tuple(x.to(device) for x in inputs)


def by_libraries(module: nn.Module, inputs: tuple[Tensor, ...], path: Path, target: str = "h200") -> Executable:
    """The module with every region by a library that one can compute."""
    record_libraries(path, module, inputs, machine(target))
    with with_layers_by_libraries():
        return tilewright.compile(module, inputs, target, vendor=True, records=path)


def calls_of(executable: Executable) -> list[LibraryCall]:
    return [region.library for region in executable.image.program.regions if region.library is not None]


def agree(found: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        expected = copy.deepcopy(module).double()(*(x.double() for x in inputs))
    for ours, exact in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def fresh(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn_like(x) for x in inputs)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", CASES)
def test_one_graph_holds_ours_and_the_librarys(name: str, tmp_path: Path) -> None:
    module, inputs = case(name)
    executable = by_libraries(module, inputs, tmp_path / "records")
    assert len(calls_of(executable)) >= 2
    capturing = [False]
    with emulated(executable, capturing) as driver:
        assert not executable._libraries and executable._require_engine().libraries  # type: ignore[attr-defined]
        assert [kind for kind, _, _ in executable._segments] == ["kernels"]
        other = executable.clone()
        poison(executable)
        poison(other)
        held = []
        for _ in range(3):
            given = fresh(inputs)
            driver.log.clear()
            held.append((executable(*given), given))
            assert driver.log.count("graph") == 1 and set(driver.log) <= {"graph", "copy"}
        executable.close()
        held.append((other(*inputs), inputs))
        assert other.verify(*inputs).passed
        capturing.append(True)
        driver.log.clear()
        held.append((other(*inputs), inputs))
        assert driver.log.count("child graph") == len(calls_of(other)) and "graph" not in driver.log
        for found, given in held:
            agree(found, module, given)


class LargeFilters(nn.Module):
    """Filters of 9 x 9 with an activation after them, and depthwise ones of 13 x 13."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, channels, 9, padding=4), nn.Conv2d(channels, channels, 13, padding=6, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.second(torch.relu(self.first(x))))


def by_transforms(executable: Executable) -> bool:
    return [call.operator.name for call in calls_of(executable)] == ["fft_convolution"] * 2


def test_fourier_transforms_are_an_operator(tmp_path: Path) -> None:
    module, inputs = LargeFilters(8).eval(), (torch.randn(2, 3, 15, 14),)
    record_libraries(tmp_path / "records", module, inputs, H200, ("fft_convolution",))
    executable = tilewright.compile(module, inputs, "h200", vendor=True, records=tmp_path / "records")
    assert by_transforms(executable)
    with emulated(executable):
        for _ in range(2):
            given = fresh(inputs)
            agree(executable(*given), module, given)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_operators_take_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Convolutions with an epilogue and without one, and a linear layer, whose factors and products are all stored in 16 bits."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False), nn.Flatten(), nn.Linear(144, 5)).eval().to(dtype)
    x = torch.randn(2, 3, 6, 6).to(dtype)
    executable = by_libraries(module, (x,), tmp_path / "records")
    calls = calls_of(executable)
    assert len(calls) == 3
    storage = executable.image.program.storage
    assert {storage[view.name].value.dtype for call in calls for view in call.views} == {"f16" if dtype is torch.float16 else "bf16"}
    with torch.no_grad():
        expected = copy.deepcopy(module).double()(x.double())
    with emulated(executable):
        found = executable(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_and_windows_take_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    class Windowed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
            return y, nn.functional.max_pool2d(v, 2), torch.softmax(nn.functional.avg_pool2d(k, 3, 1, 1), -1)

    torch.manual_seed(3)
    inputs = tuple(torch.randn(2, 4, 32, 16).to(dtype) for _ in range(3))
    inputs = (*inputs, torch.rand(2, 1, 32, 32) > 0.3)
    module = Windowed().eval()
    executable = by_libraries(module, inputs, tmp_path / "records")
    assert sorted(call.operator.name for call in calls_of(executable)) == ["attention", "average_pooling", "max_pooling", "softmax"]
    with emulated(executable):
        found = executable(*inputs)
    for ours, exact in zip(found, module(*(x.double() if x.is_floating_point() else x for x in inputs)), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


def test_what_a_library_reads_or_writes_of_the_caller_is_copied(tmp_path: Path) -> None:
    """Also where PyTorch's operators read or write the same tensors."""

    class Rising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rising, _ = torch.cummax(x, 0)
            y = self.first(x)
            return y, torch.cummax(y, 0)[0] + 1, self.second(y) * rising

    module, inputs = Rising().eval(), (torch.randn(6, 8),)
    with pytest.warns(UserWarning, match="through PyTorch"):
        executable = by_libraries(module, inputs, tmp_path / "records")
    with emulated(executable):
        engine: Any = executable._require_engine()
        assert len(engine.libraries) == 2 and set(engine.staging) == {0, 1}
        for _ in range(2):
            given = fresh(inputs)
            agree(executable(*given), module, given)
        assert executable.verify(*inputs).passed


def test_calls_of_libraries_are_ordered_and_ours_are_not(tmp_path: Path) -> None:
    """They share what they allocate, so that two of them without other dependencies still follow each other."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(12, 16, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(y)

    module, inputs = Branches().eval(), (torch.randn(6, 8), torch.randn(6, 12))
    seen: list[list[list[int]]] = []

    def noted(accesses: Any) -> list[list[int]]:
        seen.append(dependencies(accesses))
        return [[i - 1] if i else [] for i in range(len(accesses))]

    for vendor, expected in ((True, [[], [0]]), (False, [[], []])):
        record_libraries(tmp_path / "records", module, inputs, H200)
        executable = tilewright.compile(module, inputs, "h200", vendor=vendor, records=tmp_path / "records")
        with emulated(executable), pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilewright.runtime.gpu.dependencies", noted)
            executable._require_engine().in_order = False  # type: ignore[attr-defined]
            executable(*inputs)
        assert seen.pop() == expected


def test_trials_measure_a_library_as_a_node_before_its_epilogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = OTHER
    order: list[str] = []

    def prepared(calls: Any, device: torch.device) -> list[Any]:
        for call in calls:
            call()
        return list(calls)

    monkeypatch.setattr(trial_worker, "captured", prepared)
    monkeypatch.setattr(trial_worker, "handle_of", lambda graph: graph)
    server = EmulatedServer(problem, H200, seconds=40e-6)
    program = server.program(library(H200).schedule("convolution"), tmp_path)
    calls = 1 + len(program["calls"])
    original = server.driver.add_child_graph_node

    def noted(*given: Any) -> int:
        order.append("operator")
        return int(original(*given))

    server.driver.add_child_graph_node = noted
    answer = server.trial({"program": program, "mode": "network", "limit": None})
    assert answer["times"] == pytest.approx([calls * 40e-6] * 4) and answer["relative_error"] < 1e-5
    assert len(order) > 4
    server.driver.add_child_graph_node = lambda graph, before, child: original(graph, before, lambda: None)
    assert server.trial({"program": program, "mode": "network"})["wrong"], "a node that computes nothing leaves the poison"


def test_a_graph_is_added_to_a_capture() -> None:
    fake = FakeLibrary()
    driver = Driver(fake)
    driver.capture_graph(77, 9)
    (info, add, update) = [(name, arguments) for name, arguments in fake.calls if name != "cuInit"]
    assert info[0] == "cuStreamGetCaptureInfo_v2" and info[1][0] == 9
    assert add[0] == "cuGraphAddChildGraphNode" and add[1][-1] == 77
    assert update[0] == "cuStreamUpdateCaptureDependencies" and update[1][0] == 9 and list(update[1][1]) == [fake.next]
    assert update[1][2:] == (1, SET_CAPTURE_DEPENDENCIES)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `captured` does, with stand-ins for PyTorch's streams and graphs."""
    found: list[Any] = []

    class Graph:
        def __init__(self, keep_graph: bool) -> None:
            assert keep_graph

        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            found.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            found.append("end")

        def raw_cuda_graph(self) -> int:
            return 5

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def synchronize(self) -> None:
            found.append("wait")

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        found.append("stream")
        yield

    stand_ins = {"CUDAGraph": Graph, "Stream": Stream, "stream": stream, "device": nullcontext, "graph_pool_handle": lambda: "pool"}
    for name, value in {**stand_ins, "synchronize": lambda device: found.append("wait for all")}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: found.append("clear"), raising=False)
    return found


def test_calls_run_before_they_are_captured(events: list[Any]) -> None:
    products: Any = torch.backends.cuda.matmul

    def call() -> None:
        assert not products.allow_tf32 and not torch.is_grad_enabled()
        events.append("call")

    products.allow_tf32 = True
    try:
        graphs = captured([call, call], torch.device("cpu"))
        assert products.allow_tf32
    finally:
        products.allow_tf32 = False
    begin = ("begin", "pool", "thread_local")
    each = [begin, "call", "end"]
    assert events == ["wait for all", "stream", "call", "call", "wait", "clear", *each, *each, "clear"]
    assert [captured_module.handle_of(graph) for graph in graphs] == [5, 5]


def test_a_failing_call_ends_its_capture(events: list[Any]) -> None:
    def call() -> None:
        events.append("call")
        if events.count("call") == 2:
            raise RuntimeError("not permitted while capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captured([call], torch.device("cpu"))
    assert events[-2:] == ["call", "end"]


def test_old_versions_of_pytorch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    with pytest.raises(UnsupportedOption, match=r"install PyTorch 2.8"):
        captured([], torch.device("cpu"))


# On a GPU


def nodes_of(executable: Executable) -> int:
    (segment,) = executable._require_engine()._segments.values()  # type: ignore[attr-defined]
    return len(segment.nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("small", [True, False], ids=["small", "usual"])
@pytest.mark.parametrize("name", CASES)
def test_libraries_in_one_graph_on_the_gpu(name: str, small: bool, tmp_path: Path) -> None:
    """Every region by a library that one can compute: right against float64, one graph, again with other inputs, streams, captures, clones, artifacts."""
    module, inputs = case(name, small, "cuda")
    with by_libraries(module, inputs, tmp_path / "records", "cuda") as executable:
        assert len(calls_of(executable)) >= 2 and [kind for kind, _, _ in executable._segments] == ["kernels"]
        other = executable.clone()
        poison(executable)
        poison(other)
        held = []
        for which in range(6):
            with torch.cuda.stream(torch.cuda.Stream()) if which % 2 else nullcontext():
                given = fresh(inputs)
                held.append((executable(*given), given))
        torch.cuda.synchronize()
        for found, given in held:
            agree(found, module, given)
        assert nodes_of(executable) == sum((region.library is not None) + len(region.calls) for region in executable.image.program.regions)
        assert executable.verify(*inputs).passed
        profile = executable.profile(*inputs, repetitions=3)
        assert {region.number for region in profile.regions} >= {row.number for row in executable.plan.rows if row.has_library}
        graph, static = torch.cuda.CUDAGraph(), fresh(inputs)
        with torch.cuda.graph(graph):
            found = executable(*static)
        torch._C._cuda_clearCublasWorkspaces()  # as another library may, so that PyTorch gives their memory to others
        churn = [torch.randn(1 << 22, device="cuda") for _ in range(8)]
        for _ in range(3):
            for x in static:
                x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            agree(found, module, static)
        del churn
        agree(other(*inputs), module, inputs)
        executable.save(tmp_path / "artifact")
    agree(other(*inputs), module, inputs)
    other.close()
    with tilewright.load(tmp_path / "artifact") as loaded:
        agree(loaded(*inputs), module, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_trials_of_libraries_on_the_gpu(name: str, tmp_path: Path) -> None:
    """All candidates of libraries, and partitions with layers by them, are measured and right, and the network that the records choose is, too."""
    module, inputs = case(name, False, "cuda")
    with tilewright.compile(module, inputs, trials=2, vendor=True, records=tmp_path / "records") as executable:
        with Records(tmp_path / "records") as records:
            entries = [entry for entry in records.all() if entry.description.startswith("library")]
        assert entries and not [(entry.description, entry.reason) for entry in entries if entry.status != "measured"]
        layers = [partition.text for partition in executable.plan.partitions if "layers by a library" in partition.text]
        assert len(layers) == (name == "recurrent layers") and all("measured" in text for text in layers)
        assert len(executable._segments) == 1
        for _ in range(3):
            given = fresh(inputs)
            agree(executable(*given), module, given)
        print(f"{name}: {len(calls_of(executable))} of {len(entries)} candidates of libraries chosen", *layers)


@pytest.mark.gpu
def test_fourier_transforms_in_a_graph_on_the_gpu(tmp_path: Path) -> None:
    """cuFFT's plans are made before the capture, and what it allocates stays with the graph."""
    torch.manual_seed(3)
    module, inputs = LargeFilters(32).eval().cuda(), (torch.randn(4, 3, 56, 56, device="cuda"),)
    record_libraries(tmp_path / "records", module, inputs, machine("cuda"), ("fft_convolution",))
    with tilewright.compile(module, inputs, "cuda", vendor=True, records=tmp_path / "records") as executable:
        assert by_transforms(executable)
        other = executable.clone()
        held = []
        for _ in range(3):
            given = fresh(inputs)
            held.append((executable(*given), given))
        held.append((other(*inputs), inputs))
        torch.cuda.synchronize()
        for found, given in held:
            agree(found, module, given)
