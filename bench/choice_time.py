"""Time to choose a schedule: predicting every candidate of a region and finding the best, from models alone.

    python -m bench.choice_time

For each convolution of `LAYERS` and each target the whole space is generated, pruned, predicted and ranked several times; the fastest and the median
are reported. `considered` counts candidates including rejected ones, `feasible` those that are predicted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import write_results
from tilewright.hardware import identified_machine
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand
from tilewright.kernels.gpu.gemv.schema import GEMV
from tilewright.kernels.schema import Options
from tilewright.selection.choice import candidates
from tilewright.selection.ranking import Ranking

LAYERS = {"R2": (64, 64, 56, 3), "R6": (128, 128, 28, 3), "R12": (512, 512, 7, 3), "Y8": (256, 128, 68, 3), "Y18": (1024, 512, 17, 3)}
"""Output channels, input channels, output width and height, filter; stride 1."""


def gpu_problem(outputs: int, channels: int, size: int, filter_size: int) -> ContractionFacts:
    a = Operand("r", 4, 4 * channels * size * size, 2)
    b = Operand("own", 4, 4 * outputs * channels * filter_size**2)
    return ContractionFacts(1, size * size, outputs, channels * filter_size**2, a, b, 4, 4 * size * size * outputs)


def cpu_chooser(outputs: int, channels: int, size: int, filter_size: int, target: str, threads: int) -> Callable[[], tuple[str, int, int]]:
    """The CPU's choice of a tile for the same layer with a stored halo."""
    from tilewright.kernels.cpu.contraction.schema import CONTRACTION, match
    from tilewright.tuning.problems import convolution_problem

    machine = identified_machine(target)
    facts = match(convolution_problem(outputs, channels, size, size, filter_size), machine).facts

    def choose() -> tuple[str, int, int]:
        ranking = candidates(Ranking(machine), CONTRACTION, facts, Options(threads))
        return str(ranking.first().schedule), ranking.candidates, ranking.candidates + sum(ranking.rejected.values())

    return choose


def gpu_chooser(facts: ContractionFacts, target: str) -> Callable[[], tuple[str, int, int]]:
    machine = identified_machine(target)

    def choose() -> tuple[str, int, int]:
        ranking = Ranking(machine)
        for schema in (GEMM, GEMV):
            ranking = candidates(ranking, schema, facts, Options())
        return str(ranking.first().schedule), ranking.candidates, ranking.candidates + sum(ranking.rejected.values())

    return choose


def timed(choose: Callable[[], tuple[str, int, int]], repeats: int) -> dict[str, Any]:
    chosen, feasible, considered = choose()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        again = choose()
        seconds.append(time.perf_counter() - start)
        assert again[0] == chosen, "the choice varies"
    return {
        "chosen": chosen, "feasible": feasible, "considered": considered,
        "best_ms": min(seconds) * 1e3, "median_ms": statistics.median(seconds) * 1e3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--gpus", default="h200,a100,rtx4090")
    parser.add_argument("--cpus", default="x86-avx512,cortex-a53")
    parser.add_argument("--name", default="choice_time")
    options = parser.parse_args()
    results = []
    for name, layer in LAYERS.items():
        for target in options.gpus.split(","):
            results.append({"layer": name, "target": target, **timed(gpu_chooser(gpu_problem(*layer), target), options.repeats)})
        for target in options.cpus.split(","):
            results.append({"layer": name, "target": target, **timed(cpu_chooser(*layer, target, 2), options.repeats)})
    write_results(options.name, vars(options), results)
    table = Table("layer", "target", "considered", "feasible", "best ms", "median ms", "chosen")
    for r in results:
        cells = (r["layer"], r["target"], r["considered"], r["feasible"], f"{r['best_ms']:.1f}", f"{r['median_ms']:.1f}", r["chosen"])
        table.add_row(*map(str, cells))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
