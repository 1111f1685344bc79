"""Time to compile with a cold and a warm cache, for this CPU and for machines that need not be present.

    python -m bench.compile_time resnet50

Each compilation runs in a fresh process with a cache folder of its own: first empty (cold), then filled (warm), with Python's byte code on disk, as
where a package was used before. PyTorch's import and export are timed separately, since a compiler cannot avoid them, with the import of Dynamo, of
which the exporter is a part; "process" is the whole process, from start to end, and "processor" the time that all its threads spent on processors.
The other figures are wall-clock seconds, each with the machine's load average of the minute before it starts, since other processes may use the
cores too.

    python -m bench.compile_time resnet50 --targets native,h200 --against CHECKOUT --rounds 5 --name compile_time_against

compares with another checkout of this repository: each round compiles cold and then warm with either, in turns.

    python -m bench.compile_time resnet50 mobilenet_v2 --targets h200,x86-avx512 --search [--against CHECKOUT --rounds 3]

takes only the search for what runs together, chains that predictions choose included, of a graph that is read and simplified, each time in a fresh
process: seconds of processor time, which other processes hardly change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]


def one_compilation(network: str, target: str, precision: str) -> dict[str, float]:
    """Stage times of one compilation in this process."""
    start = time.perf_counter()
    import torch

    imported_torch = time.perf_counter()
    import torch._dynamo

    export_seconds = time.perf_counter() - imported_torch
    import tilewright.frontend.torch_export
    from tilewright import zoo

    before = time.perf_counter()
    module, inputs = zoo.build(network)
    built = time.perf_counter()
    original = torch.export.export

    def timed_export(*arguments: Any, **keywords: Any) -> Any:
        nonlocal export_seconds
        began = time.perf_counter()
        try:
            return original(*arguments, **keywords)
        finally:
            export_seconds += time.perf_counter() - began

    torch.export.export = timed_export
    decompose = torch.export.ExportedProgram.run_decompositions

    def timed_decompose(*arguments: Any, **keywords: Any) -> Any:
        nonlocal export_seconds
        began = time.perf_counter()
        try:
            return decompose(*arguments, **keywords)
        finally:
            export_seconds += time.perf_counter() - began

    torch.export.ExportedProgram.run_decompositions = timed_decompose  # type: ignore[method-assign]
    during = export_seconds
    tilewright.compile(module, inputs, target, precision=precision)
    besides = time.perf_counter() - built - (export_seconds - during)
    return {
        "import_torch": imported_torch - start,
        "build_module": built - before,
        "export": export_seconds,
        "compile_besides_export": besides,
        "compile": besides + export_seconds,
        "processor": time.process_time(),
    }


def one_search(network: str, target: str, precision: str) -> dict[str, float]:
    """Seconds of processor time, and wall-clock seconds, of one search in this process, and of the part that decides about chains."""
    from tilewright import zoo
    from tilewright.compile import read
    from tilewright.graph.passes import simplify
    from tilewright.hardware import identified_machine, planned_threads
    from tilewright.partition.chains import Search
    from tilewright.partition.plan import divide
    from tilewright.system.collection import collection_paused

    module, inputs = zoo.build(network)
    graph, here, chained, chains = simplify(read(module, inputs).graph)[0], identified_machine(target), Search.chained, 0.0

    def timed(search: Search) -> Any:
        nonlocal chains
        began = time.process_time()
        found = chained(search)
        chains += time.process_time() - began
        return found

    Search.chained = timed  # type: ignore[method-assign, assignment]
    start, began = time.perf_counter(), time.process_time()
    with collection_paused():  # as in compilations
        divide(graph, here, planned_threads(here), precision=precision, chains=True)
    return {"search": time.process_time() - began, "wall": time.perf_counter() - start, "chains": chains}


def one_process(network: str, target: str, cache: str, checkout: Path = HERE, precision: str = "fp32", asked: str = "--one") -> dict[str, float]:
    """The stage times of one compilation, or those of one search, by a checkout's package, taken by this script, in a process of its own with this
    cache folder, and the time of the whole process."""
    command = [sys.executable, "-P", "-W", "ignore", __file__, network, "--targets", target, "--precision", precision, asked]
    load = os.getloadavg()[0]
    start = time.perf_counter()
    environment = {**os.environ, "TILEWRIGHT_CACHE": cache, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": ""}
    output = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True).stdout
    return {**json.loads(output.strip().splitlines()[-1]), "process": time.perf_counter() - start, "load_before": load}


def keep_byte_code(network: str, targets: Iterable[str], checkout: Path = HERE) -> None:
    """Compiles once, untimed, so that no compilation that counts is the first one of a checkout and a target."""
    for target in targets:
        with tempfile.TemporaryDirectory() as cache:
            one_process(network, target, cache, checkout)


def in_turns(network: str, target: str, checkouts: Mapping[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Seconds besides export of cold and warm compilations by each checkout: the median, and all of them."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        order = list(checkouts.items())
        for name, checkout in order[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as cache:
                for which in ("cold", "warm"):
                    seconds.setdefault((name, which), []).append(one_process(network, target, cache, checkout)["compile_besides_export"])
    return [
        {"network": network, "target": target, "checkout": name, "cache": which, "median": statistics.median(values), "seconds": values}
        for (name, which), values in seconds.items()
    ]


def searches(network: str, target: str, precision: str, checkouts: Mapping[str, Path], rounds: int) -> list[dict[str, Any]]:
    """The times of searches by each checkout, in turns: medians, and those of all rounds."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(rounds):
        for name, checkout in list(checkouts.items())[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as cache:
                runs[name].append(one_process(network, target, cache, checkout, precision, "--one-search"))
    medians = {name: {key: statistics.median(run[key] for run in its) for key in its[0]} for name, its in runs.items()}
    return [{"network": network, "target": target, "checkout": name, "medians": medians[name], "runs": its} for name, its in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=["resnet50"], metavar="NETWORK")
    parser.add_argument("--targets", default="native,cortex-a53,neoverse-n1,x86-avx512,h200,a100")
    parser.add_argument("--precision", default="fp32", help="of the compilations, except with --against")
    parser.add_argument("--repeats", type=int, default=3, help="cold and warm compilations, of all targets in turns; medians count")
    parser.add_argument("--name", default="compile_time")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository, in turns with this one")
    parser.add_argument("--rounds", type=int, default=5, help="of turns with the other checkout")
    parser.add_argument("--one", action="store_true", help="one compilation in this process, as JSON")
    parser.add_argument("--search", action="store_true", help="only the search for what runs together, in processor time")
    parser.add_argument("--one-search", action="store_true", help="one search in this process, as JSON")
    options = parser.parse_args()
    if options.one_search:
        print(json.dumps(one_search(options.networks[0], options.targets, options.precision)))
        return
    if options.one:
        print(json.dumps(one_compilation(options.networks[0], options.targets, options.precision)))
        return
    from bench.common import git_commit, write_results

    targets = options.targets.split(",")
    results: list[dict[str, Any]] = []
    checkouts = {"this": HERE, **({"against": options.against.resolve()} if options.against else {})}
    against = git_commit(options.against / "bench") if options.against else None
    if options.search:
        for network, target in itertools.product(options.networks, targets):
            results += searches(network, target, options.precision, checkouts, options.rounds)
            for entry in results[-len(checkouts) :]:
                its = entry["medians"]
                print(f"{network} {target} {entry['checkout']}: {its['search']:.2f} s of processor time, {its['chains']:.2f} of them for chains")
        write_results(options.name, {**vars(options), "against": against}, results)
        return
    if options.against:
        for checkout in checkouts.values():
            keep_byte_code(options.networks[0], targets, checkout)
        for network in options.networks:
            for target in targets:
                results += in_turns(network, target, checkouts, options.rounds)
        for entry in results:
            print(f"{entry['network']} {entry['target']} {entry['checkout']} {entry['cache']}: {entry['median']:.2f} s")
        settings = {"networks": options.networks, "targets": options.targets, "rounds": options.rounds, "against": against}
        write_results(options.name, settings, results)
        return
    columns = ("cold process s", "cold s", "cold besides export s", "cold processor s", "warm s", "warm besides export s", "load")
    table = Table("network", "target", *columns)
    keep_byte_code(options.networks[0], targets)
    for network in options.networks:
        runs: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {target: [] for target in targets}
        for _, (target, its) in itertools.product(range(options.repeats), runs.items()):
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = (one_process(network, target, cache, precision=options.precision) for _ in range(2))
            its.append((cold, warm))
        for target, its in runs.items():
            cold, warm = ({key: statistics.median(run[key] for run in way) for key in way[0]} for way in zip(*its, strict=True))
            results.append({"network": network, "target": target, "cold": cold, "warm": warm, "runs": its})
            row = [cold[key] for key in ("process", "compile", "compile_besides_export", "processor")]
            row += [warm[key] for key in ("compile", "compile_besides_export")]
            table.add_row(network, target, *(f"{seconds:.1f}" for seconds in row), f"{cold['load_before']:.1f}")
        write_results(options.name, vars(options), results)
    Console().print(table)


if __name__ == "__main__":
    main()
