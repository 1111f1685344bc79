"""A measuring process without a GPU, whose driver runs kernels in the interpreter on host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewright.codegen.interpreter import run
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import lower
from tilewright.runtime.driver import KernelNodeParams
from tilewright.tuning.compile_worker import program_of
from tilewright.tuning.trial_worker import DeviceProblem, Server


class EmulatedDriver:
    """The part of `Driver` that measuring uses; functions are kernel numbers."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.launches = 0
        self.loaded = 0
        self._graphs: dict[int, list[KernelNodeParams]] = {}

    def load_module(self, image: bytes) -> int:
        self.loaded += 1
        return 1

    def unload_module(self, module: int) -> None:
        self.loaded -= 1

    def function(self, module: int, name: str) -> int:
        return 1 + [kernel.name for kernel in self.kernels].index(name)

    def allow_shared_bytes(self, function: int, count: int) -> None:
        pass

    def create_graph(self) -> int:
        self._graphs[len(self._graphs) + 1] = []
        return len(self._graphs)

    def add_kernel_node(self, graph: int, before: Sequence[int], params: KernelNodeParams, cooperative: bool = False) -> int:
        assert list(before) == ([len(self._graphs[graph])] if self._graphs[graph] else [])
        self._graphs[graph].append(params)
        return len(self._graphs[graph])

    def instantiate(self, graph: int) -> int:
        return graph

    def launch(self, executable: int, stream: int) -> None:
        for params in self._graphs[executable]:
            self.launch_kernel(params, stream)

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
            kind = np.dtype(ELEMENT_TYPES[parameter.dtype].numpy)
            memory = (ctypes.c_uint8 * (parameter.size * kind.itemsize)).from_address(address)
            arrays.append(np.frombuffer(memory, kind))
        report = run(kernel, arrays)
        assert not report.faults, report.faults


class EmulatedServer(Server):
    """Answers like the real one, for one problem, on the CPU; every launch takes a time set by the test."""

    problem: DeviceProblem

    def __init__(self, problem: Problem, machine: Machine, seconds: float = 50e-6) -> None:
        self.device = torch.device("cpu")
        self.stream = 0
        self.driver: Any = EmulatedDriver()
        self.other = torch.zeros(16)
        self.given, self.machine, self.each = problem, machine, seconds
        self.problem = DeviceProblem(problem, 0, self.device, 1 << 16)

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
