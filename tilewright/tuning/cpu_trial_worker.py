"""A child process that checks and times candidates on this CPU: `python -m tilewright.tuning.cpu_trial_worker --device THREADS`.

It answers the requests of `trial_worker` in the same way, but loads and calls kernels differently. Modes "cold" and "network" are as there, with the
level-2 caches of the threads instead of a GPU's, but at least NETWORK_BYTES (code is small in comparison and stays cached); a replay is a loop of
calls. In mode "network" all threads rewrite the activations before each call: a core reads data just written by another core more slowly than its
own.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.hardware.host import read_cpu_identity
from tilewright.hardware.machine import Machine
from tilewright.runtime.cpu import permit_tiles, share_openmp
from tilewright.system.libraries import mapped
from tilewright.tuning import serialisation
from tilewright.tuning.trial_worker import CACHE_SIZES, Server
from tilewright.tuning.workers import Message, serve

LEAST_CALLS = 3
"""Minimum calls per replay; below three, the median equals the mean."""
NETWORK_BYTES = 96 << 20
"""Bytes that a network moves between two uses of a weight, about the size of ResNet-50's weights: too much for shared caches."""
Call = tuple[Any, Sequence[Any], Any]
"""A C function, an array of addresses for each set of buffers, and its scalars; or `_call_operator`, a library's operator over each, and None."""


@dataclass
class Loaded:
    """A loaded candidate: its calls, the tensors that the previous kernel has just written, and objects to keep alive during the calls."""

    calls: Sequence[Call]
    written_before: Sequence[torch.Tensor]
    kept: Sequence[Any]


class Replay:
    """`count` successive calls of a candidate, which rotate over sets of buffers."""

    def __init__(self, loaded: Loaded, count: int, sets: int) -> None:
        self._written_before = loaded.written_before
        self._calls = [[(function, arguments[number % sets], scalars) for function, arguments, scalars in loaded.calls] for number in range(count)]

    def seconds(self) -> float:
        """Median seconds of one call, since other processes interrupt some. Outputs of the previous kernel are rewritten before each call, untimed:
        each thread writes a part, so that most of them are in a core's cache, though not always that of the core that reads them."""
        spent = []
        for calls in self._calls:
            for tensor in self._written_before:
                tensor.mul_(1)
            start = time.perf_counter()
            for function, arguments, scalars in calls:
                function(arguments, scalars)
            spent.append(time.perf_counter() - start)
        return statistics.median(spent)

    def destroy(self) -> None:
        """Does nothing: there is nothing to release."""


class CpuServer(Server):
    """State of the process: the number of threads, and the problem of the following requests."""

    coarse_seconds, fine_seconds = 0.01, 0.01

    def __init__(self, threads: int) -> None:
        self.device, self.problem, self.threads = torch.device("cpu"), None, threads

    def finish(self) -> None:
        """Does nothing: calls are synchronous, and a failure that does not end the process leaves no state behind."""

    def start(self, message: Message) -> Message:
        machine: Machine = serialisation.decode(message["machine"])
        openmp = share_openmp()
        if openmp is not None:
            openmp.omp_set_num_threads(self.threads)
        torch.set_num_threads(self.threads)
        permit_tiles()
        level_2 = machine.cache(2)
        self.cold_bytes = max(CACHE_SIZES * self.threads * (level_2.bytes if level_2 is not None else 1 << 21), NETWORK_BYTES)
        name = read_cpu_identity().properties.get("model name", platform.machine())
        return {"gpu": f"{name}, {self.threads} threads", "driver": platform.release(), "torch": torch.__version__}

    def load(self, data: Mapping[str, Any], mode: str) -> Loaded:  # type: ignore[override]
        program, rows = self.buffers(data)
        try:
            library = mapped(Path(data["binary"]).read_bytes(), next(iter(data["kernels"]), "candidate")) if data["kernels"] else None
        except OSError as error:
            raise RuntimeError(f"the binary cannot be loaded: {error}") from error
        self.poison(rows, program)
        operators = self.library(rows, program, mode)
        calls: list[Call] = [(_call_operator, operators, None)] if operators else []
        calls += [
            (getattr(library, kernel), [(ctypes.c_void_p * len(each))(*each) for each in sets], (ctypes.c_int64 * 1)(trips))
            for (kernel, sets), (_, _, trips) in zip(self.addresses(rows, program, mode), program["calls"], strict=True)
        ]
        assert self.problem is not None
        activations = [name for name in self.problem.region.inputs if name in rows and not self.problem.is_weight(name, program)]
        written = [self.row(rows, name, 0, mode, program) for name in activations if mode == "network"]
        return Loaded(calls, [tensor for tensor in written if tensor.dtype != torch.bool], [library, *rows.values()])

    def unload(self, loaded: Loaded) -> None:  # type: ignore[override]
        """Does nothing: the library stays mapped."""

    def once(self, loaded: Loaded) -> None:  # type: ignore[override]
        for function, arguments, scalars in loaded.calls:
            function(arguments[0], scalars)

    def make_replay(self, loaded: Loaded, count: int) -> Replay:  # type: ignore[override]
        assert self.problem is not None
        return Replay(loaded, max(count, LEAST_CALLS), self.problem.sets)

    def seconds(self, replay: Replay, cold: bool) -> float:  # type: ignore[override]
        return replay.seconds()


def _call_operator(operator: Callable[[], object], _: None) -> None:
    """Calls a library's operator in the way in which kernels are called."""
    operator()


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times candidates on this CPU; see the module's text.")
    parser.add_argument("--device", type=int, default=1, metavar="THREADS")
    serve(CpuServer(parser.parse_args().device))


if __name__ == "__main__":
    main()
