"""Time to compile with trials on the GPU present, and the gain from the trials.

    python -m bench.tuned_compile [resnet18] [--trials 10] [--name tuned_compile_h200]

Each network is compiled with `--trials` trials per region, from empty records (and an empty kernel cache where TILEWRIGHT_CACHE names an empty
folder), and then with none; both results are checked against float64 and timed interleaved, with the L2 cache full of other data.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tilewright
from bench.common import as_list, double_precision_outputs, relative_error, write_results
from bench.gpu_networks import FLUSHED_BYTES, cold_seconds
from tilewright import zoo
from tilewright.tuning.records import Records


def measure(name: str, trials: int, rounds: int, scratch: torch.Tensor) -> dict[str, Any]:
    module, _ = zoo.build(name, 1)
    module = module.cuda().eval()
    inputs = tuple(x.cuda() for x in zoo.NETWORKS[name].example_inputs(1))
    expected = double_precision_outputs(module, inputs)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.sqlite"
        start = time.perf_counter()
        tuned = tilewright.compile(module, inputs, trials=trials, records=records)
        tuned_seconds = time.perf_counter() - start
        with Records(records) as known:
            measured = len(known)
        planned = tilewright.compile(module, inputs)
    times: dict[str, list[float]] = {"planned": [], "tuned": []}
    errors: dict[str, float] = {}
    for how, executable in (("planned", planned), ("tuned", tuned)):
        errors[how] = relative_error(as_list(executable(*inputs)), expected)
        if not errors[how] < 1e-3:
            raise SystemExit(f"{name}, {how}: wrong result, relative error {errors[how]:.1e}")
    for _ in range(rounds):
        for how, executable in (("planned", planned), ("tuned", tuned)):
            times[how].append(cold_seconds(partial(executable, *inputs), scratch))
    medians = {how: statistics.median(values) for how, values in times.items()}
    return {
        "network": name, "trials": trials, "compile_seconds": tuned_seconds,
        "measurements": measured, "median_us": {how: 1e6 * seconds for how, seconds in medians.items()}, "relative_error": errors,
        "gain": medians["planned"] / medians["tuned"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=["resnet18"])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--name", default="tuned_compile_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    results = []
    for name in options.networks:
        results.append(measure(name, options.trials, options.rounds, scratch))
        write_results(options.name, vars(options), results)
    table = Table("network", "compile s", "measured", "planned us", "tuned us", "gain", box=None)
    for row in results:
        table.add_row(
            row["network"], f"{row['compile_seconds']:.1f}", f"{row['measurements']}",
            f"{row['median_us']['planned']:.0f}", f"{row['median_us']['tuned']:.0f}", f"{row['gain']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
