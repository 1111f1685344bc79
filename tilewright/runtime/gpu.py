"""Runs a program on a GPU: each segment between operators of PyTorch is a CUDA graph, launched on the caller's stream.

Kernels and calls of libraries (child graphs, see `captured`) are nodes. There is an edge if a call reads or overwrites what an earlier call wrote, or
overwrites what the earlier one reads; this is determined from the bytes that they access, so that values that share memory are ordered too, except
for disjoint slices of one buffer. Calls without a path between them may run concurrently, except for two calls of libraries, which share workspaces.
Further nodes bring constants to level 2 (`prefetching`).

The caller's tensors are read and written in place: their addresses are node parameters, and before a launch only the nodes whose addresses changed
are updated. A tensor that very many nodes access (a scan's input), or a call of a library, whose graph cannot be updated, is copied to a staging
buffer instead.

Kernels store indices out of range in host memory (`Buffers.faults`). The next call checks it before it enqueues anything, so nothing waits for a
kernel. If a second call is enqueued before the first has found a fault, the call after it raises the error.

If the caller captures a call into a CUDA graph, its calls are added to that graph one by one. Replays of that graph use this executable's memory:
the caller must order them with respect to other calls.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright.errors import KernelFailed
from tilewright.ir.library import LibraryCall
from tilewright.ir.region import Call
from tilewright.runtime.accesses import EDGES_UP_TO, accesses, dependencies
from tilewright.runtime.buffers import Buffers, SharedConstants
from tilewright.runtime.captured import captured, handle_of
from tilewright.runtime.cpu import Compiled
from tilewright.runtime.driver import Driver, KernelNodeParams, system_driver
from tilewright.runtime.gpu_kernels import GpuLibrary, ParameterBlock, node_params, parameter_block
from tilewright.runtime.library import BoundCall, bound_calls
from tilewright.runtime.loadable import LoadableProgram
from tilewright.runtime.memory_plan import GPU_ALIGNMENT
from tilewright.runtime.packing import torch_dtype
from tilewright.runtime.prefetching import PrefetchNode, are_short, prefetches

STAGED_FROM = 16
"""A caller's tensor that at least this many nodes access is copied, rather than all of them updated."""
EARLY = True
"""Whether kernels that wait for those that they depend on begin before these have ended."""
PREFETCH = True
"""Whether constants are brought to level 2 ahead of the kernels that read them."""
PREFETCHES_FROM = (9, 0)
"""The least compute capability that can."""
IDLE_CYCLES = 40_000
"""How long a GPU idles per region before timed kernels: at 2 GHz 20 us, which is more than a launch and an event take on the host."""


def _destroy(driver: Driver, context: int, graphs: list[tuple[int, int]], events: list[int], writing: Sequence[int], used: object) -> None:
    """Destroys graphs and events. `writing` is the stream on which kernels may still use what is `used`, which is kept alive until they are done."""
    try:
        if writing:
            driver.push_context(context)
            for stream in writing:
                driver.record_event(events[0], stream)
            driver.pop_context()
        for event in events:
            driver.wait_for_event(event)  # PyTorch's allocator does not know external streams
        for graph, executable in graphs:
            driver.destroy_executable(executable)
            driver.destroy_graph(graph)
        for event in events:
            driver.destroy_event(event)
    except KernelFailed:
        return


@dataclass(frozen=True, eq=False)
class _Node:
    handle: int
    params: KernelNodeParams
    block: ParameterBlock
    pointer: Any
    """Pointer to `params`, for the driver."""
    cooperative: bool

    def enqueue(self, driver: Driver, stream: int) -> None:
        """Adds the node to the capture that is under way on the stream."""
        self.block.encode(driver)
        driver.launch_kernel(self.params, stream, self.cooperative)


@dataclass(frozen=True, eq=False)
class _Operator:
    """The node of a library's operator, `graph`."""

    handle: int
    graph: int

    def enqueue(self, driver: Driver, stream: int) -> None:
        """As for kernels."""
        driver.capture_graph(self.graph, stream)


class _Segment:
    """The CUDA graph of a range of regions."""

    def __init__(self, engine: GpuEngine, first: int, last: int) -> None:
        buffers, driver, program = engine.buffers, engine.library.driver, engine.buffers.program
        calls: list[tuple[int, Call | LibraryCall, int]] = []
        for index, region in enumerate(program.regions[first:last], first):
            own: list[Call | LibraryCall] = [*([region.library] if region.library is not None else []), *region.calls]
            calls += [(index, call, step) for step in range(region.repeat) for call in own]
        self.touching: dict[int, list[_Node]] = {}
        edges = self._edges(engine, [call for _, call, _ in calls])
        graph = driver.create_graph()
        nodes: list[_Node | _Operator] = []
        for (index, call, step), before in zip(calls, edges, strict=True):
            if isinstance(call, LibraryCall):
                operator = handle_of(engine.operators[index])
                nodes.append(_Operator(driver.add_child_graph_node(graph, [nodes[i].handle for i in before], operator), operator))
                continue
            kernel = program.kernels[call.kernel]
            slots, fixed, touched = [], [], set()
            for name in call.arguments:
                external, slot = buffers.external(name), buffers.slot(name)
                if external is None or slot is None:
                    slots.append(0)
                    fixed.append(buffers.address(name))
                elif external in engine.staging:
                    slots.append(0)
                    fixed.append(engine.staging[external].data_ptr() + program.base_bytes(name))
                else:
                    slots.append(ctypes.addressof(engine.externals) + 8 * slot)
                    touched.add(slot)
            block = parameter_block(driver, kernel, slots, fixed, step, call.trips)
            params = node_params(engine.library.functions[call.kernel], kernel, block, call.trips)
            sources = [nodes[i] for i in before]
            early = EARLY and kernel.waits and all(isinstance(source, _Node) and not source.cooperative for source in sources)
            handle = driver.add_kernel_node(graph, [source.handle for source in sources], params, kernel.cooperative, early)
            node = _Node(handle, params, block, ctypes.byref(params), kernel.cooperative)
            nodes.append(node)
            for slot in touched:
                self.touching.setdefault(slot, []).append(node)
        known = [region for region in program.regions[first:last] if region.measured_seconds or region.predicted_seconds]
        seconds = sum(region.measured_seconds or region.predicted_seconds for region in known)
        fetched = len(calls) > 1 and are_short(sum(region.repeat * max(len(region.calls), 1) for region in known), seconds)
        self._prefetches = self._prefetching(engine, graph, [call for _, call, _ in calls], nodes) if fetched else []
        self.nodes = nodes
        self.graph = graph  # kept, as updates of the executable graph refer to its nodes
        self.executable = driver.instantiate(graph)
        self.seen = engine._pointers

    @staticmethod
    def _prefetching(engine: GpuEngine, graph: int, calls: Sequence[Call | LibraryCall], nodes: Sequence[_Node | _Operator]) -> list[PrefetchNode]:
        level_2 = engine.prefetched_level()
        if not level_2:
            return []
        read = [
            engine.buffers.constants_of([view.name for view in call.views] if isinstance(call, LibraryCall) else call.arguments) for call in calls
        ]
        found = prefetches([[(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors] for tensors in read], level_2)
        driver = engine.library.driver
        return [
            PrefetchNode(driver, graph, [] if one.after is None else [nodes[one.after].handle], engine.library.prefetch, one.pieces) for one in found
        ]

    @staticmethod
    def _edges(engine: GpuEngine, calls: Sequence[Call | LibraryCall]) -> list[list[int]]:
        if engine.in_order or len(calls) > EDGES_UP_TO:
            return [[i - 1] if i else [] for i in range(len(calls))]
        return dependencies(accesses(engine.buffers.program, calls, engine.buffers.extent))


class GpuEngine:
    """One program over one arena on one GPU. Calls of `run` must not overlap; `run` returns when the kernels are enqueued.

    `in_order` runs the kernels of a segment one after another, even if the data allow them to run concurrently.
    """

    input_alignment = 16
    """In bytes: kernels load vectors of up to 16 bytes."""
    threads = 1

    def __init__(self, buffers: Buffers, library: GpuLibrary, in_order: bool = False, model: GpuEngine | None = None) -> None:
        """`model`: another engine of the program, whose reordered filters this one shares."""
        self.buffers = buffers
        self.library = library
        self.in_order = in_order
        self._driver = library.driver
        functions = library.driver.functions  # looked up once, as each call of the executable uses them
        self._launch, self._record = functions["cuGraphLaunch"], functions["cuEventRecord"]
        self._set_params = functions["cuGraphExecKernelNodeSetParams_v2"]
        self._get_context = functions["cuCtxGetCurrent"]
        self._context = ctypes.c_void_p()
        self._context_pointer = ctypes.byref(self._context)
        self._pushed = False
        self._device = buffers.device.index or 0
        self.externals = (ctypes.c_uint64 * max(buffers.slots, 1))()
        self._inputs = len(buffers.places.inputs)
        self.staging = self._staging_buffers(buffers.program)
        roots = (*buffers.places.inputs, *buffers.places.outputs)
        self._staged = {
            external: copy[: buffers.program.bytes_of(roots[external])].view(torch_dtype(buffers.program.storage[roots[external]].value.dtype))
            for external, copy in self.staging.items()
        }
        self.libraries: dict[int, BoundCall] = bound_calls(buffers, model.libraries if model is not None else None)
        unknown = self.in_place([None] * self._inputs, [None] * len(buffers.places.outputs))
        calls = [partial(call, *unknown, self.threads) for call in self.libraries.values()]
        self.operators: dict[int, Any] = dict(zip(self.libraries, captured(calls, buffers.device), strict=True)) if calls else {}
        self._segments: dict[tuple[int, int], _Segment] = {}
        faults = buffers.faults
        self._faults = (ctypes.c_char * (8 * faults.numel())).from_address(faults.data_ptr()) if faults.numel() else None
        self._no_faults = bytes(8 * faults.numel())
        self._event = self._driver.create_event()
        self._pointers: list[int] = []
        self._stream = 0  # stream of the current call
        self._capturing = False
        self._last: int | None = None  # the stream that used the memory last
        self._lasting = False  # whether that stream is never destroyed, so that its event can be recorded when needed
        self._streams: dict[int, bool] = {}
        self._graphs: list[tuple[int, int]] = []
        self._writing: list[int] = []
        used = (buffers.faults, self.operators, self.libraries)
        self._finalizer = weakref.finalize(self, _destroy, self._driver, library.context, self._graphs, [self._event], self._writing, used)

    def _staging_buffers(self, program: LoadableProgram) -> dict[int, torch.Tensor]:
        touching: dict[int, int] = {}
        size: dict[int, int] = {}
        for region in program.regions:
            operators = [([view.name for view in region.library.views], STAGED_FROM)] if region.library is not None else []
            for names, nodes in (*operators, *((call.arguments, region.repeat) for call in region.calls)):
                for name in dict.fromkeys(names):
                    external = self.buffers.external(name)
                    if external is not None:
                        touching[external] = touching.get(external, 0) + nodes
                        size[external] = program.bytes_of(program.root(name))
        return {
            external: torch.zeros(max(size[external], 1), dtype=torch.uint8, device=self.buffers.device)
            for external, count in touching.items()
            if count >= STAGED_FROM
        }

    def prefetched_level(self) -> int:
        """Bytes of level 2 of the GPU, if constants are brought there; else 0."""
        if not PREFETCH or not self.library.prefetch:
            return 0
        return int(torch.cuda.get_device_properties(self.buffers.device).L2_cache_size)

    def in_place(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The caller's tensors as PyTorch's operators are to see them: flat copies in place of those that are staged."""
        if not self._staged:
            return inputs, outputs
        every = [self._staged.get(external, tensor) for external, tensor in enumerate((*inputs, *outputs))]
        return every[: self._inputs], every[self._inputs :]

    def bind(self, pointers: Sequence[int]) -> None:
        """Sets the addresses of the caller's tensors for the following runs: inputs, then outputs.

        The GPU's context is current from here to `finish` or `abandon`. Enqueues the work that must precede the kernels.
        """
        self._pointers = self.buffers.addresses(pointers)
        self.externals[: len(self._pointers)] = self._pointers  # type: ignore[assignment]  # ctypes accepts integers as well
        self._stream = stream = current_stream(self._device)
        self._enter()
        self._capturing = is_capturing()
        if self._last != stream and not self._capturing:  # captured work must not wait for work outside the capture
            self._follow(stream)
        if self.staging:
            for external, copy in self.staging.items():
                if external < self._inputs and pointers[external]:
                    self._driver.copy(copy.data_ptr(), pointers[external], copy.numel(), stream)

    def _follow(self, stream: int) -> None:
        """Makes this stream wait for the last use of the memory on the previous stream."""
        if self._last is not None:
            if self._lasting:
                self._driver.record_event(self._event, self._last)
            self._driver.wait_event(stream, self._event)
        if stream not in self._streams:
            self._streams[stream] = self._adopt(stream)
        self._last, self._lasting = stream, self._streams[stream]
        self._writing[:] = [stream] if self._lasting and (self._faults is not None or self.operators) else []

    def _adopt(self, stream: int) -> bool:
        """Whether the stream is one of PyTorch's own or the default one. These are never destroyed, and PyTorch's allocator is told that this
        engine's memory is used on the stream as well."""
        current = torch.cuda.current_stream(self.buffers.device)
        if stream and current.stream_id == stream:  # the id of an external stream is its address
            return False
        for tensor in (self.buffers.arena, *self.buffers.constants.values(), *self.staging.values()):
            tensor.record_stream(current)
        return True

    def run(self, first: int, last: int) -> None:
        """Enqueues the kernels and libraries' operators of regions `first` to `last` (excluded), none of which is a PyTorch node."""
        segment = self._segments.get((first, last))
        if segment is None:
            segment = self._segments[first, last] = _Segment(self, first, last)
            self._graphs.append((segment.graph, segment.executable))
        if self._capturing:
            for node in segment.nodes:
                node.enqueue(self._driver, self._stream)
            return
        if segment.seen != self._pointers:
            self._update(segment)
        if segment.nodes:
            status = self._launch(segment.executable, self._stream)
            if status:
                self._driver.fail("cuGraphLaunch", status)

    def run_timed(self, first: int, last: int) -> list[torch.cuda.Event]:
        """Enqueues the kernels as `run` does, but those of one region after those of another. Returns the moment at which the first region began, and
        those at which each one ended. The GPU idles until all is enqueued, so that no region waits for its launch."""
        self.idle(last - first)
        moments = [self.moment()]
        for region in range(first, last):
            self.run(region, region + 1)
            moments.append(self.moment())
        return moments

    def idle(self, launches: int) -> None:
        """The GPU idles until the host has enqueued so many launches, each with an event."""
        torch.cuda._sleep(IDLE_CYCLES * launches)

    def moment(self) -> torch.cuda.Event:
        """An event on the caller's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The seconds between two moments; waits for the second."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return 1e-3 * milliseconds

    def clock_seconds(self) -> float:
        """The seconds between two events with nothing between them, which they add to the time of each region."""
        torch.cuda._sleep(10 * IDLE_CYCLES)  # both are enqueued before the GPU reaches the first
        return self.seconds(self.moment(), self.moment())

    def _update(self, segment: _Segment) -> None:
        """Updates the parameters of the nodes that access a tensor at a new address; their blocks already hold that address."""
        changed = [nodes for slot, nodes in segment.touching.items() if segment.seen[slot] != self._pointers[slot]]
        segment.seen = self._pointers
        for node in changed[0] if len(changed) == 1 else dict.fromkeys(node for nodes in changed for node in nodes):
            if node.block.maps:
                node.block.encode(self._driver)
            status = self._set_params(segment.executable, node.handle, node.pointer)
            if status:
                segment.seen = [0] * len(segment.seen)
                self._driver.fail("cuGraphExecKernelNodeSetParams_v2", status)

    def finish(self) -> None:
        """Enqueues the work that must follow the kernels: copies of staged outputs, and the event that other streams wait for."""
        if self.staging:
            for external, copy in self.staging.items():
                if external >= self._inputs and self._pointers[external]:
                    self._driver.copy(self._pointers[external], copy.data_ptr(), copy.numel(), self._stream)
        if not self._lasting and not self._capturing:
            self._driver.record_event(self._event, self._stream)
        if self._pushed:
            self._leave()

    def abandon(self) -> None:
        """Ends a call that failed between `bind` and `finish`."""
        if not self._lasting and not self._capturing:
            self._record(self._event, self._stream)  # other streams must still wait for what was enqueued
        self._leave()

    def check_indices(self, wait: bool) -> None:
        """Raises the error for faults that kernels have reported so far; with `wait`, first waits for the call enqueued last, unless it was captured.

        Raises:
            IndexOutOfRange: if an index was out of range.
        """
        if self._faults is None:
            return
        if wait and not self._capturing:
            self._enter()
            self._driver.record_event(self._event, self._stream)
            self._driver.wait_for_event(self._event)
            self._leave()
        if self._faults.raw != self._no_faults:
            fault = self.buffers.take_fault()
            if fault is not None:
                raise fault

    def _enter(self) -> None:
        status = self._get_context(self._context_pointer)
        if status:
            self._driver.fail("cuCtxGetCurrent", status)
        self._pushed = self._context.value != self.library.context
        if self._pushed:
            self._driver.push_context(self.library.context)

    def _leave(self) -> None:
        if self._pushed:
            self._pushed = False
            self._driver.pop_context()

    def close(self) -> None:
        """Waits for the GPU and destroys the graphs."""
        torch.cuda.synchronize(self.buffers.device)
        self._segments.clear()
        self._finalizer()


def current_stream(device: int) -> int:
    """The handle of PyTorch's current stream on a device."""
    quick: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick(device) if quick is not None else torch.cuda.current_stream(device).cuda_stream


def is_capturing() -> bool:
    """Whether PyTorch's current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def gpu_engine(
    program: LoadableProgram,
    binaries: Sequence[Compiled],
    model: GpuEngine | None = None,
    shared_constants: SharedConstants | None = None,
    in_order: bool = False,
    cache_bytes: int = 0,
) -> GpuEngine:
    """An engine over fresh buffers on the current GPU; a clone of `model`, if given, is on the GPU of `model` and shares its constants and
    kernels, others `shared_constants`. `cache_bytes`: as in `plan_memory`."""
    torch.cuda.init()
    if model is not None:
        device, constants, library = model.buffers.device, model.buffers.constants, model.library
    else:
        device, constants = torch.device("cuda", torch.cuda.current_device()), None
        driver = system_driver()
        index = device.index or 0
        context = driver.primary_context(index)
        driver.push_context(context)
        try:
            prefetches = torch.cuda.get_device_capability(device) >= PREFETCHES_FROM
            library = GpuLibrary(driver, binaries, program.kernels, context, prefetches)
        finally:
            driver.pop_context()
    buffers = Buffers(program, device, GPU_ALIGNMENT, constants, shared_constants, cache_bytes)
    engine = GpuEngine(buffers, library, in_order, model)
    torch.cuda.synchronize(device)  # the arena is zeroed and the constants are copied before the first call, whatever its stream
    return engine
