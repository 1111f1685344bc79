"""Evolution strategies over the candidates of a space: the search of Tuna (section IV, algorithm 4), for scores too expensive to compute for all of
them.

The candidates form a grid: each axis runs from 0 to 1, with its values equally spaced in their order. Algorithm 4 moves the mean theta of a normal
distribution along the estimated gradient of the expected fitness,

    theta <- theta + alpha / (n sigma) * sum over i of F_i eps_i,      eps_i ~ N(0, I),      F_i = F(theta + sigma eps_i)

with four additions, which `bench/evolution.py` measures together against the algorithm as printed:

- a sampled point stands for the nearest candidate, so that none is infeasible; a candidate is scored once;
- F is not the score but the utility of its rank (Wierstra et al., Natural Evolution Strategies, JMLR 15, 2014, section 3.1), with equal scores
  sharing theirs: the scale of the scores does not matter, and infinity, for a candidate that turns out to be infeasible, is an ordinary score;
- samples come in pairs eps and -eps (Brockhoff et al., Mirrored Sampling, PPSN 2010);
- theta starts at the best of a uniform sample, and again when a generation samples nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.columns import Columns, length

Score = Callable[[np.ndarray], np.ndarray]
"""Maps positions of candidates to their scores, lower is better; infinity or NaN if a candidate turns out to be infeasible."""


@dataclass(frozen=True)
class Strategy:
    """n, sigma (the range of an axis being 1) and alpha (in units of sigma squared, so that the mean moves by multiples of sigma)."""

    population: int = 16
    deviation: float = 0.2
    learning_rate: float = 1.0


@dataclass(frozen=True)
class Searched:
    """The scored candidates by position, each once, in the order of scoring; NaN scores have become infinity."""

    positions: np.ndarray
    scores: np.ndarray

    @property
    def best(self) -> int:
        """Position of the candidate with the least score, the first in the order of the space among equal ones."""
        return int(self.positions[np.lexsort((self.positions, self.scores))[0]])

    @property
    def best_so_far(self) -> np.ndarray:
        """The least score after each evaluation."""
        return np.minimum.accumulate(self.scores)


def coordinates(candidates: Columns) -> np.ndarray:
    """(candidates, axes): with each axis scaled from 0 (least value) to 1 (largest); axes with one value are left out."""
    axes = []
    for column in candidates.values():
        values, index = np.unique(column, return_inverse=True)
        if len(values) > 1:
            axes.append(index / (len(values) - 1))
    return np.stack(axes, axis=1) if axes else np.zeros((length(candidates), 0))


def nearest(grid: np.ndarray, points: np.ndarray) -> np.ndarray:
    """For each of `points` (n, axes), the position of the nearest candidate in `grid` (candidates, axes)."""
    # without the squares of the points, which are the same for every candidate
    positions: np.ndarray = np.argmin(np.einsum("ca,ca->c", grid, grid) - 2 * (points @ grid.T), axis=1)
    return positions


def utilities(scores: np.ndarray) -> np.ndarray:
    """Fitness by rank: the sum is 0 and almost only the better half is positive; equal scores share their mean."""
    count = len(scores)
    by_rank = np.maximum(0, np.log(count / 2 + 1) - np.log(np.arange(1, count + 1)))
    by_rank = count * by_rank / by_rank.sum() - 1
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ordered = np.empty(count)
    ordered[np.argsort(scores, kind="stable")] = by_rank
    return (np.bincount(group, ordered) / sizes)[group]


class _Evaluations:
    """The candidates scored so far, within the budget."""

    def __init__(self, score: Score, candidates: int, budget: int) -> None:
        self._score, self._left = score, min(budget, candidates)
        self._known = np.full(candidates, np.nan)
        self._order: list[np.ndarray] = []

    @property
    def left(self) -> int:
        return self._left

    @property
    def unknown(self) -> np.ndarray:
        return np.flatnonzero(np.isnan(self._known))

    def of(self, positions: np.ndarray) -> tuple[np.ndarray, bool]:
        """Scores (infinity beyond the budget), and whether any was new."""
        _, first = np.unique(positions, return_index=True)
        distinct = positions[np.sort(first)]
        new = distinct[np.isnan(self._known[distinct])][: self._left]
        if len(new):
            scores = np.asarray(self._score(new), dtype=np.float64)
            self._known[new] = np.where(np.isnan(scores), np.inf, scores)
            self._order.append(new)
            self._left -= len(new)
        scores = self._known[positions]
        return np.where(np.isnan(scores), np.inf, scores), bool(len(new))

    def result(self) -> Searched:
        positions = np.concatenate(self._order) if self._order else np.zeros(0, dtype=np.int64)
        return Searched(positions, self._known[positions])


def evolve(
    candidates: Columns, score: Score, evaluations: int, seed: int = 0, strategy: Strategy | None = None, start: int | None = None
) -> Searched:
    """Scores at most `evaluations` of the candidates, one generation at a time; all of them if there are no more. Deterministic for a seed.

    `score` receives a generation's new candidates at once, so that it can score them in parallel. `start`: the position of the candidate that is the
    initial mean, such as the favourite of a cheaper score."""
    chosen = strategy or Strategy()
    grid = coordinates(candidates)
    generator = np.random.default_rng(seed)
    done = _Evaluations(score, length(candidates), evaluations)
    pairs = max(1, chosen.population // 2)
    while done.left:
        if start is None:
            unknown = done.unknown
            sample = generator.choice(unknown, min(2 * pairs, len(unknown)), replace=False)
            start = int(sample[np.argmin(done.of(sample)[0])])
        else:
            done.of(np.array([start]))
        mean, start, found = grid[start], None, True
        while done.left and found:
            half = generator.standard_normal((pairs, grid.shape[1]))
            noise = np.concatenate([half, -half])
            points = np.clip(mean + chosen.deviation * noise, 0, 1)
            scores, found = done.of(nearest(grid, points))
            gradient = utilities(scores) @ noise / len(noise)  # the gradient of the expected utility, times sigma
            mean = np.clip(mean + chosen.learning_rate * chosen.deviation * gradient, 0, 1)
    return done.result()
