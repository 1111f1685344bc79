"""The source text of a kernel in its language, printed once for all kernels that differ only in name and header."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import print_cuda
from tilewright.ir.kernel import Kernel

_ANONYMOUS = "anonymous_kernel"
_HEADER = "header of the kernel"


def source_text(kernel: Kernel) -> str:
    """One complete source file with the kernel: CUDA C++ if it has a launch, else C."""
    text = _anonymous_text(replace(kernel, name=_ANONYMOUS, header=_HEADER))
    header = "".join(f"// {line}\n" for line in kernel.header.splitlines())
    return text.replace(f"// {_HEADER}\n", header).replace(_ANONYMOUS, kernel.name)


@lru_cache(maxsize=1024)
def _anonymous_text(kernel: Kernel) -> str:
    return print_cuda([kernel]) if kernel.is_gpu else print_c([kernel])
