"""The learned part of the ranking on CPUs: where it applies, what it leaves alone, and the training that made it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilewright.cost import cpu_learned
from tilewright.cost.cpu_choice import modelled, rank
from tilewright.cost.cpu_learned import corrected, file_of, forest_of, record, table
from tilewright.cost.forest import fit, save
from tilewright.cost.ranking import Ranking
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.runtime.problems import convolution_problem

SAPPHIRE_RAPIDS = machine("xeon-sapphire-rapids")
LAYERS = ((64, 32, 20, 20, 3), (96, 64, 14, 14, 3), (32, 16, 28, 28, 3))


def both(sizes: tuple[int, ...], target: Machine, threads: int = 2) -> tuple[Ranking, Ranking]:
    """By the models alone, and as it chooses."""
    problem = convolution_problem(*sizes)  # type: ignore[arg-type]
    facts = (problem.region, problem.layouts, problem.values, problem.constants, target, threads)
    return modelled(*facts), rank(*facts)


@pytest.mark.parametrize("sizes", LAYERS)
def test_the_core_it_was_trained_for_is_corrected(sizes: tuple[int, ...]) -> None:
    before, after = both(sizes, SAPPHIRE_RAPIDS)
    assert after.predicted is not None
    assert (after.predicted > 0).all()
    assert not np.allclose(before.seconds, after.seconds)
    choice = after.first()
    assert choice.seconds == after.seconds.min()
    assert "learned correction" in choice.terms


def test_others_are_left_to_the_models() -> None:
    pointwise, filtered = (96, 64, 14, 14, 1), LAYERS[0]
    cases = ((filtered, machine("neoverse-n1"), 2), (filtered, machine("x86-avx2"), 2), (filtered, SAPPHIRE_RAPIDS, 3), (pointwise, SAPPHIRE_RAPIDS, 2))
    for sizes, target, threads in cases:
        before, after = both(sizes, target, threads)
        assert after.predicted is None
        assert (before.seconds == after.seconds).all()


def test_what_it_has_not_seen_is_no_part() -> None:
    before, _ = both(LAYERS[1], SAPPHIRE_RAPIDS)
    part = before.parts[0]
    assert record(part) is not None
    assert record(replace(part, problem=replace(part.problem, whole_rows=True))) is None
    assert record(replace(part, problem=replace(part.problem, images=4))) is None
    assert record(replace(part, problem=None)) is None


def test_a_forest_learns_what_the_models_are_off_by(tmp_path, monkeypatch) -> None:  # noqa: ANN001
    """Kernels that take twice the modelled time where a tile has few vectors."""
    monkeypatch.setattr(cpu_learned, "MODELS", tmp_path)
    rankings = [both(sizes, SAPPHIRE_RAPIDS)[0] for sizes in LAYERS]
    columns = [record(part) for ranking in rankings for part in ranking.parts[:1]]
    names = tuple(sorted({name for own in columns if own is not None for name in own}))
    features = np.concatenate([table(own, names) for own in columns if own is not None])
    few = features[:, names.index("axis vectors")] < 2
    forest = fit("gradient_boosting", features, few.astype(float), None, names, cpu_learned.VERSION, {"max_iter": 60, "learning_rate": 0.2})
    save(forest, file_of(SAPPHIRE_RAPIDS, 5))
    forest_of.cache_clear()
    found = corrected(rankings[1], SAPPHIRE_RAPIDS, 5)
    count = len(rankings[1].parts[0].estimate.seconds)
    expected = np.where(rankings[1].parts[0].rows["vectors"] < 2, 2.0, 1.0)
    assert np.allclose(found.seconds[:count] / rankings[1].seconds[:count], expected, rtol=0.05)
    forest_of.cache_clear()
