"""The source file from which a kernel is compiled to be loaded: its text, and the requirements on its caller as the name of a symbol."""

from __future__ import annotations

from tilewright.codegen.source import source_text
from tilewright.hardware import Machine
from tilewright.ir.kernel import Kernel
from tilewright.runtime.loadable import facts_symbol, loadable_kernel
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import language_of


def declared(symbol: str, language: str) -> str:
    """Source text that defines the symbol in a binary; see `loadable.facts_symbol`."""
    before = 'extern "C" __device__ const' if language == "cuda" else "const"
    return f"\n// What is called with less memory, more steps or otherwise than this says is not this kernel.\n{before} char {symbol} = 1;\n"


def kernel_source(kernel: Kernel, machine: Machine) -> SourceFile:
    """One file with one kernel."""
    language = language_of(machine)
    text = source_text(kernel) + declared(facts_symbol(loadable_kernel(kernel), machine), language)
    return SourceFile(kernel.name, text, language, (kernel.name,))
