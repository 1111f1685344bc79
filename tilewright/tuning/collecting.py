"""Measures samples of schedules of many layers into a data set; an interruption loses only the incomplete layer."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.counts import TensorCounts, TileCounts
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.selection.choice import rank
from tilewright.selection.learned.gpu import corrected, models_for, refined
from tilewright.selection.learned.hybrid import Learned
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.sampling import evenly, towards_the_best, towards_the_first
from tilewright.tuning.trials import Job, Outcome, Trials

Layer = Mapping[str, Any]
Choose = Callable[[Layer, Problem], Sequence[Any]]
"""Returns the schedules to measure for a layer."""
Progress = Callable[[str, int, int, int], None]
"""Called after each candidate with the layer's name and the numbers of candidates measured, candidates failed, and layers completed."""


def ranking_of(problem: Problem, machine: Machine, numerics: Numerics = USUAL) -> Ranking:
    """Every candidate of a problem with its analytical prediction."""
    return rank(problem, machine, numerics=numerics, learned=False)


def to_sample(layer: Layer, problem: Problem, machine: Machine) -> Ranking:
    """The candidates among which samples are drawn: all in fp32; in other precisions, where there are some on tensor cores, none with tiles on CUDA
    cores."""
    ranking = ranking_of(problem, machine, dataset.layer_numerics(layer))
    # no model knows a schema without features
    on_tensor_cores = [isinstance(part.counts, TensorCounts) and part.schema.features is not None for part in ranking.parts]
    if not any(on_tensor_cores):
        return ranking
    own = zip(ranking.parts, on_tensor_cores, strict=True)
    return replace(ranking, parts=tuple(part for part, tensor in own if tensor or not isinstance(part.counts, TileCounts)))


def sample_of(each: int, seed: int, machine: Machine) -> Choose:
    """Chooses `each` schedules of `to_sample`: a third drawn evenly over the schemas, others with a bias towards the best by the analytical and
    the learned models of the machine, if there are any."""

    def choose(layer: Layer, problem: Problem) -> list[Any]:
        ranking = to_sample(layer, problem, machine)
        learned = bool(models_for(machine))
        own = int(np.random.SeedSequence([seed, zlib.crc32(str(layer["name"]).encode())]).generate_state(1)[0])
        parts = [evenly(ranking, each // 3, own), towards_the_best(ranking, each // 3 if learned else each, own)]
        if learned:
            parts.append(towards_the_first(corrected(ranking, machine), each, own))
        generator = np.random.default_rng(own)
        shuffled = [generator.permutation(part) for part in parts]
        positions = list(dict.fromkeys(int(position) for part in shuffled for position in part))[:each]
        return [ranking.choice(position).schedule for position in generator.permutation(positions)]

    return choose


def favourites_of(model: Learned, each: int, known: Sequence[dataset.MeasuredLayer], machine: Machine) -> Choose:
    """Chooses the first `each` schedules of a model's ranking that were not measured yet: it learns most where it is too optimistic."""
    texts = {str(measured.layer["name"]): set(measured.times()) for measured in known}

    def choose(layer: Layer, problem: Problem) -> list[Any]:
        ranking = refined(to_sample(layer, problem, machine), machine, (model,))
        new = (choice.schedule for choice in ranking if serialisation.schedule_text(choice.schedule) not in texts.get(str(layer["name"]), ()))
        return list(islice(new, each))

    return choose


def collect(
    trials: Trials,
    machine: Machine,
    layers: Iterable[Layer],
    choose: Choose,
    path: Path,
    seconds: float = float("inf"),
    progress: Progress | None = None,
) -> int:
    """Measures layers one after another and appends each to the file once all its schedules are done. Returns the number of candidates measured.

    No new layer is started after `seconds`."""
    waiting: dict[str, tuple[Layer, int]] = {}
    done: dict[str, list[Outcome]] = {}
    ends = time.monotonic() + seconds

    def jobs() -> Iterator[Job]:
        for layer in layers:
            if time.monotonic() > ends:
                return
            problem = dataset.layer_problem(layer)
            schedules = choose(layer, problem)
            name = str(layer["name"])
            waiting[name] = (layer, len(schedules))
            done[name] = []
            for schedule in schedules:
                yield Job(problem, schedule, name)

    measured = failed = complete = 0
    for outcome in trials.measure(jobs()):
        name = str(outcome.job.key)
        done[name].append(outcome)
        measured += outcome.timing is not None
        failed += outcome.timing is None
        layer, count = waiting[name]
        if len(done[name]) == count:
            dataset.append(path, dataset.from_outcomes(layer, machine.name, done.pop(name)))
            complete += 1
        if progress is not None:
            progress(name, measured, failed, complete)
    return measured
