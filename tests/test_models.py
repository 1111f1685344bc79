"""Counts of data movement, features, forests as arrays, learned ranking, and the reproduction of published measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cnnopt import PUBLISHED, printed_cost
from bench.fitting import fit_overheads, without_failures
from tilewright.errors import InvalidModel, UnsupportedOption
from tilewright.hardware import machine as find_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.kernels.columns import length, take
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.counts import TileCounts, row_sectors
from tilewright.kernels.gpu.direct.counts import GENERATED, bank_conflicts, direct_registers, input_extent, variant_counts
from tilewright.kernels.gpu.direct.features import NUMBER as DIRECT
from tilewright.kernels.gpu.direct.schedule import RS, DirectFacts, DirectSchedule, S
from tilewright.kernels.gpu.features import RECORDS, VERSION, features
from tilewright.kernels.gpu.features import described as of_axes
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.features import NUMBER as CONTRACTION
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand, contraction_space
from tilewright.selection.learned import forest as trees
from tilewright.selection.learned import hybrid
from tilewright.selection.learned.hybrid import Recipe, Samples, loss_of_performance

V100 = find_machine("v100")
OVERHEADS = gpu_calibration(V100).counted
ROOT = Path(__file__).parent.parent
COMMON = ("black box", "hybrid", "detailed", "relative")
"""Feature records that need only counts."""


def columns_of(*schedules: DirectSchedule) -> dict[str, np.ndarray]:
    return {spec.name: np.array([getattr(one, spec.name) for one in schedules]) for spec in fields(DirectSchedule)}


def rs_schedule(k: int = 2, y: int = 2, x: int = 3, block_y: int = 2, block_x: int = 2, split: int = 1) -> DirectSchedule:
    return DirectSchedule(RS, k, y, x, 32, 1, 1, 1, block_y, block_x, channels=1, split=split, filters=1)


# ---- counts, against enumeration ----


def wavefronts(words: list[int]) -> int:
    """Wavefronts of a warp's words: the largest number of distinct words in one of 32 banks."""
    distinct = set(words)
    return max(sum(word % 32 == bank for word in distinct) for bank in range(32))


@pytest.mark.parametrize("stride, groups", [(1, 32), (2, 32), (3, 8), (4, 16), (8, 4), (17, 32), (32, 8), (6, 32)])
def test_bank_conflicts_count_the_fullest_bank(stride: int, groups: int) -> None:
    words = [stride * group for group in range(groups) for _ in range(32 // groups)]
    assert bank_conflicts(np.array([stride]), np.array([groups]))[0] == wavefronts(words)


@given(st.integers(1, 70))
def test_sectors_of_a_run_are_the_mean_over_its_starts(words: int) -> None:
    touched = [len({(start + word) // 8 for word in range(words)}) for start in range(8)]
    assert row_sectors(np.array([words]))[0] == pytest.approx(np.mean(touched))


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_input_extent_counts_the_points_that_outputs_reach(outputs: int, filter_size: int, stride: int, dilation: int) -> None:
    reached = [output * stride + tap * dilation for output in range(outputs) for tap in range(filter_size)]
    assert input_extent(*map(np.array, (outputs, filter_size, stride, dilation))) == max(reached) + 1


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rs_counts_against_a_walk_over_one_block(data: st.DataObject) -> None:
    draw = data.draw
    stride, size, split = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2]))
    k, y, x, block_y, block_x = (draw(st.integers(1, 3)) for _ in range(5))
    tiles_k, tiles_y, tiles_x, channels = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), 4
    facts = DirectFacts(1, 1, 32 * k * tiles_k, channels, y * block_y * tiles_y, x * block_x * tiles_x, size, size, stride, stride)
    candidates = columns_of(rs_schedule(k, y, x, block_y, block_x, split))
    counted = variant_counts(candidates, facts, V100, PUBLISHED)

    in_y, in_x = (y * block_y - 1) * stride + size, (x * block_x - 1) * stride + size
    # a warp's reads, thread by thread: all 32 threads are along K, so that they read the same word of the input
    shared, cached, multiply_adds = 0, 0, 0
    for i in range((y - 1) * stride + size):
        for j in range((x - 1) * stride + size):
            shared += wavefronts([i * in_x + j] * 32)
    for _ in range(k):
        for _tap in range(size * size):
            cached += 1  # 32 adjacent words
            multiply_adds += y * x
    assert counted.step_shared_loads[0] == shared
    assert counted.step_cached_loads[0] == cached
    assert counted.step_multiply_adds[0] == multiply_adds
    # sectors of the input tile and of the filters of one channel, over all starts of a row
    input_sectors = in_y * np.mean([len({(start + j) // 8 for j in range(in_x)}) for start in range(8)])
    filter_sectors = size * size * np.mean([len({(start + j) // 8 for j in range(32 * k)}) for start in range(8)])
    assert counted.step_sectors[0] == pytest.approx(input_sectors + filter_sectors)
    assert counted.blocks[0] == tiles_k * tiles_y * tiles_x * split
    assert counted.steps[0] == channels // split
    assert counted.warps[0] == block_y * block_x
    assert counted.step_fill[0] == sum(-(-in_x // 32) for _ in range(in_y))
    assert counted.shared_bytes[0] == 4 * (in_y * in_x + y * block_y * x * block_x * 33)
    # with whole tiles there are no multiply-adds for padding
    total = counted.blocks * counted.steps * counted.warps * 32 * counted.step_multiply_adds
    assert 2 * total[0] == counted.flops[0] == counted.padded_flops[0] == facts.flops
    stores = sum(-(-x * block_x // 32) for _ in range(32 * k) for _ in range(y * block_y))
    assert counted.store_instructions[0] == stores


@pytest.mark.parametrize("register_k, warp_k, register_x", [(2, 32, 5), (4, 8, 17), (8, 16, 3), (16, 2, 4), (64, 32, 1)])
def test_s_counts_against_a_warps_words(register_k: int, warp_k: int, register_x: int) -> None:
    warp_x = 32 // warp_k
    schedule = DirectSchedule(S, register_k, 1, register_x, warp_k, 1, warp_x, 1, 1, 1, channels=1, stages=2)
    facts = DirectFacts(1, 1, register_k * warp_k, 8, 4, register_x * warp_x, 3, 3)
    counted = variant_counts(columns_of(schedule), facts, V100, PUBLISHED)
    lanes = [(lane % warp_k, lane // warp_k) for lane in range(32)]
    expected = 0
    for _row in range(3):
        expected += sum(wavefronts([along_x * register_x + j for _, along_x in lanes]) for j in range(register_x + 2))
        for _tap in range(3):
            for pair in range(0, register_k, 2):
                # two words at a time: the largest count in a bank over the pairs' even words
                expected += wavefronts([along_k * register_k + pair for along_k, _ in lanes])
    assert counted.step_shared_loads[0] == expected
    assert counted.step_cached_loads[0] == 0
    assert counted.steps[0] == 8


def test_padding_is_counted() -> None:
    facts = DirectFacts(1, 1, 40, 8, 5, 7, 3, 3)
    counted = variant_counts(columns_of(rs_schedule(1, 2, 2, 1, 1)), facts, V100, PUBLISHED)
    assert counted.blocks[0] == 2 * 3 * 4
    assert counted.padded_flops[0] / counted.flops[0] == pytest.approx(64 * 6 * 8 / (40 * 5 * 7))


def test_registers_follow_equations_2_and_3() -> None:
    candidates = columns_of(rs_schedule(4, 2, 5), replace(rs_schedule(4, 1, 5), slice=S, filters=0))
    facts = DirectFacts(1, 1, 128, 8, 20, 20, 3, 3)
    assert list(direct_registers(candidates, facts, replace(PUBLISHED, spare_registers=0))) == [40 + 4 * 7 + 1, 20 + 7 + 1]


def test_a_problem_as_columns_is_as_one_problem() -> None:
    facts = DirectFacts(1, 1, 64, 16, 12, 12, 3, 3, bytes_read=1)
    candidates = columns_of(rs_schedule(), rs_schedule(1, 1, 6, 1, 1), rs_schedule(2, 3, 3, 2, 2, 4))
    as_columns = {spec.name: np.full(3, getattr(facts, spec.name)) for spec in fields(DirectFacts)}
    one, many = (variant_counts(candidates, given, V100, PUBLISHED) for given in (facts, as_columns))
    for spec in fields(TileCounts):
        np.testing.assert_array_equal(getattr(one, spec.name), getattr(many, spec.name), err_msg=spec.name)


def contraction_candidates() -> tuple[dict[str, np.ndarray], ContractionFacts]:
    facts = ContractionFacts(1, 784, 128, 1152, Operand("r", 4, 4 * 128 * 900, 2), Operand("own", 4, 4 * 128 * 1152), 4, 4 * 784 * 128)
    candidates, _ = contraction_space(facts, find_machine("h200"))
    return candidates, facts


def test_contraction_counts() -> None:
    candidates, facts = contraction_candidates()
    candidates = take(candidates, np.arange(0, length(candidates), 97))
    counted = contraction_counts(facts, candidates, find_machine("h200"))
    for position in range(0, len(counted), 11):
        m, n, k, split = (int(candidates[name][position]) for name in ("block_m", "block_n", "block_k", "split"))
        assert counted.blocks[position] == len(range(0, 784, m)) * len(range(0, 128, n)) * split
        steps = -(-len(range(0, 1152, k)) // split)
        assert counted.steps[position] == steps
        assert counted.padded_flops[position] == 2 * counted.blocks[position] * m * n * k * steps
        threads = (m // int(candidates["thread_m"][position])) * (n // int(candidates["thread_n"][position]))
        # a is read along r, block_k words per row; b along n
        assert counted.step_sectors[position] == m * max(k / 8, 1) + k * max(n / 8, 1)
        assert counted.step_fill[position] * 32 * 4 == pytest.approx((m + n) * k)
        assert counted.threads[position] == threads


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
    tiled, product = contraction_candidates()
    direct = (of_axes(DIRECT, candidates, facts), variant_counts(candidates, facts, machine, GENERATED))
    implicit = (of_axes(CONTRACTION, tiled, {}), contraction_counts(product, tiled, machine))
    for described, volumes in (direct, implicit):
        estimate = counted_cost(volumes, machine)
        assert all((term >= 0).all() for term in estimate.terms.values())
        assert (estimate.seconds > volumes.flops / machine.peak_flops["fp32"]).all()
        assert (printed_cost(volumes, machine).seconds > 0).all()
        for record in COMMON:
            names = RECORDS[record]
            table = features(record, described, volumes, machine, OVERHEADS)
            assert table.shape == (len(volumes), len(names)) and table.dtype == np.float32
            assert np.isfinite(table).all()


def test_records_have_no_name_twice() -> None:
    assert all(len(set(names)) == len(names) for names in RECORDS.values())


def test_relative_features_do_not_change_with_the_clock() -> None:
    """A machine that is twice as fast in everything has the same ranking: no feature depends on absolute seconds."""
    quick = replace(V100, clock_hz=2 * V100.clock_hz, memory_bandwidth=2 * V100.memory_bandwidth, launch_seconds=V100.launch_seconds / 2)
    quick = replace(quick, peak_flops={"fp32": 2 * V100.peak_flops["fp32"]})
    candidates, facts = some_rows()
    described = of_axes(DIRECT, candidates, facts)
    one, other = [features("relative", described, variant_counts(candidates, facts, machine, PUBLISHED), machine, OVERHEADS) for machine in (V100, quick)]
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# ---- forests ----


def training_table(rows: int = 600) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(11)
    table = random.normal(size=(rows, 5)).astype(np.float32)
    table[:, 3] = np.round(table[:, 3])  # ties
    return table, table[:, 0] * 2 + np.sin(3 * table[:, 1]) + table[:, 3] * (table[:, 2] > 0) + random.normal(size=rows) * 0.1


NAMES = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize("learner", trees.LEARNERS)
def test_arrays_predict_what_scikit_learn_predicts(learner: str) -> None:
    from sklearn import ensemble

    table, goal = training_table()
    weights = np.linspace(0.5, 2, len(goal))
    options = {"max_iter": 40} if learner == "gradient_boosting" else {"n_estimators": 15}
    forest = trees.fit(learner, table, goal, weights, NAMES, 7, options, seed=3)
    maker = {
        "gradient_boosting": lambda: ensemble.HistGradientBoostingRegressor(random_state=3, early_stopping=False, **options),
        "random_forest": lambda: ensemble.RandomForestRegressor(random_state=3, **options),
        "extra_trees": lambda: ensemble.ExtraTreesRegressor(random_state=3, **options),
    }[learner]
    peer = maker().fit(table, goal, sample_weight=weights)
    fresh = np.random.default_rng(12).normal(size=(5000, 5)).astype(np.float32)
    for inputs in (table, fresh, table[:1], table[:0]):
        expected = peer.predict(inputs) if len(inputs) else np.zeros(0)
        np.testing.assert_allclose(forest.predict(inputs), expected, rtol=1e-5, atol=1e-5)


def test_the_mean_of_forests_is_their_mean() -> None:
    table, goal = training_table(200)
    several = [trees.fit("gradient_boosting", table, goal, None, NAMES, 1, {"max_iter": 5, "max_features": 0.5}, seed) for seed in range(3)]
    together = trees.mean_of(several).predict(table)
    np.testing.assert_allclose(together, np.mean([one.predict(table) for one in several], 0), rtol=1e-5, atol=1e-6)


def test_a_stored_forest_is_the_same(tmp_path: Path) -> None:
    table, goal = training_table()
    forest = trees.fit("random_forest", table, goal, None, NAMES, 4, {"n_estimators": 5})
    trees.save(forest, tmp_path / "f.npz", {"note": "x"})
    again, more = trees.load(tmp_path / "f.npz")
    assert (again.names, again.version, more) == (NAMES, 4, {"note": "x"})
    np.testing.assert_array_equal(again.predict(table), forest.predict(table))


def test_features_of_another_width_are_refused() -> None:
    table, goal = training_table(100)
    forest = trees.fit("random_forest", table, goal, None, NAMES, 4, {"n_estimators": 2})
    with pytest.raises(ValueError, match="5 of them"):
        forest.predict(table[:, :4])


def test_an_unknown_learner_is_refused() -> None:
    table, goal = training_table(20)
    with pytest.raises(UnsupportedOption, match="no learner 'oracle'"):
        trees.fit("oracle", table, goal, None, NAMES, 1, {})


def stored(path: Path, **changes: object) -> Path:
    """A small valid forest's file, with some arrays replaced (None: left out)."""
    arrays: dict[str, object] = {
        "feature": np.array([1, 0, 0], np.int16), "threshold": np.array([0.5, 0, 0], np.float32), "left": np.array([1, 1, 2], np.int32),
        "right": np.array([2, 1, 2], np.int32), "value": np.array([0, 1, 2], np.float32), "roots": np.array([0], np.int32),
        "document": {"format": trees.FORMAT, "version": 1, "names": ["a", "b"], "base": 0.0, "more": {}},
    }  # fmt: skip
    arrays |= changes
    if isinstance(arrays["document"], dict):
        arrays["document"] = np.frombuffer(json.dumps(arrays["document"]).encode(), np.uint8)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]
    return path


def test_the_small_forest_is_valid(tmp_path: Path) -> None:
    forest, _ = trees.load(stored(tmp_path / "f.npz"))
    assert list(forest.predict(np.array([[0, 0.5], [0, 0.6]]))) == [1, 2]


DAMAGE: dict[str, dict[str, object]] = {
    "a child outside": {"right": np.array([9, 1, 2], np.int32)},
    "a negative child": {"left": np.array([-5, 1, 2], np.int32)},
    "a cycle": {"left": np.array([1, 0, 2], np.int32)},
    "one child of a leaf": {"right": np.array([2, 2, 2], np.int32)},
    "two parents": {"right": np.array([1, 1, 2], np.int32)},
    "a feature outside": {"feature": np.array([2, 0, 0], np.int16)},
    "a negative feature": {"feature": np.array([-1, 0, 0], np.int16)},
    "a root outside": {"roots": np.array([0, 3], np.int32)},
    "no root": {"roots": np.array([], np.int32)},
    "a value that is no number": {"value": np.array([0, np.nan, 2], np.float32)},
    "an endless threshold": {"threshold": np.array([np.inf, 0, 0], np.float32)},
    "arrays of two lengths": {"value": np.array([0, 1], np.float32)},
    "another type": {"left": np.array([1, 1, 2], np.int64)},
    "two dimensions": {"value": np.array([[0, 1, 2]], np.float32)},
    "a missing array": {"value": None},
    "objects": {"value": np.array([0, "x", None], object)},
    "another format": {"document": {"format": 99, "version": 1, "names": ["a", "b"], "base": 0.0, "more": {}}},
    "no document": {"document": np.frombuffer(b"not json", np.uint8)},
    "a list as document": {"document": np.frombuffer(b"[]", np.uint8)},
    "a base that is no number": {"document": {"format": 1, "version": 1, "names": ["a", "b"], "base": "x", "more": {}}},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"f\.npz.*train it again"):
        trees.load(stored(tmp_path / "f.npz", **DAMAGE[damage]))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"\x80\x04K\x01."])
def test_files_that_are_no_forests_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.npz").write_bytes(content)
    with pytest.raises(InvalidModel):
        trees.load(tmp_path / "f.npz")
    with pytest.raises(InvalidModel):
        trees.load(tmp_path / "absent.npz")


def test_cut_files_are_refused(tmp_path: Path) -> None:
    whole = stored(tmp_path / "f.npz").read_bytes()
    for share in (0.2, 0.5, 0.9):
        (tmp_path / "f.npz").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(InvalidModel):
            trees.load(tmp_path / "f.npz")


def test_a_file_that_would_fill_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "f.npz")
    monkeypatch.setattr(trees, "MAX_STORED_BYTES", 100)
    with pytest.raises(InvalidModel, match="unpack"):
        trees.load(tmp_path / "f.npz")


# ---- learned ranking ----


def synthetic(count: int = 1200) -> Samples:
    candidates, facts = some_rows(count)
    volumes = variant_counts(candidates, facts, V100, PUBLISHED)
    seconds = counted_cost(volumes, V100).seconds * (1 + 0.3 * (candidates["register_k"] == 8) + 0.1 * (candidates["block_x"] == 2))
    numbers = np.unique(np.stack([facts["outputs"], facts["height"]]), axis=1, return_inverse=True)[1].ravel()
    return Samples(of_axes(DIRECT, candidates, facts), volumes, seconds, numbers)


SMALL = {"max_iter": 60, "min_samples_leaf": 5}


@pytest.mark.parametrize("target", hybrid.TARGETS)
@pytest.mark.parametrize("record", COMMON)
def test_training_stores_and_predicts(target: str, record: str, tmp_path: Path) -> None:
    samples = synthetic()
    learned = hybrid.train(samples, V100, Recipe(record=record, target=target, favour=1.0, options=SMALL), OVERHEADS)
    predicted = learned.seconds(samples.described, samples.counts, V100)
    assert np.corrcoef(np.log(predicted), np.log(samples.seconds))[0, 1] > 0.95
    learned.save(tmp_path / "model.npz")
    again = hybrid.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.seconds(samples.described, samples.counts, V100), predicted)


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


def test_models_of_another_record_are_refused(tmp_path: Path) -> None:
    table, goal = training_table(100)
    forest = trees.fit("random_forest", table, goal, None, NAMES, VERSION, {"n_estimators": 2})
    trees.save(forest, tmp_path / "f.npz", {"record": "hybrid", "target": "time", "overheads": {}})
    with pytest.raises(InvalidModel, match="another feature record"):
        hybrid.load(tmp_path / "f.npz")


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


# ---- published measurements ----


def write_folder(folder: Path) -> None:
    """A folder in the published format: a few problems, times by a rule, and some failed launches."""
    random = np.random.default_rng(3)
    header = "K,H,W,C,R,TK,TH,TW,BK,BH,BW,CMult,Time"

    def lines(k: int, h: int, c: int, r: int) -> list[str]:
        made = []
        for tk in (1, 2, 4):
            for tw in (1, 2, 7, 14):
                for bh in (1, 2):
                    milliseconds = 2 * k * h * h * c * r * r / 5e9 * (1 + 0.3 * tk + 2 / tw + 0.1 * bh) + 0.02
                    made.append(f"{k}, {h}, {h}, {c}, {r}, {tk}, 1, {tw}, 32, {bh}, 1, 1, {milliseconds:.6f}")
        return made

    (folder / "rs").mkdir(parents=True)
    (folder / "s").mkdir()
    (folder / "rs_stride2").mkdir()
    training = [header]
    for _ in range(12):
        training += lines(int(random.choice([128, 256])), int(random.choice([14, 28, 56])), int(random.choice([32, 64, 96, 128])), int(random.choice([1, 3])))
        training.append("Error: too many resources requested for launch")
    (folder / "rs" / "train.csv").write_text("\n".join(training) + "\n")
    for name, sizes in (("rs/layer_128x42x42_64_3", (128, 42, 64, 3)), ("rs_stride2/layer_128x14x14_96_3", (128, 14, 96, 3))):
        (folder / f"{name}.csv").write_text("\n".join([header, *lines(*sizes)]) + "\n")
    s_lines = [f"128,42,42,64,3,1,{tw},{tk},1,2,16,1,{42 // tw // 2},{bk},{0.2 + 0.01 * tk + 0.5 / tw}" for tw in (3, 7, 21) for tk in (2, 4) for bk in (1, 2)]
    (folder / "s" / "layer_128x42x42_64_3.csv").write_text("\n".join(["K,H,W,C,R,TH,TW,TK,WH,WW,WK,BH,BW,BK,Time", *s_lines]) + "\n")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_published_data_on_a_small_folder(tmp_path: Path) -> None:
    from bench.published_data import RECIPES, reproduce

    write_folder(tmp_path / "data")
    settings, results = reproduce(tmp_path / "data", find_machine("rtx2080ti"))
    keys = {"lop@1", "lop@10", "lop@30", "trials_95", "trials_99", "trials_100"}
    models = ["analytical as printed", "analytical", *RECIPES]
    layers = ["128x42x42_64_3", "128x14x14_96_3"]
    assert [(entry["model"], entry["layer"]) for entry in results] == [(model, layer) for model in models for layer in (*layers, "all")]
    for model in models:
        *figures, mean = (entry for entry in results if entry["model"] == model)
        for entry in figures:
            assert entry["lop@1"] >= entry["lop@10"] >= entry["lop@30"] >= 0
            assert 1 <= entry["trials_95"] <= entry["trials_99"] <= entry["trials_100"]
        for key in keys:
            assert mean[key] == pytest.approx(np.mean([entry[key] for entry in figures]))
    both = next(entry for entry in results if entry["model"] == "detailed" and entry["layer"] == "128x42x42_64_3")
    assert both["rs"]["trials_100"] <= 24 and both["s"]["trials_100"] <= 12
    assert settings["lines skipped"]["rs/train.csv"] == 13


def test_an_error_between_the_kernels_shows_beside_each_other_alone(tmp_path: Path) -> None:
    from bench.published_data import held_out, read

    random = np.random.default_rng(1)
    splits, tiles = (1, 2, 4, 8), ((1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (1, 7), (2, 7), (7, 7), (2, 14), (1, 14), (7, 14), (14, 14))
    rs = [f"128,14,14,64,3,1,{y},{x},32,1,1,{split},{random.uniform(0.1, 0.5)}" for split in splits for y, x in tiles]
    s = [f"64,28,28,32,3,1,{x},{k},1,1,32,{y},1,1,{random.uniform(0.1, 0.5)}" for x in (1, 2, 4, 7) for k in (1, 2) for y in (1, 2)]
    (tmp_path / "rs.csv").write_text("\n".join(rs))
    (tmp_path / "s.csv").write_text("\n".join(s))
    samples = hybrid.join([read(tmp_path / f"{kind}.csv", kind, 1, V100).samples for kind in ("rs", "s")])
    exact = held_out(samples, samples.seconds)
    assert {kind: found["problems"] for kind, found in exact.items()} == {"all": 1, "like the layers": 1, "whole space": 1, "S beside RS": 1}
    assert all(found["lop@1"] == 0 for found in exact.values())
    of_s = samples.described["tile slice"] == S
    apart = held_out(samples, samples.seconds * np.where(of_s, 2.0, 1.0))
    assert {kind for kind, found in apart.items() if found["lop@1"] > 0} == {"S beside RS"}
    within = held_out(samples, np.where(of_s, 1.0, 1 / samples.seconds))
    assert within["all"]["lop@1"] > 0 and within["whole space"]["lop@1"] > 0


def broken(folder: Path, name: str) -> None:
    write_folder(folder)
    layer = folder / "rs" / "layer_128x42x42_64_3.csv"
    if name == "no training":
        (folder / "rs" / "train.csv").unlink()
    elif name == "no layers":
        for path in folder.glob("*/layer_*.csv"):
            path.unlink()
    elif name == "too few numbers":
        layer.write_text("1,2,3\n")
    elif name == "a negative time":
        layer.write_text("128,42,42,64,3,1,1,1,32,1,1,1,-0.5\n")
    elif name == "half a tile":
        layer.write_text("128,42,42,64,3,1.5,1,1,32,1,1,1,0.5\n")
    elif name == "no number":
        layer.write_text("128,42,42,64,3,1,1,1,32,1,1,1,nan\n")
    elif name == "an empty file":
        layer.write_text("")


@pytest.mark.parametrize(
    "name, message",
    [
        ("no training", "no training file"), ("no layers", "no layer"), ("too few numbers", "line 1: not a measurement"),
        ("a negative time", "line 1"), ("half a tile", "line 1"), ("no number", "line 1"), ("an empty file", "no measurement"),
    ],
)  # fmt: skip
def test_published_data_refuses_other_folders(name: str, message: str, tmp_path: Path) -> None:
    from bench.published_data import read_folder
    from tilewright.errors import InvalidInput

    broken(tmp_path / "data", name)
    with pytest.raises(InvalidInput, match=message):
        read_folder(tmp_path / "data", V100)


def test_published_data_says_what_is_wrong(tmp_path: Path) -> None:
    absent = run_command("-m", "bench.published_data", str(tmp_path / "absent"))
    assert absent.returncode != 0 and "is no folder" in absent.stderr and "Traceback" not in absent.stderr
    write_folder(tmp_path / "data")
    unknown = run_command("-m", "bench.published_data", str(tmp_path / "data"), "--machine", "v1000")
    assert unknown.returncode != 0 and "v1000" in unknown.stderr and "Traceback" not in unknown.stderr


@pytest.fixture
def published(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--published-data")
    if not folder:
        pytest.skip("needs the published measurements: --published-data FOLDER")
    return Path(folder)


def test_the_published_measurements_are_as_counted(published: Path) -> None:
    from bench.published_data import evaluate, read_folder

    training, layers, skipped = read_folder(published, V100)
    assert len(training) > 70_000 and len(layers) == 20 and skipped["rs/train.csv"] == 148
    for samples in (training, *(samples for kinds in layers.values() for samples in kinds.values())):
        # only whole tiles: the meaning of the columns
        np.testing.assert_allclose(samples.counts.padded_flops, samples.counts.flops)
        product = np.prod([samples.described[f"tile warp_{axis}"] for axis in "kyx"], 0)
        assert (product == 32).all()
    printed = {entry["layer"]: entry for entry in evaluate(layers, lambda samples: printed_cost(samples.counts, V100).seconds)}
    # table 9, analytical on a V100: R12, D2, D3, D5 and D6
    expected = {"512x7x7_512_3": 5.4, "32x108x108_32_3": 15.8, "64x54x54_32_3": 31.9, "128x27x27_64_3": 50.0, "128x27x27_128_3": 6.3}
    assert {name: round(100 * printed[name]["lop@30"], 1) for name in expected} == expected
    *_, ours = evaluate(layers, lambda samples: counted_cost(samples.counts, V100).seconds)
    assert ours["layer"] == "all" and ours["lop@30"] < 0.01
