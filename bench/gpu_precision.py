"""Float32 modules in 16 bits on the GPU present: factors by region, 16 bits everywhere, TF32 and float32, and PyTorch's autocast, in turns.

    python -m bench.gpu_precision --name gpu_precision                                      small networks, recurrent layers, networks
    python -m bench.gpu_precision small recurrent --precisions fp16,bf16 --batches 1,16
    python -m bench.gpu_precision --check                                  without a GPU: plans and compiles the same for --target

`tilewright` is `precision="fp16"` or `"bf16"`: predictions decide which regions keep float32 factors or round them where they read them
(`partition.type_choice`). In `everywhere` all factors are of 16 bits, and those that are stored otherwise are copied. `autocast` is the module under
`torch.autocast`, as a CUDA graph; of recurrent layers that is cuDNN in 16 bits. All are checked against PyTorch in float64 on the weights and inputs
as they are before they are timed, and find the level-2 cache full of other data. Rows of ours have the predicted seconds, the number of
regions, and what was decided about their types, with both predicted times. The file is written after each comparison; after `--seconds-in-all` no
further one begins, and `--resume` leaves out those that a file of this commit has.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn

import tilewright
from bench import half
from bench.common import Contender, Outcome, Run, compare, rows_to_resume, write_results
from bench.cpu_networks import OURS, cell, table_of
from bench.gpu_half import OPERATOR_TOLERANCE, is_done, network
from bench.gpu_networks import FLUSHED_BYTES, captured, cold_seconds
from bench.recurrent import Workload, layer
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.partition import plan
from tilewright.partition.precision import NARROW, Precision, precision_of
from tilewright.runtime.executable import Executable

EVERYWHERE, AUTOCAST = "everywhere", "autocast"
TYPES = {"fp16": "float16", "bf16": "bfloat16"}
STEPS = 64
SMALL: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType({
    "stem_3": (lambda: nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.SiLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.SiLU()), (1, 3, 160, 160)),
    "stem_patches": (lambda: nn.Sequential(nn.Conv2d(3, 96, 4, 4), nn.GELU(), nn.Conv2d(96, 64, 1)), (1, 3, 128, 128)),
    "head_tiny": (lambda: nn.Sequential(nn.Linear(320, 96), nn.ReLU(), nn.Linear(96, 6)), (16, 320)),
    "head_wide": (lambda: nn.Sequential(nn.Linear(640, 2560), nn.GELU(), nn.Linear(2560, 640)), (96, 640)),
    "perceptron_odd": (lambda: nn.Sequential(nn.Linear(77, 301), nn.Tanh(), nn.Linear(301, 53), nn.Tanh(), nn.Linear(53, 11)), (64, 77)),
    "rows_large": (lambda: nn.Linear(768, 1536), (2048, 768)),
    "maps": (lambda: nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 384), nn.Softmax(-1)), (256, 384)),
})  # fmt: skip
"""Modules of one or a few layers beside their inputs and results, with the shape of the input at batch 1; the first extent grows with the batch."""
RECURRENT: Mapping[str, Callable[[int], Workload]] = MappingProxyType({
    f"{name} {hidden}": partial(lambda kind, hidden, batch: layer(kind, hidden, STEPS, batch)(), kind, hidden)
    for name, kind in (("LSTM", nn.LSTM), ("GRU", nn.GRU), ("RNN", nn.RNN)) for hidden in (384, 768)
})  # fmt: skip
"""One layer of 64 steps by the number of sequences, with all its results."""
NETWORKS = ("mobilenet_v2", "darknet53", "bert_base", "deepspeech2", "torchvision:shufflenet_v2_x1_0")
GROUPS: Mapping[str, Sequence[str]] = MappingProxyType({"small": tuple(SMALL), "recurrent": tuple(RECURRENT), "networks": NETWORKS})


def built(name: str, batch: int, device: str) -> Workload:
    """The module in float32, example inputs, and the inputs that are timed."""
    torch.manual_seed(0)
    if name in RECURRENT:
        module, *given = RECURRENT[name](batch)
    elif name in SMALL:
        make, (first, *rest) = SMALL[name]
        module, given = make(), [(torch.randn(batch * first, *rest),) for _ in range(2)]
    else:
        module, draw = network(name, batch)
        given = [draw(0), draw(1)]
    example, fresh = (tuple(x.to(device) for x in inputs) for inputs in given)
    return module.eval().to(device), example, fresh


@contextmanager
def everywhere() -> Iterator[None]:
    """Inside the context a precision holds for all regions."""

    def of(name: str, graph: Graph, machine: Machine) -> Precision:
        return replace(precision_of(name, graph, machine), by_region=False)

    with mock.patch.object(plan, "precision_of", of):
        yield


def ours(precision: str, module: nn.Module, inputs: tuple[Tensor, ...], target: str | None = None) -> Executable:
    """Our own kernels, without trials."""
    return tilewright.compile(module, inputs, target, precision=precision, unsupported="error")


def ours_everywhere(precision: str, module: nn.Module, inputs: tuple[Tensor, ...], target: str | None = None) -> Executable:
    """The same, with 16 bits for all regions."""
    with everywhere():
        return ours(precision, module, inputs, target)


def under_autocast(precision: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """The module under autocast as a CUDA graph."""
    dtype = getattr(torch, TYPES[precision])

    def call(*given: Tensor) -> Any:
        with torch.autocast("cuda", dtype, cache_enabled=False):
            return module(*given)

    return captured(call, inputs)


Prepare = Callable[[str, nn.Module, tuple[Tensor, ...]], Run]
WAYS: Mapping[str, Prepare] = MappingProxyType({
    OURS: ours, EVERYWHERE: ours_everywhere, "tf32": lambda _, *given: ours("tf32", *given), "fp32": lambda _, *given: ours("fp32", *given),
    AUTOCAST: under_autocast,
})  # fmt: skip


def decided(executable: Executable) -> dict[str, Any]:
    """What a row says of a plan of ours: predicted seconds, regions, and the decisions about types."""
    rows = executable.plan.rows
    said = [decision for decision in executable.image.program.search if " factors" in decision.text]
    return {
        "predicted_seconds": sum(row.predicted_seconds for row in rows),
        "regions": sum(bool(row.kernels) for row in rows),
        "types": [{"results": decision.results, "taken": decision.taken, "text": decision.text} for decision in said],
    }


def contender(way: str, precision: str, plans: dict[str, Executable]) -> Contender:
    """A way of running a module, which adds plans of ours to `plans`."""

    def prepare(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        run = WAYS[way](precision, module, inputs)
        if isinstance(run, Executable):
            plans[way] = run
        return run

    return Contender(way, prepare)


def check(names: Sequence[str], batches: Sequence[int], precisions: Sequence[str], target: str, console: Console) -> None:
    """Plans and compiles for a target, and prints what is predicted and decided."""
    for name, batch, precision in ((n, b, p) for n in names for b in batches for p in precisions):
        module, inputs, _ = built(name, batch, "cpu")
        found = {way: decided(make(precision, module, inputs, target)) for way, make in ((OURS, ours), (EVERYWHERE, ours_everywhere))}
        told = ", ".join(f"{way} {1e6 * facts['predicted_seconds']:.4g} us in {facts['regions']} regions" for way, facts in found.items())
        console.print(f"{name} {precision} x{batch}: {told}")
        for entry in found[OURS]["types"]:
            console.print(f"    {entry['text']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*GROUPS], metavar="NAME", help=f"of {', '.join(GROUPS)}, or what they have")
    parser.add_argument("--precisions", default="fp16", help=f"of {','.join(NARROW)}")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--against", default=",".join((EVERYWHERE, "tf32", "fp32", AUTOCAST)), help=f"of {','.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.01, help="least device time of one turn in one round")
    parser.add_argument("--seconds-in-all", type=float, default=480.0, help="no comparison begins after these")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--name", default="gpu_precision", help="the result file's name in bench/results")
    parser.add_argument("--check", action="store_true", help="plan and compile for --target, which need not be present")
    parser.add_argument("--target", default="h200", help="of --check")
    options = parser.parse_args()
    names = [one for name in options.names for one in GROUPS.get(name, (name,))]
    batches, precisions = [int(batch) for batch in options.batches.split(",")], options.precisions.split(",")
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    if options.check:
        check(names, batches, precisions, options.target, console)
        return
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    ways = list(dict.fromkeys([OURS, *options.against.split(",")]))
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    before = rows_to_resume(options.name, {"rounds": options.rounds, "seconds": options.seconds}) if options.resume else []
    rows: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for name, batch, precision in ((n, b, p) for n in names for b in batches for p in precisions):
        label = f"{name} {precision} x{batch}"
        if is_done(before, label, ways):
            continue
        before = [row for row in before if row["network"] != label]
        if time.monotonic() - start > options.seconds_in_all:
            console.print(f"out of time before {label}")
            break
        module, example, fresh = built(name, batch, "cuda")
        plans: dict[str, Executable] = {}
        found = compare(
            label, module, example, fresh, [contender(way, precision, plans) for way in ways],
            OPERATOR_TOLERANCE if name in SMALL or name in RECURRENT else half.TOLERANCES[TYPES[precision]], options.rounds, options.seconds,
            partial(cold_seconds, scratch=scratch),
        )  # fmt: skip
        for outcome in found:
            facts = decided(plans[outcome.contender]) if outcome.contender in plans else {}
            rows.append({**dataclasses.asdict(outcome), **facts})
            console.print(f"{label} {outcome.contender}: {outcome.status} {outcome.reason} {cell(outcome)} ms, error {outcome.relative_error}")
        outcomes += found
        write_results(options.name, vars(options), [*before, *rows])
        del module, plans
        gc.collect()
        torch.cuda.empty_cache()
    console.print(table_of(outcomes, ways, torch.cuda.get_device_name()))
    for way in ways[1:]:
        pairs = [
            (theirs.median_seconds, own.median_seconds)
            for own in outcomes if own.contender == OURS
            for theirs in outcomes if (theirs.network, theirs.contender) == (own.network, way)
        ]  # fmt: skip
        ratios = [theirs / own for theirs, own in pairs if theirs and own]
        if ratios:
            console.print(f"{way} / ours: {statistics.geometric_mean(ratios):.3f} in the geometric mean, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
