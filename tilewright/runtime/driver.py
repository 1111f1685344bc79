"""The CUDA driver through ctypes: the few functions that the GPU engine calls, with every return code checked.

Structures and numbers are those of cuda.h in CUDA 12 and 13 (with version 2 of the kernel node parameters, introduced in CUDA 12.0).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from functools import lru_cache
from typing import Any

from tilewright.errors import KernelFailed, TargetNotPresent
from tilewright.ir.dtypes import size_of
from tilewright.ir.tensor_map import TensorMap

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
EVENT_DISABLE_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""
LAUNCH_COOPERATIVE = 2
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE."""
SET_CAPTURE_DEPENDENCIES = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES."""
MAP_TYPES = {
    "u8": 0, "i8": 0, "bool": 0, "u16": 1, "i16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
}  # fmt: skip
"""CUtensorMapDataType."""
MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle."""
MAP_L2_PROMOTION = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c_void_p),
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("kernelParams", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    ]


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5)]


EARLY = (1, 1)
"""CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""


class LaunchAttributeValue(ctypes.Union):
    """CUlaunchAttributeValue."""

    _fields_ = [("pad", ctypes.c_char * 64), ("cooperative", c_int)]


ADD_EDGES = "cuGraphAddDependencies_v2"
"""Since CUDA 12.3; without it no kernel begins early."""
PROTOTYPES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuGraphCreate": [POINTER(c_void_p), c_uint],
    "cuGraphDestroy": [c_void_p],
    "cuGraphAddKernelNode_v2": [POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t, POINTER(KernelNodeParams)],
    "cuGraphAddChildGraphNode": [POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t, c_void_p],
    "cuGraphKernelNodeSetAttribute": [c_void_p, c_int, POINTER(LaunchAttributeValue)],
    ADD_EDGES: [c_void_p, POINTER(c_void_p), POINTER(c_void_p), POINTER(EdgeData), c_size_t],
    "cuGraphInstantiateWithFlags": [POINTER(c_void_p), c_void_p, c_ulonglong],
    "cuGraphExecDestroy": [c_void_p],
    "cuGraphExecKernelNodeSetParams_v2": [c_void_p, c_void_p, POINTER(KernelNodeParams)],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "cuLaunchCooperativeKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p)],
    "cuTensorMapEncodeTiled": [c_void_p, c_int, c_uint, c_void_p, *[c_void_p] * 4, *[c_int] * 4],
    "cuTensorMapEncodeIm2col": [c_void_p, c_int, c_uint, c_void_p, *[c_void_p] * 4, c_uint, c_uint, c_void_p, *[c_int] * 4],
    "cuMemcpyDtoDAsync_v2": [c_ulonglong, c_ulonglong, c_size_t, c_void_p],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuStreamGetCaptureInfo_v2": [
        c_void_p,
        POINTER(c_int),
        POINTER(c_ulonglong),
        POINTER(c_void_p),
        POINTER(POINTER(c_void_p)),
        POINTER(c_size_t),
    ],
    "cuStreamUpdateCaptureDependencies": [c_void_p, POINTER(c_void_p), c_size_t, c_uint],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class Driver:
    """The functions of libcuda with their prototypes. `library` is for tests; the default is ``libcuda.so.1``.

    Raises:
        TargetNotPresent: if there is no driver, or it is older than CUDA 12.
        KernelFailed: from every method, with the name of the function and the driver's name for the error.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise TargetNotPresent("there is no NVIDIA driver (libcuda.so.1)", "run on a machine with an NVIDIA GPU") from error
        self.functions: dict[str, Any] = {}
        for name, arguments in PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None and name == ADD_EDGES:
                continue
            if function is None:
                raise TargetNotPresent(f"the NVIDIA driver has no {name}", "install a driver of CUDA 12.0 or later")
            function.argtypes, function.restype = arguments, c_int
            self.functions[name] = function
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function and raises for any status except success."""
        status = self.functions[name](*arguments)
        if status:
            self.fail(name, status)

    def fail(self, name: str, status: int) -> None:
        """Raises for a status that is not success."""
        raise KernelFailed(f"{name} failed: {self.error(status)}", "see the CUDA driver's documentation of the error")

    def error(self, status: int) -> str:
        """The driver's name and description of a status."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            known = self.functions[function](status, byref(text)) == 0 and text.value is not None
            texts.append(text.value.decode() if known and text.value else "unknown")
        return f"{texts[0]} ({status}): {texts[1]}"

    def _handle(self, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument receives a handle."""
        handle = c_void_p()
        self(name, byref(handle), *arguments)
        return handle.value or 0

    @property
    def version(self) -> tuple[int, int]:
        """The latest CUDA release that the driver supports."""
        number = c_int()
        self("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def primary_context(self, device: int) -> int:
        handle = c_int()
        self("cuDeviceGet", byref(handle), device)
        return self._handle("cuDevicePrimaryCtxRetain", handle.value)

    def push_context(self, context: int) -> None:
        self("cuCtxPushCurrent_v2", context)

    def pop_context(self) -> None:
        self._handle("cuCtxPopCurrent_v2")

    def load_module(self, image: bytes) -> int:
        return self._handle("cuModuleLoadData", image)

    def unload_module(self, module: int) -> None:
        self("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return self._handle("cuModuleGetFunction", module, name.encode())

    def allow_shared_bytes(self, function: int, count: int) -> None:
        """Allows a kernel to be launched with `count` bytes of dynamic shared memory."""
        self("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, count)

    def create_graph(self) -> int:
        return self._handle("cuGraphCreate", 0)

    def destroy_graph(self, graph: int) -> None:
        self("cuGraphDestroy", graph)

    def add_kernel_node(
        self, graph: int, dependencies: Sequence[int], params: KernelNodeParams, cooperative: bool = False, early: bool = False
    ) -> int:
        """A node that launches the kernel; if it is cooperative, with all its blocks resident at once; if `early`, before its dependencies, which are
        kernels, have ended, where the driver can do that."""
        early = early and ADD_EDGES in self.functions
        before = () if early else dependencies
        handle = self._handle("cuGraphAddKernelNode_v2", graph, _nodes(before), len(before), byref(params))
        if early and dependencies:
            port, kind = EARLY
            edges = (EdgeData * len(dependencies))(*[EdgeData(from_port=port, type=kind) for _ in dependencies])
            self(ADD_EDGES, graph, _nodes(dependencies), _nodes([handle] * len(dependencies)), edges, len(dependencies))
        if cooperative:
            self("cuGraphKernelNodeSetAttribute", handle, LAUNCH_COOPERATIVE, byref(LaunchAttributeValue(cooperative=1)))
        return handle

    def add_child_graph_node(self, graph: int, dependencies: Sequence[int], child: int) -> int:
        """A node that runs a copy of the graph `child`, which must have no nodes that allocate."""
        return self._handle("cuGraphAddChildGraphNode", graph, _nodes(dependencies), len(dependencies), child)

    def capture_graph(self, child: int, stream: int) -> None:
        """Adds a graph to the capture that is under way on the stream, as the next thing that the stream does."""
        status, identity, graph, before, count = c_int(), c_ulonglong(), c_void_p(), POINTER(c_void_p)(), c_size_t()
        self("cuStreamGetCaptureInfo_v2", stream, byref(status), byref(identity), byref(graph), byref(before), byref(count))
        node = self.add_child_graph_node(graph.value or 0, before[: count.value], child)
        self("cuStreamUpdateCaptureDependencies", stream, _nodes([node]), 1, SET_CAPTURE_DEPENDENCIES)

    def instantiate(self, graph: int) -> int:
        return self._handle("cuGraphInstantiateWithFlags", graph, 0)

    def destroy_executable(self, executable: int) -> None:
        self("cuGraphExecDestroy", executable)

    def launch(self, executable: int, stream: int) -> None:
        self("cuGraphLaunch", executable, stream)

    def launch_kernel(self, params: KernelNodeParams, stream: int, cooperative: bool = False) -> None:
        """Launches one kernel with the parameters of a graph node."""
        launch = (
            params.func, params.gridDimX, params.gridDimY, params.gridDimZ, params.blockDimX, params.blockDimY,
            params.blockDimZ, params.sharedMemBytes, stream, params.kernelParams,
        )  # fmt: skip
        if cooperative:
            self("cuLaunchCooperativeKernel", *launch)
        else:
            self("cuLaunchKernel", *launch, None)

    def encode_map(self, target: int, described: TensorMap, address: int) -> None:
        """Writes the encoded map, MAP_BYTES at `target` in host memory (aligned to 64), of a tensor in the buffer at the address."""
        size = size_of(described.dtype)
        extents = (c_ulonglong * len(described.extents))(*described.extents)
        strides = (c_ulonglong * max(len(described.strides) - 1, 1))(*(stride * size for stride in described.strides[1:]))
        steps = (c_uint * len(described.extents))(*([1, *described.steps, 1] if described.corners else [1] * len(described.extents)))
        tensor = (target, MAP_TYPES[described.dtype], len(described.extents), address + described.offset * size, extents, strides)
        tail = (steps, 0, MAP_SWIZZLES[described.swizzle], MAP_L2_PROMOTION, 0)
        if described.corners:
            lower, upper = ((c_int * len(side))(*side) for side in zip(*described.corners, strict=True))
            self("cuTensorMapEncodeIm2col", *tensor, lower, upper, *described.box, *tail)
        else:
            self("cuTensorMapEncodeTiled", *tensor, (c_uint * len(described.box))(*described.box), *tail)

    def copy(self, target: int, source: int, count: int, stream: int) -> None:
        """Copies bytes from device memory to device memory, in stream order."""
        self("cuMemcpyDtoDAsync_v2", target, source, count, stream)

    def create_event(self) -> int:
        return self._handle("cuEventCreate", EVENT_DISABLE_TIMING)

    def record_event(self, event: int, stream: int) -> None:
        self("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self("cuStreamWaitEvent", stream, event, 0)

    def wait_for_event(self, event: int) -> None:
        """Makes the host wait for the event; returns at once if it was never recorded."""
        self("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        self("cuEventDestroy_v2", event)


def _nodes(handles: Sequence[int]) -> Any:
    """An array of nodes; None for none."""
    return (c_void_p * len(handles))(*handles) if handles else None


@lru_cache(maxsize=1)
def system_driver() -> Driver:
    """The driver of this machine."""
    return Driver()
