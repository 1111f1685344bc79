"""Predicted cache misses of CPU kernels (`tilewright.analysis.cpu.caches`) against the counts of cachegrind.

    python -m bench.cache_misses [--layers D3 R4] [--schedules 10] [--network mobilenet_v2] [--name cache_misses]

Schedules are evenly spaced in the ranking of each layer for the catalogue's machine with AVX2, from first to last. Kernels of all kinds come from a
network planned for that machine. Each kernel is built with the toolchain and run once, on one thread, by valgrind with the machine's first two levels
(cachegrind has no third: its last level represents the second). Data misses of reads and writes inside the kernel's functions are counted. Buffers
begin at random multiples of a cache line. Layers have their full extents. Errors are |predicted - counted| / counted; rank correlations are
Spearman's, over all schedules and within each layer. The same figures are given for the paper's own rule (`bench.tuna_misses`).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.instruction_counts import kernels_of
from bench.layers import layer
from bench.tuna_misses import tuna_misses
from tilewright.analysis.cpu.caches import cache_misses
from tilewright.analysis.cpu.loop_tree import loop_tree
from tilewright.codegen.source import source_text
from tilewright.errors import KernelFailed
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Cache, Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.kernel import Kernel
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.build import compile_kernels
from tilewright.tuning.dataset import layer_problem
from tilewright.zoo import build

MACHINE = "x86-avx2"
LAYERS = ("D1", "D3", "D5", "R1", "R2", "R4", "R6", "R9", "R10", "R12")
LEVELS = (1, 2)
WAYS = ("predicted", "paper's rule")
COPIES = (b"memcpy", b"memmove", b"memset")

DRIVER = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

/* driver LIBRARY FUNCTION TRIPS [BYTES OFFSET]...: one call over fresh, zeroed buffers that begin at so many bytes behind a page's begin */
int main(int count, char **words) {
    void *arguments[16];
    int64_t trips = atol(words[3]);
    void *library = dlopen(words[1], RTLD_NOW);
    if (!library) return 2;
    void (*kernel)(void *const *, const int64_t *) = (void (*)(void *const *, const int64_t *))dlsym(library, words[2]);
    if (!kernel || count > 4 + 2 * 16) return 3;
    for (int i = 0; 5 + 2 * i < count; ++i) {
        size_t bytes = atol(words[4 + 2 * i]), offset = atol(words[5 + 2 * i]);
        char *memory = mmap(0, bytes + offset, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return 4;
        arguments[i] = memory + offset;
    }
    kernel(arguments, &trips);
    return 0;
}
"""


@dataclass(frozen=True)
class Counted:
    """Cachegrind's counts inside a kernel: instructions, and data misses (lines) of the first and of the last level."""

    instructions: int
    misses: tuple[int, int]


def build_driver(folder: Path) -> Path:
    """Builds the program that calls one kernel."""
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-O1", "-o", "driver", "driver.c", "-ldl"], cwd=folder, check=True)
    return folder / "driver"


def count_misses(driver: Path, library: Path, kernel: Kernel, caches: Sequence[Cache], seed: int) -> Counted:
    """One call of the kernel under cachegrind with two levels of cache.

    Raises:
        RuntimeError: if valgrind or the kernel fails.
    """
    place = random.Random(seed)
    buffers = [word for b in kernel.parameters for word in (b.size * size_of(b.dtype), 64 * place.randrange(1024))]
    first, last = (f"{cache.bytes},{cache.ways},{cache.line_bytes}" for cache in caches)
    result = driver.parent / "cachegrind.out"
    command = [
        "valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--I1={first}", f"--D1={first}", f"--LL={last}", f"--cachegrind-out-file={result}",
        str(driver), str(library), kernel.name, str(kernel.trips), *map(str, buffers),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    code = library.read_bytes()
    copies = ("mem", "__mem") if any(name in code for name in COPIES) else ()  # these functions may run under each other's names
    return parse(result.read_text(), kernel.name, copies)


def parse(text: str, kernel: str, copies: tuple[str, ...] = ()) -> Counted:
    """The counts of the functions that belong to a kernel: OpenMP outlines a parallel loop into a function of its own, and the compiler replaces some
    loops by calls of C library functions whose names begin with one of `copies` (the little that the program copies at its start is then counted
    too).

    Raises:
        RuntimeError: if the kernel is not among the functions.
    """
    events = re.search(r"^events: (.*)$", text, re.MULTILINE)
    assert events is not None, "cachegrind names its events"
    names = events[1].split()
    totals = np.zeros(len(names), dtype=np.int64)
    found = inside = False
    for row in text.splitlines():
        if row.startswith("fn="):
            inside = row[3:].startswith(kernel)
            found |= inside
            inside |= row[3:].startswith(copies)
        elif inside and row[:1].isdigit():
            totals += np.array(row.split()[1:], dtype=np.int64)
    if not found:
        raise RuntimeError(f"cachegrind saw no function {kernel}")
    count = dict(zip(names, totals.tolist(), strict=True))
    return Counted(count["Ir"], (count["D1mr"] + count["D1mw"], count["DLmr"] + count["DLmw"]))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        return ((ends - counts + ends - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def judge(kernels: Sequence[Kernel], machine: Machine, driver: Path) -> list[dict[str, Any]]:
    """Predicted and counted misses of kernels."""
    binaries = compile_kernels([SourceFile(k.name, source_text(k), "c", (k.name,)) for k in kernels], machine, workers=1)
    rows = []
    for number, (kernel, binary) in enumerate(zip(kernels, binaries, strict=True)):
        if isinstance(binary, KernelFailed):
            raise binary
        predicted, tree = cache_misses(kernel, machine), loop_tree(kernel)
        counted = count_misses(driver, binary.path, kernel, machine.caches[: len(LEVELS)], seed=number)
        row: dict[str, Any] = {"instructions": counted.instructions}
        for level, misses in zip(LEVELS, counted.misses, strict=True):
            of_level = predicted.level(level)
            row |= {f"L{level} counted": misses, f"L{level} predicted": round(of_level.total)}
            row[f"L{level} paper's rule"] = round(tuna_misses(tree, machine.caches[level - 1]))
            row[f"L{level} by buffer"] = {buffer: round(lines) for buffer, lines in of_level.misses.items()}
        rows.append(row)
    return rows


def judge_layer(name: str, schedules: int, machine: Machine, driver: Path) -> list[dict[str, Any]]:
    """Evenly sampled schedules of one layer."""
    problem = layer_problem(layer(name))
    ranking = list(rank(problem, machine, 1))
    places = np.unique(np.linspace(0, len(ranking) - 1, schedules).round().astype(int)).tolist()
    choices = [ranking[place] for place in places]
    lowered = [lower(problem, choice.schedule, machine) for choice in choices]
    rows = judge([each.kernels[-1] for each in lowered], machine, driver)
    return [
        {"layer": name, "schedule": str(choice.schedule), "place": place, "predicted seconds": choice.seconds, **row}
        for choice, place, row in zip(choices, places, rows, strict=True)
    ]


def judge_network(name: str, machine: Machine, driver: Path) -> list[dict[str, Any]]:
    """Every kernel of a network."""
    kernels = kernels_of(*build(name), machine, 1)
    rows = judge(kernels, machine, driver)
    return [{"layer": name, "schedule": kernel.header.partition("\n")[0], **row} for kernel, row in zip(kernels, rows, strict=True)]


def summary(rows: Sequence[dict[str, Any]], level: int, way: str) -> dict[str, Any]:
    """Median and upper decile of the errors, and rank correlations, of one prediction method (a column name without its level)."""
    predicted = [row[f"L{level} {way}"] for row in rows]
    counted = [row[f"L{level} counted"] for row in rows]
    errors = [abs(p - c) / c for p, c in zip(predicted, counted, strict=True)]
    within = {}
    for name in dict.fromkeys(row["layer"] for row in rows):
        own = [row for row in rows if row["layer"] == name]
        if len({row[f"L{level} counted"] for row in own}) > 1:
            within[name] = round(spearman([row[f"L{level} {way}"] for row in own], [row[f"L{level} counted"] for row in own]), 4)
    return {
        "level": level, "way": way, "kernels": len(rows), "median error": round(statistics.median(errors), 4),
        "error of nine in ten at most": round(float(np.quantile(errors, 0.9)), 4), "largest error": round(max(errors), 4),
        "rank correlation": round(spearman(predicted, counted), 4), "rank correlation within layers": within,
        "mean rank correlation within layers": round(statistics.mean(within.values()), 4) if within else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=LAYERS)
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--network", default="mobilenet_v2")
    parser.add_argument("--name", default="cache_misses")
    options = parser.parse_args()
    machine = find_machine(MACHINE)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        driver = build_driver(Path(folder))
        for name in options.layers:
            rows += judge_layer(name, options.schedules, machine, driver)
            print(f"{name}: {len(rows)} schedules", flush=True)
        network = judge_network(options.network, machine, driver) if options.network else []
    table = Table("layer", "schedule", *(title for level in LEVELS for title in (f"L{level} counted", "predicted", "ratio")))
    for row in (*rows, *network):
        figures = [(row[f"L{level} counted"], row[f"L{level} predicted"]) for level in LEVELS]
        table.add_row(row["layer"], row["schedule"], *(cell for c, p in figures for cell in (f"{c:,}", f"{p:,}", f"{p / c:.2f}")))
    Console(width=180).print(table)
    parts = {"layers": rows, "network": network}
    summaries = [{"of": part, **summary(own, level, way)} for part, own in parts.items() if own for level in LEVELS for way in WAYS]
    for found in summaries:
        print(found)
    version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {
        "machine": MACHINE, "layers": list(options.layers), "schedules": options.schedules, "network": options.network,
        "simulator": f"{version}, cachegrind", "summary": summaries,
    }  # fmt: skip
    print(write_results(options.name, settings, [*rows, *network]))


if __name__ == "__main__":
    main()
