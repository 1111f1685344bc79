"""What trials gain on networks on the GPU present, and what they take: chosen by the models alone, and with trials of each region.

    python -m bench.tuned_compile [NETWORK ...] [--batch 1,8,64] [--trials 20] [--seconds S] [--resume] [--name tuned_compile_h200]
    python -m bench.tuned_compile --type float16 --batch 1 --seconds 500 --name tuned_compile_float16

A network is `zoo:NAME`, `torchvision:NAME` or `timm:NAME` (random weights); without names the ten of UNSEEN, none of which the zoo defines. Each is
compiled with `--trials` trials per region, from empty records (and an empty kernel cache where TILEWRIGHT_CACHE names an empty folder), and then with
none; both results are checked against float64 and timed interleaved, with the L2 cache full of other data. A network that fails is a row with the
reason; the others name the regions in which the first choice lost most. `--resume` leaves out what the result file already has, so that the table can
be made in slices of `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tilewright
from bench import common, half
from bench.common import as_list, double_precision_outputs, relative_error
from bench.gpu_half import TF32, built
from bench.gpu_networks import FLUSHED_BYTES, cold_seconds
from tilewright.runtime.loadable import LoadableProgram
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.problems import code_of
from tilewright.tuning.records import Records

UNSEEN = (
    "torchvision:googlenet", "torchvision:resnext50_32x4d", "torchvision:efficientnet_b0", "torchvision:regnet_y_400mf", "torchvision:densenet121",
    "torchvision:shufflenet_v2_x1_0", "torchvision:convnext_tiny", "timm:mobilenetv3_large_100", "timm:vit_small_patch16_224", "timm:mixer_b16_224",
)  # fmt: skip
"""Convolutional networks with groups, depthwise and dense connections, a vision transformer and an MLP-Mixer."""
LARGEST_ERROR = 1e-3
"""Largest error in float32 relative to the largest output."""
LOSSES_KEPT = 12
"""Regions named in a row."""


def measure(name: str, batch: int, dtype: str, trials: int, rounds: int, scratch: torch.Tensor) -> dict[str, Any]:
    """Raises ValueError for a wrong result."""
    module, inputs = built(name, torch.float32 if dtype == TF32 else getattr(torch, dtype), batch)
    precision = "tf32" if dtype == TF32 else "fp32"
    expected = double_precision_outputs(module, inputs)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.sqlite"
        start = time.perf_counter()
        tuned = tilewright.compile(module, inputs, precision=precision, trials=trials, records=records)
        tuned_seconds = time.perf_counter() - start
        start = time.perf_counter()
        planned = tilewright.compile(module, inputs, precision=precision)
        planned_seconds = time.perf_counter() - start
        with Records(records) as known:
            measured = len(known)
            lost, unknown = losses(planned.image.program, known)
    times: dict[str, list[float]] = {"planned": [], "tuned": []}
    errors: dict[str, float] = {}
    for how, executable in (("planned", planned), ("tuned", tuned)):
        errors[how] = relative_error(as_list(executable(*inputs)), expected)
        if not errors[how] < (LARGEST_ERROR if dtype == "float32" else half.TOLERANCES[dtype]):
            raise ValueError(f"wrong result ({how}), relative error {errors[how]:.1e}")
    for _ in range(rounds):
        for how, executable in (("planned", planned), ("tuned", tuned)):
            times[how].append(cold_seconds(partial(executable, *inputs), scratch))
    quartiles = {how: statistics.quantiles(values, n=4) for how, values in times.items()}
    medians = {how: found[1] for how, found in quartiles.items()}
    return {
        "compile_seconds": tuned_seconds, "planned_compile_seconds": planned_seconds, "measurements": measured,
        "median_us": {how: 1e6 * seconds for how, seconds in medians.items()},
        "quartiles_us": {how: [1e6 * seconds for seconds in found] for how, found in quartiles.items()}, "relative_error": errors,
        "gain": medians["planned"] / medians["tuned"] - 1, "lost": lost[:LOSSES_KEPT], "lost_us": 1e6 * sum(entry["seconds"] for entry in lost),
        "unknown": unknown, "calls": {how: calls_of(executable.image.program) for how, executable in (("planned", planned), ("tuned", tuned))},
    }  # fmt: skip


def calls_of(program: LoadableProgram) -> int:
    """Kernels that a call of the program launches."""
    return sum(region.repeat * len(region.calls) for region in program.regions)


def losses(planned: LoadableProgram, records: Records) -> tuple[list[dict[str, Any]], int]:
    """The distinct regions by the time that their planned kernels lose against the fastest recorded ones, `seconds` in all calls of the network, and
    the number of regions whose planned kernels were not measured, as the tuned network has others."""
    by_code: dict[str, Measurement] = {}
    by_region: dict[str, Measurement] = {}
    for entry in records.all():
        if entry.status == "measured":
            by_code[entry.code] = entry  # the latest is measured with most replays
            by_region[entry.region] = min(entry, by_region.get(entry.region, entry), key=lambda entry: entry.seconds)
    found: list[dict[str, Any]] = []
    unknown = 0
    for code, calls in Counter(code_of(lowered) for lowered in planned.regions).items():
        own = by_code.get(code)
        if own is None:
            unknown += calls
        else:
            best = by_region[own.region]
            found.append({
                "seconds": calls * (own.seconds - best.seconds), "calls": calls, "problem": own.problem,
                "planned": own.description, "planned_us": 1e6 * own.seconds, "fastest": best.description, "fastest_us": 1e6 * best.seconds,
            })  # fmt: skip
    return sorted(found, key=lambda entry: -entry["seconds"]), unknown


def attempted(name: str, batch: int, dtype: str, trials: int, rounds: int, scratch: torch.Tensor) -> dict[str, Any]:
    """The row of a network, with the reason if it failed."""
    row: dict[str, Any] = {"network": name, "batch": batch, "type": dtype, "trials": trials}
    try:
        return row | measure(name, batch, dtype, trials, rounds, scratch)
    except Exception as error:  # a network without figures must not take the others' with it
        return row | {"failed": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The mean and largest gain for each batch, and for all."""
    found = []
    for batch in (*dict.fromkeys(row["batch"] for row in rows), "all"):
        gains = [row["gain"] for row in rows if "gain" in row and batch in (row["batch"], "all")]
        failed = sum("failed" in row and batch in (row["batch"], "all") for row in rows)
        if gains:
            entry = {"mean gain": statistics.fmean(gains), "largest gain": max(gains)}
            found.append({"network": "all", "batch": batch, "networks": len(gains), "failed": failed, **entry})
    return found


def known_rows(name: str, trials: int, dtype: str) -> list[dict[str, Any]]:
    """The rows of networks in a result file of the same commit, number of trials and type."""
    return [row for row in common.rows_to_resume(name, {"trials": trials, "type": dtype}) if row["network"] != "all"]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("network", "batch", "compile s", "with trials", "measured", "planned us", "tuned us", "gain %", box=None)
    for row in rows:
        if "failed" in row and row["network"] != "all":
            table.add_row(row["network"], str(row["batch"]), row["failed"])
        elif row["network"] == "all":
            table.add_row("mean, largest", str(row["batch"]), "", "", "", "", "", f"{100 * row['mean gain']:.1f}, {100 * row['largest gain']:.1f}")
        else:
            times = [f"{row['planned_compile_seconds']:.1f}", f"{row['compile_seconds']:.1f}", str(row["measurements"])]
            medians = [f"{row['median_us'][how]:.0f}" for how in ("planned", "tuned")]
            table.add_row(row["network"], str(row["batch"]), *times, *medians, f"{100 * row['gain']:.1f}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=UNSEEN)
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--type", choices=("float32", TF32, *half.TYPES), default="float32", help="of the modules")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no network is begun later")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--name", default="tuned_compile_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    rows = known_rows(options.name, options.trials, options.type) if options.resume else []
    done = {(row["network"], row["batch"]) for row in rows}
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    start = time.monotonic()
    for batch in map(int, options.batch.split(",")):
        for name in options.networks:
            if (name, batch) in done or time.monotonic() - start > options.seconds:
                continue
            rows.append(attempted(name, batch, options.type, options.trials, options.rounds, scratch))
            common.write_results(options.name, vars(options), [*summary(rows), *rows])
            print(name, batch, rows[-1].get("failed", rows[-1].get("gain")), f"{time.monotonic() - start:.0f} s", flush=True)
    show([*rows, *summary(rows)])


if __name__ == "__main__":
    main()
