"""Zoo networks on the CPU: Tilewright, PyTorch eager, Inductor, ONNX Runtime and OpenVINO, in one process.

    python -m bench.cpu_networks resnet18 mobilenet_v2 --against eager,eager_cl,onnxruntime
    python -m bench.cpu_networks resnet50 --precision bf16 --against openvino_default --tolerance 0.03
    python -m bench.cpu_networks resnet50 --batch 16 --against eager,eager_cl,inductor,vendor --trials 3

Every contender has the same number of threads and computes in float32, except for Tilewright with `--precision bf16` and `openvino_default`. Each is
checked against PyTorch in float64 before it is timed, and is left out with the reason if it is absent, fails, or is wrong. `vendor` is Tilewright
with library kernels and `--trials`, whose records stay in the cache folder: what was measured by an earlier run is not measured again.

With `--left-out` Tilewright chooses as on a core that was never measured: by a forest that is first trained with the other cores' measurements alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import tilewright
from bench.common import Contender, Outcome, compare, write_results
from bench.cpu_learned import DATA, RANDOM, TILED_RANDOM, rankings, trained, write
from tilewright import settings, zoo
from tilewright.hardware import identified_cpu
from tilewright.selection.learned import cpu
from tilewright.tuning.peers import PEERS

OURS, VENDOR = "tilewright", "vendor"


def ours(precision: str = "fp32") -> Contender:
    """Tilewright's own kernels, no trials and no vendor library."""
    return Contender(OURS, lambda module, inputs: tilewright.compile(module, inputs, precision=precision))


def with_libraries(trials: int = 3) -> Contender:
    """Tilewright with library kernels, by trials."""
    place = settings.cache_directory() / "bench_vendor.sqlite"
    return Contender(VENDOR, lambda module, inputs: tilewright.compile(module, inputs, trials=trials, vendor=True, records=place))


CONTENDERS = {OURS: ours(), VENDOR: with_libraries(), **PEERS}


def leave_this_core_out(folder: Path) -> None:
    """From here on this process chooses as on a core without data; `folder` receives the forest of the other cores, and kernels and choices."""
    core = identified_cpu().pipeline
    layers = [layer for name in (*RANDOM, TILED_RANDOM) for layer in rankings(DATA / name) if layer.machine.pipeline != core]
    cpu.MODEL = folder / "cpu.npz"
    write(trained(layers), layers, cpu.MODEL)
    os.environ["TILEWRIGHT_CACHE"] = str(folder)  # choices that are kept do not name the forest


def cell(outcome: Outcome) -> str:
    """Median milliseconds and half the interquartile range, or the reason for having none."""
    if outcome.median_seconds is None or outcome.quartile_seconds is None:
        return "–" if outcome.status == "unavailable" else outcome.status
    lower, upper = outcome.quartile_seconds
    return f"{outcome.median_seconds * 1e3:.3f} ± {(upper - lower) / 2 * 1e3:.3f}"


def speed_up(outcomes: Sequence[Outcome]) -> str:
    """The time of the fastest peer over ours."""
    medians = {outcome.contender: outcome.median_seconds for outcome in outcomes if outcome.median_seconds is not None}
    own = medians.pop(OURS, None)
    medians.pop(VENDOR, None)
    return f"{min(medians.values()) / own:.2f}" if own and medians else "–"


def table_of(results: Sequence[Outcome], names: Sequence[str], title: str) -> Table:
    """One row per network, one column per contender."""
    table = Table("network", *names, "best peer / ours", title=title, caption="ms: median ± half interquartile range")
    for network in dict.fromkeys(outcome.network for outcome in results):
        row = [outcome for outcome in results if outcome.network == network]
        by_name = {outcome.contender: outcome for outcome in row}
        table.add_row(network, *(cell(by_name[name]) for name in names), speed_up(row))
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="zoo networks; all if none is named")
    parser.add_argument("--against", default="eager,eager_cl,onnxruntime", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--precision", default="fp32", help="of Tilewright")
    parser.add_argument("--trials", type=int, default=3, help="of `vendor`")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.3, help="least time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest error relative to the largest output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--left-out", action="store_true", help="by a forest without measurements of this core")
    parser.add_argument("--name", default="cpu_networks", help="the result file's name in bench/results")
    parsed = parser.parse_args()
    parsed.against = list(dict.fromkeys([OURS, *parsed.against.split(",")]))
    if unknown := sorted(set(parsed.against) - set(CONTENDERS)):
        parser.error(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(CONTENDERS)}")
    return parsed


def main() -> None:
    options = arguments()
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    if options.left_out:
        folder = tempfile.TemporaryDirectory()
        leave_this_core_out(Path(folder.name))
    torch.set_num_threads(options.threads)
    contenders = {**CONTENDERS, OURS: ours(options.precision), VENDOR: with_libraries(options.trials)}
    results: list[Outcome] = []
    reported: set[tuple[str, str]] = set()
    path = None
    for name in options.networks or list(zoo.NETWORKS):
        module, example_inputs = zoo.build(name, options.batch, options.seed)
        torch.manual_seed(options.seed + 1)
        fresh_inputs = zoo.NETWORKS[name].example_inputs(options.batch)
        ways = [contenders[way] for way in options.against]
        outcomes = compare(name, module, example_inputs, fresh_inputs, ways, options.tolerance, options.rounds, options.seconds)
        for outcome in outcomes:
            if outcome.reason and (outcome.contender, outcome.reason) not in reported:
                reported.add((outcome.contender, outcome.reason))
                console.print(f"{name}, {outcome.contender}: {outcome.status}: {outcome.reason}", markup=False)
        results += outcomes
        path = write_results(options.name, vars(options), results)  # after every network: a crash loses little
        del module
        gc.collect()
    console.print(table_of(results, options.against, f"CPU, batch {options.batch}, {options.threads} threads"))
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
