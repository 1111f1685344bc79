"""Networks in float32 on this CPU by what runs together: nothing, what fits in registers, chains too, with library kernels too (the ablation of
DeepCuts, Jung et al., PLDI 2021, figures 5 to 7).

    python -m bench.fusion mobilenet_v2 resnet50 --threads 2 --name fusion_2
    python -m bench.fusion densenet121 --threads 2 --name fusion_2              the file's other networks stay
    python -m bench.fusion resnet18 resnet50 --limit --name fusion_limit
    python -m bench.fusion mobilenet_v2 --ways none,registers,chains,libraries --batch 16 --name ablation_16

`none` makes a kernel of each operator that is no view, after constants are folded, also of those of attention; `registers` and `chains` are
Tilewright's own kernels without trials; `libraries` measures the candidates first. All are checked against PyTorch in float64, and timed in
interleaved turns.

`--limit` times nothing: it states what chains could save at most by prediction if every region could be in one, Winograd's kernels too, and strips
cost nothing.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tilewright
from bench.common import Contender, Outcome, compare, earlier_results, write_results
from bench.cpu_networks import cell, with_libraries
from tilewright import zoo
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.calibration import cpu_calibration
from tilewright.ir.region import Region
from tilewright.kernels.schema import USUAL
from tilewright.partition import chains, regions, rewriting
from tilewright.partition.divisions import best_division
from tilewright.partition.fusion import Partition, partition
from tilewright.partition.paths import Uses, sections
from tilewright.partition.plan import plan_program
from tilewright.partition.poolings import Poolings
from tilewright.partition.predictions import Predictions
from tilewright.partition.prologues import Prologues
from tilewright.partition.siblings import Merged
from tilewright.partition.strip_judge import between_kernels
from tilewright.selection.choice import choose
from tilewright.stages import Stages

PIPELINE = importlib.import_module("tilewright.compile")  # the package's attribute of this name is its function
NETWORKS = ("mobilenet_v2", "resnet18", "resnet50", "inception_v3", "densenet121")
WAYS = ("none", "registers", "chains", "libraries")


def _apart(*given: Any, **named: Any) -> Partition:
    """The partition in which no operators share a kernel."""
    return partition(*given, **{**named, "fused": False})


@contextmanager
def fusing(way: str) -> Iterator[None]:
    """Inside the context regions are made in one of `WAYS`; or `stored`: as in registers, but no contraction computes a map that it reads; or
    `unpooled`: as usual, but no contraction pools its results."""
    with ExitStack() as stack:
        if way == "stored":
            stack.enter_context(mock.patch.object(rewriting, "choose_prologues", lambda *_: Prologues()))
        if way in ("unpooled", "none"):
            stack.enter_context(mock.patch.object(rewriting, "choose_poolings", lambda *_: Poolings()))
        if way != "unpooled":
            stack.enter_context(mock.patch.object(PIPELINE, "plan_program", partial(plan_program, chains=way not in ("none", "registers", "stored"))))
        if way == "none":
            stack.enter_context(mock.patch.object(regions, "partition", _apart))
            for merging in ("merge_siblings", "join_loops"):
                stack.enter_context(mock.patch.object(rewriting, merging, lambda graph, *_: Merged(graph)))
        yield


def contender(way: str, threads: int, trials: int, compiled: dict[str, Any]) -> Contender:
    """Tilewright in one of `WAYS`."""

    def prepare(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        start = time.perf_counter()
        with fusing(way):
            if way == "libraries":
                executable: Any = with_libraries(trials).prepare(module, inputs)
            else:
                executable = tilewright.compile(module, inputs, "native", threads=threads)
        regions = executable.image.program.regions
        compiled[way] = {
            "seconds": time.perf_counter() - start,
            "regions": len(regions),
            "chains": sum(region.kind == "chain" for region in regions),
            "libraries": sum(region.library is not None for region in regions),
        }
        return executable

    return Contender(way, prepare)


def limit(network: str, batch: int, threads: int) -> dict[str, Any]:
    """Predicted seconds of a network's regions, and the most that chains of `chains.LONGEST` regions could save of them."""
    native = machine("native")
    graph = simplify(read(*zoo.build(network, batch)).graph)[0]
    predictions = Predictions(choose, native, threads, USUAL, Stages())
    laid_out, context = predictions.laid_out(graph), predictions.context(graph)
    total = sum(predictions.seconds(region, context) for region in laid_out.regions if region.kind not in ("torch", "loop"))
    saved, constants = 0.0, cpu_calibration(native).chains
    uses, size = Uses(graph, laid_out), {name: value.bytes for name, value in laid_out.values.items()}

    def spared(segment: Sequence[Region]) -> float:
        """Seconds that a chain would save if strips cost nothing."""
        stored, total = uses.stored(segment), (len(segment) - 1) * constants.start_cycles / native.clock_hz
        for region in segment:
            (name,) = region.outputs
            loaded = sum(size[other] for other in region.inputs if other not in graph.constants)
            readers = [size[other.outputs[0]] for other in segment if name in other.inputs]
            passes = len(readers) + (name not in stored)
            total += constants.stored * between_kernels(size[name], max(loaded, *readers), native, threads, passes) if readers else 0.0
        return total

    for section in sections(uses, chains.LONGEST):
        worth = {place: (0, spared(section.of(place))) for place in section.segments}
        saved += sum(worth[place][1] for place in best_division(section.before, worth) if place in worth)
    return {"network": network, "batch": batch, "threads": threads, "predicted_seconds": total, "most_saved_seconds": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--ways", default="registers,chains", help=f"of {','.join(WAYS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--trials", type=int, default=3, help="of `libraries`")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.1, help="least time of one turn in one round")
    parser.add_argument("--limit", action="store_true", help="time nothing: what chains could save at most by prediction, with one and two threads")
    parser.add_argument("--name", help="name of the result file")
    options = parser.parse_args()
    names = options.ways.split(",")
    if unknown := sorted(set(names) - set(WAYS)):
        parser.error(f"unknown ways {', '.join(unknown)}; choose from {', '.join(WAYS)}")
    if options.limit:
        limits = [limit(name, options.batch, threads) for name in options.networks for threads in (1, 2)]
        Console().print(*limits, sep="\n")
        if options.name:
            write_results(options.name, vars(options), limits)
        return
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    table, rows, console = Table("network", *(f"{way}, ms" for way in names), "chains of regions"), [], Console()
    for name in options.networks:
        module, inputs = zoo.build(name, options.batch)
        fresh = zoo.build(name, options.batch, seed=1)[1]
        compiled: dict[str, Any] = {}
        ways = [contender(way, options.threads, options.trials, compiled) for way in names]
        found: list[Outcome] = compare(name, module, inputs, fresh, ways, 1e-3, options.rounds, options.seconds)
        rows += [{"network": name, "contender": each.contender, "status": each.status, "reason": each.reason, "median_seconds": each.median_seconds,
                  "quartile_seconds": each.quartile_seconds, "relative_error": each.relative_error, **compiled.get(each.contender, {})}
                 for each in found]  # fmt: skip
        told = compiled.get(names[-1])
        table.add_row(name, *map(cell, found), f"{told['chains']} of {told['regions']}" if told else "")
    console.print(table)
    if options.name:
        earlier = earlier_results(options.name) or {"results": []}
        kept = [row for row in earlier["results"] if row["network"] not in options.networks]
        console.print(f"wrote {write_results(options.name, vars(options), [*kept, *rows])}")


if __name__ == "__main__":
    main()
