"""Choosing among the candidates of a ranking by a score that is too expensive for all of them, such as one that reads the compiler's assembly.

The cheap stage is the ranking itself: the whole space, in numpy. It feeds the expensive one either with its first tens (`rescored`), or, where it is
not trusted to have the best among them, with a starting point for evolution strategies over the whole space (`evolved`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tilewright.kernels.columns import length
from tilewright.selection.evolution import Strategy, evolve
from tilewright.selection.ranking import Choice, Ranking

ScheduleScore = Callable[[Any], float]
"""A schedule to its score, the lower the better; infinity or NaN where it turns out to be infeasible."""


@dataclass(frozen=True)
class Scored:
    """A candidate with its expensive score."""

    choice: Choice
    score: float


def rescored(ranking: Ranking, score: ScheduleScore, count: int = 30, executor: Executor | None = None) -> list[Scored]:
    """The first `count` of the ranking in the order of the expensive score; equal ones in that of the ranking. Infeasible ones are left out.

    `executor` scores side by side: a pool of processes (`concurrent.futures.ProcessPoolExecutor`), or Dask's workers (`Client.get_executor()`)."""
    choices = list(islice(ranking, count))
    return _ordered(choices, _scores(choices, score, executor))


def evolved(
    ranking: Ranking,
    score: ScheduleScore,
    evaluations: int = 200,
    seed: int = 0,
    strategy: Strategy | None = None,
    executor: Executor | None = None,
) -> list[Scored]:
    """At most `evaluations` candidates in the order of the expensive score, found by evolution strategies from each schema's favourite on; infeasible
    ones are left out. Every schema gets the same number of evaluations; what one with few candidates leaves goes to the others.

    `executor`: as for `rescored`; a generation is scored at once. The same for the same ranking, score and seed."""
    parts, starts, seconds = ranking.parts, ranking.starts, ranking.seconds
    sizes = [length(part.rows) for part in parts]
    found: list[tuple[int, float]] = []
    left = evaluations
    for turn, number in enumerate(np.argsort(sizes, kind="stable")):
        begin, end = int(starts[number]), int(starts[number + 1])
        share = min(sizes[number], left // (len(parts) - turn))
        left -= share
        if not share:
            continue

        def score_all(positions: np.ndarray, begin: int = begin) -> np.ndarray:
            return _scores([ranking.choice(begin + int(position)) for position in positions], score, executor)

        favourite = int(np.argmin(seconds[begin:end]))
        searched = evolve(parts[number].rows, score_all, share, seed, strategy, favourite)
        found += zip((begin + searched.positions).tolist(), searched.scores.tolist(), strict=True)
    found.sort()  # by their places, so that equal scores stay in the order of the space
    return _ordered([ranking.choice(position) for position, _ in found], np.array([value for _, value in found]))


def _scores(choices: Sequence[Choice], score: ScheduleScore, executor: Executor | None) -> np.ndarray:
    schedules = [choice.schedule for choice in choices]
    return np.array(list((executor.map if executor else map)(score, schedules)), dtype=np.float64)


def _ordered(choices: Sequence[Choice], scores: np.ndarray) -> list[Scored]:
    order = np.argsort(np.where(np.isnan(scores), np.inf, scores), kind="stable")
    return [Scored(choices[at], float(scores[at])) for at in order if np.isfinite(scores[at])]
