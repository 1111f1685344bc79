"""The twenty benchmark layers in float16 and TF32 on the GPU present: ours against cuDNN and Inductor, and our candidates against their predictions.

    python -m bench.gpu_tensor_layers [--layers R2,R12] [--batches 1,64] [--types fp16,tf32] [--first 6] [--name gpu_tensor_layers]
    python -m bench.gpu_tensor_layers --first 1 --only "tensor cores,warpgroups" --against cudnn
    python -m bench.gpu_tensor_layers --types fp16 --batches 1 --first 2 --only "tensor cores,warpgroups,warpgroup patches" --apart meeting

As in `bench.layer_speed` everything is timed in one process as replays of CUDA graphs over sets of buffers that exceed level 2, interleaved, and the
median over rounds counts. cuDNN and Inductor have both layouts, cuDNN in PyTorch's benchmark mode, and with the types of pairs compute in float32
without TF32. Ours reads the channels-last input with the zeroed
halo that the previous layer would have stored: the models' choice, and the fastest of the first `--first` candidates of every schema (or of `--only`
these) in their order, which is that of a compilation, or with `--formulas` that without learned corrections. Kernels of the models' choice begin
before those ahead of them have ended, as in compiled programs, and once more do not (`late`), like those of all other contenders. Variants of
warpgroups that take the axis `--apart`, those of all candidates by formulas, count as a schema of their own, so that what the axis gains is measured.
The second table has the measured and the predicted time of each of these, by schema, from which constants can be judged; fit them to problems of
`tilewright train`, not to these layers. After `--seconds` no further layer begins, and `--resume` leaves out those of which the result file has rows.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.common import earlier_results, write_results
from bench.layer_speed import MOST_SETS, ROTATED_BYTES, Call, Ours, best, compare, geometric_mean, on_set
from bench.layers import LAYERS
from tilewright.errors import KernelFailed
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.columns import length
from tilewright.kernels.schema import USUAL
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice, Ranking, variants_of
from tilewright.tuning import compile_worker, serialisation, trial_worker
from tilewright.tuning.problems import convolution_problem

TYPES = {
    "fp16": ("f16", torch.float16), "bf16": ("bf16", torch.bfloat16), "tf32": ("f32", torch.float32), "fp32-tensor": ("f32", torch.float32),
    "fp32-tensor-fp16": ("f32", torch.float32),
}  # fmt: skip
"""By precision: the type of stored values, in Tilewright and in PyTorch."""
TOLERANCES = {"fp16": 2e-3, "bf16": 2e-2, "tf32": 2e-3, "fp32-tensor": 1e-4, "fp32-tensor-fp16": 1e-4}
"""Largest errors relative to the largest result."""

BEST = "ours, best "
"""Before the name of a schema: the contender that is its fastest candidate."""
LATE = "ours, late"
"""The models' choice again: every kernel begins when the one ahead of it has ended, as cuDNN's do."""


def layer_problem(name: str, batch: int, precision: str) -> Problem:
    """The layer with values of the precision's type."""
    outputs, channels, size, filter_size, stride = LAYERS[name]
    problem = convolution_problem(outputs, channels, size, size, filter_size, stride, batch=batch)
    return replace(problem, values={value: replace(entry, dtype=TYPES[precision][0]) for value, entry in problem.values.items()})


def candidates(ranking: Ranking, first: int, apart: str = "") -> dict[str, list[Choice]]:
    """The first candidates of every schema in the order of the ranking; by themselves the first variants with the axis `apart` of all candidates, in
    the order of formulas."""

    def takes(choice: Choice) -> bool:
        return bool(apart) and getattr(choice.schedule, apart, 0) != 0

    found: dict[str, list[Choice]] = {}
    for name in dict.fromkeys(part.schema.name for part in ranking.parts):
        found[name] = list(islice((choice for choice in ranking if choice.schema.name == name and not takes(choice)), first))
    for part in ranking.parts:
        name = f"{part.schema.name}, {apart}"
        if name in found or apart not in (entry.name for entry in fields(part.schema.schedule)):
            continue
        varied = variants_of(part, np.arange(length(part.candidates)), ranking.machine)
        if varied is not None:
            found[name] = list(islice(filter(takes, Ranking(ranking.machine, (varied[0],))), first))
    return found


def ranking_of(problem: Problem, machine: Machine, precision: str, learned: bool = False) -> Ranking:
    """All candidates, ranked by formulas or as a compilation does."""
    numerics = USUAL.at(precision)
    return rank(problem, machine, numerics=numerics, learned=learned)


def library_calls(x: torch.Tensor, w: torch.Tensor, stride: int, padding: int, sets: int, against: Sequence[str]) -> dict[str, Call]:
    """PyTorch's convolution and Inductor's in both layouts."""

    def convolve(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(image, weight, None, stride, padding)

    torch._dynamo.reset()  # every layer is a function of its own, not another shape of one function
    compiled = torch.compile(convolve, dynamic=False)
    calls: dict[str, Call] = {}
    for name, layout in (("nchw", torch.contiguous_format), ("nhwc", torch.channels_last)):
        images, weights = ([tensor.clone().to(memory_format=layout) for _ in range(sets)] for tensor in (x, w))
        calls |= {f"{peer} {name}": partial(on_set, {"cudnn": convolve, "inductor": compiled}[peer], images, weights) for peer in against}
    return calls


def measured_or_error(seconds: Callable[[], float]) -> dict[str, Any]:
    """The `measured` time of a candidate; None, and the `error`, if it does not compile, load or run."""
    try:
        return {"measured": seconds()}
    except (RuntimeError, KernelFailed) as problem:
        return {"measured": None, "error": str(problem).splitlines()[0]}


def measure_layer(name: str, batch: int, precision: str, ours: Ours, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all contenders of one layer; the rows of `candidates` are ours with their predictions, in seconds."""
    outputs, channels, size, filter_size, stride = LAYERS[name]
    dtype = TYPES[precision][1]
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(batch, channels, size * stride, size * stride, device="cuda", generator=generator).to(dtype)
    w = torch.randn(outputs, channels, filter_size, filter_size, device="cuda", generator=generator).to(dtype)
    expected = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, filter_size // 2)
    sets = max(2, min(MOST_SETS, math.ceil(ROTATED_BYTES / (x.element_size() * (x.numel() + w.numel() + expected.numel())))))
    only = options.only.split(",") if options.only else None
    listed = candidates(ours.ranking, options.first, options.apart)
    found = {group: choices for group, choices in listed.items() if only is None or group.split(",")[0] in only}
    best_of_all = ours.ranking.first()
    chosen = serialisation.schedule_text(best_of_all.schedule)
    texts = {serialisation.schedule_text(choice.schedule): choice for choices in (*found.values(), [best_of_all]) for choice in choices}
    with suppress(RuntimeError, KernelFailed):  # what does not compile says so below
        ours.prepare(list(texts))
    rows: list[dict[str, Any]] = []
    for text, choice in texts.items():
        row: dict[str, Any] = {"schema": choice.schema.name, "schedule": text, "predicted": choice.seconds, "terms": dict(choice.terms)}
        rows.append(row | measured_or_error(partial(ours.seconds, text)))
    measured = {row["schedule"]: row["measured"] for row in rows if row["measured"] is not None and math.isfinite(row["measured"])}
    timers: dict[str, tuple[Callable[[], float], float]] = {}
    if chosen in measured:
        timers |= {"ours": ours.timer(chosen, early=True), LATE: ours.timer(chosen)}
    for group, choices in found.items():
        own = {text: measured[text] for text in map(serialisation.schedule_text, (c.schedule for c in choices)) if text in measured}
        if own:
            timers[BEST + group] = ours.timer(min(own, key=lambda text: own[text]))
    calls = library_calls(x, w, stride, filter_size // 2, sets, options.against.split(","))
    contenders = compare(calls, expected, sets, options.rounds, timers, TOLERANCES[precision])
    return {"layer": name, "batch": batch, "precision": precision, "sets": sets, "contenders": contenders, "candidates": rows}


def summary(result: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of cuDNN's and Inductor's best, of our choice and of the fastest of those of ours that begin late."""
    entries = list(result["contenders"])
    wanted: dict[str, Callable[[str], bool]] = {
        "cudnn": lambda name: name.startswith("cudnn"),
        "inductor": lambda name: name.startswith("inductor"),
        "ours": "ours".__eq__,
        "best of ours": lambda name: name.startswith("ours,"),
    }
    found = {name: best(entries, test) for name, test in wanted.items()}
    return {name: entry["median_us"] for name, entry in found.items() if entry is not None}


def tables(results: list[dict[str, Any]]) -> list[Table]:
    """The times of layers with cuDNN's over ours, those of the best of each schema, and each candidate's measured and predicted time."""
    times = Table("layer", "batch", "type", "cudnn us", "inductor us", "ours us", "best of ours", "cudnn / ours", "cudnn / best", box=None)
    ratios: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for result in results:
        its = summary(result)
        cells = [f"{its[name]:.1f}" if name in its else "-" for name in ("cudnn", "inductor", "ours", "best of ours")]
        over = [its["cudnn"] / its[name] if name in its and "cudnn" in its else math.nan for name in ("ours", "best of ours")]
        if not any(map(math.isnan, over)):
            ratios.setdefault((result["batch"], result["precision"]), []).append((over[0], over[1]))
        times.add_row(result["layer"], str(result["batch"]), result["precision"], *cells, *(f"{value:.2f}" for value in over))
    for (batch, precision), pairs in ratios.items():
        means = [geometric_mean(column) for column in zip(*pairs, strict=True)]
        times.add_row("mean", str(batch), precision, "", "", "", "", *(f"{value:.2f}" for value in means))
    each = Table("layer", "batch", "type", "schema", "measured us", "predicted us", "predicted / measured", "schedule", box=None)
    for result in results:
        for row in sorted(result["candidates"], key=lambda row: (row["schema"], row["predicted"])):
            measured = row["measured"]
            known = measured is not None and math.isfinite(measured)
            cells = [f"{1e6 * row['predicted']:.1f}", f"{row['predicted'] / measured:.2f}" if known else "-"]
            cells = [f"{1e6 * measured:.1f}" if known else "-", *cells]
            each.add_row(result["layer"], str(result["batch"]), result["precision"], row["schema"], *cells, row["schedule"])
    kinds = list(dict.fromkeys(entry["contender"] for result in results for entry in result["contenders"] if entry["contender"].startswith(BEST)))
    schemas = Table("layer", "batch", "type", *(f"{kind.removeprefix(BEST)} us" for kind in kinds), box=None)
    for result in results:
        found = {entry["contender"]: entry["median_us"] for entry in result["contenders"] if entry["median_us"] is not None}
        cells = [f"{found[kind]:.2f}" if kind in found else "-" for kind in kinds]
        schemas.add_row(result["layer"], str(result["batch"]), result["precision"], *cells)
    return [times, schemas, each]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--types", default="fp16,tf32", help=f"of {','.join(TYPES)}")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--first", type=int, default=6, help="candidates of each schema that are measured")
    parser.add_argument("--only", help="schemas whose candidates are measured besides our choice, such as tensor cores,warpgroups")
    parser.add_argument("--apart", default="", help="an axis of variants of warpgroups, such as meeting, which are measured by themselves")
    parser.add_argument("--against", default="cudnn,inductor", help="of cudnn,inductor")
    parser.add_argument("--formulas", action="store_true", help="rank without learned corrections")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=500.0, help="no layer begins after these")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--name", default="gpu_tensor_layers", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    machine, start = identified_machine(options.target), time.monotonic()
    server, compiler = trial_worker.Server(0), compile_worker.Server()
    server({"do": "start", "machine": serialisation.encode(machine)})
    compiler({"do": "machine", "machine": serialisation.encode(machine)})
    before = earlier_results(options.name) if options.resume else None
    results: list[dict[str, Any]] = before["results"] if before else []
    done = {(row["layer"], row["batch"], row["precision"]) for row in results}
    work = [(n, b, t) for t in options.types.split(",") for b in map(int, options.batches.split(",")) for n in options.layers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for name, batch, precision in (item for item in work if item not in done):
            if time.monotonic() - start > options.seconds:
                print(f"out of time before {name} x{batch} {precision}", flush=True)
                break
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            problem = layer_problem(name, batch, precision)
            ranking = ranking_of(problem, machine, precision, not options.formulas)
            ours = Ours(problem, ranking, server, compiler, Path(folder) / f"{name}_{batch}_{precision}")
            results.append(measure_layer(name, batch, precision, ours, options))
            print(name, batch, precision, {key: round(value, 1) for key, value in summary(results[-1]).items()}, flush=True)
            write_results(options.name, vars(options), results)
            torch.cuda.empty_cache()
    for table in tables(results):
        Console(width=220).print(table)


if __name__ == "__main__":
    main()
