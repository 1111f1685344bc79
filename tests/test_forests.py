"""Forests as arrays: predictions, files, and files that are damaged or of something else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tilewright.errors import InvalidModel, UnsupportedOption
from tilewright.kernels.gpu.features import VERSION
from tilewright.selection.learned import forest as trees
from tilewright.selection.learned import hybrid


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


def test_models_of_another_record_are_refused(tmp_path: Path) -> None:
    table, goal = training_table(100)
    forest = trees.fit("random_forest", table, goal, None, NAMES, VERSION, {"n_estimators": 2})
    trees.save(forest, tmp_path / "f.npz", {"record": "hybrid", "target": "time", "overheads": {}})
    with pytest.raises(InvalidModel, match="another feature record"):
        hybrid.load(tmp_path / "f.npz")


def test_each_row_takes_its_own_way() -> None:
    """Numbers equal to a threshold go left and missing ones right; sums of any numbers of rows and trees are those of walks down single trees."""
    table, goal = training_table()
    forest = trees.fit("random_forest", table, goal, None, NAMES, 4, {"n_estimators": 4})
    thresholds = forest.threshold[forest.left != np.arange(len(forest.left))]
    rows = np.concatenate([table, np.resize(thresholds, (130, 5)), np.full((1, 5), np.inf), np.full((1, 5), np.nan)])
    rows[::7, 2] = np.nan

    def walked(row: np.ndarray, node: int) -> np.float32:
        while forest.left[node] != node:
            node = (forest.left if row[forest.feature[node]] <= forest.threshold[node] else forest.right)[node]
        return forest.value[node]

    for first, last in ((0, None), (1, 3), (2, 2)):
        roots = [int(root) for root in forest.roots[first:last]]
        expected = [(forest.base if first == 0 else 0.0) + sum(float(walked(row, root)) for root in roots) for row in rows]
        np.testing.assert_allclose(forest.predict(rows, first, last), expected, rtol=1e-12)
        np.testing.assert_allclose(forest.predict(rows[-1:], first, last), expected[-1:], rtol=1e-12)
