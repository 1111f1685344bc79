"""Choosing among a ranking's candidates by a score that is too expensive for all of them, such as one that reads the compiler's assembly.

The cheap stage is the ranking itself: the whole space, in NumPy. Its first few candidates enter the expensive stage (`rescored`).
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
"""Maps a schedule to its score (lower is better); infinity or NaN if it is infeasible."""


@dataclass(frozen=True)
class Scored:
    """A candidate with its expensive score."""

    choice: Choice
    score: float


def rescored(ranking: Ranking, score: ScheduleScore, count: int = 30, executor: Executor | None = None) -> list[Scored]:
    """The first `count` candidates of the ranking, sorted by the expensive score; ties keep their order. Infeasible candidates are omitted.

    `executor` scores in parallel: a pool of processes (`concurrent.futures.ProcessPoolExecutor`), or Dask's workers (`Client.get_executor()`)."""
    choices = list(islice(ranking, count))
    scores = np.array(list((executor.map if executor else map)(score, [choice.schedule for choice in choices])), dtype=np.float64)
    order = np.argsort(np.where(np.isnan(scores), np.inf, scores), kind="stable")
    return [Scored(choices[at], float(scores[at])) for at in order if np.isfinite(scores[at])]
