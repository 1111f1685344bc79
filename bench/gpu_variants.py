"""What variants of the code gain on the GPU present: measured and predicted, for the best few candidates of random problems.

    python -m bench.gpu_variants [--problems 24] [--seconds 180] [--seed 7] [--name gpu_variants_h200]
    python -m bench.gpu_variants --only warpgroups --precisions fp16,bf16,tf32 --classes 3x3,linear,1x1,batch --problems 300 --seconds 190 \
        --name gpu_variants_tensor_h200
    python -m bench.gpu_variants --only warpgroups --axes sent --precisions fp16,bf16 --classes batch,heavy,linear,wide,1x1,3x3 --problems 400 \
        --seconds 70 --seed 10 --name gpu_variants_sent_h200
    python -m bench.gpu_variants --fit gpu_variants_tensor_h200
    python -m bench.gpu_variants --axes sent --fit gpu_variants_sent_h200 gpu_variants_sent_h200_2

Problems are drawn by a seed; none is a layer on which models are judged. Of each schema that has variants (`kernels/gpu/gemm/variants.py`,
`kernels/gpu/warpgroup/variants.py`) the first candidate of the ranking that has any, and the first of these with at most two stages, or else the
second, are measured with every variant that differs in one axis, and the one that is predicted best (`--only` these schemas and `--axes`). All are
checked against float64 first; those that are right are timed again in turns, and these medians count. A gain is the time of the candidate over that
of its variant. `confirmed` of an axis is the slope through the origin of the logarithms of measured gains over those of predicted ones, where a gain
was predicted: the constants of the part "variants" of a machine's calibration file.

`--fit` measures nothing: of one axis (parts that meet, or `--axes`) it finds the slope of what was measured over what is believed of predictions
(`selection.variants`), of the variants that are made today, and prints it with the gain of choosing as predictions do.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cells import results_of
from bench.common import write_results
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import GpuVariants
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.columns import length, row
from tilewright.kernels.gpu.warpgroup.space import MEETING
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Part, Ranking, rows_of, variants_of
from tilewright.selection.variants import LEAST_GAIN, believed
from tilewright.tuning import dataset
from tilewright.tuning.sampling import random_workloads
from tilewright.tuning.trials import Job, Trials
from tilewright.tuning.workloads import numerics_of, text_of, workload_of

CLASSES = ("3x3", "1x1", "first", "product", "batch", "groups", "linear", "forms")
TOGETHER = 4
"""Problems whose candidates are compiled while those before them are measured."""
BASES = 2
AXES = frozenset(axis.name for axis in fields(GpuVariants))
Rows = list[dict[str, Any]]


def variants_with(part: Part, which: np.ndarray, machine: Machine, axes: Collection[str]) -> tuple[Part, np.ndarray, np.ndarray] | None:
    """As `variants_of`; if `axes` are given, those alone that take one of them."""
    found = variants_of(part, which, machine)
    if found is None or not axes:
        return found
    variants, origins, ratios = found
    own = [variants.candidates[axis] > 0 for axis in axes if axis in variants.candidates]
    kept = np.flatnonzero(np.any(own, axis=0)) if own else np.zeros(0, np.int64)
    return (rows_of(variants, kept), origins[kept], ratios[kept]) if len(kept) else None


def bases_of(ranking: Ranking, number: int, axes: Collection[str]) -> list[int]:
    """Positions of the candidates of one schema that are varied: of the first ones that have variants."""
    start, end = map(int, ranking.starts[number : number + 2])
    first = np.argsort(ranking.seconds[start:end], kind="stable")[:64]
    found = variants_with(ranking.parts[number], first, ranking.machine, axes)
    if found is None:
        return []
    order = start + first[np.unique(found[1])]
    few = [int(at) for at in order if ranking.choice(int(at)).schedule.stages <= 2]
    return list(dict.fromkeys((*map(int, order[:1]), *few[:1], *map(int, order[1:]))))[:BASES]


def differing(name: str, schedule: Any, base: Any) -> list[str]:
    """The axes of variants in which one differs from its candidate, each with the schema's name and its value."""
    axes = [axis.name for axis in fields(schedule) if axis.name in AXES]
    return [f"{name} {axis} {getattr(schedule, axis)}" for axis in axes if getattr(schedule, axis) != getattr(base, axis)]


def varied(
    problem: Problem, machine: Machine, numerics: Numerics = USUAL, only: Sequence[str] = (), wanted: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """The candidates to measure: `base`, `schedule`, `axes` that differ (none for the candidate itself) and the predicted gain. `only` these schemas,
    and the `wanted` axes, if any are given."""
    ranking = rank(problem, machine, numerics=numerics)
    seen: set[str] = set()
    for number, (part, start) in enumerate(zip(ranking.parts, ranking.starts, strict=False)):
        if part.schema.variants is None or part.schema.name in seen or (only and part.schema.name not in only):
            continue
        seen.add(part.schema.name)
        for at in bases_of(ranking, number, wanted):
            base = ranking.choice(at)
            yield {"base": base.schedule, "schedule": base.schedule, "axes": [], "gain": 1.0, "predicted us": 1e6 * base.seconds}
            found = variants_with(part, np.array([at - int(start)]), machine, wanted)
            if found is None:
                continue
            variants, _, ratios = found
            for place in range(len(ratios)):
                schedule = part.schema.schedule_of(row(variants.candidates, place), machine)
                axes = differing(part.schema.name, schedule, base.schedule)
                if len(axes) == 1 or place == int(np.argmin(ratios)):
                    seconds = base.seconds * float(ratios[place])
                    yield {"base": base.schedule, "schedule": schedule, "axes": axes, "gain": 1 / float(ratios[place]), "predicted us": 1e6 * seconds}


def measured(trials: Trials, problem: Problem, wanted: Sequence[Mapping[str, Any]], checked: Mapping[Any, Any], rounds: int) -> Rows:
    """A row for each candidate and variant of a problem, with its median in turns if it was right."""
    right = [schedule for schedule, outcome in checked.items() if outcome.status == "measured"]
    again = {outcome.job.schedule: outcome for outcome in trials.remeasure([Job(problem, schedule) for schedule in right], rounds)} if right else {}
    times = {schedule: outcome.timing for schedule, outcome in again.items() if outcome.timing is not None}
    rows: Rows = []
    for entry in wanted:
        schedule, base, outcome = entry["schedule"], entry["base"], checked[entry["schedule"]]
        line = {"schedule": str(schedule), "of": str(base), "axes": entry["axes"], "predicted gain": entry["gain"], "gain": None, "us": None}
        if schedule in times:
            line |= {"us": 1e6 * times[schedule].median, "spread us": 1e6 * times[schedule].spread}
            line["gain"] = times[base].median / times[schedule].median if base in times else None
        else:
            line["failed"] = f"{outcome.status}: {outcome.reason}"[:300]
        line["registers"] = max((figures["registers"] for figures in outcome.resources.values()), default=None)
        rows.append({**line, "predicted us": entry["predicted us"]})
    return rows


def summary(results: Sequence[Mapping[str, Any]]) -> Rows:
    """A row for each single axis and value; then the best of each problem's variants beside the best of its candidates."""
    lines = [line for result in results for line in result["rows"] if line["gain"] is not None]
    found: Rows = []
    for axis in sorted({line["axes"][0] for line in lines if len(line["axes"]) == 1}):
        own = [line for line in lines if line["axes"] == [axis]]
        logs = [(math.log(line["predicted gain"]), math.log(line["gain"])) for line in own]
        hopeful = [(predicted, gained) for predicted, gained in logs if predicted > 0]
        square = sum(predicted**2 for predicted, _ in hopeful)
        found.append({
            "axis": axis, "variants": len(own), "gain": math.exp(statistics.fmean(gained for _, gained in logs)),
            "predicted": math.exp(statistics.fmean(predicted for predicted, _ in logs)), "best": max(line["gain"] for line in own),
            "faster by 2 %": sum(line["gain"] > 1.02 for line in own), "gains predicted": len(hopeful),
            "confirmed": sum(predicted * gained for predicted, gained in hopeful) / square if square else None,
        })  # fmt: skip
    gains = []
    for result in results:
        times = [[line["us"] for line in result["rows"] if line["us"] is not None and bool(line["axes"]) == varies] for varies in (False, True)]
        if all(times):
            gains.append(min(times[0]) / min(*times[0], *times[1]))
    if gains:
        found.append({"axis": "best of all", "variants": len(gains), "gain": math.exp(statistics.fmean(map(math.log, gains))), "best": max(gains),
                      "faster by 2 %": sum(gain > 1.02 for gain in gains)})  # fmt: skip
    return found


def show(rows: Rows) -> None:
    names = ("axis", "variants", "gain", "predicted", "best", "faster by 2 %", "gains predicted", "confirmed")
    table = Table(*names, box=None, title="variants: the candidate's time over the variant's")
    for line in rows:
        cells = (line.get(name) for name in names)
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in cells))
    Console(width=120).print(table)


@dataclass(frozen=True)
class Pairs:
    """Candidates and their variants of an axis, one of each per row: logarithms of gains, `gained` as measured and `believed` of what formulas say
    (`selection.variants.believed`)."""

    gained: np.ndarray
    believed: np.ndarray

    @property
    def share(self) -> float:
        """The constant of the axis: the slope of measured gains where one is believed."""
        hopeful = self.believed > 0
        gained, predicted = self.gained[hopeful], self.believed[hopeful]
        return float(predicted @ gained / (predicted @ predicted))

    @property
    def chosen(self) -> np.ndarray:
        """Whether the variant is chosen instead of its candidate."""
        return self.believed >= -math.log(1 - LEAST_GAIN)


def pairs_of(results: Sequence[Mapping[str, Any]], axis: str, machine: Machine) -> Pairs:
    """What was measured of the axis, beside today's formulas, of the variants that are made today."""
    rows: list[tuple[float, float]] = []
    for result in results:
        workload = workload_of(result["problem"])
        ranking = rank(dataset.layer_problem(dataset.layer_of(workload)), machine, numerics=numerics_of(workload), learned=False)
        for part in ranking.parts:
            own = [line for line in result["rows"] if len(line["axes"]) == 1 and line["axes"][0].startswith(f"{part.schema.name} {axis} ")]
            gains = {(line["of"], line["schedule"]): line["gain"] for line in own if line["gain"] is not None}
            if not gains:
                continue
            bases = {of for of, _ in gains}
            texts = [str(part.schema.schedule_of(row(part.candidates, at), machine)) for at in range(length(part.candidates))]
            varied = np.flatnonzero([text in bases for text in texts])
            found = variants_with(part, varied, machine, (axis,))
            if found is None:
                continue
            variants, origins, ratios = found
            gain_of = believed(variants, ratios)
            for place, origin in enumerate(origins):
                gain = gains.get((texts[varied[origin]], str(part.schema.schedule_of(row(variants.candidates, place), machine))))
                if gain is not None:
                    rows.append((math.log(gain), float(gain_of[place])))
    return Pairs(*map(np.array, zip(*rows, strict=True)))


def fit(results: Sequence[Mapping[str, Any]], axis: str, machine: Machine) -> dict[str, float]:
    """The constant, and mean logarithms of gains over all pairs: of always choosing the faster one, and of choosing as predictions do."""
    pairs = pairs_of(results, axis, machine)
    return {
        "pairs": len(pairs.gained), "gains believed": float((pairs.believed > 0).sum()), axis: pairs.share,
        "best": float(np.maximum(pairs.gained, 0).mean()), "chosen": float(pairs.chosen.sum()), "gained": float((pairs.gained * pairs.chosen).mean()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=180, help="no further problem is begun later")
    parser.add_argument("--only", default="", help="these schemas, such as 'warpgroups,warpgroup patches'")
    parser.add_argument("--axes", default="", help="variants with these axes alone, such as 'sent'")
    parser.add_argument("--classes", default=",".join(CLASSES), help="of the problems, drawn in turn")
    parser.add_argument("--precisions", default="fp32", help="of the problems, such as fp16,tf32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--name", default="gpu_variants_h200")
    parser.add_argument("--fit", nargs="+", metavar="RESULTS", help="fit the constant of `--axes` to these result files, and end")
    options = parser.parse_args()
    machine = identified_machine(options.target)
    if options.fit:
        found = fit([entry for name in options.fit for entry in results_of(name) if "problem" in entry], options.axes or MEETING, machine)
        print("\n".join(f"{name:14} {value:.4g}" for name, value in found.items()))
        return
    results: Rows = []
    begin = time.monotonic()
    with Trials(machine) as trials:
        listed = (options.classes, options.precisions, options.only, options.axes)
        classes, precisions, only, axes = (text.split(",") if text else () for text in listed)
        drawn = islice(random_workloads(options.seed, classes, precisions=precisions), options.problems)
        while (workloads := list(islice(drawn, TOGETHER))) and time.monotonic() - begin < options.seconds:
            problems = {text_of(workload): dataset.layer_problem(dataset.layer_of(workload)) for workload in workloads}
            wanted = {text_of(each): list(varied(problems[text_of(each)], machine, numerics_of(each), only, axes)) for each in workloads}
            distinct = {name: dict.fromkeys(entry["schedule"] for entry in entries) for name, entries in wanted.items()}
            jobs = [Job(problems[name], schedule, name) for name, schedules in distinct.items() for schedule in schedules]
            checked: dict[str, dict[Any, Any]] = {name: {} for name in problems}
            for outcome in trials.measure(jobs):
                checked[str(outcome.job.key)][outcome.job.schedule] = outcome
            for name, problem in problems.items():
                if time.monotonic() - begin > options.seconds:
                    break
                if wanted[name]:
                    results.append({"problem": name, "rows": measured(trials, problem, wanted[name], checked[name], options.rounds)})
                write_results(options.name, vars(options), [*summary(results), *results])
            print(f"{len(results)} problems after {time.monotonic() - begin:.0f} s", flush=True)
    show(summary(results))


if __name__ == "__main__":
    main()
