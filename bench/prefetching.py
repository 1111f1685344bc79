"""Constants that are brought to level 2 ahead of the kernels that read them: networks on the GPU present, by how much is ahead.

    python -m bench.prefetching [NETWORK ...] [--types float16] [--batches 1,8,64] [--shares 6:24,12:24] [--name gpu_prefetching]

A contender `A:N`, also of long calls, may have level 2 divided by A ahead, and divided by N in one node (`runtime.prefetching`); `none` brings
nothing. All run the same kernels and are timed in turns as in `bench.gpu_half`, with level 2 full of other data.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from functools import partial
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn

from bench import half
from bench.common import Contender, Outcome, Run, compare, write_results
from bench.cpu_networks import table_of
from bench.gpu_half import TF32, built, label_of
from bench.gpu_networks import FLUSHED_BYTES, cold_seconds, with_graph
from tilewright.runtime import gpu, prefetching

UNJUDGED = (
    "torchvision:regnet_y_400mf", "torchvision:shufflenet_v2_x1_0", "torchvision:resnet34", "torchvision:convnext_tiny", "timm:mixer_b16_224",
    "timm:deit_small_patch16_224",
)  # fmt: skip
"""Networks that no table of tensor cores judges. The shares were first tried on four that are judged, and kept as these gain by them as well."""
NONE = "none"


def prefetched(shares: str, module: nn.Module, inputs: tuple[Tensor, ...], precision: str = "fp32") -> Run:
    """Ours with these shares."""
    ahead, node = map(int, shares.split(":")) if shares != NONE else (1, 1)
    with (
        mock.patch.object(gpu, "PREFETCH", shares != NONE),
        mock.patch.object(prefetching, "SHARE_AHEAD", ahead),
        mock.patch.object(prefetching, "SHARE_OF_NODE", node),
        mock.patch.object(prefetching, "SHORT_SECONDS", math.inf),
    ):
        return with_graph(module, inputs, precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(UNJUDGED), metavar="NETWORK")
    parser.add_argument("--types", default="float16", help=f"of {', '.join((*half.TYPES, TF32, 'float32'))}")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--shares", default=f"{prefetching.SHARE_AHEAD}:{prefetching.SHARE_OF_NODE}", help="contenders besides none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.01, help="least device time of one turn in one round")
    parser.add_argument("--seconds-in-all", type=float, default=190.0, help="no comparison begins after these")
    parser.add_argument("--name", default="gpu_prefetching", help="the result file's name in bench/results")
    options = parser.parse_args()
    names = [NONE, *options.shares.split(",")]
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    results: list[Outcome] = []
    start = time.monotonic()
    for name, batch, dtype in ((n, b, t) for n in options.names for b in map(int, options.batches.split(",")) for t in options.types.split(",")):
        if time.monotonic() - start > options.seconds_in_all:
            print(f"out of time before {label_of(name, dtype, batch)}", flush=True)
            break
        rounded = dtype == TF32
        module, inputs = built(name, torch.float32 if rounded else getattr(torch, dtype), batch)
        contenders = [Contender(shares, partial(prefetched, shares, precision=TF32 if rounded else "fp32")) for shares in names]
        results += compare(
            label_of(name, dtype, batch), module, inputs, inputs, contenders, half.TOLERANCES[dtype], options.rounds, options.seconds,
            partial(cold_seconds, scratch=scratch),
        )  # fmt: skip
        write_results(options.name, vars(options), results)
        del module, inputs
        gc.collect()
        torch.cuda.empty_cache()
    Console(width=150).print(table_of(results, names, torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
