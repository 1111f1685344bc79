"""Scores a CPU kernel from its loops and its compiled code, without running it (Tuna, sections III and IV).

Terms of one call, in seconds of the busiest thread, each as if it were the only cost::

    pipeline    cycles of the executed blocks (`analysis/cpu/pipeline.py`)
    starts      extra time of the first iterations of inner loops
    level 2     lines loaded into level 1, at level 2's bandwidth (`analysis/cpu/caches.py`); "level 3" is analogous
    memory      lines loaded into the last level, for all threads, at the memory bandwidth
    multiply-adds, loads, stores, spills, integers    executed instructions of a class, at the core's rate for it (`analysis/cpu/instructions.py`)
    dispatch    parallel regions

The score is a linear combination of the terms with coefficients per architecture (`linear`), as in the paper. The coefficients are data
(`models/cpu_ARCHITECTURE.json`). For x86-64 they were fitted once to measured kernels. For AArch64, where nothing was measured, they are 1 for terms
that are cycles from published tables, and 0 for instruction classes, which "pipeline" includes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from tilewright.analysis.cpu.assembly import parse
from tilewright.analysis.cpu.caches import CacheMisses, cache_misses
from tilewright.analysis.cpu.reading import KernelReading, read
from tilewright.hardware.machine import Machine
from tilewright.ir.kernel import Kernel
from tilewright.runtime.loadable import loadable_kernel

MODELS = Path(__file__).parent / "models"
COMPARISONS = 15_000
"""Maximum comparisons of iterations while control flow is followed (`loops_execution.Execution`): about a second. Kernels that need more have no
terms."""


def code_terms(kernels: Iterable[tuple[Kernel, str]], machine: Machine, threads: int) -> dict[str, float]:
    """The terms of kernels that run one after another, each with its assembly (`analysis.cpu.assembly.disassembled`).

    Raises:
        Unanalysable: if the control flow of a kernel cannot be followed.
        KeyError: for a machine without a pipeline table.
    """
    sums: dict[str, float] = {}
    for kernel, assembly in kernels:
        for name, seconds in _terms(kernel, assembly, machine, threads).items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _terms(kernel: Kernel, assembly: str, machine: Machine, threads: int) -> dict[str, float]:
    found = read(loadable_kernel(kernel), parse(assembly, machine.architecture), machine, threads, COMPARISONS)
    return terms_of(found, misses_by_capacity(kernel, machine, threads), threads)


def misses_by_capacity(kernel: Kernel, machine: Machine, threads: int) -> CacheMisses:
    """Cache misses by the capacities alone: modelling the distribution of lines over sets takes ten times as long as everything else, and does not
    change the order of candidates."""
    return cache_misses(kernel, replace(machine, caches=tuple(replace(cache, ways=0) for cache in machine.caches)), threads)


def terms_of(found: KernelReading, misses: CacheMisses | None, threads: int) -> dict[str, float]:
    """The terms of one kernel, in seconds; without the cache misses, those that do not need them."""
    machine, counts = found.machine, found.counts
    cycle = 1 / machine.clock_hz
    terms = {
        "pipeline": found.cycles.steady * cycle,
        "starts": found.cycles.starts * cycle,
        "multiply-adds": counts.fma / machine.fma_ports * cycle,
        "loads": counts.loads / machine.load_ports * cycle,
        "stores": counts.stores / machine.store_ports * cycle,
        "spills": counts.spills / machine.load_ports * cycle,
        "integers": (counts.integer + counts.move + counts.branch) / machine.issue_width * cycle,
    }
    if misses is not None:
        caches = sorted(machine.caches, key=lambda cache: cache.level)
        for nearer, cache in zip(caches, caches[1:], strict=False):
            terms[f"level {cache.level}"] = misses.level(nearer.level).bytes_moved / cache.bandwidth * cycle
        terms["memory"] = misses.level(caches[-1].level).bytes_moved * min(threads, machine.processors) / machine.memory_bandwidth
    return {**terms, "dispatch": machine.dispatch_seconds}


def linear(terms: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """Seconds as a linear combination of the terms; a term without a coefficient does not count."""
    return sum(coefficients.get(name, 0.0) * seconds for name, seconds in terms.items())


@lru_cache(maxsize=8)
def coefficients_of(architecture: str) -> Mapping[str, float]:
    """The coefficients shipped for an architecture ("x86-64", "aarch64"). Raises FileNotFoundError if there are none."""
    content = json.loads((MODELS / f"cpu_{architecture}.json").read_text())
    return MappingProxyType({name: float(value) for name, value in content["coefficients"].items()})
