"""Text to binary, with the compiler's output. The runtime loads the binaries."""

from __future__ import annotations

from tilewright.toolchain.binary import Binary as Binary
from tilewright.toolchain.binary import Resources as Resources
from tilewright.toolchain.binary import SourceFile as SourceFile
from tilewright.toolchain.build import Early as Early
from tilewright.toolchain.build import compile_kernels as compile_kernels
from tilewright.toolchain.build import default_cache as default_cache
from tilewright.toolchain.cache import KernelCache as KernelCache
from tilewright.toolchain.compilers import CCompiler as CCompiler
from tilewright.toolchain.compilers import NvrtcCompiler as NvrtcCompiler
from tilewright.toolchain.compilers import compiler_for as compiler_for
