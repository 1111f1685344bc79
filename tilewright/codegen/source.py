"""The source text of a kernel in its language, printed once whatever the kernel is called."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import print_cuda
from tilewright.ir.kernel import Kernel

_ANONYMOUS = "anonymous_kernel"


def source_text(kernel: Kernel) -> str:
    """One complete source file that holds the kernel: CUDA C++ where it has a launch, else C."""
    return _anonymous_text(replace(kernel, name=_ANONYMOUS)).replace(_ANONYMOUS, kernel.name)


@lru_cache(maxsize=1024)
def _anonymous_text(kernel: Kernel) -> str:
    return print_cuda([kernel]) if kernel.is_gpu else print_c([kernel])
