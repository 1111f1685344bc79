"""A child process that compiles candidates for a CPU and reads the code: `python -m tilewright.tuning.score_worker`.

Requests (see `tilewright.tuning.workers`): {"do": "machine", "machine": plain form}; {"do": "problem", "problem": plain form of region, layouts,
values and constants}, which sets the problem of the following candidates; {"do": "score", "schedule": text, "threads": number, "seconds", "terms":
the models' prediction, for the kernels' headers}. The answer to the last is {"terms": seconds by name (`selection/code_score.py`)}, or {"error":
reason, "hung": whether a program did not end in time}.
Binaries go to the kernel cache, so that the chosen candidate is not compiled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright import settings
from tilewright.analysis.cpu.assembly import disassembled
from tilewright.codegen.describe import prediction
from tilewright.errors import KernelFailed, TilewrightError
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.registry import lower
from tilewright.runtime.kernel_source import kernel_source
from tilewright.selection.code_score import code_terms
from tilewright.toolchain import Binary, compile_kernels
from tilewright.tuning import serialisation
from tilewright.tuning.workers import Message, serve

COMPILER_SECONDS = 45.0
"""Time after which a compiler call counts as hung: less than `code_choice.SCORE_SECONDS`, so that this process survives it."""


class Server:
    """State of the process: the machine, and the problem of the following candidates."""

    def __init__(self) -> None:
        self._machine: Machine | None = None
        self._problem: Problem | None = None
        self._known: dict[tuple[str, ...], dict[str, float]] = {}

    def __call__(self, message: Message) -> Message:
        if message["do"] == "machine":
            self._machine = serialisation.decode(message["machine"])
            return {}
        if message["do"] == "problem":
            self._problem = serialisation.decode(message["problem"])
            return {}
        try:
            return {"terms": self.terms(message["schedule"], message["threads"], message["seconds"], message["terms"])}
        except (Unsuitable, TilewrightError, KeyError) as error:
            return {"error": str(error), "hung": isinstance(error, KernelFailed) and error.hung}

    def terms(self, schedule: str, threads: int, seconds: float, predicted: Mapping[str, float]) -> dict[str, float]:
        """The score's terms for one candidate, in seconds by name."""
        assert self._machine is not None and self._problem is not None
        machine = self._machine
        lowered = lower(self._problem, serialisation.schedule_of(schedule), machine)
        key = (str(threads), *(call.kernel for call in lowered.calls))
        if key in self._known:  # schedules that give the same kernels for this problem
            return self._known[key]
        said = prediction(seconds, predicted, len(lowered.kernels))
        kernels = [replace(kernel, header=f"{kernel.header}\n{said}") for kernel in {kernel.name: kernel for kernel in lowered.kernels}.values()]
        sources = [kernel_source(kernel, machine) for kernel in kernels]
        built = compile_kernels(sources, machine, workers=1, seconds=min(settings.compile_seconds(), COMPILER_SECONDS))
        pairs = []
        for kernel, binary in zip(kernels, built, strict=True):
            if not isinstance(binary, Binary):
                raise binary
            pairs.append((kernel, disassembled(binary.path, machine)))
        self._known[key] = code_terms(pairs, machine, threads)
        return self._known[key]


if __name__ == "__main__":
    serve(Server())
