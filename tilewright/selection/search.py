"""Choosing among the candidates of a ranking by a score that is too expensive for all of them, such as one that reads the compiler's assembly.

The cheap stage is the ranking itself: the whole space, in numpy. It feeds the expensive one with its first few (`rescored`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

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
    scores = np.array(list((executor.map if executor else map)(score, [choice.schedule for choice in choices])), dtype=np.float64)
    order = np.argsort(np.where(np.isnan(scores), np.inf, scores), kind="stable")
    return [Scored(choices[at], float(scores[at])) for at in order if np.isfinite(scores[at])]
