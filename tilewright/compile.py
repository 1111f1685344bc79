"""The whole pipeline: a model and a target go in, an executable comes out."""

from __future__ import annotations

from typing import Any, Sequence

from . import settings
from .codegen.c import print_c
from .codegen.cuda import print_cuda
from .frontend.torch_export import import_module
from .hardware import machine as find_machine
from .hardware.machine import Machine
from .ir.region import Program
from .partition.plan import plan_program
from .runtime.executable import Executable, Image
from .runtime.loadable import loadable
from .runtime.signature import positional_signature
from .toolchain import SourceFile, compile_kernels


def compile(module: Any, example_inputs: Sequence[Any] | None = None, target: str | Machine | None = None) -> Executable:
    machine = find_machine(target)
    imported = import_module(module, tuple(example_inputs or ()))
    program = plan_program(imported.graph, machine, settings.threads())
    sources = source_files(program, machine)
    binaries = compile_kernels(sources, machine)
    for b in binaries:
        if isinstance(b, Exception):
            raise b
    graph = imported.graph
    signature = positional_signature([(n, graph.values[n].shape, graph.values[n].dtype) for n in graph.inputs], len(graph.outputs))
    return Executable(Image(loadable(program), signature, machine, tuple(binaries), {s.name: s.text for s in sources}))


def source_files(program: Program, machine: Machine) -> list[SourceFile]:
    """One source file for each distinct kernel."""
    language, show = ("cuda", print_cuda) if machine.is_gpu else ("c", print_c)
    return [SourceFile(name, show([kernel]), language, (name,)) for name, kernel in program.kernels().items()]
