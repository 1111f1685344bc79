"""The online-learned search: every configuration once, deterministic for a seed, no access to times before a trial, better than random order."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bench.search_peer import features_of, judge, loss_of_performance, main, proposed_batches, search, trials_to, tried
from tilewright.hardware import machine
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.features import COUNTS
from tilewright.tuning import dataset
from tilewright.tuning.collecting import ranking_of


def landscape(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A pool drawn from a grid of four axes of which two interact, with noise; a fifth axis is absent in half of the pool."""
    generator = np.random.default_rng(seed)
    grid = np.array(list(product(range(8), range(8), range(6), range(3))), dtype=float)
    grid = grid[generator.permutation(len(grid))[:500]]
    far = (grid[:, 0] - 5) ** 2 + (grid[:, 1] - grid[:, 0] / 2) ** 2 + 2 * np.abs(grid[:, 2] - 2) + np.array([3, 0, 1])[grid[:, 3].astype(int)]
    extra = np.where(np.arange(500) % 2, np.nan, generator.integers(3, size=500))
    return np.column_stack([grid, extra]), 1e-5 * (1 + far) * generator.normal(1, 0.02, 500)


def test_every_configuration_is_tried_once() -> None:
    features, seconds = landscape()
    order = search(features, seconds, batch=50, seed=3)
    assert sorted(order.tolist()) == list(range(500))
    assert (search(features, seconds, batch=50, seed=3) == order).all()
    assert (search(features, seconds, batch=50, seed=4) != order).any()
    assert (search(features, seconds, batch=50, seed=3, trials=70) == order[:70]).all()


def test_it_beats_chance_by_far() -> None:
    features, seconds = landscape()
    learned = np.mean([trials_to(search(features, seconds, seed=seed, trials=150), seconds, 0.05) for seed in range(4)])
    chance = np.mean([trials_to(np.random.default_rng(seed).permutation(500), seconds, 0.05) for seed in range(50)])
    assert learned < chance / 2


def test_times_are_not_seen_before_the_trial() -> None:
    features, seconds = landscape()
    walk = tried(features, seconds, batch=16, seed=0)
    first = [next(walk) for _ in range(48)]
    changed = seconds.copy()
    others = np.setdiff1d(np.arange(500), first)
    changed[others] = changed[others][::-1] * 3
    assert search(features, changed, batch=16, seed=0, trials=48).tolist() == first


def test_measures_of_an_order() -> None:
    seconds = np.array([2.0, 1.0, 1.04, 4.0])
    order = [3, 0, 2, 1]
    assert loss_of_performance(order, seconds, 1) == 3 and loss_of_performance(order, seconds, 3) == pytest.approx(0.04)
    assert [trials_to(order, seconds, loss) for loss in (1.0, 0.05, 0.0)] == [2, 3, 4]
    assert trials_to(order[:2], seconds, 0.05) == 3


def test_judging_a_pool() -> None:
    features, seconds = landscape()
    found = judge(features, seconds, seeds=2, trials=120)
    for row in found.values():
        assert 1 <= row["trials_95"] <= row["trials_99"] <= 120 and row["lop@1"] >= row["lop@10"] >= row["lop@30"] >= 0
    assert found["online-learned search"]["trials_95"] < found["random order"]["trials_95"]


def test_the_command_judges_the_layers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = {"name": "tiny", "outputs": 64, "channels": 16, "height": 7, "width": 7, "filter": 1, "stride": 1}
    ranking = ranking_of(dataset.layer_problem(layer), machine("h200"))
    schemas = {}
    for part in ranking.parts:
        count = min(20, length(part.candidates))
        measures = {"seconds": part.estimate.seconds[:count], "spread": np.zeros(count), "rounds": np.ones(count, dtype=int)}
        schemas[part.schema.schedule.__name__] = {**{name: column[:count] for name, column in part.candidates.items()}, **measures}
    dataset.write(tmp_path / "layers.jsonl.gz", [dataset.MeasuredLayer(layer, "h200", schemas)])
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "layers.jsonl.gz"), "--seeds=1", "--trials=40", "--name=found"])
    main()
    rows = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [(row["layer"], row["way"]) for row in rows[::2]] == [("all", "online-learned search"), ("tiny", "online-learned search")]
    assert rows[2]["candidates"] == sum(len(columns["seconds"]) for columns in schemas.values())


def test_features_are_axes_and_counts_that_a_schema_has() -> None:
    parts = ranking_of(dataset.layer_problem({"name": "convolution batch=1 channels=32 outputs=64 size=14x14 filter=3x3"}), machine("h200")).parts
    features = features_of(parts)
    axes = {name for part in parts for name in part.candidates}
    assert features.shape == (sum(length(part.candidates) for part in parts), len(axes) + len(COUNTS))
    assert np.isnan(features).any() and np.isfinite(features[:, -len(COUNTS) :]).any(axis=1).all()


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="features"):
        search(np.zeros((3, 2)), np.ones(2))
    with pytest.raises(ValueError, match="positive"):
        search(np.zeros((2, 2)), np.array([1.0, 0.0]))


def test_batches_are_those_of_the_search_over_a_pool() -> None:
    """The proposals for measuring are the same as those of the search over a pool of known times."""
    generator = np.random.default_rng(5)
    features = generator.integers(0, 4, (90, 3)).astype(float)
    seconds = 1 + features.sum(1) + generator.random(90)
    proposals = proposed_batches(features, 8, 3)
    chosen, order = next(proposals), []
    while True:
        order += chosen.tolist()
        try:
            chosen = proposals.send(seconds[chosen])
        except StopIteration:
            break
    assert order == search(features, seconds, 8, 3).tolist() and sorted(order) == list(range(90))


def test_no_configuration_measured_so_far_may_have_a_column() -> None:
    features = np.column_stack([np.arange(60.0), np.where(np.arange(60) == 59, 1.0, np.nan)])
    assert sorted(search(features, np.arange(60.0) + 1)) == list(range(60))


def test_failures_are_slow() -> None:
    features = np.arange(60.0)[:, None]
    proposals = proposed_batches(features, 10, 0)
    chosen = next(proposals)
    for _ in range(4):
        chosen = proposals.send(np.where(features[chosen, 0] % 2 == 1, np.inf, 1 + features[chosen, 0]))
        assert len(chosen) == 10
