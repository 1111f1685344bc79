"""Random layers and samples of schedules: within their bounds, reproducible, and none of the layers on which models are evaluated."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bench.layers import LAYERS
from tests.bare_schemas import part, ranking_of
from tilewright.selection.ranking import Ranking
from tilewright.tuning.sampling import JUDGED, LEAST_FLOPS, MOST_FLOPS, evenly, has_small_factors, random_layers, towards_the_best


def layers(seed: int, count: int = 400) -> list[dict[str, Any]]:
    return list(itertools.islice(random_layers(seed, JUDGED), count))


def test_random_layers_keep_their_bounds() -> None:
    found = layers(3)
    for layer in found:
        work = 2.0 * layer["outputs"] * layer["channels"] * layer["height"] * layer["width"] * layer["filter"] ** 2
        assert LEAST_FLOPS <= work <= MOST_FLOPS
        assert has_small_factors(layer["height"]) and has_small_factors(layer["width"])
        assert layer["channels"] == 3 or 16 <= layer["channels"] <= 1024
        assert 16 <= layer["outputs"] <= 1024
    assert {layer["filter"] for layer in found} == {1, 3, 5, 7}
    assert {layer["stride"] for layer in found} == {1, 2}
    assert len({layer["name"] for layer in found}) == len(found)


def test_random_layers_are_those_of_their_seed() -> None:
    assert layers(5, 50) == layers(5, 50)
    assert layers(5, 50) != layers(6, 50)


def test_judged_layers_are_the_benchmark_and_never_drawn() -> None:
    assert set(LAYERS.values()) == JUDGED
    first = layers(3, 1)[0]
    key = tuple(first[name] for name in ("outputs", "channels", "height", "filter", "stride"))
    again = list(itertools.islice(random_layers(3, {key}), 5))
    assert first not in again and again == layers(3, 6)[1:]


def ranking(sizes: tuple[int, ...]) -> Ranking:
    generator = np.random.default_rng(0)
    parts = []
    for size in sizes:
        parts.append(part(dict, {"number": np.arange(size)}, generator.uniform(1, 2, size)))
    return ranking_of(*parts)


def test_evenly_takes_as_many_of_each_schema() -> None:
    space = ranking((1000, 5, 400))
    positions = evenly(space, 65, seed=1)
    assert len(set(positions)) == 65
    counts = np.histogram(positions, [0, 1000, 1005, 1405])[0]
    assert counts.tolist() == [30, 5, 30]


def test_towards_the_best_prefers_fast_candidates_of_each_schema() -> None:
    space = ranking((2000, 2000))
    positions = towards_the_best(space, 100, seed=2)
    assert len(set(positions)) == 100
    ranks = np.concatenate([np.argsort(np.argsort(part.estimate.seconds)) for part in space.parts])
    assert np.median(ranks[positions]) < 200 < ranks[positions].max()
    assert 30 < (positions < 2000).sum() < 70
