"""The source text of a kernel in its language, printed once for all kernels that differ only in name, header and, on CPUs, number of trips."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.trips import with_trips
from tilewright.ir.kernel import Kernel

_ANONYMOUS = "anonymous_kernel"
_HEADER = "header of the kernel"


def source_text(kernel: Kernel) -> str:
    """One complete source file with the kernel: CUDA C++ if it has a launch, else C."""
    if kernel.trips and not kernel.is_gpu:  # an argument of the call, on which no code depends
        kernel = with_trips(kernel, 1)
    text = _anonymous_text(replace(kernel, name=_ANONYMOUS, header=_HEADER))
    header = "".join(f"// {line}\n" for line in kernel.header.splitlines())
    return text.replace(f"// {_HEADER}\n", header).replace(_ANONYMOUS, kernel.name)


@lru_cache(maxsize=1024)
def _anonymous_text(kernel: Kernel) -> str:
    return print_cuda([kernel]) if kernel.is_gpu else print_c([kernel])
