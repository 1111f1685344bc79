"""A child process that lowers, prints and compiles candidates for trials: `python -m tilewright.tuning.compile_worker`.

Requests (see `tilewright.tuning.workers`): {"do": "machine", "machine": plain form}; {"do": "problem", "problem": plain form}, which sets the problem
of the following candidates; {"do": "compile", "schedule": text, "folder": folder for the binary}. The answer to the last is {"program": input of the
measuring process, "schedule": readable text, "resources": those of each kernel} or {"error": reason}.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tilewright import settings
from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.intrinsics.mma import rounds_to_tf32
from tilewright.codegen.intrinsics.wgmma import truncates_to_tf32
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.partition.judges import lower
from tilewright.runtime.loadable import loadable_kernel
from tilewright.toolchain.binary import SourceFile, parse_resources
from tilewright.toolchain.compilers import Compiler, compiler_for, language_of
from tilewright.tuning import serialisation
from tilewright.tuning.problems import code_of
from tilewright.tuning.workers import Message, serve

COMPILER_SECONDS = 90.0
"""Time after which a compiler call counts as hung: less than `trial_processes.COMPILE_SECONDS`, so that this process survives it."""


def program_of(lowered: Lowered, binary: str) -> dict[str, Any]:
    """The kernels, calls and extra buffers of a lowered region as plain values, as JSON gives them."""
    kernels = {kernel.name: asdict(loadable_kernel(kernel)) if kernel.is_gpu else {} for kernel in lowered.kernels}
    return {
        "binary": binary,
        "kernels": json.loads(json.dumps(kernels)),
        "calls": [[call.kernel, list(call.arguments), call.trips] for call in lowered.calls],
        "storage": serialisation.encode(dict(sorted(lowered.storage.items()))),
        "library": serialisation.encode(lowered.library),
        "tf32": any(rounds_to_tf32(kernel) or truncates_to_tf32(kernel) for kernel in lowered.kernels),
    }


class Server:
    """State of the process: the machine, and the problem of the following candidates."""

    def __init__(self) -> None:
        self._machine: Machine | None = None
        self._problem: Problem | None = None

    def __call__(self, message: Message) -> Message:
        if message["do"] == "machine":
            self._machine = serialisation.decode(message["machine"])
            return {"compiler": self.identity(self._machine)}
        if message["do"] == "problem":
            self._problem = serialisation.decode(message["problem"])
            return {}
        return self.compile(message["schedule"], Path(message["folder"]))

    def compiler(self, machine: Machine) -> Compiler:
        """The machine's compiler, with a time limit shorter than the parent's."""
        return replace(compiler_for(machine, language_of(machine)), seconds=min(settings.compile_seconds(), COMPILER_SECONDS))

    def identity(self, machine: Machine) -> str:
        """The identity of the loaded compiler."""
        compiler = self.compiler(machine)
        compiler.require()
        return compiler.identity

    def compile(self, schedule: str, folder: Path) -> Message:
        """The candidate's program and binary, or the reason why there are none."""
        assert self._machine is not None and self._problem is not None
        start = time.perf_counter()
        try:
            lowered = lower(self._problem, serialisation.schedule_of(schedule), self._machine)
        except Unsuitable as error:
            return {"error": f"not lowered: {error}"}
        middle = time.perf_counter()
        answer: Message = {"code": code_of(lowered), "schedule": lowered.schedule, **self.build(lowered, self._machine, folder)}
        return {**answer, "seconds": [middle - start, time.perf_counter() - middle]}

    def build(self, lowered: Lowered, machine: Machine, folder: Path) -> Message:
        """One binary with all kernels, if there are any, and the compiler's report on them."""
        distinct = list({kernel.name: kernel for kernel in lowered.kernels}.values())
        if not distinct:
            return {"resources": {}, "program": program_of(lowered, "")}
        compiler = self.compiler(machine)
        folder.mkdir(parents=True, exist_ok=True)
        text = print_cuda(distinct) if machine.is_gpu else print_c(distinct)
        (folder / compiler.source_name).write_text(text)
        outcome = compiler.compile(SourceFile("trial", text, language_of(machine), tuple(kernel.name for kernel in distinct)), folder)
        if not outcome.succeeded:
            errors = [line for line in outcome.log.splitlines() if "error" in line.lower()] or [outcome.log.strip()]
            return {"error": f"does not compile: {errors[0][:400]}"}
        return {
            "resources": {name: asdict(found) for name, found in parse_resources(outcome.log).items()},
            "program": program_of(lowered, str(folder / compiler.binary_name)),
        }


if __name__ == "__main__":
    serve(Server())
