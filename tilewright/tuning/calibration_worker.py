"""A child process that runs the micro-benchmarks on this CPU: `python -m tilewright.tuning.calibration_worker`.

It answers {"binary": path, "machine": encoded machine, "threads": n, "seconds": s} with {"samples": {name: [seconds of one unit of work, ...]},
"openmp": file name}. The benchmarks run in turns, so that a disturbance or a change of the clock affects all of them, for `seconds` seconds.

Memory is allocated as the memory of executables is, so that address translation costs what it costs kernels.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewright.hardware.machine import Machine
from tilewright.runtime.cpu import openmp_libraries, share_openmp
from tilewright.system.libraries import mapped
from tilewright.tuning import serialisation
from tilewright.tuning.micro_benchmarks import FUNCTIONS, PADDING, STEPS, multiply_adds
from tilewright.tuning.workers import Message, serve

LEAST_ROUNDS = 20
WARM_SECONDS = 0.05
"""Seconds of multiply-adds before the first round, in which the clock settles."""
TURNS = 5_000
"""Turns of the loops of arithmetic: about a quarter of a millisecond each."""
CACHE_BYTES = 4 << 20
"""Bytes that one sample reads from a cache, and from memory."""
PASSES = 2
"""Passes over a working set before a sample, and at least in one: a cache may keep only what was read more than once."""
CACHE_LOADS, MEMORY_LOADS = 10_000, 1_000
"""Dependent loads of one sample."""
REGIONS = 20
"""Parallel regions of one sample, of which the quickest counts: no thread of it had to wait for a core."""
MOST_MEMORY, LEAST_MEMORY = 1 << 30, 1 << 28
SPACING_LINES = 2
"""Lines from one pointer to the next place of one: cores fetch the other line of a pair as well."""
WINDOW = 1 << 20
"""Bytes in which pointers follow each other, few enough pages for the translation buffers."""
BLOCK = 4096
"""Working sets are multiples of this many bytes."""


@dataclass(frozen=True)
class Area:
    """Memory that each thread reads on its own: `bytes` from `address + thread * bytes` on."""

    address: int
    bytes: int
    windows: int
    slots: int
    """Pointers in each window."""
    spacing: int
    """Bytes from one slot to the next."""
    step: int
    """Slots from each pointer to the next in its window, modulo `slots`."""
    kept: torch.Tensor

    def chained(self, number: int) -> int:
        """The address of the pointer that is so many after the first, in the first thread's chain."""
        window, place = divmod(number % (self.windows * self.slots), self.slots)
        return self.address + (window * self.slots + place * self.step % self.slots) * self.spacing


class Benchmarks:
    """The loaded functions, for a machine and a number of threads."""

    def __init__(self, library: ctypes.CDLL, machine: Machine, threads: int) -> None:
        self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        self.machine, self.threads = machine, threads
        self._seconds = torch.zeros(threads * PADDING, dtype=torch.float64)

    def call(self, name: str, threads: int, *arguments: int) -> list[float]:
        """The seconds that each thread spent in the function."""
        values = [ctypes.c_int64(argument) for argument in arguments]
        self._functions[name](ctypes.c_int64(threads), ctypes.c_void_p(self._seconds.data_ptr()), *values)
        return self._seconds[: threads * PADDING : PADDING].tolist()

    def per_core(self, name: str, threads: int, units: float, *arguments: int) -> float:
        """Seconds in which one core does one unit of work while `threads` threads do `units` each."""
        rate = sum(units / seconds for seconds in self.call(name, threads, *arguments))
        return min(threads, self.machine.processors) / rate

    def area(self, size: int) -> Area:
        """Memory of so many bytes for each thread, with a cycle of pointers through it."""
        spacing = SPACING_LINES * self.machine.caches[0].line_bytes
        windows = -(-size // WINDOW)
        slots = size // spacing // windows
        step = int(slots * 0.618) | 1
        while math.gcd(step, slots) != 1:
            step += 2
        memory = torch.empty(size * self.threads + BLOCK, dtype=torch.uint8)
        area = Area(-(-memory.data_ptr() // BLOCK) * BLOCK, size, windows, slots, spacing, step, memory)
        self.call("link", self.threads, area.address, size, windows, slots, spacing, step)
        return area


def working_sets(machine: Machine, threads: int) -> dict[int, int]:
    """Bytes for each level of cache that one thread reads again and again: half of the first level; for each other level several times the nearer
    one, but no more than fits into both together. A level is divided among the cores that share it, and among the threads of a core."""
    found: dict[int, int] = {}
    nearer, of_a_core = 0, -(-threads // machine.processors)
    for cache in machine.caches:
        own = cache.bytes // (min(cache.shared_by, machine.processors) * of_a_core)
        size = own // 2 if not nearer else min(4 * nearer, 3 * (nearer + own) // 4)
        found[cache.level] = max(size // BLOCK, 1) * BLOCK
        nearer = own
    return found


def memory_bytes(machine: Machine, threads: int) -> int:
    """Bytes for each thread, together more than the caches hold as far as that is possible in a second."""
    last = max(cache.bytes * -(-machine.processors // cache.shared_by) for cache in machine.caches)
    size = min(max(2 * last, LEAST_MEMORY), MOST_MEMORY, machine.memory_bytes // 4)
    return size // threads // CACHE_BYTES * CACHE_BYTES or CACHE_BYTES


def cache_byte(run: Benchmarks, area: Area, _: int) -> float:
    """Seconds of a byte that a core reads from its area, while every thread does, after passes that bring it into the cache."""
    passes = max(PASSES, CACHE_BYTES // area.bytes)
    return run.per_core("reads", run.threads, area.bytes * passes, area.address, area.bytes, area.bytes, PASSES, passes)


def load(run: Benchmarks, area: Area, count: int, number: int) -> float:
    """Seconds of each of `count` dependent loads from the first thread's area, which continue where those of the last round ended."""
    return run.call("chase", 1, area.chained(number * count), 0, count)[0] / count


def measured(run: Benchmarks, seconds: float) -> dict[str, list[float]]:
    """Seconds of one unit of each benchmark's work, one entry for each round."""
    machine, threads = run.machine, run.threads
    adds = TURNS * multiply_adds(machine)
    benchmarks: dict[str, Callable[[int], float]] = {
        "multiply-add": lambda _: run.per_core("multiply_adds", threads, adds, TURNS),
        "multiply-add of one core": lambda _: run.per_core("multiply_adds", 1, adds, TURNS),
        "step": lambda _: sum(run.call("dependent_steps", threads, TURNS)) / threads / TURNS / STEPS,
        "parallel region": lambda _: run.call("parallel_regions", 1, REGIONS)[0],
    }
    for level, size in working_sets(machine, threads).items():
        area = run.area(size)
        benchmarks[f"level {level} byte"] = partial(cache_byte, run, area)
        benchmarks[f"level {level} load"] = partial(load, run, area, CACHE_LOADS)
    memory = run.area(memory_bytes(machine, threads))
    parts = memory.bytes // CACHE_BYTES

    def from_memory(count: int) -> Callable[[int], float]:
        def sample(number: int) -> float:
            at = memory.address + (2 * number + (count == 1)) % parts * CACHE_BYTES
            return run.per_core("reads", count, CACHE_BYTES, at, memory.bytes, CACHE_BYTES, 0, 1)

        return sample

    benchmarks |= {"memory byte": from_memory(threads), "memory byte of one core": from_memory(1)}
    benchmarks["memory load"] = partial(load, run, memory, MEMORY_LOADS)
    deadline = time.monotonic() + WARM_SECONDS
    while time.monotonic() < deadline:
        run.call("multiply_adds", threads, TURNS)
    samples: dict[str, list[float]] = {name: [] for name in benchmarks}
    deadline, number = time.monotonic() + seconds, 0
    while number < LEAST_ROUNDS or time.monotonic() < deadline:
        for name, benchmark in benchmarks.items():
            samples[name].append(benchmark(number))
        number += 1
    return samples


def answer(message: Mapping[str, Any]) -> Message:
    """The answer to a request; see the module's text."""
    machine: Machine = serialisation.decode(message["machine"])
    openmp = share_openmp()
    if openmp is not None:
        openmp.omp_set_num_threads(message["threads"])
    library = mapped(Path(message["binary"]).read_bytes(), "micro-benchmarks")
    names = [Path(path).name for path in openmp_libraries()]
    return {"samples": measured(Benchmarks(library, machine, message["threads"]), message["seconds"]), "openmp": names[0] if names else ""}


if __name__ == "__main__":
    serve(answer)
