"""Small layers with synthetic measured times: the analytical model's time (`SLOWER` times that for one schema) with some noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tilewright.hardware import machine
from tilewright.kernels.schema import AnySchema
from tilewright.tuning import dataset
from tilewright.tuning.collecting import ranking_of, to_sample
from tilewright.tuning.sampling import evenly
from tilewright.tuning.trials import Job, Outcome, Timing

H200 = machine("h200")
SLOWER = 3.0
NOISE = 0.02


@lru_cache(maxsize=1)
def slow() -> AnySchema:
    """The schema that is slower than predicted: the analytical models' favourite."""
    return ranking_of(dataset.layer_problem(layer(32, 32, 8)), H200).first().schema


def layer(outputs: int, channels: int, size: int, filter_size: int = 3, stride: int = 1) -> dict[str, Any]:
    name = f"{outputs}x{channels}_{size}_f{filter_size}s{stride}"
    return {"name": name, "outputs": outputs, "channels": channels, "height": size, "width": size, "filter": filter_size, "stride": stride}


def outcome(job: Job, seconds: float, rounds: int = 4) -> Outcome:
    timing = Timing(seconds, 0.99 * seconds, 1.01 * seconds, rounds)
    return Outcome(job, "measured", timing=timing, schedule=str(job.schedule), environment={"gpu": "made up"})


def measured(described: dict[str, Any], count: int, seed: int = 0) -> dataset.MeasuredLayer:
    """`count` candidates of a layer with their times, spread evenly over the schemas."""
    problem = dataset.layer_problem(described)
    ranking = to_sample(described, problem, H200)
    generator = np.random.default_rng(seed)
    outcomes = []
    for position in evenly(ranking, count, seed):
        choice = ranking.choice(int(position))
        factor = SLOWER if choice.schema is slow() else 1.0
        outcomes.append(outcome(Job(problem, choice.schedule), choice.seconds * factor * float(np.exp(NOISE * generator.normal()))))
    return dataset.from_outcomes(described, H200.name, outcomes)


def some(number: int, count: int) -> Sequence[dataset.MeasuredLayer]:
    """`number` different small layers."""
    shapes = [(32 + 8 * (at % 3), 32 * (1 + at % 2), 8 + 2 * (at % 5)) for at in range(number)]
    return [measured(layer(*shape), count, seed) for seed, shape in enumerate(shapes)]
