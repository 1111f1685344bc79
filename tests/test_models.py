"""Estimates, features and learned ranking of GPU candidates."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cnnopt import PUBLISHED, printed_cost
from bench.fitting import fit_overheads, without_failures
from tilewright.errors import InvalidModel
from tilewright.hardware import machine as find_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.direct.counts import GENERATED, variant_counts
from tilewright.kernels.gpu.direct.features import NUMBER as DIRECT
from tilewright.kernels.gpu.direct.schedule import RS, S
from tilewright.kernels.gpu.features import RECORDS, features
from tilewright.kernels.gpu.features import described as of_axes
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.features import NUMBER as CONTRACTION
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand, contraction_space
from tilewright.selection.learned import forest as trees
from tilewright.selection.learned import hybrid
from tilewright.selection.learned.hybrid import Recipe, Samples, loss_of_performance

V100 = find_machine("v100")
OVERHEADS = gpu_calibration(V100).counted
COMMON = ("black box", "hybrid", "detailed", "relative")
"""Feature records that need only counts."""


# ---- analytical model and features ----


def some_rows(count: int = 200) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random direct schedules and problems."""
    random = np.random.default_rng(5)

    def pick(*values: int) -> np.ndarray:
        return random.choice(values, count)

    slices = pick(RS, S)
    warp_k = np.where(slices == RS, 32, pick(4, 8, 16))
    rows = {
        "slice": slices, "register_k": pick(2, 4, 8), "register_y": pick(1, 2), "register_x": pick(1, 3, 7), "warp_k": warp_k, "warp_y": pick(1, 1),
        "warp_x": 32 // warp_k, "block_k": pick(1, 2), "block_y": pick(1, 2, 4), "block_x": pick(1, 2), "channels": pick(1, 1), "split": pick(1, 2, 4),
        "stages": np.where(slices == RS, 1, 2), "filters": np.where(slices == RS, 1, 0),
    }  # fmt: skip
    problem = {
        "outputs": pick(32, 128, 256), "height": pick(7, 14, 56), "width": pick(7, 14, 56), "channels": pick(3, 64, 256), "filter_y": pick(1, 3),
        "filter_x": pick(1, 3), "stride_y": pick(1, 2), "stride_x": pick(1, 2), "images": pick(1, 1), "groups": pick(1, 1),
    }  # fmt: skip
    return rows, problem


@pytest.mark.parametrize("target", ["v100", "rtx2080ti", "h200"])
def test_times_and_features_are_finite(target: str) -> None:
    machine = find_machine(target)
    candidates, facts = some_rows()
    product = ContractionFacts(1, 784, 128, 1152, Operand("r", 4, 4 * 128 * 900, 2), Operand("own", 4, 4 * 128 * 1152), 4, 4 * 784 * 128)
    tiled, _ = contraction_space(product, find_machine("h200"))
    direct = (of_axes(DIRECT, candidates, facts), variant_counts(candidates, facts, machine, GENERATED))
    implicit = (of_axes(CONTRACTION, tiled, {}), contraction_counts(product, tiled, machine))
    for described, volumes in (direct, implicit):
        estimate = counted_cost(volumes, machine)
        assert all((term >= 0).all() for term in estimate.terms.values())
        assert (estimate.seconds > volumes.flops / machine.peak_flops["fp32"]).all()
        assert (printed_cost(volumes, machine).seconds > 0).all()
        for record in COMMON:
            names = RECORDS[record].names
            table = features(record, described, volumes, machine, OVERHEADS)
            assert table.shape == (len(volumes), len(names)) and table.dtype == np.float32
            assert np.isfinite(table).all()


def test_records_have_no_name_twice() -> None:
    assert all(len(set(record.names)) == len(record.names) for record in RECORDS.values())


def test_relative_features_do_not_change_with_the_clock() -> None:
    """A machine that is twice as fast in everything has the same ranking: no feature depends on absolute seconds."""
    quick = replace(V100, clock_hz=2 * V100.clock_hz, memory_bandwidth=2 * V100.memory_bandwidth, launch_seconds=V100.launch_seconds / 2)
    quick = replace(quick, peak_flops={"fp32": 2 * V100.peak_flops["fp32"]})
    candidates, facts = some_rows()
    described = of_axes(DIRECT, candidates, facts)
    one, other = [
        features("relative", described, variant_counts(candidates, facts, machine, PUBLISHED), machine, OVERHEADS) for machine in (V100, quick)
    ]
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# ---- learned ranking ----


def synthetic(count: int = 1200) -> Samples:
    candidates, facts = some_rows(count)
    volumes = variant_counts(candidates, facts, V100, PUBLISHED)
    seconds = counted_cost(volumes, V100).seconds * (1 + 0.3 * (candidates["register_k"] == 8) + 0.1 * (candidates["block_x"] == 2))
    numbers = np.unique(np.stack([facts["outputs"], facts["height"]]), axis=1, return_inverse=True)[1].ravel()
    return Samples(of_axes(DIRECT, candidates, facts), volumes, seconds, numbers)


SMALL = {"max_iter": 60, "min_samples_leaf": 5}


@pytest.mark.in_turns
@pytest.mark.parametrize("target", hybrid.TARGETS)
@pytest.mark.parametrize("record", COMMON)
def test_training_stores_and_predicts(target: str, record: str, tmp_path: Path) -> None:
    samples = synthetic()
    learned = hybrid.train(samples, V100, Recipe(record=record, target=target, favour=1.0, options=SMALL), OVERHEADS)
    predicted = learned.seconds(samples.described, samples.counts, V100)
    assert target == "combined" or np.corrcoef(np.log(predicted), np.log(samples.seconds))[0, 1] > 0.95  # which is of one problem
    learned.save(tmp_path / "model.npz")
    again = hybrid.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.seconds(samples.described, samples.counts, V100), predicted)


def test_a_combined_model_is_the_mean_of_two_forests_at_the_scale_of_the_correction() -> None:
    """Also where stages of the correction leave candidates out."""
    samples = synthetic()
    combined, correction = (hybrid.train(samples, V100, Recipe(target=target, options=SMALL), OVERHEADS) for target in ("combined", "correction"))
    one = samples.where(samples.problem == np.bincount(samples.problem).argmax())
    analytical = one.expected(V100, OVERHEADS)
    found, corrected = (np.log(model.predicted(one.described, one.counts, V100, analytical)) for model in (combined, correction))
    assert combined.order is not None
    table = features(combined.record, one.described, one.counts, V100, OVERHEADS)
    mean = (corrected + combined.forest.predict(table, combined.order)) / 2
    np.testing.assert_allclose(found - found[0], mean - mean[0], atol=1e-9)
    assert found.min() == pytest.approx(corrected.min())
    for stages in (((30, 18),), ((30, 20), (90, 18))):  # the second asks for more trees than the first forest has
        staged = np.log(combined.predicted(one.described, one.counts, V100, analytical, stages))
        left = ~np.isnan(staged)
        assert left.sum() == 18
        np.testing.assert_allclose(staged[left] - staged[left].min(), mean[left] - mean[left].min(), atol=1e-9)


@pytest.mark.parametrize("more", [{}, {"order": 0}, {"order": 120}, {"order": True}, {"order": "60"}])
def test_models_that_do_not_say_what_gives_the_order_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    learned = hybrid.train(synthetic(), V100, Recipe(target="combined", options=SMALL), OVERHEADS)
    assert len(learned.forest.roots) == 120 and learned.order == 60
    path = tmp_path / "model.npz"
    trees.save(learned.forest, path, {"record": learned.record, "target": "combined", "overheads": asdict(OVERHEADS), **more})
    with pytest.raises(InvalidModel, match="120 trees"):
        hybrid.load(path)


def test_a_correction_learns_what_the_analytical_model_misses() -> None:
    samples = synthetic()
    predicted = hybrid.out_of_fold(samples, V100, Recipe(options=SMALL), OVERHEADS)
    before = np.abs(np.log(counted_cost(samples.counts, V100).seconds / samples.seconds)).mean()
    assert np.abs(np.log(predicted / samples.seconds)).mean() < 0.3 * before


def test_large_spaces_keep_the_analytical_models_best(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = synthetic()
    learned = hybrid.train(samples, V100, Recipe(options=SMALL), OVERHEADS)
    whole = learned.seconds(samples.described, samples.counts, V100)
    monkeypatch.setattr(hybrid, "LEARNED_ROWS", 300)
    part = learned.seconds(samples.described, samples.counts, V100)
    kept = np.argsort(counted_cost(samples.counts, V100).seconds)[:300]
    np.testing.assert_array_equal(part[kept], whole[kept])
    others = np.setdiff1d(np.arange(len(samples)), kept)
    assert part[others].min() > part[kept].max()


def test_folds_keep_problems_together() -> None:
    problem = np.repeat(np.arange(50), 7)
    folds = hybrid.folds_of(problem, 5)
    assert all(len(set(folds[problem == one])) == 1 for one in range(50))
    assert {int(fold) for fold in folds} == set(range(5))


def test_impossible_measurements_are_dropped() -> None:
    samples = synthetic()
    wrong = samples.seconds.copy()
    wrong[10] = samples.counts.flops[10] / V100.peak_flops["fp32"] / 2
    wrong[20] = samples.seconds[20] / 8
    kept = without_failures(replace(samples, seconds=wrong), V100, OVERHEADS)
    assert wrong[10] not in kept.seconds and wrong[20] not in kept.seconds
    assert len(kept) > 0.98 * len(samples)


def test_fitted_constants_recover_a_change() -> None:
    samples = synthetic(3000)
    told = replace(OVERHEADS, step_instructions=OVERHEADS.step_instructions * 2, latency=OVERHEADS.latency * 1.5)
    samples = replace(samples, seconds=counted_cost(samples.counts, V100, told).seconds)
    fitted = fit_overheads(samples, V100, OVERHEADS, each=200, prior=1e-3)

    def error(constants: object) -> float:
        return float(np.abs(np.log(counted_cost(samples.counts, V100, constants).seconds / samples.seconds)).mean())  # type: ignore[arg-type]

    assert error(fitted) < 0.1 * error(OVERHEADS)


def test_loss_of_performance_by_hand() -> None:
    seconds, predicted = np.array([4.0, 2.0, 3.0, 2.2]), np.array([1.0, 4.0, 2.0, 3.0])  # order: 4, 3, 2.2, 2
    assert [loss_of_performance(seconds, predicted, tried) for tried in (1, 2, 3, 4, 30)] == pytest.approx([1.0, 0.5, 0.1, 0.0, 0.0])


def test_equal_predictions_keep_the_order_of_the_space() -> None:
    assert loss_of_performance(np.array([2.0, 1.0]), np.zeros(2), 1) == 1.0
