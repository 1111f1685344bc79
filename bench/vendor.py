"""Library kernels as candidates, by trials on this CPU: networks without and with them, and each region both ways.

    python -m bench.vendor [NETWORK ...] [--trials 6] [--threads 1] [--name vendor_cpu]
    python -m bench.vendor filter7 filter11 filter15 filter31 --name vendor_filters

A network is one of the zoo, or a convolution with large filters (`FILTERS`), for which PyTorch's Fourier transforms are candidates.

The candidates of all regions are measured first, those of libraries among them; both ways then use the same records. Every contender is checked
against PyTorch in float64, and timed in interleaved turns with PyTorch eager in both layouts. For each region that a library can compute, the result
file has the recorded time of the fastest kernel of ours and of the fastest of the library, with what follows it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.common import Contender, Outcome, Run, compare, write_results
from bench.cpu_networks import cell
from tilewright import zoo
from tilewright.hardware import machine
from tilewright.kernels.registry import library
from tilewright.runtime.executable import Executable
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.peers import PEERS
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import recorded_as

NETWORKS = ("resnet18", "mobilenet_v2", "bert_base")
FILTERS = {f"filter{size}": size for size in (7, 11, 15, 31)}
"""Convolutions of 16 to 16 channels of 56 x 56 pixels, by the extent of their filters."""
OURS = ("without", "with")
"""Tilewright without and with library kernels."""


def regions(path: Path, network: str, threads: int) -> Iterator[dict[str, Any]]:
    """For each recorded region with a library's time: the fastest of ours and of the library, in seconds."""
    native = machine("native")
    schedule = library(native).schedule
    with Records(path, write=False) as records:
        problems = {entry.region: entry.problem for entry in records.all()}
        for region, problem in problems.items():
            entries = [entry for entry in records.standing(region, recorded_as(native, threads)) if entry.status == "measured"]
            fastest: dict[bool, Measurement] = {}
            for entry in entries:
                fastest.setdefault(isinstance(serialisation.schedule_of(entry.schedule), schedule), entry)
            if True in fastest and False in fastest:
                ours, theirs = fastest[False], fastest[True]
                yield {
                    "network": network, "region": problem, "ours": ours.description, "ours_seconds": ours.seconds, "library": theirs.description,
                    "library_seconds": theirs.seconds, "in turns": min(ours.count, theirs.count) > 4,
                }  # fmt: skip


def built(network: str, seed: int) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The module, its example inputs, and other inputs."""
    if network in FILTERS:
        torch.manual_seed(seed)
        size = FILTERS[network]
        return nn.Conv2d(16, 16, size, padding=size // 2).eval(), (torch.randn(1, 16, 56, 56),), (torch.randn(1, 16, 56, 56),)
    module, inputs = zoo.build(network, 1, seed)
    torch.manual_seed(seed + 1)
    return module, inputs, zoo.NETWORKS[network].example_inputs(1)


def ready(executable: Executable, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """A contender that is compiled already."""
    return executable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK", help="of the zoo, or of FILTERS")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="least time of one turn in one round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="vendor_cpu", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: list[Outcome | dict[str, Any]] = []
    columns = ("network", *OURS, "eager", "eager_cl", "regions by libraries", "of")
    table = Table(*columns, title="CPU, library kernels as candidates", caption="ms: median ± half interquartile range")
    for network in options.networks:
        module, inputs, fresh = built(network, options.seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "records"
            compiled = partial(tilewright.compile, trials=options.trials, threads=options.threads, records=path)
            made = {"with": compiled(module, inputs, vendor=True), "without": compiled(module, inputs)}
            contenders = [*(Contender(name, partial(ready, made[name])) for name in OURS), PEERS["eager"], PEERS["eager_cl"]]
            outcomes = compare(network, module, inputs, fresh, contenders, 1e-3, options.rounds, options.seconds)
            program = made["with"].image.program
            found = list(regions(path, network, options.threads))
        count = sum(region.library is not None for region in program.regions)
        results += [*outcomes, {"network": network, "regions": len(program.regions), "computed by libraries": count}, *found]
        table.add_row(network, *(cell(outcome) for outcome in outcomes), str(count), str(len(program.regions)))
        write_results(options.name, vars(options), results)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


if __name__ == "__main__":
    main()
