"""Regions in one kernel, by tiles in shared memory, against separate kernels and cuDNN on the GPU present: predicted and measured.

    python -m bench.gpu_chains                            30 random chains, the constants fitted to them, and the chains of `bench.chains.LITERATURE`
    python -m bench.gpu_chains --random 0 --name gpu_chains_judged     those of LITERATURE alone, with the constants of the calibration file
    python -m bench.gpu_chains --check                    without a GPU: plans and compiles the same chains

Each chain is compiled twice, as one kernel with the tiles predicted fastest and as separate kernels, and checked against PyTorch in float64. The time
of a chain is that of its layers alone: the median time of a program up to its last layer, less that up to the layer before the first, in interleaved
turns that find the level-2 cache full of other data (`bench.gpu_regions`). So it is for cuDNN, of which PyTorch's modules in both layouts and its
fused convolution with bias and ReLU take part, as CUDA graphs. The constants of `hardware.calibration.GpuChains` are fitted to the random chains
alone, before the others are compiled. One run takes less than five minutes on a machine with 16 cores: kernels are compiled ahead on all of them.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.chains import LARGEST_ERROR, LITERATURE, Links, drawn, merging, summary
from bench.common import double_precision_outputs, interleaved_seconds, relative_error, write_results
from bench.fusion import fusing
from bench.gpu_networks import FLUSHED_BYTES, captured, cold_seconds
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import UNFITTED_CHAINS, GpuChains, gpu_chains
from tilewright.partition import chains, tile_judge
from tilewright.partition.tile_judge import TileJudge, TileParts
from tilewright.runtime.executable import Executable
from tilewright.runtime.gpu import GpuEngine, gpu_engine

GRID = {"work": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.8, 2.2), "turn": (0.0, 250.0, 500.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0)}
"""Values that are tried for the constants."""
WAYS = ("separate", "merged")


@contextmanager
def planned(links: Links, merges: bool, constants: GpuChains, seen: dict[str, Any]) -> Iterator[None]:
    """Inside the context the layers of the chain become one kernel, or separate ones."""
    known = mock.Mock(return_value=constants)
    with fusing("chains"), mock.patch.object(tile_judge, "gpu_chains", known):
        with merging(len(links.layers), merges, seen, judging=TileJudge), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


def compiled(
    links: Links, merges: bool, constants: GpuChains, seen: dict[str, Any], device: str, target: str
) -> tuple[Executable, tuple[Tensor, ...]]:
    """The chain and what surrounds it, compiled for the target, with inputs on the device. Raises RuntimeError if it is not planned as asked for."""
    torch.manual_seed(0)
    module, inputs = links.module().to(device), tuple(x.to(device) for x in links.inputs())
    with planned(links, merges, constants, seen):
        executable = tilewright.compile(module, inputs, identified_machine(target))
    found = sum(region.kind == "chain" for region in executable.image.program.regions)
    if found != (merges and "way" in seen):
        raise RuntimeError(f"{links}: {found} chains where {'one' if merges else 'none'} is asked for")
    return executable, inputs


def compile_ahead(links: Links, constants: GpuChains, target: str) -> str:
    """Compiles a chain both ways into the kernel cache; runs in a process of its own. Returns why that failed, if it did."""
    seen: dict[str, Any] = {}
    try:
        for merges in (False, True):
            compiled(links, merges, constants, seen, "cpu", target)
    except Exception as error:
        return f"{links}: {error}"
    return f"{links}: {seen['reason']}" if "reason" in seen else ""


def all_ahead(links: Sequence[Links], constants: GpuChains, target: str) -> list[str]:
    """Compiles chains on all cores. Returns what is to be said about them."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        return [text for text in pool.map(partial(compile_ahead, constants=constants, target=target), links) if text]


def prefixes(executable: Executable, inputs: tuple[Tensor, ...]) -> tuple[GpuEngine, Callable[[int], None]]:
    """An engine that runs a program's regions one after another, and a function that runs so many of them."""
    image = executable.image
    engine = gpu_engine(image.program, image.binaries, in_order=True)
    outputs = executable._allocate()
    pointers = [tensor.data_ptr() for tensor in (*executable._admission.admit(inputs), *outputs)]

    def run(count: int, kept: object = (outputs, inputs)) -> None:
        engine.bind(pointers)
        engine.run(0, count)
        engine.finish()

    return engine, run


def places(ways: Mapping[str, Executable]) -> dict[str, tuple[int, int]]:
    """For each way the regions of the chain, as (first, end)."""
    (merged,) = [region for region in ways["merged"].plan.rows if region.kind == "chain"]
    rows = {name: [row.name for row in ways[name].plan.rows] for name in WAYS}
    end = rows["merged"].index(merged.name)
    before = rows["merged"][end - 1]  # the same in both programs
    return {
        "merged": (end, end + 1),
        "separate": (rows["separate"].index(before) + 1, rows["separate"].index(merged.name) + 1),
    }


class FusedByCudnn(nn.Module):
    """cuDNN's convolution with bias and ReLU."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer
        assert not isinstance(own.padding, str)
        result: Tensor = torch.cudnn_convolution_relu(x, own.weight, own.bias, own.stride, own.padding, own.dilation, own.groups)
        return result


def cudnn_ways(links: Links, inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """PyTorch's ways of computing the layer before the chain, and of that and the chain, as CUDA graphs; those that work."""
    found: dict[str, Callable[[], object]] = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        module = links.module().cuda().to(memory_format=layout)  # type: ignore[call-overload]
        assert isinstance(module, nn.Sequential)
        x = inputs[0].to(memory_format=layout)
        first, *layers = list(module)[:-1]
        fused = [FusedByCudnn(layer[0]) for layer in layers if isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Conv2d)]
        kind = "cl" if layout is torch.channels_last else "nchw"
        for name, parts in (("before", [first]), ("modules", [first, *layers]), ("fused", [first, *fused])):
            try:
                found[f"{name} {kind}"] = partial(captured(nn.Sequential(*parts).eval(), (x,)), x)
            except RuntimeError:  # cuDNN has no such kernel
                continue
    return found


def measured(links: Links, constants: GpuChains, rounds: int, scratch: Tensor) -> dict[str, Any]:
    """Predicted and measured seconds of one chain. Raises RuntimeError for a wrong result."""
    seen: dict[str, Any] = {}
    ways: dict[str, Executable] = {}
    for name in WAYS:
        ways[name], inputs = compiled(links, name == "merged", constants, seen, "cuda", "cuda")
    torch.manual_seed(0)
    reference = double_precision_outputs(links.module().cuda(), inputs)
    errors = {name: relative_error([run(*inputs)], reference) for name, run in ways.items()}
    if max(errors.values()) > LARGEST_ERROR:
        raise RuntimeError(f"{links} is wrong: {errors}")
    row: dict[str, Any] = {"chain": str(links), "predicted": seen, "errors": errors}
    if "way" not in seen:
        return row
    calls: dict[str, Callable[[], object]] = {}
    engines = []
    for name, (first, end) in places(ways).items():
        engine, run = prefixes(ways[name], inputs)
        engines.append(engine)
        calls |= {f"{name} before": partial(run, first), f"{name} until": partial(run, end)}
    peers = cudnn_ways(links, inputs)
    found = interleaved_seconds({**calls, **peers}, rounds, 0.002, partial(cold_seconds, scratch=scratch))
    for engine in engines:
        engine.close()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    row["calls"] = {name: (medians[name], *np.quantile(seconds, (0.25, 0.75))) for name, seconds in found.items()}
    row["seconds"] = {name: medians[f"{name} until"] - medians[f"{name} before"] for name in WAYS}
    row["cudnn"] = {name: medians[name] - medians[f"before {name.split()[1]}"] for name in peers if not name.startswith("before")}
    row["taken"] = taken(seen["chain"], seen["apart"])
    return row


def taken(chain: float, apart: float) -> bool:
    return chain < (1 - chains.LEAST_GAIN) * apart


def fitted(rows: Sequence[Mapping[str, Any]], clock_hz: float) -> tuple[GpuChains, float]:
    """The constants whose decisions take the least time on these chains: the geometric mean over that of separate kernels, the second result. Among
    equal ones those whose predictions are closest."""
    found = [row for row in rows if "seconds" in row]
    separate, merged = (np.array([row["seconds"][name] for row in found]) for name in WAYS)
    apart = np.array([row["predicted"]["apart"] for row in found])
    parts = [TileParts(**row["predicted"]["parts"]) for row in found]

    def judged(constants: GpuChains) -> tuple[float, float]:
        predicted = np.array([each.seconds(constants, clock_hz) for each in parts])
        chosen = np.where([taken(a, b) for a, b in zip(predicted, apart, strict=True)], merged, separate)
        return float(np.mean(np.log(chosen / separate))), float(np.mean(np.log(predicted / merged) ** 2))

    best = min((GpuChains(*values) for values in itertools.product(*GRID.values())), key=judged)
    return best, float(np.exp(judged(best)[0]))


def line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']} {row['chain']}: FAILED: {row['error']}"
    told = row["predicted"]
    if "seconds" not in row:
        return f"{row['name']} {row['chain']}: {told.get('reason', '')}"
    apart, merged = (1e6 * row["seconds"][name] for name in WAYS)
    peer = f", cuDNN {1e6 * min(row['cudnn'].values()):.1f}" if row["cudnn"] else ""
    predicted = f"predicted {1e6 * told['apart']:.1f} -> {1e6 * told['chain']:.1f} {told['way']}, {'taken' if row['taken'] else 'refused'}"
    return f"{row['name']} {row['chain']}: {apart:.1f} -> {merged:.1f} us, {apart / merged:.2f}{peer}; {predicted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=30, metavar="COUNT", help="random chains to which the constants are fitted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="gpu_chains", help="name of the result file")
    parser.add_argument("--check", action="store_true", help="plan and compile for --target, which need not be present")
    parser.add_argument("--target", default="h200", help="of --check")
    options = parser.parse_args()
    console = Console(width=180)
    random = list(drawn(options.seed, options.random))
    if options.check:
        for text in all_ahead([*random, *LITERATURE.values()], UNFITTED_CHAINS, options.target):
            console.print(text)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    scratch, target = torch.empty(FLUSHED_BYTES // 4, device="cuda"), identified_machine("cuda")
    known = None if options.random else gpu_chains(target)
    constants, rows = known or UNFITTED_CHAINS, list[dict[str, Any]]()
    for kind, problems in (("random", {f"random {number}": links for number, links in enumerate(random)}), ("literature", dict(LITERATURE))):
        for text in all_ahead(list(problems.values()), constants, target.name):
            console.print(text)
        for name, links in problems.items():
            row: dict[str, Any] = {"name": name, "set": kind}
            try:
                row |= measured(links, constants, options.rounds, scratch)
            except RuntimeError as error:  # said at the end as well; the other chains are still measured
                row |= {"chain": str(links), "error": str(error)}
            rows.append(row)
            console.print(line(row))
        if kind == "random" and any("seconds" in row for row in rows):
            constants, mean = fitted(rows, target.clock_hz)
            console.print(f"fitted: {constants}; decisions of these take {mean:.3f} of the time of separate kernels")
    said = {**summary([row for row in rows if row["set"] == "literature"]), "constants": vars(constants)}
    table = Table("figure", "value")
    for key, value in said.items():
        table.add_row(key, str(value) if key == "constants" else f"{value:.3g}")
    console.print(table)
    console.print(f"wrote {write_results(options.name, {**vars(options), **said}, rows)}")
    if failed := [row["name"] for row in rows if "error" in row]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
