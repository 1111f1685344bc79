"""A measuring process and executables without a GPU: the driver runs kernels in the interpreter on host memory, and a graph of a library's operator is
the call itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.codegen.interpreter import run
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.tensor_map import TensorMap
from tilewright.partition.judges import lower
from tilewright.runtime import executable as executable_module
from tilewright.runtime import gpu as gpu_module
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.driver import KernelNodeParams
from tilewright.runtime.executable import Executable
from tilewright.runtime.gpu import GpuEngine
from tilewright.runtime.memory_plan import GPU_ALIGNMENT
from tilewright.tuning.compile_worker import program_of
from tilewright.tuning.trial_worker import DeviceProblem, Server


class EmulatedDriver:
    """The part of `Driver` that measuring uses; functions are kernel numbers."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.launches = 0
        self.loaded = 0
        self._graphs: dict[int, list[KernelNodeParams | Callable[[], object]]] = {}

    def load_module(self, image: bytes) -> int:
        self.loaded += 1
        return 1

    def unload_module(self, module: int) -> None:
        self.loaded -= 1

    def function(self, module: int, name: str) -> int:
        return 1 + [kernel.name for kernel in self.kernels].index(name)

    def allow_shared_bytes(self, function: int, count: int) -> None:
        pass

    def encode_map(self, place: int, described: TensorMap, address: int) -> None:
        """Nothing: the interpreter takes tensor maps from the kernel."""

    def create_graph(self) -> int:
        self._graphs[len(self._graphs) + 1] = []
        return len(self._graphs)

    def add_kernel_node(
        self, graph: int, before: Sequence[int], params: KernelNodeParams, cooperative: bool = False, early: bool = False
    ) -> int:
        assert list(before) == ([len(self._graphs[graph])] if self._graphs[graph] else [])
        self._graphs[graph].append(params)
        return len(self._graphs[graph])

    def add_child_graph_node(self, graph: int, before: Sequence[int], child: Callable[[], object]) -> int:
        assert list(before) == ([len(self._graphs[graph])] if self._graphs[graph] else [])
        self._graphs[graph].append(child)
        return len(self._graphs[graph])

    def instantiate(self, graph: int) -> int:
        return graph

    def launch(self, executable: int, stream: int) -> None:
        for node in self._graphs[executable]:
            if isinstance(node, KernelNodeParams):
                self.launch_kernel(node, stream)
            else:
                self.launches += 1
                node()

    def destroy_executable(self, executable: int) -> None:
        pass

    def destroy_graph(self, graph: int) -> None:
        pass

    def launch_kernel(self, params: KernelNodeParams, stream: int, cooperative: bool = False) -> None:
        self.launches += 1
        kernel = self.kernels[params.func - 1]
        assert kernel.launch is not None
        assert (params.gridDimX, params.gridDimY, params.gridDimZ) == tuple(kernel.launch.grid)
        arrays = []
        for number, parameter in enumerate(kernel.parameters):
            address = ctypes.c_uint64.from_address(params.kernelParams[number]).value
            assert address % 16 == 0
            kind = np.dtype(ELEMENT_TYPES[parameter.dtype].array)
            memory = (ctypes.c_uint8 * (parameter.size * kind.itemsize)).from_address(address)
            arrays.append(np.frombuffer(memory, kind))
        report = run(kernel, arrays)
        assert not report.faults, report.faults


class TimedDriver(EmulatedDriver):
    """Runs a graph when it is first launched. Launched again, to be timed, it would compute the same from the same, so its launches are counted only."""

    def __init__(self) -> None:
        super().__init__()
        self._done: set[int] = set()

    def launch(self, executable: int, stream: int) -> None:
        if executable in self._done:
            self.launches += len(self._graphs[executable])
        else:
            self._done.add(executable)
            super().launch(executable, stream)


class EmulatedServer(Server):
    """Answers like the real one, for one problem, on the CPU; every launch takes a time set by the test."""

    problem: DeviceProblem

    def __init__(self, problem: Problem, machine: Machine, seconds: float = 50e-6) -> None:
        self.device = torch.device("cpu")
        self.stream = 0
        self.driver: Any = TimedDriver()
        self.other = torch.zeros(16)
        self.given, self.machine, self.each = problem, machine, seconds
        self.problem = DeviceProblem(problem, 0, self.device, 1 << 16)

    def finish(self) -> None:
        pass

    def timed(self, launch: Callable[[], None]) -> float:  # type: ignore[override]
        before = self.driver.launches
        launch()
        return self.each * (self.driver.launches - before)

    def program(self, schedule: Any, folder: Path) -> dict[str, Any]:
        """Lowers a schedule and registers its kernels with the driver."""
        lowered = lower(self.given, schedule, self.machine)
        self.driver.kernels += lowered.kernels
        (folder / "nothing").write_bytes(b"")
        return program_of(lowered, str(folder / "nothing"))


class EngineDriver(EmulatedDriver):
    """The part of `Driver` that an engine uses. `log`: what was launched or captured, in order."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        super().__init__()
        self.kernels += kernels
        self.log: list[str] = []

        def nothing(*_: object) -> int:
            return 0

        self.functions: dict[str, Any] = dict.fromkeys(("cuEventRecord", "cuGraphExecKernelNodeSetParams_v2"), nothing)
        self.functions |= {"cuGraphLaunch": self._launched, "cuCtxGetCurrent": lambda pointer: 0}
        for name in ("create_event", "record_event", "wait_event", "wait_for_event", "destroy_event", "push_context", "pop_context"):
            setattr(self, name, nothing)

    def _launched(self, executable: int, stream: int) -> int:
        self.log.append("graph")
        self.launch(executable, stream)
        return 0

    def capture_graph(self, child: Callable[[], object], stream: int) -> None:
        self.log.append("child graph")
        child()

    def copy(self, target: int, source: int, count: int, stream: int) -> None:
        self.log.append("copy")
        ctypes.memmove(target, source, count)


@contextmanager
def emulated(executable: Executable, capturing: Sequence[bool] = (False,)) -> Iterator[EngineDriver]:
    """Inside the context, the executable for a GPU runs here, on tensors of the CPU. `capturing`: whether calls are captured; its last element counts."""
    driver = EngineDriver(list(executable.image.kernels.values()))
    names = [kernel.name for kernel in driver.kernels]
    library: Any = SimpleNamespace(prefetch=0, driver=driver, functions={name: 1 + at for at, name in enumerate(names)}, context=None)

    def engine(program: Any, binaries: object, model: GpuEngine | None, shared: object, cache_bytes: int = 0) -> GpuEngine:
        constants = model.buffers.constants if model is not None else None
        buffers = Buffers(program, torch.device("cpu"), GPU_ALIGNMENT, constants, cache_bytes=cache_bytes)
        return GpuEngine(buffers, library, in_order=True, model=model)

    def captured(calls: Sequence[Callable[[], object]], device: torch.device) -> list[Callable[[], object]]:
        for call in calls:
            call()
        return list(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable_module, "is_present", lambda machine: True)
        patch.setattr(gpu_module, "gpu_engine", engine)
        patch.setattr(gpu_module, "captured", captured)
        patch.setattr(gpu_module, "handle_of", lambda graph: graph)
        patch.setattr(gpu_module, "current_stream", lambda device: 0)
        patch.setattr(gpu_module, "is_capturing", lambda: capturing[-1])
        patch.setattr(GpuEngine, "_adopt", lambda self, handle: True)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        yield driver
