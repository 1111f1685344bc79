"""Models of transformers and timm, as a new user would try them: `torch.compile(module, backend="tilewright")` on the CPU, at several batch sizes.

    python -m bench.first_day
    python -m bench.first_day "BERT (small)" resnet50 --batches 1,4 --against eager

The kernel cache is empty at first. `ready_seconds` is the time of a contender's first call with a batch size: what it takes until that call and all
later ones run compiled; `ready_cpu_seconds` is the processor time of this process and the compilers in it, which other load on the machine changes
less; `captured_seconds` is what Dynamo takes for the same call by itself, with `backend="eager"`. After the last size it takes `settled_seconds`
until each of ours has the program that is predicted best, and only then calls are timed. Each contender is checked against PyTorch in float64 at
every batch size, before and after that, and timed in turns with the others. What does not run compiled is in `uncompiled`. Results of networks that
are not measured again are kept.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import math
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.common import earlier_results, interleaved_seconds, relative_error, write_results
from bench.first_day_models import NETWORKS, Inputs
from tilewright.errors import NotCompiled
from tilewright.runtime.builds import wait_for_all

OURS = "tilewright"
CONTENDERS: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = MappingProxyType(
    {
        OURS: partial(torch.compile, backend="tilewright", options={"wait": True}),
        "eager": lambda module: module,
        "inductor": partial(torch.compile, dynamic=False),
        "inductor, frozen": partial(torch.compile, dynamic=False, options={"freezing": True}),
    }
)
"""How a user would prepare a module; our first call with new sizes waits for its program. Inductor compiles for each batch size, with its parameters
as inputs or as constants."""


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a model's result."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started and that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def exact(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The results in float64."""
    wide = copy.deepcopy(module).double()
    return tensors(wide(**{name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}))


def captured(module: nn.Module, inputs: Mapping[int, Inputs]) -> dict[int, float]:
    """What Dynamo takes to capture the graph, for the first call with each batch size, without a call's own time."""
    call, found = torch.compile(module, backend="eager"), {}
    for batch, given in inputs.items():
        taken = []
        for _ in range(2):
            start = time.perf_counter()
            call(**given)
            taken.append(time.perf_counter() - start)
        found[batch] = taken[0] - taken[1]
    torch._dynamo.reset()
    return found


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for each batch size and contender."""
    torch._dynamo.reset()
    torch.manual_seed(options.seed)
    network = NETWORKS[name]
    module = network.build()
    inputs = {batch: network.inputs(batch) for batch in options.batches}
    references = {batch: exact(module, inputs[batch]) for batch in options.batches}
    capturing = captured(module, inputs)
    entries: dict[tuple[int, str], dict[str, Any]] = {}
    calls: dict[int, dict[str, Callable[[], object]]] = {batch: {} for batch in options.batches}
    for contender in options.against:
        call = CONTENDERS[contender](module)
        for batch in options.batches:
            entry = entries[batch, contender] = {"network": name, "batch": batch, "contender": contender, "status": "measured"}
            start, spent = time.perf_counter(), cpu_seconds()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    result = tensors(call(**inputs[batch]))
                except Exception as error:  # a peer's failure is a result, not the end of the run
                    entry |= {"status": "failed", "reason": f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"}
                    continue
            entry |= {"ready_seconds": time.perf_counter() - start, "ready_cpu_seconds": cpu_seconds() - spent}
            entry["relative_error"] = relative_error(result, references[batch])
            if contender == OURS:
                entry["captured_seconds"] = capturing[batch]
                entry["uncompiled"] = [str(w.message) for w in caught if issubclass(w.category, NotCompiled)]
            if entry["relative_error"] > options.tolerance:
                entry["status"] = "wrong"
            else:
                calls[batch][contender] = partial(call, **inputs[batch])
    start = time.perf_counter()
    wait_for_all()  # better programs are made in the background
    settled = {"settled_seconds": time.perf_counter() - start}
    for batch, contenders in calls.items():
        if OURS in contenders:
            off = relative_error(tensors(contenders[OURS]()), references[batch])
            entries[batch, OURS] |= settled | {"relative_error": max(off, entries[batch, OURS]["relative_error"])}
            if off > options.tolerance:
                entries[batch, OURS]["status"] = "wrong"
                continue
        for contender, seconds in interleaved_seconds(contenders, options.rounds, options.seconds).items():
            lower, median, upper = statistics.quantiles(seconds, n=4)
            entries[batch, contender] |= {
                "median_seconds": median, "quartile_seconds": [lower, upper], "minimum_seconds": min(seconds), "calls": len(seconds),
            }  # fmt: skip
    return list(entries.values())


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def speed_ups(results: list[dict[str, Any]], contenders: tuple[str, ...]) -> dict[tuple[str, int], float]:
    """The time of the fastest of the contenders over ours, by network and batch size."""
    medians = {(r["network"], r["batch"], r["contender"]): r["median_seconds"] for r in results if "median_seconds" in r}
    found = {}
    for network, batch in dict.fromkeys(key[:2] for key in medians):
        others = [medians[network, batch, other] for other in contenders if (network, batch, other) in medians]
        if others and (network, batch, OURS) in medians:
            found[network, batch] = min(others) / medians[network, batch, OURS]
    return found


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and worst of the speed-ups, times until the first and the later batch sizes are ready."""
    found: dict[str, Any] = {}
    for what, contenders in (("eager", ("eager",)), ("inductor", ("inductor", "inductor, frozen"))):
        ratios = list(speed_ups(results, contenders).values())
        found |= {f"over {what}": geometric_mean(ratios), f"least over {what}": min(ratios, default=math.nan)}
    ours = [r for r in results if r["contender"] == OURS and "ready_seconds" in r]
    firsts = {network: next(r["batch"] for r in ours if r["network"] == network) for network in dict.fromkeys(r["network"] for r in ours)}
    kinds: dict[str, Callable[[dict[str, Any]], float]] = {
        "ready_seconds": lambda r: r["ready_seconds"],
        "ready_cpu_seconds": lambda r: r["ready_cpu_seconds"],
        "ready besides captured": lambda r: r["ready_seconds"] - r["captured_seconds"],
    }
    for what, of in (("first", True), ("later", False)):
        for kind, seconds_of in kinds.items():
            seconds = [seconds_of(r) for r in ours if (r["batch"] == firsts[r["network"]]) == of]
            found |= {f"{kind}, {what}, median": statistics.median(seconds), f"{kind}, {what}, most": max(seconds)} if seconds else {}
    found["calls that are not all compiled"] = sum(bool(r["uncompiled"]) for r in ours)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"all if none is named: {', '.join(NETWORKS)}")
    parser.add_argument("--against", default="eager;inductor;inductor, frozen", help=f"of {';'.join(CONTENDERS)}")
    parser.add_argument("--batches", default="1,2,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="least time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest error relative to the largest output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="first_day", help="the result file's name in bench/results")
    options = parser.parse_args()
    options.against = [OURS, *filter(None, options.against.split(";"))]
    for what, names, known in (("networks", options.networks, NETWORKS), ("contenders", options.against, CONTENDERS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown {what} {', '.join(unknown)}; choose from {'; '.join(known)}")
    options.batches = [int(batch) for batch in options.batches.split(",")]
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = len(CONTENDERS) * len(options.batches)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = options.networks or list(NETWORKS)
    before = earlier_results(options.name)
    results: list[dict[str, Any]] = [r for r in before["results"] if r["network"] not in chosen] if before else []
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TILEWRIGHT_CACHE"] = cache
        for name in chosen:
            found = measured(name, options)
            results += found
            table = Table("batch", "contender", "ms", "ready, s", "error", title=name)
            for r in found:
                lower, upper = r.get("quartile_seconds", (math.nan, math.nan))
                time_text = f"{r.get('median_seconds', math.nan) * 1e3:.2f} ± {(upper - lower) / 2 * 1e3:.2f}"
                error = f"{r['relative_error']:.1e}" if "relative_error" in r else r.get("reason", "")
                table.add_row(str(r["batch"]), r["contender"], time_text, f"{r.get('ready_seconds', math.nan):.1f}", error)
                for message in r.get("uncompiled", ()):
                    console.print(message, markup=False)
            console.print(table)
            path = write_results(options.name, {**vars(options), **summary(results)}, results)  # after every network: a crash loses little
            gc.collect()
    for what, value in summary(results).items():
        console.print(f"{what}: {value:.2f}")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
