"""Quality of the schedules that the models choose for this CPU: measures their favourites and an even sample of the rest.

    python -m bench.cpu_choice [R2 W3 ...] [--top 100] [--evenly 200] [--again 50] [--only direct] [--precision bf16] [--beside 1] [--data FILE]
        [--name NAME]

Without names: the twenty convolution layers of `bench.layers`, and the depthwise convolutions and batched matrix products of `bench.operators`; with
`--precision bf16`, which needs a CPU with AMX, the same without depthwise convolutions, in bfloat16 and with the candidates on tile registers.

Loss: the time of the models' first choice over the least of everything measured, minus 1. The fastest `--again` and as many favourites are measured
once more, interleaved, and those times count; each is the lower quartile, since other load on the machine can only add time. The top-k ratio is
Tuna's (section V): the summed times of the truly best k over those of the k that the models rank best; for convolutions, also among the schedules of
Winograd's algorithm alone. `--only` measures one of the WAYS to convolve, so that the best of the slower one are interleaved too. `--beside` divides
the machine's cores among that number of concurrent measurements, each with `--threads` cores of its own; `--data` stores every measured time in a new
file (files may be joined with `cat`), and with `--resume` continues such a file; `--random N` measures random problems instead, to fit models to.
After `--seconds` no further problem is begun. `bench.cpu_learned` evaluates the stored data again with the current ranking; `--name` writes the
figures of this run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import operators
from bench.common import write_results
from bench.layers import LAYERS, layer
from tilewright.errors import UnsupportedOption
from tilewright.files import written
from tilewright.hardware import machine as find_machine
from tilewright.hardware.host import separate_cores
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.winograd.schema import WINOGRAD
from tilewright.partition.precision import check_precision
from tilewright.selection.choice import rank
from tilewright.selection.learned.cpu import MODEL, predicted, trained, units_of
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.sampling import evenly
from tilewright.tuning.trials import Job, Trials
from tilewright.tuning.workloads import FP32

KS = (10, 50)
ROUNDS = 9
KINDS = {"conv2d": LAYERS, "depthwise": operators.DEPTHWISE, "batched product": operators.PRODUCTS}
KINDS_DRAWN = ("conv2d", "block", "winograd", "depthwise", "block", "product", "linear", "block")
"""Kinds of random problems, drawn in turn; "winograd": convolutions that suit that algorithm; "block" and "linear": with the operators that follow
them in a network."""
TILED_DRAWN = ("conv2d", "block", "linear", "product", "block", "linear")
"""Those of them in bfloat16: products, for which there are tile registers."""
BF16 = "bf16"
SIZES = (7, 10, 13, 14, 17, 19, 20, 28, 35, 38, 40, 52, 56, 75, 80, 112, 150, 224)
CHANNELS = (16, 24, 32, 40, 48, 64, 64, 80, 96, 128, 128, 160, 192, 224, 256, 256, 320, 384, 512, 512, 576, 640, 768, 960, 1024, 1280, 1536, 2048)
LEAST_WORK, MOST_WORK = 4e6, 4e9
"""Operations: with fewer the call's overhead dominates, and more take too long to measure."""
ROWS = (16, 49, 64, 77, 96, 128, 128, 196, 197, 256, 384, 512)
FEATURES = (64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 768, 1024, 1000, 1536, 2048, 3072, 4096)
WAYS = {"direct": "direct conv2d", "winograd": "winograd conv2d"}
"""Ways to convolve, and the names of the rows for those schedules alone."""
SAME = ("threads", "mode", "only", "precision")
"""Circumstances of the lines of one file."""
MEASURES = ("loss", "loss of ten", *(f"ratio of {k}" for k in KS))


def drawn_names(count: int, seed: int, kinds: Sequence[str] = KINDS_DRAWN) -> list[str]:
    """Random problems of each kind in turn, named by kind and sizes; similar to those of networks, but none is a test problem."""
    draw = random.Random(seed)
    names: list[str] = []
    sizes: tuple[int, ...]
    layers = ((k, c, size, size, f, stride) for k, c, size, f, stride in LAYERS.values())
    judged = {*layers, *operators.DEPTHWISE.values(), *operators.PRODUCTS.values()}
    while len(names) < count:
        kind = kinds[len(names) % len(kinds)]
        size, filter_size, stride = draw.choice(SIZES), draw.choice((1, 3, 3, 3, 5, 7)), 1
        channels, outputs = (draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32)) * draw.choice((4, 8, 16, 16, 32)) for _ in range(2))
        if kind == "winograd":
            channels, outputs = (-(-count // 16) * 16 for count in (channels, outputs))
            kind, sizes = "conv2d", (outputs, channels, size, size, 3, 1)
            work = 2 * prod(sizes) * 3
        elif kind == "conv2d":
            if draw.random() < 0.15:
                channels, filter_size = draw.choice((3, 3, 1, 8)), draw.choice((3, 5, 7))
            if filter_size > 1 and draw.random() < 0.25:
                stride = 2
            work = 2 * outputs * channels * size**2 * filter_size**2
            sizes = (outputs, channels, size, size, filter_size, stride)
        elif kind == "depthwise":
            stride, filter_size = draw.choice((1, 1, 2)), draw.choice((3, 3, 5, 7))
            channels = -(-channels // 16) * 16
            work, sizes = 50 * channels * size**2 * filter_size**2 // stride**2, (channels, size, filter_size, stride)
        elif kind == "block":
            filter_size, stride = draw.choice((1, 1, 3)), draw.choice((1, 1, 1, 1, 2))
            channels, outputs = (draw.choice(CHANNELS) for _ in range(2))
            if (outputs, channels, size, size, filter_size, stride) in judged:
                continue
            sizes = (outputs, channels, size, filter_size, stride, draw.choice((0, 0, 1)))
            work = 2 * outputs * channels * size**2 * filter_size**2
        elif kind == "linear":
            rows, reduced, columns = draw.choice(ROWS), draw.choice(FEATURES), draw.choice(FEATURES)
            sizes = (rows, reduced, columns, draw.choice((0, 1, 2)))
            work = 2 * rows * reduced * columns
        else:
            rows, reduced, columns = (draw.choice((32, 49, 64, 77, 96, 128, 196, 256, 384)) for _ in range(3))
            sizes = (draw.choice((1, 4, 8, 12, 16, 32)), rows, reduced, columns)
            work = 2 * prod(sizes)
        name = f"{kind}:{','.join(map(str, sizes))}"
        if LEAST_WORK < work < MOST_WORK and sizes not in judged and name not in names:
            names.append(name)
    return names


def problem(name: str, machine: Machine, threads: int, precision: str = FP32) -> Problem:
    """The problem of a name from one of the KINDS, or from `drawn_names`."""
    kind, colon, text = name.partition(":")
    described = layer(name) if name in LAYERS else None
    if colon:
        sizes = [int(size) for size in text.split(",")]
        if kind != "conv2d":
            return operators.problem_of(kind, sizes, machine, threads, precision)
        described = dict(zip(dataset.LAYER_FIELDS, sizes, strict=True))
    if described is None:
        return operators.problem(name, machine, threads, precision)
    if precision != FP32:  # in a network, since types and layouts depend on the neighbours
        return operators.problem_of("conv2d", [int(described[field]) for field in dataset.LAYER_FIELDS], machine, threads, precision)
    return dataset.layer_problem(described)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `--data` wrote."""
    with gzip.open(path, "rt") as file:
        return list(map(json.loads, file))


def kind_of(name: str, only: str | None = None) -> str:
    """The kind of a name from one of the KINDS, or from `drawn_names`; if only one of the WAYS was measured, that one."""
    if only is not None:
        return WAYS[only]
    return next((kind for kind, names in KINDS.items() if name in names), name.partition(":")[0])


def with_instructions_of(host: Machine, other: Machine) -> Machine:
    """The host as kernels compiled for the instructions of another CPU see it: to them it is another machine.

    Raises:
        ValueError: if the host lacks any of these instructions.
    """
    if not set(other.isa) <= set(host.isa):
        raise ValueError(f"this CPU lacks instructions of {other.name}")
    names = ("vector_bits", "vector_registers", "isa", "compiler_flags")
    peaks = {"fp32": host.peak_flops["fp32"] * other.vector_bits / host.vector_bits}
    return replace(host, peak_flops=peaks, **{name: getattr(other, name) for name in names})


def ratios(times: Mapping[int, float], order: Sequence[int]) -> dict[str, float]:
    """The top-k ratio for each k of KS for which at least k candidates were measured; `order` is the models', of which the measured ones count."""
    liked = [times[position] for position in order if position in times]
    best = sorted(liked)
    return {f"ratio of {k}": sum(best[:k]) / sum(liked[:k]) for k in KS if len(liked) >= k}


def winograd(ranking: Ranking) -> np.ndarray:
    """Whether each candidate uses Winograd's algorithm."""
    return np.repeat([part.schema is WINOGRAD for part in ranking.parts], np.diff(ranking.starts))


def of_way(ranking: Ranking, way: str | None) -> Ranking:
    """The candidates for one of the WAYS; all for None.

    Raises:
        ValueError: if there are none.
    """
    if way is None:
        return ranking
    parts = tuple(part for part in ranking.parts if (part.schema is WINOGRAD) == (way == "winograd"))
    if not parts:
        raise ValueError(f"there are no candidates for {WAYS[way]}")
    own = winograd(ranking) == (way == "winograd")
    return replace(ranking, parts=parts, predicted=None if ranking.predicted is None else ranking.predicted[own])


def winograd_rows(name: str, ranking: Ranking, times: Mapping[int, float], order: Sequence[int]) -> list[dict[str, Any]]:
    """A row for the schedules of Winograd's algorithm alone, if there are others."""
    if len(ranking.parts) == 1:
        return []
    own = winograd(ranking)
    return [{"layer": name, "kind": WAYS["winograd"], **ratios(times, [position for position in order if own[position]])}]


def favourites_of_forest(ranking: Ranking, machine: Machine, threads: int, count: int) -> list[int]:
    """The candidates that the package's forest ranks best, also if it has no measurements of this core; none if it does not cover the region,
    or has no measurements on tile registers and ranks these."""
    known = trained(MODEL)
    covers = known is not None and all(map(known.cores, units_of(ranking)))
    found = predicted(known.forest, ranking, machine, threads) if known is not None and covers else None
    return [] if found is None else [int(position) for position in np.argsort(found, kind="stable")[:count]]


def judge(
    name: str, found: Problem, trials: Trials, machine: Machine, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Measures the candidates and evaluates the order: a row for all schedules, for convolutions also one for Winograd's; and every time by
    schedule, None if no candidate could be measured."""
    ranking = of_way(rank(found, machine, threads=options.threads), options.only)
    order = [int(position) for position in np.argsort(ranking.seconds, kind="stable")]
    by_models = np.argsort(replace(ranking, predicted=None).seconds, kind="stable")[: options.by_models]
    by_forest = favourites_of_forest(ranking, machine, options.threads, options.by_forest) if options.by_forest else []
    first = list(dict.fromkeys([*order[: options.top], *map(int, by_models), *by_forest]))
    rest = [int(position) for position in evenly(ranking, min(options.evenly, ranking.candidates), seed=1) if int(position) not in set(first)]
    jobs = [Job(found, ranking.choice(position).schedule, position) for position in (*first, *rest)]
    outcomes = {int(str(outcome.job.key)): outcome for outcome in trials.measure(jobs, options.mode)}
    seconds = {position: outcome.timing.lower for position, outcome in outcomes.items() if outcome.timing is not None}
    failed = {outcome.schedule: outcome.reason for outcome in outcomes.values() if outcome.timing is None}
    if not seconds:
        return [{"layer": name, "kind": kind_of(name, options.only), "candidates": ranking.candidates, "measured": 0, "failed": failed}], None
    fastest = sorted(seconds, key=lambda position: seconds[position])[: options.again]
    liked = [position for position in first[: options.again] if position in seconds and position not in fastest]
    repeated = [Job(found, ranking.choice(position).schedule, position) for position in (*fastest, *liked)]
    for outcome in trials.remeasure(repeated, ROUNDS, options.mode):
        if outcome.timing is not None:
            seconds[int(str(outcome.job.key))] = outcome.timing.lower
    best = min(seconds, key=lambda position: seconds[position])
    rows: list[dict[str, Any]] = [{
        "layer": name, "kind": kind_of(name, options.only), "candidates": ranking.candidates, "measured": len(seconds),
        "failed": failed,
        "predicted us": 1e6 * float(ranking.seconds[first[0]]), "chosen": serialisation.schedule_text(ranking.choice(first[0]).schedule),
        "best": serialisation.schedule_text(ranking.choice(best).schedule), "best us": 1e6 * seconds[best],
        "place of the best": order.index(best) + 1,
        "loss of ten": min(seconds[position] for position in first[:10] if position in seconds) / seconds[best] - 1,
        **ratios(seconds, order),
    }]  # fmt: skip
    if first[0] in seconds:
        rows[0] |= {"chosen us": 1e6 * seconds[first[0]], "loss": seconds[first[0]] / seconds[best] - 1}
    rows += winograd_rows(name, ranking, seconds, order)
    times = {serialisation.schedule_text(ranking.choice(position).schedule): float(f"{value:.5g}") for position, value in seconds.items()}
    circumstances = {name: getattr(options, name) for name in ("beside", *SAME)}
    return rows, {"layer": name, "machine": serialisation.encode(machine), **circumstances, "times": times}


def judge_all(problems: Mapping[str, Problem], machine: Machine, options: argparse.Namespace, end: float) -> Iterator[Any]:
    """`judge` for every problem, in order of completion; `options.beside` at a time, each with cores and processes of its own. Past the time `end` of
    the monotonic clock no further one is begun."""
    if options.beside == 1:
        with Trials(machine, threads=options.threads) as trials:
            for name, found in problems.items():
                if time.monotonic() < end:
                    yield judge(name, found, trials, machine, options)
        return
    cores = separate_cores()
    free: SimpleQueue[set[int]] = SimpleQueue()
    for number in range(options.beside):
        free.put(set(cores[number * options.threads : (number + 1) * options.threads]))
    own = threading.local()

    with ExitStack() as stack, ThreadPoolExecutor(options.beside) as pool:

        def one(name: str) -> Any:
            if time.monotonic() >= end:
                return None
            if not hasattr(own, "trials"):
                os.sched_setaffinity(0, free.get())  # affinity of this thread and of the processes that it starts
                own.trials = stack.enter_context(Trials(machine, threads=options.threads))
            return judge(name, problems[name], own.trials, machine, options)

        for future in as_completed([pool.submit(one, name) for name in problems]):
            if (found := future.result()) is not None:
                yield found


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over the rows of each kind that have the measure."""
    result = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        shared = {key: [row[key] for row in own if key in row] for key in MEASURES}
        mean = {key: statistics.fmean(found) for key, found in shared.items() if found}
        median = {"median loss": statistics.median(shared["loss"])} if shared["loss"] else {}
        result.append({"layer": "all", "kind": kind, "layers": len(own), **mean, **median})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="default: all, in bfloat16 those of products")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random problems in place of named ones")
    parser.add_argument("--seed", type=int, default=0, help="of the random problems")
    parser.add_argument("--kinds", nargs="+", choices=KINDS_DRAWN, help="of the random problems, in turns")
    parser.add_argument("--precision", default=FP32, choices=(FP32, BF16), help="bf16: on tile registers (AMX)")
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--by-models", type=int, default=0, metavar="N", help="so many favourites of the models alone, without the learned part")
    parser.add_argument("--by-forest", type=int, default=0, metavar="N", help="so many favourites of the forest, measured on this core or not")
    parser.add_argument("--evenly", type=int, default=200)
    parser.add_argument("--again", type=int, default=max(KS), help="as many as the greatest k: both sums of its ratio are then of times in turns")
    parser.add_argument("--only", choices=WAYS, help="the convolutions' schedules that are measured; all without it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instructions", metavar="TARGET", help="this CPU with the instructions of one of the catalogue, such as x86-avx2")
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=inf, metavar="S", help="begin no problem later than this")
    parser.add_argument("--mode", default="network", choices=("network", "cold", "warm"))
    parser.add_argument("--name", help="of the file of results; none without it")
    parser.add_argument("--data", type=Path, help="a file of JSON lines, compressed: the times of each layer's schedules")
    parser.add_argument("--resume", action="store_true", help="add to the file of --data the problems that it does not have")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    data: list[dict[str, Any]] = []
    if options.data and options.data.exists():
        if not options.resume:
            parser.error(f"{options.data} is there already: give another name, and join the files afterwards, or --resume")
        data = lines(options.data)
        others = [line["layer"] for line in data if any(line.get(name, parser.get_default(name)) != getattr(options, name) for name in SAME)]
        if others:
            parser.error(f"{options.data} has lines with other options than these, such as {others[0]}: all have the same {', '.join(SAME)}")
    rows: list[dict[str, Any]] = []
    known = [name for kind in KINDS.values() for name in kind]
    names = options.names or [name for name in known if options.precision == FP32 or kind_of(name) != "depthwise"]
    if options.random:
        kinds = options.kinds or (KINDS_DRAWN if options.precision == FP32 else TILED_DRAWN)
        names = drawn_names(options.random, options.seed, kinds)
    for name in names:
        if name not in known and name.partition(":")[0] not in KINDS_DRAWN:
            parser.error(f"there is no problem {name!r}: one of {', '.join(known)}, or a kind and its sizes as in linear:128,768,768,1")
    machine = find_machine("native")
    if options.instructions is not None:
        machine = with_instructions_of(machine, find_machine(options.instructions))
    if options.only and options.precision != FP32:
        parser.error("--only is for float32: in bfloat16 there is one way")
    if options.only and any(kind_of(name) != "conv2d" for name in names):
        parser.error("--only is for convolutions: name those that are to be measured")
    try:
        check_precision(options.precision, machine)
    except UnsupportedOption as error:
        parser.error(str(error))
    if options.beside > 1 and options.beside * options.threads > len(separate_cores()):
        parser.error(f"{options.beside} measurements at a time with {options.threads} threads each need more cores than {len(separate_cores())}")
    already = {line["layer"] for line in data}
    # before any thread starts: PyTorch exports one model at a time
    problems = {name: problem(name, machine, options.threads, options.precision) for name in names if name not in already}
    if options.precision != FP32:
        without = [name for name, found in problems.items() if not any(units_of(rank(found, machine, options.threads)))]
        if without and not options.random:
            parser.error(f"there are no candidates on tile registers for {', '.join(without)}")
        for name in without:  # such as images of one channel
            print(f"{name}: left out, there are no candidates on tile registers")
            del problems[name]
    done = 0
    for judged, times in judge_all(problems, machine, options, end):
        rows += judged
        done += 1
        if times is None:
            print(f"{judged[0]['layer']}: nothing could be measured: {next(iter(judged[0]['failed'].values()), 'no candidates')}", flush=True)
            continue
        data.append(times)
        if options.name:
            write_results(options.name, {**vars(options), "data": str(options.data)}, [*means(rows), *rows])
        if options.data:
            with written(options.data) as file:
                file.write(gzip.compress("".join(json.dumps(line) + "\n" for line in data).encode(), mtime=0))
        print(f"{judged[0]['layer']}: loss {100 * judged[0].get('loss', float('nan')):.1f} %", flush=True)
    if done < len(problems):
        print(f"the time is over: {len(problems) - done} problems are left, for --resume")
    headings = ("chosen us", "predicted us", "best us", "loss", "loss of ten", "place of the best", *(f"ratio of {k}" for k in KS))
    title = f"of {options.top} favourites and {options.evenly} others, {options.threads} threads"
    table = Table("layer", "kind", *headings, "best", box=None, title=title)
    for row in (*rows, *means(rows)):
        cells = [f"{row[key]:.3g}" if key in row else "–" for key in headings]
        table.add_row(row["layer"], row["kind"], *cells, str(serialisation.schedule_of(row["best"])) if "best" in row else "")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
