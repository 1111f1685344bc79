"""Networks in float32 on this CPU without chains and with them: what runs together in registers against all that is predicted faster.

    python -m bench.fusion mobilenet_v2 resnet50 --threads 2 --name fusion_2

Both plans are Tilewright's own kernels without trials, checked against PyTorch in float64, and timed in interleaved turns.
"""

from __future__ import annotations

import argparse
import importlib
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tilewright
from bench.common import Contender, Outcome, compare, write_results
from tilewright import zoo
from tilewright.partition.plan import plan_program

PIPELINE = importlib.import_module("tilewright.compile")  # the package's attribute of this name is its function
NETWORKS = ("mobilenet_v2", "resnet18", "resnet50", "inception_v3", "densenet121")


def contender(name: str, chains: bool, threads: int, compiled: dict[str, Any]) -> Contender:
    """Tilewright, with chains or without."""

    def prepare(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        start = time.perf_counter()
        with mock.patch.object(PIPELINE, "plan_program", partial(plan_program, chains=chains)):
            executable = tilewright.compile(module, inputs, "native", threads=threads)
        compiled[name] = {
            "seconds": time.perf_counter() - start,
            "regions": len(executable.image.program.regions),
            "chains": sum(region.kind == "chain" for region in executable.image.program.regions),
        }
        return executable

    return Contender(name, prepare)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--name", help="name of the result file")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    table, rows, console = Table("network", "in registers, ms", "with chains, ms", "ratio", "chains of regions", "compiled, s"), [], Console()
    for name in options.networks:
        module, inputs = zoo.build(name, options.batch)
        fresh = zoo.build(name, options.batch, seed=1)[1]
        compiled: dict[str, Any] = {}
        ways = [contender(way, chains, options.threads, compiled) for way, chains in (("registers", False), ("chains", True))]
        found: list[Outcome] = compare(name, module, inputs, fresh, ways, 1e-3, options.rounds, 0.1)
        rows += [{"network": name, "contender": each.contender, "status": each.status, "median_seconds": each.median_seconds,
                  "quartile_seconds": each.quartile_seconds, "relative_error": each.relative_error, **compiled.get(each.contender, {})}
                 for each in found]  # fmt: skip
        if any(each.median_seconds is None for each in found):
            console.print(*(f"{name}, {each.contender}: {each.status} {each.reason}" for each in found), sep="\n")
            continue
        first, second = (each.median_seconds or 0.0 for each in found)
        told = compiled["chains"]
        times = f"{compiled['registers']['seconds']:.1f}, {told['seconds']:.1f}"
        table.add_row(name, f"{1e3 * first:.2f}", f"{1e3 * second:.2f}", f"{first / second:.3f}", f"{told['chains']} of {told['regions']}", times)
    console.print(table)
    if options.name:
        console.print(f"wrote {write_results(options.name, vars(options), rows)}")


if __name__ == "__main__":
    main()
