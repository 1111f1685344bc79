"""Whether a rule that shortens spaces excludes the best candidates: measures the likeliest of what it excludes beside the best of what it keeps.

    python -m bench.excluded [--layers 6] [--seed S] [--first 80] [--evenly 40] [--devices 0] [--name excluded_h200]

One rule of the `direct` schema bounds the size of its space without a proof that nothing good is lost: at most 256 threads a block. On random
convolutions, which no model was trained with, the space is made with and without this rule (the machine's threads). Of both parts the first
`--first` by the shipped ranking and `--evenly` others drawn evenly are measured, then the fastest `--again` of each part once more, interleaved, and
these times count. `lost` is the time of the best kept candidate over that of the best of all, minus 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.direct import space
from tilewright.selection.choice import rank
from tilewright.tuning import serialisation
from tilewright.tuning.sampling import JUDGED, random_workloads
from tilewright.tuning.trials import Job, Trials
from tilewright.tuning.workloads import problem_of, text_of

CLASSES = ("3x3", "batch", "large", "3x3", "groups", "first")


@contextmanager
def without_rule(machine: Machine) -> Iterator[None]:
    """Spaces without the rule."""
    with mock.patch.object(space, "THREADS", (space.THREADS[0], machine.threads_per_block)):
        yield


def direct_texts(problem: Problem, machine: Machine) -> list[str]:
    """The schema's schedules as texts, in the order of the shipped ranking."""
    ranking = rank(problem, machine)
    order = np.argsort(ranking.seconds, kind="stable")
    choices = (ranking.choice(int(position)) for position in order)
    return [serialisation.schedule_text(choice.schedule) for choice in choices if choice.schema.name == "direct"]


def some_of(texts: list[str], first: int, evenly: int, seed: int) -> list[str]:
    """The first ones, and others drawn evenly."""
    rest = texts[first:]
    drawn = np.random.default_rng(seed).choice(len(rest), min(evenly, len(rest)), replace=False)
    return [*texts[:first], *(rest[int(position)] for position in drawn)]


def lost(kept: float | None, excluded: float | None) -> float | None:
    """The best kept candidate's time over that of the best of all, minus 1; None if all candidates of one part failed."""
    return None if kept is None or excluded is None else kept / min(kept, excluded) - 1


def text_or_dash(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.2f}"


def measure(problem: Problem, machine: Machine, trials: Trials, options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one problem; None if the rule excludes nothing."""
    kept = direct_texts(problem, machine)
    with without_rule(machine):
        everything = direct_texts(problem, machine)
    inside = set(kept)
    excluded = [text for text in everything if text not in inside]
    if not kept or not excluded:
        return None
    both = {"kept": kept, "excluded": excluded}
    parts = {name: some_of(texts, options.first, options.evenly, options.seed) for name, texts in both.items()}
    part_of = {text: name for name, texts in parts.items() for text in texts}
    jobs = [Job(problem, serialisation.schedule_of(text), text) for text in part_of]
    outcomes = list(trials.measure(jobs))
    seconds = {str(outcome.job.key): outcome.timing.median for outcome in outcomes if outcome.timing is not None}
    again = [text for name in parts for text in sorted((t for t in seconds if part_of[t] == name), key=lambda text: seconds[text])[: options.again]]
    final = {
        str(outcome.job.key): outcome.timing.median
        for outcome in trials.remeasure([Job(problem, serialisation.schedule_of(text), text) for text in again], options.rounds)
        if outcome.timing is not None
    }
    best = {name: min((text for text in final if part_of[text] == name), key=lambda text: final[text], default=None) for name in parts}
    us = {name: None if text is None else 1e6 * final[text] for name, text in best.items()}
    return {
        "candidates kept": len(kept), "candidates excluded": len(excluded),
        **{f"measured {name}": sum(part_of[text] == name for text in seconds) for name in parts},
        **{f"best {name}": best[name] for name in parts}, **{f"best {name} us": us[name] for name in parts}, "lost": lost(us["kept"], us["excluded"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--first", type=int, default=80)
    parser.add_argument("--evenly", type=int, default=40)
    parser.add_argument("--again", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--devices", default="0")
    parser.add_argument("--name", default="excluded_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    machine = identified_machine(options.target)
    rows: list[dict[str, Any]] = []
    with Trials(machine, tuple(map(int, options.devices.split(",")))) as trials:
        for workload in islice(random_workloads(options.seed, CLASSES, JUDGED), 50):
            found = measure(problem_of(workload), machine, trials, options)
            if found is not None:
                rows.append({"layer": text_of(workload), **found})
                write_results(options.name, vars(options), rows)
                print(f"{rows[-1]['layer']}: lost {text_or_dash(found['lost'], 100)} %", flush=True)
            if len(rows) == options.layers:
                break
    table = Table("layer", "kept", "excluded", "best kept us", "best excluded us", "lost %", box=None)
    for row in rows:
        sizes = (f"{row[f'candidates {name}']:,}" for name in ("kept", "excluded"))
        table.add_row(row["layer"], *sizes, *(text_or_dash(row[f"best {name} us"]) for name in ("kept", "excluded")), text_or_dash(row["lost"], 100))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
