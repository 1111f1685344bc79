"""Zoo networks on the GPU present: Tilewright, PyTorch eager (both layouts) and Inductor, all as CUDA graphs, in one process.

    python -m bench.gpu_networks resnet18 resnet50 --against eager,eager_cl,inductor
    python -m bench.gpu_networks mobilenet_v2 --against none,chains,vendor,eager_cl --batch 64      what is fused (`bench.fusion`)
    python -m bench.gpu_networks mobilenet_v2 --against tuned_apart,tuned         chains where trials measured them to be faster

Every contender computes in float32 (TF32 off, cuDNN in benchmark mode), is checked against PyTorch in float64 before it is timed, and is left out
with the reason if it fails or is wrong. Before each timed call a buffer larger than the L2 cache is overwritten, so that weights and inputs come from
device memory; the events around the call exclude that.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.common import Contender, Outcome, Run, Unavailable, compare, write_results
from bench.cpu_networks import OURS, VENDOR, cell, speed_up, with_libraries
from bench.fusion import WAYS, fusing
from tilewright import zoo

FLUSHED_BYTES = 256 << 20
TRIALS = 8
"""Candidates of each region and chain that the contenders `tuned` and `tuned_apart` measure."""


def captured(module: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Run:
    """The module's call on exactly these input tensors as a CUDA graph."""
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                module(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = module(*inputs)

    def run(*given: Tensor, kept: object = module) -> object:  # keeps the module alive, whose parameters the graph reads
        for mine, theirs in zip(inputs, given, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)
        graph.replay()
        return outputs

    return run


def eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    return captured(module, inputs)


def eager_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    if not any(parameter.dim() == 4 for parameter in module.parameters()):
        raise Unavailable("no two-dimensional convolutions")
    return captured(module.to(memory_format=torch.channels_last), inputs)  # type: ignore[call-overload]


def inductor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """torch.compile in its default mode, captured as one CUDA graph."""
    with torch.inference_mode():
        compiled = torch.compile(module)
        compiled(*inputs)
    return captured(compiled, inputs)


def ours(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Tilewright's own kernels, no trials, no vendor library, no operator through PyTorch."""
    executable = tilewright.compile(module, inputs, unsupported="error")
    return executable


def fused(way: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Our own kernels where only so much is fused."""
    with fusing(way):
        return ours(module, inputs)


def tuned(way: str | None, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Our own kernels with `TRIALS` trials, recorded in the user's file: with the chains that were measured to be faster, or where only so much is
    fused."""
    with fusing(way) if way is not None else nullcontext():
        executable = tilewright.compile(module, inputs, unsupported="error", trials=TRIALS)
    return executable


CONTENDERS = {
    OURS: Contender(OURS, ours),
    "none": Contender("none", partial(fused, "none")),
    "chains": Contender("chains", partial(fused, "chains")),
    "tuned": Contender("tuned", partial(tuned, None)),
    "tuned_apart": Contender("tuned_apart", partial(tuned, "registers")),
    VENDOR: with_libraries(),
    "eager": Contender("eager", eager),
    "eager_cl": Contender("eager_cl", eager_channels_last),
    "inductor": Contender("inductor", inductor),
}


def cold_seconds(call: Callable[[], object], scratch: Tensor) -> float:
    """Seconds between two events around one call that finds the L2 cache full of other data."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    scratch.zero_()
    before.record()
    call()
    after.record()
    after.synchronize()
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="zoo networks; all if none is named")
    parser.add_argument("--against", default="eager,eager_cl", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="least device time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest error relative to the largest output")
    parser.add_argument("--name", default="gpu_networks", help="the result file's name in bench/results")
    options = parser.parse_args()
    options.against = list(dict.fromkeys([OURS, *filter(None, options.against.split(","))]))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    console = Console(width=150)
    results: list[Outcome] = []
    for name in options.networks or list(zoo.NETWORKS):
        module, _ = zoo.build(name, options.batch)
        torch.manual_seed(1)
        inputs = tuple(x.cuda() for x in zoo.NETWORKS[name].example_inputs(options.batch))
        outcomes = compare(
            name, module.cuda(), inputs, inputs, [CONTENDERS[c] for c in options.against], options.tolerance, options.rounds,
            options.seconds, partial(cold_seconds, scratch=scratch),
        )  # fmt: skip
        for outcome in outcomes:
            print(f"{name} {outcome.contender}: {outcome.status} {outcome.reason} prepared in {outcome.preparation_seconds or 0:.1f} s, "
                  f"error {outcome.relative_error}, {cell(outcome)} ms", flush=True)  # fmt: skip
        results += outcomes
        write_results(options.name, vars(options), results)
        del module
        gc.collect()
        torch.cuda.empty_cache()
    table = Table("network", *options.against, "best peer / ours", title=f"{torch.cuda.get_device_name()}, fp32, batch {options.batch}")
    for network in dict.fromkeys(outcome.network for outcome in results):
        by_name = {outcome.contender: outcome for outcome in results if outcome.network == network}
        peers = [outcome for name, outcome in by_name.items() if name not in WAYS]
        table.add_row(network, *(cell(by_name[name]) for name in options.against), speed_up(peers))
    console.print(table)


if __name__ == "__main__":
    main()
