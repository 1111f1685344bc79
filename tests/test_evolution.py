"""Evolution strategies against exhaustive ranking and pycma, and choosing in two stages."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.evolution import pycma, spaces_of
from bench.evolution_strategies import Strategy, coordinates, evolve, nearest, utilities
from tests.bare_schemas import part, ranking_of
from tilewright.kernels.columns import length, product_of, take
from tilewright.kernels.cpu.contraction.space import schedule_of
from tilewright.selection.ranking import Ranking
from tilewright.selection.search import rescored

ROWS = product_of({"a": (1, 2, 4, 8), "b": range(10), "c": (0, 1), "one": (7,)})


def bowl(candidates: dict[str, np.ndarray]) -> np.ndarray:
    return (np.log2(candidates["a"]) - 2) ** 2 + (candidates["b"] - 6) ** 2 / 9 + 0.5 * (candidates["c"] == 1)


def test_coordinates_are_positions_on_the_axes() -> None:
    grid = coordinates(ROWS)
    assert grid.shape == (80, 3)
    assert sorted(set(grid[:, 0])) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert (nearest(grid, grid + 0.01) == np.arange(80)).all()


def test_utilities_follow_the_ranks_only() -> None:
    scores = np.array([3.0, 1.0, np.inf, 1.0, 2.0, np.inf])
    found = utilities(scores)
    assert found.sum() == pytest.approx(0)
    assert found[1] == found[3] > found[4] > found[0] >= found[2] == found[5]
    assert (utilities(np.exp(scores)) == found).all()
    assert np.allclose(utilities(np.full(5, np.inf)), 0)


@settings(max_examples=40, deadline=None)
@given(
    extents=st.lists(st.integers(1, 6), min_size=1, max_size=4), kept=st.floats(0.1, 1), budget=st.integers(1, 300), seed=st.integers(0, 9),
    broken=st.floats(0, 1), population=st.integers(1, 20),
)  # fmt: skip
def test_no_candidate_twice_and_no_more_than_allowed(extents: list[int], kept: float, budget: int, seed: int, broken: float, population: int) -> None:
    """Spaces with holes, and candidates that turn out to be infeasible: NaN and infinity."""
    generator = np.random.default_rng(seed)
    candidates = product_of({f"axis{number}": range(extent) for number, extent in enumerate(extents)})
    candidates = take(candidates, np.unique(np.concatenate([[0], np.flatnonzero(generator.random(length(candidates)) < kept)])))
    scores = generator.random(length(candidates))
    scores[generator.random(length(candidates)) < broken] = generator.choice([np.nan, np.inf])
    asked: list[int] = []

    def score(positions: np.ndarray) -> np.ndarray:
        asked.extend(positions.tolist())
        return scores[positions]

    found = evolve(candidates, score, budget, seed, Strategy(population))
    assert len(asked) == len(set(asked)) == min(budget, length(candidates))
    assert found.positions.tolist() == asked
    expected = np.where(np.isnan(scores), np.inf, scores)
    assert (found.scores == expected[asked]).all()
    assert expected[found.best] == expected[asked].min() == found.best_so_far[-1]
    again = evolve(candidates, lambda positions: scores[positions], budget, seed, Strategy(population))
    assert (again.positions == found.positions).all()


def test_the_mean_moves_to_the_best() -> None:
    """The last generations are closer to the best than the first: a search that does not learn fails."""
    candidates = product_of({name: range(12) for name in "abcd"})
    target = np.array([2, 9, 5, 7])
    scores = sum((candidates[name] - target[number]) ** 2 for number, name in enumerate("abcd")).astype(float)
    losses = []
    for seed in range(5):
        found = evolve(candidates, lambda positions: scores[positions], 300, seed)
        assert scores[found.positions[-100:]].mean() < 0.5 * scores[found.positions[:32]].mean()
        losses.append(scores[found.best])
    assert np.mean(losses) <= 2  # 300 of 20,736 candidates with scores up to 280 were evaluated


def test_the_start_is_scored_first_and_searched_around() -> None:
    scores = bowl(ROWS)
    found = evolve(ROWS, lambda positions: scores[positions], 20, 1, start=37)
    assert found.positions[0] == 37 and len(found.positions) == 20


@pytest.mark.parametrize("target", ["h200", "x86-avx512"])
def test_against_exhaustive_ranking_and_pycma(target: str) -> None:
    """On real spaces: with a quarter of the candidates, at most 200, within 5 % of the best on average, and at most 2 % worse than pycma."""
    pytest.importorskip("cma")
    ours, theirs = [], []
    for _, rows, scores in spaces_of(["R6", "R12"], target):
        budget = min(200, max(len(scores) // 4, 10))
        for seed in range(3):
            ours.append(scores[evolve(rows, scores.__getitem__, budget, seed).best] / scores.min() - 1)
            theirs.append(pycma(rows, scores, budget, seed).best_so_far[-1] / scores.min() - 1)
    assert np.mean(ours) < 0.05
    assert np.mean(ours) < np.mean(theirs) + 0.02


def ranking(bias: float) -> Ranking:
    """Two schemas, whose estimates are the scores of `expensive` plus an error of up to twice `bias`."""
    parts = []
    for lanes in (4, 8):
        candidates = product_of({"tile_rows": range(1, 9), "tile_columns": range(1, 13), "vectors": (1, 2, 3, 4), "order": (0, 1)})
        seconds = np.array([expensive(schedule_of(lanes, **{k: int(v[i]) for k, v in candidates.items()})) for i in range(length(candidates))])
        seconds = np.where(np.isfinite(seconds), seconds, 5) + bias * (candidates["vectors"] % 3)
        parts.append(part(partial(schedule_of, lanes), candidates, seconds))
    return ranking_of(*parts)


def expensive(schedule: Any) -> float:
    """The best is 3x8 pixels by 2 vectors of 8; an odd number of columns beyond 9 does not compile."""
    if schedule.tile_columns > 9 and schedule.tile_columns % 2:
        return math.nan
    wrong = (schedule.tile_rows - 3) ** 2 + (schedule.tile_columns - 8) ** 2 + (schedule.vectors - 2) ** 2 + (schedule.order == "m")
    return 1 + wrong / 10 + 0.3 * (schedule.lanes == 4)


def test_two_stages() -> None:
    cheap = ranking(bias=0.1)
    assert expensive(cheap.first().schedule) > 1
    found = rescored(cheap, expensive, 40)
    assert [entry.score for entry in found] == sorted(expensive(choice.schedule) for choice, _ in zip(cheap, range(40), strict=False))
    assert found[0].score == 1 and expensive(found[0].choice.schedule) == 1
    assert rescored(cheap, expensive, 1)[0].choice.schedule == cheap.first().schedule


def test_two_stages_leave_out_what_is_infeasible() -> None:
    assert rescored(ranking(0), lambda schedule: math.inf, 5) == []
    found = rescored(ranking(0), lambda schedule: math.nan if schedule.order == "m" else expensive(schedule), 20)
    assert found and all(entry.choice.schedule.order == "n" for entry in found)


def test_a_pool_of_processes_gives_the_same() -> None:
    cheap = ranking(bias=0.1)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert rescored(cheap, expensive, 20, pool) == rescored(cheap, expensive, 20)
