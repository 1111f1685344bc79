"""The twenty benchmark layers on the CPU: Tilewright, PyTorch eager, Inductor, ONNX Runtime and OpenVINO, interleaved in one process.

    python -m bench.cpu_layers [R2 R6 ...] [--threads 2] [--name cpu_layers]

A layer is a convolution with bias in float32. Input and output are NCHW for ours, eager, Inductor, ONNX Runtime and OpenVINO; `eager_nhwc` is PyTorch
with channels-last input and output and no conversion. Every contender is checked against float64 first.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.common import Contender, Outcome, Run, compare, write_results
from bench.cpu_networks import CONTENDERS, OURS, cell
from bench.layers import LAYERS, NETWORKS

NHWC = "eager_nhwc"
"""The only contender whose input and output are not NCHW."""
AGAINST = ("eager", NHWC, "inductor", "onnxruntime", "openvino")


def eager_nhwc(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """PyTorch with channels-last input (converted once, while preparing) and output."""
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    held: dict[int, Tensor] = {}

    @torch.inference_mode()
    def run(x: Tensor) -> Tensor:
        if id(x) not in held:
            held[id(x)] = x.contiguous(memory_format=torch.channels_last)
        return module(held[id(x)])  # type: ignore[no-any-return]

    return run


def convolution(name: str) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The layer, and two inputs for it."""
    outputs, channels, size, filter_size, stride = LAYERS[name]
    module = nn.Conv2d(channels, outputs, filter_size, stride, filter_size // 2).eval()
    shape = (1, channels, size * stride, size * stride)
    return module, (torch.randn(shape),), (torch.randn(shape),)


def ratios(outcomes: Sequence[Outcome]) -> Mapping[str, float]:
    """The time of the best peer over ours: among all, and among those with NCHW input and output."""
    medians = {outcome.contender: outcome.median_seconds for outcome in outcomes if outcome.median_seconds is not None}
    own = medians.pop(OURS)
    return {"all": min(medians.values()) / own, "nchw": min(seconds for name, seconds in medians.items() if name != NHWC) / own}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--against", default=",".join(AGAINST))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.03, help="least time of one turn in one round")
    parser.add_argument("--name", default="cpu_layers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    known = {**CONTENDERS, NHWC: Contender(NHWC, eager_nhwc)}
    names = [OURS, *options.against.split(",")]
    results: list[Outcome] = []
    table = Table("layer", *names, "best / ours", "best of NCHW / ours", title=f"CPU, {options.threads} threads, ms", box=None)
    found: dict[str, Mapping[str, float]] = {}
    for name in options.layers:
        module, example, fresh = convolution(name)
        outcomes = compare(name, module, example, fresh, [known[contender] for contender in names], 1e-4, options.rounds, options.seconds)
        results += outcomes
        found[name] = ratios(outcomes)
        table.add_row(name, *map(cell, outcomes), f"{found[name]['all']:.2f}", f"{found[name]['nchw']:.2f}")
    means = {
        f"{network}, {kind}": math.exp(statistics.fmean(math.log(found[name][kind]) for name in found if name.startswith(letter)))
        for kind in ("all", "nchw")
        for letter, network in (*NETWORKS.items(), ("", "every"))
        if any(name.startswith(letter) for name in found)
    }
    path = write_results(options.name, {**vars(options), "geometric means of best / ours": means, "best / ours": found}, results)
    console = Console(width=170)
    console.print(table)
    console.print("geometric means: " + "; ".join(f"{name} {mean:.2f}" for name, mean in means.items()))
    console.print(f"least: {min(row['all'] for row in found.values()):.2f} of all, {min(row['nchw'] for row in found.values()):.2f} of NCHW; {path}")


if __name__ == "__main__":
    main()
