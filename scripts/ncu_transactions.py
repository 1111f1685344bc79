"""Memory transactions, counted by the hardware and predicted, and their correlation with time (CNNOpt, tables 6 and 7).

    python scripts/gpu_lowering_check.py compile FOLDER --alternatives 30
    python scripts/ncu_transactions.py profile FOLDER [--layers R2,R12] [--group 5] [--ncu PATH]
    python scripts/ncu_transactions.py report FOLDER [--name transactions_h200]

`profile` needs a GPU with Nsight Compute (ncu) and permission to read counters. It launches every candidate of the folder once, and the vendor
library's convolution, with cold caches and free clocks; one ncu run for each group of layers, whose CSV stays in the folder; existing groups are not
repeated. `report` needs no GPU. Metrics that this ncu does not know are left out and listed.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.common import write_results  # noqa: E402
from bench.layers import LAYERS, layer  # noqa: E402
from bench.regions import ranking_of  # noqa: E402
from bench.transactions import OCCUPANCY as PREDICTED_OCCUPANCY  # noqa: E402
from bench.transactions import SECONDS, SECTORS, WAVEFRONTS, pearson, predicted_counts, summarised, table  # noqa: E402
from tilewright.hardware import identified_machine  # noqa: E402

TIME = "gpu__time_duration.sum"
SHARED = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
LEVEL_2 = "lts__t_sectors_srcunit_tex_op_read.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
METRICS = (
    TIME,
    SHARED,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_lookup_miss.sum",
    LEVEL_2,
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_lookup_miss.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    OCCUPANCY,
    "smsp__inst_executed.sum",
)
"""Wavefronts, sectors, bytes and instructions are sums over the chip; occupancy is in per cent."""
AGREEING = {WAVEFRONTS: SHARED, SECTORS: LEVEL_2, PREDICTED_OCCUPANCY: OCCUPANCY}
"""The metric that corresponds to each predicted count."""
UNITS = {"s": 1.0, "second": 1.0, "ms": 1e-3, "msecond": 1e-3, "us": 1e-6, "usecond": 1e-6, "ns": 1e-9, "nsecond": 1e-9}
NCU_PLACES = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")


# --- output of ncu ----------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One profiled kernel: its name and the values by metric; times in seconds, everything else in ncu's base units."""

    kernel: str
    values: dict[str, float] = field(default_factory=dict)


def parse(text: str) -> list[Launch]:
    """The launches of ncu's --csv output, in order. Lines before the header and messages (==PROF== ...) are skipped, and so are values that are not
    numbers. Both forms are read: one line per metric, or (--page raw) one line per launch with the units in a separate line.

    Raises:
        ValueError: if there is no header.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no CSV header in ncu's output:\n" + text[-2000:])
    header, *rows = csv.reader(lines[start:])
    found: dict[str, Launch] = {}
    units: dict[str, str] = {}
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        if cells["ID"] == "ID":
            continue
        if not cells["ID"]:  # the line of units of the raw page
            units = cells
            continue
        launch = found.setdefault(cells["ID"], Launch(cells["Kernel Name"].split("(")[0].strip()))
        if "Metric Name" in cells:
            measured = {cells["Metric Name"]: (cells["Metric Value"], cells["Metric Unit"])}
        else:
            measured = {name: (cells[name], units.get(name, "")) for name in header if "__" in name}
        for name, (value, unit) in measured.items():
            number = as_number(value)
            if number is not None:
                launch.values[name] = number * UNITS[unit] if unit in UNITS else number
    return list(found.values())


def as_number(text: str) -> float | None:
    """A number as printed by ncu, such as 1,234.5; None for anything else ("n/a")."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def complained_of(text: str, metrics: Sequence[str]) -> list[str]:
    """The metrics named in ncu's errors and warnings."""
    words = {word.strip(".") for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING==")) for word in re.findall(r"[\w.]+", line)}
    return [name for name in metrics if name in words or name.partition(".")[0] in words]


# --- profiling --------------------------------------------------------------------------------------------------------


def find_ncu(given: str | None) -> str:
    """Path of ncu. Raises SystemExit if there is none."""
    installed = [str(path) for pattern in NCU_PLACES for path in sorted(Path("/").glob(pattern[1:]), reverse=True)]
    for place in [given] if given else [shutil.which("ncu"), *installed]:
        if place and Path(place).exists():
            return place
    raise SystemExit("ncu is not here: install Nsight Compute, or give its path with --ncu")


def profile(folder: Path, ncu: str, names: Sequence[str], group: int) -> None:
    """Writes FOLDER/ncu_GROUP.csv and .json (what was launched) for each group of layers."""
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    print(ncu, version[-1] if version else "")
    metrics = list(METRICS)
    for at in range(0, len(names), group):
        some = names[at : at + group]
        stem = folder / f"ncu_{'_'.join(some)}"
        if stem.with_suffix(".csv").exists():
            print(f"{stem.name}: there already")
            continue
        metrics = profile_group(folder, ncu, some, stem, metrics)


def profile_group(folder: Path, ncu: str, names: Sequence[str], stem: Path, metrics: list[str]) -> list[str]:
    """Runs ncu without the metrics that it does not know; returns the remaining metrics. Raises SystemExit if nothing can be read."""
    partial = stem.with_suffix(".partial")
    launched = stem.with_suffix(".json")
    child = [sys.executable, str(Path(__file__).resolve()), "launch", str(folder), "--layers", ",".join(names), "--launched", str(launched)]
    while True:
        partial.unlink(missing_ok=True)
        command = [ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--target-processes", "all", "--replay-mode", "kernel"]
        command += ["--clock-control", "none", "--cache-control", "all", "--metrics", ",".join(metrics), "--log-file", str(partial), *child]
        done = subprocess.run(command, capture_output=True, text=True)
        log = partial.read_text(errors="replace") if partial.exists() else ""
        said = log + done.stdout + done.stderr
        if "ERR_NVGPUCTRPERM" in said:
            raise SystemExit("the counters cannot be read: the driver allows it to administrators only (ERR_NVGPUCTRPERM)")
        try:
            launches = parse(log)
        except ValueError as error:
            absent = complained_of(said, metrics)
            if absent and len(absent) < len(metrics):
                print(f"not known to this ncu: {', '.join(absent)}")
                metrics = [name for name in metrics if name not in absent]
                continue
            raise SystemExit(f"ncu read nothing (status {done.returncode}): {error}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from error
        if not launched.exists():
            raise SystemExit(f"what was profiled ended early (status {done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        partial.rename(stem.with_suffix(".csv"))
        missing = [name for name in METRICS if not any(name in launch.values for launch in launches)]
        print(f"{stem.name}: {len(launches)} launches" + (f", without {', '.join(missing)}" if missing else ""), flush=True)
        return metrics


def launch(folder: Path, names: Sequence[str], launched: Path) -> None:
    """The profiled program: launches the library's convolution and each candidate once, each between the profiler's start and stop."""
    import torch
    from gpu_lowering_check import Driver, make_buffers

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    manifest = json.loads((folder / "manifest.json").read_text())
    torch.zeros(1, device="cuda")
    driver, order = Driver(), []
    for entry in manifest["layers"]:
        if entry["layer"] not in names:
            continue
        outputs, channels, size, filter_size, stride = LAYERS[entry["layer"]]
        padding, extent = filter_size // 2, size * stride
        x = torch.randn(1, channels, extent, extent, device="cuda")
        w = torch.randn(outputs, channels, filter_size, filter_size, device="cuda")
        padded = torch.nn.functional.pad(x, (padding,) * 4).permute(0, 2, 3, 1).contiguous().reshape(-1)
        with torch.no_grad():
            torch.nn.functional.conv2d(x, w, None, stride, padding)  # lets the library select its algorithm
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.nn.functional.conv2d(x, w, None, stride, padding)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        order.append({"layer": entry["layer"], "candidate": None, "kernels": []})
        for number, candidate in enumerate(entry["candidates"]):
            done: list[str] = []
            order.append({"layer": entry["layer"], "candidate": number, "kernels": done})
            try:
                functions = driver.functions(folder / candidate["folder"] / "kernel.cubin", candidate["kernels"])
                buffers = make_buffers(torch, candidate, padded, w, outputs * size * size, 1)
                stream = torch.cuda.current_stream().cuda_stream
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                for kernel, arguments in candidate["calls"]:
                    driver.launch(functions[kernel], candidate["kernels"][kernel], [buffers[name][0].data_ptr() for name in arguments], stream)
                    done.append(kernel)
                torch.cuda.synchronize()
            except RuntimeError as error:
                order[-1]["error"] = str(error)
            torch.cuda.profiler.stop()
            launched.write_text(json.dumps(order))


# --- the report -------------------------------------------------------------------------------------------------------


def assign(order: Sequence[Mapping[str, Any]], launches: Sequence[Launch]) -> list[tuple[Mapping[str, Any], dict[str, float]]]:
    """Each launched item with the sums of its kernels' values (occupancy: the mean, weighted by time).

    The library's kernels are those before the next candidate's. Raises ValueError if the sequence is not as expected."""
    waiting = list(launches)
    found = []
    for number, item in enumerate(order):
        if item["candidate"] is None:
            following = next((other["kernels"][0] for other in order[number + 1 :] if other["kernels"]), None)
            count = next((at for at, one in enumerate(waiting) if one.kernel == following), len(waiting))
        else:
            count = len(item["kernels"])
            names = [one.kernel for one in waiting[:count]]
            if names != list(item["kernels"]):
                raise ValueError(f"candidate {item['candidate']} of {item['layer']} launched {item['kernels']}, ncu saw {names}")
        found.append((item, summed(waiting[:count])))
        waiting = waiting[count:]
    if waiting:
        raise ValueError(f"ncu saw {len(waiting)} launches more, from {waiting[0].kernel} on")
    return found


def summed(launches: Sequence[Launch]) -> dict[str, float]:
    """Sums of the metrics that every launch has; for occupancy the mean over time."""
    if not launches:
        return {}
    common = set.intersection(*(set(one.values) for one in launches))
    sums = {name: sum(one.values[name] for one in launches) for name in METRICS if name in common}
    if OCCUPANCY in sums and sums.get(TIME):
        sums[OCCUPANCY] = sum(one.values[OCCUPANCY] * one.values[TIME] for one in launches) / sums[TIME]
    return sums


@cache
def parts_of(name: str, target: str) -> tuple[Any, ...]:
    """The parts of a layer's ranking."""
    return ranking_of(layer(name), identified_machine(target)).parts


def predicted(name: str, parameters: Mapping[str, int], target: str) -> dict[str, float]:
    """The models' counts for one candidate; empty for a schema without such counts. Axes added since it was recorded have their defaults."""
    for part in parts_of(name, target):
        defaults = {axis.name: axis.default for axis in fields(part.schema.schedule) if axis.name in part.candidates and axis.default is not MISSING}
        axes = {**defaults, **parameters}
        if set(axes) == set(part.candidates):
            counts = predicted_counts(part, {axis: np.array([value]) for axis, value in axes.items()}, identified_machine(target))
            return {count: float(column[0]) for count, column in counts.items()}
    return {}


def report(folder: Path, name: str) -> dict[str, Any]:
    """Correlations of counts with time (table 6), of predicted with measured counts, and ratios to the library's kernel (table 7)."""
    manifest = json.loads((folder / "manifest.json").read_text())
    candidates = {entry["layer"]: entry["candidates"] for entry in manifest["layers"]}
    layers: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("ncu_*.csv")):
        order = json.loads(path.with_suffix(".json").read_text())
        for item, values in assign(order, parse(path.read_text(errors="replace"))):
            if TIME in values:
                values[SECONDS] = values.pop(TIME)
            found = layers.setdefault(item["layer"], {"layer": item["layer"], "library": {}, "candidates": []})
            if item["candidate"] is None:
                found["library"] = values
                continue
            candidate = candidates[item["layer"]][item["candidate"]]
            counts = {} if "error" in item else {**values, **predicted(item["layer"], candidate["parameters"], manifest["target"])}
            found["candidates"].append({"schedule": candidate["schedule"], "error": item.get("error"), "values": counts})
    rows = {key: [c["values"] for c in found["candidates"]] for key, found in layers.items()}
    summary = summarised(rows)
    everything = [row for some in rows.values() for row in some]
    summary["predicted with measured"] = {counted: agreement(everything, counted, read) for counted, read in AGREEING.items()}
    summary["missing metrics"] = [metric for metric in METRICS if metric != TIME and not any(metric in row for row in everything)]
    for key, found in layers.items():
        best: dict[str, Any] = min((row for row in rows[key] if row.get(SECONDS)), key=lambda row: row[SECONDS], default={})
        both = [metric for metric in (SECONDS, SHARED) if best.get(metric) and found["library"].get(metric)]
        found["ratio to the library"] = {metric: best[metric] / found["library"][metric] for metric in both}
    show(layers, summary)
    if name:
        settings = {"target": manifest["target"], "metrics": METRICS, "clock control": "none", "cache control": "all", **summary}
        print(write_results(name, settings, list(layers.values())))
    return summary


def agreement(rows: Iterable[Mapping[str, float]], counted: str, read: str) -> dict[str, float | None]:
    """Correlation of a predicted with a measured count, and the median of predicted / measured."""
    pairs = [(row[counted], row[read]) for row in rows if row.get(counted) and row.get(read)]
    if not pairs:
        return {"correlation": None, "median ratio": None}
    return {"correlation": pearson(*zip(*pairs, strict=True)), "median ratio": statistics.median(a / b for a, b in pairs)}


def show(layers: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    console = Console(width=140)
    console.print(table(summary))
    ratios = Table("layer", "time / library", "shared wavefronts / library")
    for key, found in layers.items():
        have = found["ratio to the library"]
        ratios.add_row(key, *(f"{have[metric]:.2f}" if metric in have else "-" for metric in (SECONDS, SHARED)))
    console.print(ratios)
    for counted, found in summary["predicted with measured"].items():
        print(f"{counted} with {AGREEING[counted]}: {found}")
    if summary["missing metrics"]:
        print("missing:", ", ".join(summary["missing metrics"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("profile", "launch", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", default="", help="default: those of the folder")
    parser.add_argument("--group", type=int, default=5, help="layers of one ncu run")
    parser.add_argument("--ncu", default=None)
    parser.add_argument("--launched", type=Path, help="of launch: where to write what was launched")
    parser.add_argument("--name", default="transactions_h200", help="the result file's name in bench/results; empty for none")
    options = parser.parse_args()
    manifest = json.loads((options.folder / "manifest.json").read_text())
    names = options.layers.split(",") if options.layers else [entry["layer"] for entry in manifest["layers"]]
    if options.mode == "launch":
        launch(options.folder, names, options.launched)
    elif options.mode == "profile":
        profile(options.folder, find_ncu(options.ncu), names, options.group)
    else:
        report(options.folder, options.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
