"""Launches kernels on the GPU like the runtime, on NumPy arrays, for tests that compare them with the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tilewright.hardware import machine
from tilewright.ir.kernel import (
    Kernel,
)
from tilewright.runtime.driver import system_driver
from tilewright.runtime.gpu_kernels import GpuLibrary, node_params, parameter_block
from tilewright.runtime.kernel_source import kernel_source
from tilewright.runtime.loadable import loadable_kernel
from tilewright.toolchain import Binary, compile_kernels


def launch(kernel: Kernel, arrays: Sequence[np.ndarray]) -> None:
    """Compiles the kernel for the GPU present and runs it once; arrays of writable parameters are written."""
    here = machine("cuda")
    (binary,) = compile_kernels([kernel_source(kernel, here)], here)
    assert isinstance(binary, Binary), binary
    bits = [torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy()).cuda() for array in arrays]
    driver, called = system_driver(), loadable_kernel(kernel)
    context = driver.primary_context(torch.cuda.current_device())
    driver.push_context(context)
    try:
        library = GpuLibrary(driver, [binary], {kernel.name: called}, context)
        parameters = parameter_block(driver, called, [0] * len(bits), [tensor.data_ptr() for tensor in bits], 0)
        driver.launch_kernel(node_params(library.functions[kernel.name], called, parameters), torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    finally:
        driver.pop_context()
    for buffer, array, tensor in zip(kernel.parameters, arrays, bits, strict=True):
        if buffer.writable:
            array.view(np.uint8)[...] = tensor.cpu().numpy()


def cuda_binary(source: str, architecture: str = "sm_90a") -> tuple[bool, str]:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode(errors="replace")
