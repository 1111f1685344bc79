"""Tests of the GPU engine without a GPU: structures against CUDA's own, parameters, edges, and the calls made to a driver."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime_programs import ProgramBuilder, chain
from tests.sample_artifacts import Returned
from tilewright.compile import read
from tilewright.errors import IndexOutOfRange, KernelFailed, TargetNotPresent
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.graph import Value
from tilewright.ir.layout import Box, row_major
from tilewright.ir.region import IndexCheck, Storage
from tilewright.partition.plan import plan_program
from tilewright.runtime import gpu as gpu_module
from tilewright.runtime.accesses import Extent, dependencies
from tilewright.runtime.artifact import SavedBinary
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.driver import PROTOTYPES, Driver, KernelNodeParams
from tilewright.runtime.gpu import STAGED_FROM, GpuEngine
from tilewright.runtime.gpu_kernels import GpuLibrary, ParameterBlock, node_params
from tilewright.runtime.loadable import LoadableKernel, LoadableProgram, loadable


def test_the_kernel_nodes_structure_is_cudas() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    theirs = driver.CUDA_KERNEL_NODE_PARAMS_v2()
    names = [field[0] for field in KernelNodeParams._fields_]
    numbers = {name: 3 + 7 * i for i, name in enumerate(names)}
    for name in names:
        if name == "func":
            theirs.func = driver.CUfunction(numbers[name])
        elif name == "kern":
            theirs.kern = driver.CUkernel(numbers[name])
        elif name == "ctx":
            theirs.ctx = driver.CUcontext(numbers[name])
        elif name not in ("kernelParams", "extra"):
            setattr(theirs, name, numbers[name])
    ours = KernelNodeParams.from_address(theirs.getPtr())
    for name in names:
        if name not in ("kernelParams", "extra"):
            assert getattr(ours, name) == numbers[name], name
    assert KernelNodeParams.kernelParams.offset == 40 and KernelNodeParams.extra.offset == 48
    assert ctypes.sizeof(KernelNodeParams) == 72


def test_numbers_are_cudas() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    from tilewright.runtime.driver import EVENT_DISABLE_TIMING, MAX_DYNAMIC_SHARED_SIZE_BYTES, SET_CAPTURE_DEPENDENCIES

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert int(attribute) == MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING) == EVENT_DISABLE_TIMING
    update = driver.CUstreamUpdateCaptureDependencies_flags
    assert int(update.CU_STREAM_SET_CAPTURE_DEPENDENCIES) == SET_CAPTURE_DEPENDENCIES


def read_parameters(pointers: Any, sizes: list[int]) -> list[int]:
    """What the driver would copy: the value behind each pointer."""
    return [int.from_bytes(ctypes.string_at(pointers[i], size), "little") for i, size in enumerate(sizes)]


@pytest.mark.parametrize("scalar_bytes", [4, 8])
def test_parameters_are_packed_in_the_kernels_order(scalar_bytes: int) -> None:
    slots = (ctypes.c_uint64 * 2)(111, 222)
    shared = [ctypes.addressof(slots) + 8, 0, ctypes.addressof(slots), 0]
    block = ParameterBlock(shared, [2**40 + 1, 2**40 + 2], [5, 6], scalar_bytes)
    params = node_params(77, LoadableKernel("k", (False,) * 4, 2, (2, 3, 4), (32, 2, 1), 50000, scalar_bytes), block)
    sizes = [8, 8, 8, 8, scalar_bytes, scalar_bytes]
    assert read_parameters(params.kernelParams, sizes) == [222, 2**40 + 1, 111, 2**40 + 2, 5, 6]
    slots[1] = 333
    assert read_parameters(params.kernelParams, sizes)[0] == 333
    assert (params.gridDimX, params.gridDimY, params.gridDimZ, params.blockDimX, params.blockDimY) == (2, 3, 4, 32, 2)
    assert params.func == 77 and params.sharedMemBytes == 50000 and not params.extra


@st.composite
def accesses(draw: st.DrawFn) -> list[tuple[list[Extent], list[Extent]]]:
    def extents() -> list[Extent]:
        result = []
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, 20))
            end = start + draw(st.integers(1, 8))
            box: Box = ()
            if draw(st.booleans()):  # a slice: its buffer is always the same bytes
                start, end = 4, 12
                box = (
                    (first := draw(st.integers(0, 3)), first + draw(st.integers(1, 3))),
                    (row := draw(st.integers(0, 1)), row + draw(st.integers(1, 2))),
                )
            result.append(Extent(draw(st.sampled_from(["arena", "x"])), start, end, "root" if box else "", box))
        return result

    return [(extents(), extents()) for _ in range(draw(st.integers(0, 15)))]


def reachable(edges: list[list[int]]) -> list[set[int]]:
    result: list[set[int]] = []
    for before in edges:
        result.append(set(before).union(*(result[i] for i in before)) if before else set())
    return result


@settings(deadline=None)
@given(accesses())
def test_edges_order_exactly_the_conflicts(calls: list[tuple[list[Extent], list[Extent]]]) -> None:
    def overlap(a: list[Extent], b: list[Extent]) -> bool:
        return any(
            m.memory == n.memory
            and m.start < n.end
            and n.start < m.end
            and (not m.box or not n.box or all(s < f and t < e for (s, e), (t, f) in zip(m.box, n.box, strict=True)))
            for m in a
            for n in b
        )

    conflicts = [
        [i for i in range(j) if overlap(calls[i][1], calls[j][0] + calls[j][1]) or overlap(calls[i][0], calls[j][1])] for j in range(len(calls))
    ]
    edges = dependencies(calls)
    assert reachable(edges) == reachable(conflicts)
    for before in edges:  # no edge is implied by the others
        for i in before:
            rest = [k for k in before if k != i]
            assert i not in set().union(*(reachable(edges)[k] for k in rest)) if rest else True


class FakeLibrary:
    """A libcuda that logs its calls, returns numbered handles, and records the launch parameters of each graph's nodes."""

    def __init__(self, failing: str = "", version: int = 13000) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing, self.version, self.next = failing, version, 1000
        self.nodes: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.context = 5
        for name in PROTOTYPES:
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == self.failing:
                return 719
            if name in ("cuGetErrorName", "cuGetErrorString"):
                arguments[1]._obj.value = b"CUDA_ERROR_LAUNCH_FAILED" if name == "cuGetErrorName" else b"launch failed"
            elif name == "cuDriverGetVersion":
                arguments[0]._obj.value = self.version
            elif name == "cuCtxGetCurrent":
                arguments[0]._obj.value = self.context
            elif arguments and type(arguments[0]).__name__ == "CArgObject":
                self.next += 1
                arguments[0]._obj.value = self.next
            if name == "cuGraphAddKernelNode_v2":
                before = list(arguments[2] or ())
                self.nodes[self.next] = (before, self._read(arguments[4]._obj))
            elif name == "cuGraphExecKernelNodeSetParams_v2":
                self.nodes[arguments[1]] = (self.nodes[arguments[1]][0], self._read(arguments[2]._obj))
            return 0

        return function

    @staticmethod
    def _read(params: KernelNodeParams) -> dict[str, Any]:
        return {"func": params.func, "pointers": [ctypes.c_uint64.from_address(params.kernelParams[i]).value for i in range(2)]}

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_failures_are_named() -> None:
    driver = Driver(FakeLibrary("cuGraphLaunch"))
    assert driver.version == (13, 0)
    with pytest.raises(KernelFailed, match=r"cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        driver.launch(1, 0)
    library = FakeLibrary()
    del library.cuGraphAddKernelNode_v2  # type: ignore[attr-defined]
    with pytest.raises(TargetNotPresent, match="cuGraphAddKernelNode_v2"):
        Driver(library)


class FakeStream:
    """The current stream as seen by the engine: its handle, whether it is PyTorch's own, and whether it is being captured."""

    handle = 0
    lasting = True
    capturing = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    fake = FakeStream()
    monkeypatch.setattr(gpu_module, "current_stream", lambda device: fake.handle)
    monkeypatch.setattr(gpu_module, "is_capturing", lambda: fake.capturing)
    monkeypatch.setattr(GpuEngine, "_adopt", lambda self, handle: fake.lasting)
    return fake


def fake_engine(program: LoadableProgram, in_order: bool = False) -> tuple[GpuEngine, FakeLibrary]:
    library = FakeLibrary()
    binary = SavedBinary(Path("0.cubin"), tuple(program.kernels), "cubin", b"cubin")
    loaded = GpuLibrary(Driver(library), [binary], program.kernels, 5)
    return GpuEngine(Buffers(program, torch.device("cpu"), 256), loaded, in_order), library


def diamond() -> LoadableProgram:
    """x -> a, b (independent) -> c."""
    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("relu", ("x",), "a", (4,), "")
    builder.kernel("neg", ("x",), "b", (4,), "")
    builder.kernel("add", ("a", "b"), "c", (4,), "")
    return loadable(builder.program(("c",)))


def test_branches_are_independent_and_only_changed_nodes_are_updated(stream: FakeStream) -> None:
    program = diamond()
    engine, library = fake_engine(program)
    x, y = 0x1000, 0x2000
    engine.bind([x, y])
    engine.run(0, 3)
    engine.finish()
    (first, a), (second, b), (third, c) = library.nodes.values()
    handles = list(library.nodes)
    assert first == [] and second == [] and third == handles[:2]
    assert a["pointers"] == [x, engine.buffers.address("a")] and b["pointers"] == [x, engine.buffers.address("b")]
    assert c["pointers"] == [engine.buffers.address("a"), engine.buffers.address("b")]
    assert "cuGraphExecKernelNodeSetParams_v2" not in library.names()
    library.calls.clear()
    engine.bind([x, y])
    engine.run(0, 3)
    engine.finish()
    assert "cuGraphExecKernelNodeSetParams_v2" not in library.names() and library.names().count("cuGraphLaunch") == 1
    library.calls.clear()
    engine.bind([x, y + 256])
    engine.run(0, 3)
    updated = [arguments[1] for name, arguments in library.calls if name == "cuGraphExecKernelNodeSetParams_v2"]
    assert updated == [handles[2]]
    engine.bind([x + 256, y + 256])
    engine.run(0, 3)
    assert [n["pointers"][0] for _, n in list(library.nodes.values())[:2]] == [x + 256] * 2


@pytest.mark.parametrize("staged", [False, True])
def test_slices_of_a_result_are_stored_concurrently_at_its_address(staged: bool, stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "STAGED_FROM", 2 if staged else STAGED_FROM)
    graph, _ = simplify(read(Returned().eval(), (torch.randn(1, 3, 6, 6),)).graph)
    program = loadable(plan_program(graph, machine("h200"), 1))
    engine, library = fake_engine(program)
    assert set(program.aliases) == {"relu", "relu_1"} and engine.buffers.external("relu_1") == 1
    places = [program.base_bytes(name) for name in ("relu", "relu_1")]
    assert places == [0, 4 * 8 * 36]
    for output in (0x2000, 0x9000):
        engine.bind([0x1000, output])
        engine.run(0, len(program.regions))
        engine.finish()
        start = engine.staging[1].data_ptr() if staged else output
        nodes = engine._segments[0, len(program.regions)].nodes
        last = {node.handle: node.block.pointers[len(node.block.pointers) - 1] or 0 for node in nodes if isinstance(node, gpu_module._Node)}
        stored = {ctypes.c_uint64.from_address(pointer).value: handle for handle, pointer in last.items()}
        stores = [stored[start + place] for place in places]
    assert not any(handle in before for handle in stores for before, _ in map(library.nodes.__getitem__, stores))


def test_in_order_is_a_chain(stream: FakeStream) -> None:
    engine, library = fake_engine(diamond(), in_order=True)
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    handles = list(library.nodes)
    assert [before for before, _ in library.nodes.values()] == [[], [handles[0]], [handles[1]]]


def test_reused_memory_orders_calls(stream: FakeStream) -> None:
    program = loadable(chain(6).program(("r5",)))
    engine, library = fake_engine(program)
    engine.bind([0x1000, 0x2000])
    engine.run(0, len(program.regions))
    handles = list(library.nodes)
    positions = [[handles.index(i) for i in before] for before, _ in library.nodes.values()]
    assert all(i - 1 in reachable(positions)[i] for i in range(1, len(handles)))


@pytest.mark.parametrize("lasting", [True, False])
def test_another_stream_waits_for_the_last_use(stream: FakeStream, lasting: bool) -> None:
    stream.lasting = lasting
    engine, library = fake_engine(diamond())
    last: int | None = None
    for handle, waits in ((0, 0), (0, 0), (7, 1), (7, 0), (0, 1)):
        stream.handle = handle
        library.calls.clear()
        engine.bind([0x1000, 0x2000])
        engine.run(0, 3)
        engine.finish()
        names = library.names()
        assert names.count("cuStreamWaitEvent") == waits
        launched = [arguments for name, arguments in library.calls if name == "cuGraphLaunch"]
        assert [arguments[1] for arguments in launched] == [handle]
        recorded = [(index, arguments[1]) for index, (name, arguments) in enumerate(library.calls) if name == "cuEventRecord"]
        launch = names.index("cuGraphLaunch")
        if lasting:  # recorded on the previous stream when another one has to wait
            assert [on for _, on in recorded] == ([last] if waits else [])
            assert all(index < names.index("cuStreamWaitEvent") < launch for index, _ in recorded)
        else:  # recorded after each call, since the stream may be destroyed later
            assert [on for _, on in recorded] == [handle] and recorded[0][0] > launch
            assert not waits or names.index("cuStreamWaitEvent") < launch
        last = handle


def test_captured_calls_launch_kernels_and_wait_for_nothing(stream: FakeStream) -> None:
    engine, library = fake_engine(diamond())
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    engine.finish()
    library.calls.clear()
    stream.handle, stream.capturing = 7, True
    engine.bind([0x3000, 0x4000])
    engine.run(0, 3)
    engine.finish()
    names = library.names()
    assert names.count("cuLaunchKernel") == 3 and not {"cuGraphLaunch", "cuStreamWaitEvent", "cuEventRecord"} & set(names)
    assert {arguments[8] for name, arguments in library.calls if name == "cuLaunchKernel"} == {7}
    library.calls.clear()
    stream.handle, stream.capturing = 0, False
    engine.bind([0x5000, 0x6000])
    engine.run(0, 3)
    assert library.names().count("cuStreamWaitEvent") == 0  # the last uncaptured use was on this stream
    assert library.names().count("cuGraphExecKernelNodeSetParams_v2") == 3


def test_a_context_that_is_not_current_is_made_so(stream: FakeStream) -> None:
    engine, library = fake_engine(diamond())
    library.context = 9
    library.calls.clear()
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    engine.finish()
    assert library.names().count("cuCtxPushCurrent_v2") == library.names().count("cuCtxPopCurrent_v2") == 1
    library.failing = "cuGraphLaunch"
    engine.bind([0x1000, 0x2000])
    with pytest.raises(KernelFailed):
        engine.run(0, 3)
    engine.abandon()
    assert library.names().count("cuCtxPushCurrent_v2") == library.names().count("cuCtxPopCurrent_v2") == 2


def test_a_tensor_that_many_nodes_touch_is_copied(stream: FakeStream) -> None:
    builder = ProgramBuilder({"x": (STAGED_FROM, 4)})
    builder.kernel("cumsum", ("x",), "y", (STAGED_FROM, 4), "", repeat=STAGED_FROM, scalars=1)
    engine, library = fake_engine(loadable(builder.program(("y",))))
    assert set(engine.staging) == {0, 1}
    engine.bind([0x1000, 0x2000])
    engine.run(0, 1)
    engine.finish()
    copies = [arguments for name, arguments in library.calls if name == "cuMemcpyDtoDAsync_v2"]
    size = STAGED_FROM * 16
    assert copies == [
        (engine.staging[0].data_ptr(), 0x1000, size, 0),
        (0x2000, engine.staging[1].data_ptr(), size, 0),
    ]
    engine.bind([0x3000, 0x4000])
    engine.run(0, 1)
    assert "cuGraphExecKernelNodeSetParams_v2" not in library.names()


def test_dynamic_shared_memory_is_asked_for_and_missing_kernels_named(stream: FakeStream) -> None:
    kernel = LoadableKernel("k", (True,), shared_bytes=100_000)
    binary = SavedBinary(Path("0.cubin"), ("k",), "cubin", b"cubin")
    library = FakeLibrary()
    GpuLibrary(Driver(library), [binary], {"k": kernel}, 5)
    ((arguments),) = [arguments for name, arguments in library.calls if name == "cuFuncSetAttribute"]
    assert arguments[1:] == (8, 100_000)
    with pytest.raises(KernelFailed, match="kernel k"):
        GpuLibrary(Driver(FakeLibrary()), [], {"k": kernel}, 5)
    with pytest.raises(KernelFailed, match="0.cubin cannot be loaded"):
        failing = Driver(FakeLibrary("cuModuleLoadData"))
        GpuLibrary(failing, [binary], {"k": kernel}, 5)


def test_a_clone_is_on_the_gpu_of_its_original(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """That GPU may not be PyTorch's current one, and the model may have no constants from which to tell."""
    for name, value in {"init": None, "synchronize": None, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    engine, _ = fake_engine(diamond())
    clone = gpu_module.gpu_engine(engine.buffers.program, (), engine)
    assert clone.buffers.device == engine.buffers.device and clone.library is engine.library


def test_an_index_out_of_range_is_said_by_the_next_call_or_after_waiting(stream: FakeStream) -> None:
    plain = diamond()
    storage = {**plain.storage, "f": Storage(Value("f", (2,), "i64"), row_major((2,)))}
    program = replace(plain, storage=storage, faults={"f": (IndexCheck("embedding a", 0, 5), IndexCheck("embedding b", -5, 5))})
    engine, library = fake_engine(program)
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    engine.finish()
    library.calls.clear()
    engine.check_indices(False)
    assert not library.calls
    engine.buffers.faults[1] = -6  # as a kernel does, through its address
    assert engine.buffers.address("f") == engine.buffers.faults.data_ptr()
    with pytest.raises(IndexOutOfRange, match="index -6 is out of range for a dimension of 5 elements, in embedding b;"):
        engine.check_indices(False)
    engine.check_indices(False)
    assert not library.calls
    engine.check_indices(True)
    assert [name for name in library.names() if name.startswith("cuEvent")] == ["cuEventRecord", "cuEventSynchronize"]
    stream.capturing = True
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    engine.finish()
    library.calls.clear()
    engine.check_indices(True)
    assert not library.calls


def test_memory_for_faults_outlives_the_kernels_that_may_write_to_it(stream: FakeStream) -> None:
    plain = diamond()
    storage = {**plain.storage, "f": Storage(Value("f", (1,), "i64"), row_major((1,)))}
    engine, library = fake_engine(replace(plain, storage=storage, faults={"f": (IndexCheck("embedding", 0, 5),)}))
    stream.handle = 7
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    engine.finish()
    library.calls.clear()
    del engine
    gc.collect()
    waits = [(name, arguments[1] if name == "cuEventRecord" else 0) for name, arguments in library.calls if name.startswith("cuEvent")]
    assert waits[:2] == [("cuEventRecord", 7), ("cuEventSynchronize", 0)]
