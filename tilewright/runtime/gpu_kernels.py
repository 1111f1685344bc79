"""The kernels of a program on a GPU as the driver has them: loaded from cubins, and nodes of a graph with their parameters."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence

from tilewright.errors import KernelFailed
from tilewright.ir.tensor_map import MAP_BYTES, TensorMap
from tilewright.runtime.cpu import Compiled
from tilewright.runtime.driver import Driver, KernelNodeParams
from tilewright.runtime.loadable import LoadableKernel
from tilewright.runtime.prefetching import NAME, PTX


class ParameterBlock:
    """The parameters of one kernel node: an array of pointers to values, some of which are slots shared with other nodes."""

    def __init__(
        self, slots: Sequence[int], fixed: Sequence[int], scalars: Sequence[int], scalar_bytes: int, maps: Sequence[tuple[int, TensorMap]] = ()
    ) -> None:
        """`slots` are addresses of shared slots, or 0 if the parameter is the next one of the `fixed` values. `maps` are not encoded yet."""
        self.values = (ctypes.c_uint64 * max(len(fixed), 1))(*fixed)
        scalar_type = ctypes.c_int64 if scalar_bytes == 8 else ctypes.c_int32
        self.scalars = (scalar_type * max(len(scalars), 1))(*scalars)
        self.pointers = (ctypes.c_void_p * max(len(slots) + len(scalars) + len(maps), 1))()
        cursor = 0
        for i, slot in enumerate(slots):
            if slot:
                self.pointers[i] = slot
            else:
                self.pointers[i] = ctypes.addressof(self.values) + 8 * cursor
                cursor += 1
        for i in range(len(scalars)):
            self.pointers[len(slots) + i] = ctypes.addressof(self.scalars) + scalar_bytes * i
        self.maps = maps
        self._encoded = (ctypes.c_char * (MAP_BYTES * (len(maps) + 1)))()
        first = -(-ctypes.addressof(self._encoded) // MAP_BYTES) * MAP_BYTES
        for i in range(len(maps)):
            self.pointers[len(slots) + len(scalars) + i] = first + MAP_BYTES * i

    def encode(self, driver: Driver) -> None:
        """Encodes the tensor maps for the addresses that the parameters have now."""
        for place, (position, described) in zip(self.pointers[len(self.pointers) - len(self.maps) :], self.maps, strict=True):
            address = ctypes.c_uint64.from_address(self.pointers[position] or 0).value
            driver.encode_map(place or 0, described, address)


def parameter_block(driver: Driver, kernel: LoadableKernel, slots: Sequence[int], fixed: Sequence[int], step: int, trips: int = 0) -> ParameterBlock:
    """The parameters of a kernel, for one step of its region and the trips of a call."""
    scalars = [*[step] * kernel.scalars, *([trips] if kernel.trips else [])]
    block = ParameterBlock(slots, fixed, scalars, kernel.scalar_bytes, kernel.maps)
    block.encode(driver)
    return block


def node_params(function: int, kernel: LoadableKernel, block: ParameterBlock, trips: int = 0) -> KernelNodeParams:
    """The driver's structure for one kernel node. It points into `block`, which must outlive it."""
    grid = kernel.grid_of(trips)
    return KernelNodeParams(
        func=function,
        gridDimX=grid[0],
        gridDimY=grid[1],
        gridDimZ=grid[2],
        blockDimX=kernel.block[0],
        blockDimY=kernel.block[1],
        blockDimZ=kernel.block[2],
        sharedMemBytes=kernel.shared_bytes,
        kernelParams=ctypes.cast(block.pointers, ctypes.POINTER(ctypes.c_void_p)),
    )


class GpuLibrary:
    """The loaded cubins of a program and the handles of their kernels; unloaded once nothing refers to them.

    `prefetch`: the kernel that brings constants to level 2; 0 without `prefetches`, or where the driver cannot assemble it. It is loaded here, since
    a user may capture the first call, and nothing can be loaded meanwhile.
    """

    def __init__(
        self, driver: Driver, binaries: Sequence[Compiled], kernels: Mapping[str, LoadableKernel], context: int, prefetches: bool = False
    ) -> None:
        self.driver = driver
        self.context = context
        self.modules: list[int] = []
        self.functions: dict[str, int] = {}
        for binary in binaries:
            try:
                module = driver.load_module(binary.content)
            except KernelFailed as error:
                raise KernelFailed(f"{binary.path} cannot be loaded: {error.cause}", "compile for this GPU") from error
            self.modules.append(module)
            for name in binary.entries:
                self.functions[name] = driver.function(module, name)
        for name, kernel in kernels.items():
            if name not in self.functions:
                raise KernelFailed(f"no binary holds the kernel {name}", "compile the model again")
            if kernel.shared_bytes:
                driver.allow_shared_bytes(self.functions[name], kernel.shared_bytes)
        self.prefetch = self._assembled() if prefetches else 0
        self._finalizer = weakref.finalize(self, _unload, driver, tuple(self.modules), context)

    def _assembled(self) -> int:
        """The kernel that brings constants to level 2; 0 if the driver cannot assemble it."""
        try:
            self.modules.append(self.driver.load_module(PTX.encode() + bytes(1)))
            return self.driver.function(self.modules[-1], NAME)
        except KernelFailed:  # a driver without its assembler
            return 0


def _unload(driver: Driver, modules: Sequence[int], context: int) -> None:
    try:
        driver.push_context(context)
        for module in modules:
            driver.unload_module(module)
        driver.pop_context()
    except KernelFailed:  # at process exit the driver may already be gone
        return
