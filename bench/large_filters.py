"""Convolutions with large or long filters on this CPU or the GPU present: direct sums, each transform of blocks, the models' choice, and PyTorch,
interleaved in one process.

    python -m bench.large_filters [NAME ...] [--threads 2] [--rounds 20] [--name large_filters]
    python -m bench.large_filters --target cuda --name large_filters_h100

A layer is a convolution with bias in float32, whose input and output are NCHW; `eager_nhwc` is PyTorch with channels-last input and output and no
conversion. On a GPU PyTorch is cuDNN in both layouts as a CUDA graph, without TF32, and each call finds level 2 full of other data. A way is the
models' first choice among its candidates. Every contender is checked against float64 first, and has its largest error over the largest magnitude of
the result.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench import gpu_networks
from bench.common import Contender, Outcome, compare, write_results
from bench.cpu_layers import NHWC, eager_nhwc
from bench.cpu_networks import OURS, ours
from bench.winograd_numerics import run_by, transformed, ways_of
from tilewright.hardware import machine
from tilewright.kernels.block_transforms import Transform, of_each
from tilewright.kernels.winograd_transform import Shape
from tilewright.selection.choice import rank
from tilewright.tuning.peers import PEERS
from tilewright.tuning.problems import convolution_problem

LAYERS: Mapping[str, tuple[int, int, int, Shape]] = MappingProxyType(
    {
        "alexnet 2": (64, 192, 27, (5, 5)),
        "googlenet 3a": (16, 32, 28, (5, 5)),
        "googlenet 4e": (32, 128, 14, (5, 5)),
        "inception v3": (48, 64, 35, (5, 5)),
        "srcnn 9-5-5": (64, 32, 96, (5, 5)),
        "7x7, 64": (64, 64, 56, (7, 7)),
        "7x7, 128": (128, 128, 28, (7, 7)),
        "7x7, small": (128, 128, 14, (7, 7)),
        "9x9, 32": (32, 32, 112, (9, 9)),
        "9x9, 64": (64, 64, 56, (9, 9)),
        "11x11, 32": (32, 32, 56, (11, 11)),
        "11x11, 64": (64, 64, 56, (11, 11)),
        "style transfer 1": (3, 32, 224, (9, 9)),
        "inception v3 6b, 1x7": (128, 128, 17, (1, 7)),
        "inception v3 6b, 7x1": (128, 192, 17, (7, 1)),
        "inception v3 6c, 7x1": (160, 160, 17, (7, 1)),
        "inception v3 6e, 1x7": (192, 192, 17, (1, 7)),
        "inception v3 7b, 1x3": (384, 384, 8, (1, 3)),
        "inception v3 7b, 3x1": (384, 384, 8, (3, 1)),
    }
)
"""By name: channels of the input and of the output, size of the square image, rows and columns of the filters. "style transfer 1" has no whole
vectors of channels."""


PYTORCH = {False: ("eager", NHWC), True: ("eager", "eager_cl")}
"""PyTorch's contenders on a CPU and on a GPU."""


def contender(way: str, transform: Transform | None, threads: int) -> Contender:
    """Our kernels, all of one way."""
    return Contender(way, lambda module, inputs: run_by(module, inputs[0], transformed(transform), threads))


def contenders(channels: int, outputs: int, size: int, filter_shape: Shape, threads: int, target: str) -> Iterator[Contender]:
    """Our kernels of each way that has candidates, those that the models choose, and PyTorch."""
    here = machine(target)
    ranking = rank(convolution_problem(outputs, channels, size, size, filter_shape), here, threads)
    several = (part for part in ranking.parts if part.schema.transforms and "fourier" in part.candidates)
    there = {transform for part in several for _, transform in of_each(part.candidates)}
    for way, transform in ways_of(filter_shape).items():
        if transform is None or transform in there:
            yield contender(way, transform, threads)
    yield ours()
    if here.is_gpu:
        yield from (gpu_networks.CONTENDERS[name] for name in PYTORCH[True])
    else:
        yield PEERS["eager"]
        yield Contender(NHWC, eager_nhwc)


def gains(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The times of direct sums, of the best of our ways, and of the best of PyTorch, over that of the models' choice."""
    medians = {outcome.contender: outcome.median_seconds for outcome in outcomes if outcome.median_seconds is not None}
    own = medians.pop(OURS)
    peers = [medians.pop(name) for name in {*PYTORCH[False], *PYTORCH[True]} if name in medians]
    return {"direct": medians["direct sums"] / own, "best way": min(medians.values()) / own, "pytorch": min(peers) / own}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--target", choices=("native", "cuda"), default="native")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.03, help="least time of one turn in one round")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, measuring = torch.device("cpu"), dict[str, Any]()
    if options.target == "cuda":
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, True
        device = torch.device("cuda")
        scratch = torch.empty(gpu_networks.FLUSHED_BYTES // 4, device=device)
        measuring = {"seconds_of": partial(gpu_networks.cold_seconds, scratch=scratch)}
    results: list[Outcome] = []
    found: dict[str, dict[str, float]] = {}
    for name in options.layers:
        channels, outputs, size, (down, across) = LAYERS[name]
        module = nn.Conv2d(channels, outputs, (down, across), padding=(down // 2, across // 2)).eval().to(device)
        make = partial(torch.randn, 1, channels, size, size, device=device)
        with torch.no_grad():
            timed = list(contenders(*LAYERS[name], options.threads, options.target))
            inputs = (make(),)
            others = inputs if measuring else (make(),)  # CUDA graphs are of these tensors
            outcomes = compare(name, module, inputs, others, timed, 1e-4, options.rounds, options.seconds, **measuring)
        results += outcomes
        found[name] = gains(outcomes)
        title = f"{name}: {channels} to {outputs} channels, {size} x {size}, {down} x {across}"
        table = Table("way", "ms", "error", box=None)
        for outcome in outcomes:
            seconds = outcome.median_seconds
            shown = f"{1e3 * seconds:.3g}" if seconds is not None else outcome.reason
            table.add_row(outcome.contender, shown, f"{outcome.relative_error:.1e}" if outcome.relative_error is not None else "")
        Console().print(title, table, sep="\n")
    means = {kind: math.exp(statistics.fmean(math.log(row[kind]) for row in found.values())) for kind in ("direct", "best way", "pytorch")}
    Console().print("geometric means of the times over ours: " + "; ".join(f"{kind} {mean:.2f}" for kind, mean in means.items()))
    if options.name:
        write_results(options.name, {**vars(options), "geometric means of times over ours": means, "times over ours": found}, results)


if __name__ == "__main__":
    main()
