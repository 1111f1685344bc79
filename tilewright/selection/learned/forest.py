"""Forests of regression trees as plain arrays: trained by scikit-learn, stored without pickle, evaluated with numpy over whole columns.

The nodes of a tree are contiguous, with children after their parent. A leaf is its own child, so every row takes as many steps as the height of the
tree, without a check for leaves. Only `fit` imports scikit-learn (the extra `train`).
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tilewright.errors import InvalidModel, UnsupportedOption
from tilewright.files import json_of, reading, regular

FORMAT = 1
"""Format version of stored files; others are rejected."""
MAX_STORED_BYTES = 256 * 1024 * 1024
"""Maximum unpacked size of a stored forest."""
MAX_HEIGHT = 64
BLOCK_ROWS = 4096
"""Rows evaluated at once: few enough that their features and nodes stay in a core's cache."""
DTYPES: Mapping[str, type] = {
    "feature": np.int16, "threshold": np.float32, "left": np.int32, "right": np.int32, "value": np.float32, "roots": np.int32,
}  # fmt: skip
LEARNERS = ("random_forest", "extra_trees", "gradient_boosting")


@dataclass(frozen=True)
class Forest:
    """A forest: the prediction for a row is `base` plus the sum over trees of the value of the leaf that it reaches. A row goes from a node to `left`
    if its `feature` is at most `threshold`, otherwise to `right`. Nodes are numbered consecutively over all trees; `roots` are the first nodes of the
    trees. `names`, `version`: the feature record that it was trained with."""

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    roots: np.ndarray
    heights: np.ndarray
    base: float
    names: tuple[str, ...]
    version: int

    @cached_property
    def _children(self) -> np.ndarray:
        """[2 * nodes]: the right child of node n is at 2n, the left child at 2n + 1."""
        return np.stack([self.right, self.left], 1).astype(np.intp).ravel()

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        """Predictions, [rows] float64, for [rows, len(names)] features, which are converted to float32. Sums only trees `first` to `last` - 1, plus
        the base if `first` is 0, so that the results of consecutive ranges add up to the prediction.

        Raises:
            ValueError: if the features have another shape.
        """
        if features.ndim != 2 or features.shape[1] != len(self.names):
            raise ValueError(f"features have the shape {features.shape}, and the forest was trained with {len(self.names)} of them")
        roots, heights = self.roots[first:last].astype(np.intp), self.heights[first:last]
        result = np.full(len(features), 0.0 if first else self.base)
        for start in range(0, len(features), BLOCK_ROWS):
            block = features[start : start + BLOCK_ROWS]
            count = len(block)
            # features are outermost, so that rows that test the same feature find its values adjacent
            flat = np.asarray(block, dtype=np.float32).T.ravel()
            offset = self.feature.astype(np.intp) * count
            together = max(1, BLOCK_ROWS // count)  # several trees at once if there are few rows
            for tree in range(0, len(roots), together):
                group = roots[tree : tree + together]
                row = np.tile(np.arange(count), len(group))
                node = np.repeat(group, count)
                for _ in range(heights[tree : tree + together].max(initial=0)):
                    # all indices are in range ("clip" avoids NumPy's check)
                    place = offset.take(node, mode="clip")
                    place += row
                    smaller = flat.take(place, mode="clip") <= self.threshold.take(node, mode="clip")
                    node += node
                    node += smaller
                    node = self._children.take(node, mode="clip")
                result[start : start + count] += self.value.take(node).reshape(len(group), count).sum(0, dtype=np.float64)
        return result


def _heights(left: np.ndarray, right: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """Steps from each root to its deepest leaf; children come after their parents."""
    depth = np.zeros(len(left), dtype=np.int64)
    level = np.asarray(roots, dtype=np.int64)
    while len(level):
        inner = level[left[level] != level]
        for children in (left[inner], right[inner]):
            depth[children] = depth[inner] + 1
        level = np.concatenate([left[inner], right[inner]])
    ends = np.append(roots[1:], len(left))
    return np.array([depth[start:end].max(initial=0) for start, end in zip(roots, ends, strict=True)], dtype=np.int64)


def _assemble(trees: list[dict[str, np.ndarray]], base: float, names: tuple[str, ...], version: int) -> Forest:
    """Combines trees, whose node numbers each start at zero and whose leaves have negative children, into one forest."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in DTYPES if name != "roots"}
    roots, start = [], 0
    for tree in trees:
        number = np.arange(len(tree["left"]))
        leaf = tree["left"] < 0
        for side in ("left", "right"):
            parts[side].append(np.where(leaf, number, tree[side]) + start)
        # for float32 x, x <= t is equivalent to x <= the largest float32 that is not above t
        rounded = tree["threshold"].astype(np.float32)
        rounded = np.where(rounded > tree["threshold"], np.nextafter(rounded, np.float32(-np.inf)), rounded)
        parts["threshold"].append(np.where(leaf, 0, rounded))
        parts["feature"].append(np.where(leaf, 0, tree["feature"]))
        parts["value"].append(np.where(leaf, tree["value"], 0))
        roots.append(start)
        start += len(number)
    arrays: dict[str, Any] = {name: np.concatenate(part).astype(DTYPES[name]) for name, part in parts.items()}
    first = np.array(roots, dtype=np.int32)
    return Forest(**arrays, roots=first, heights=_heights(arrays["left"], arrays["right"], first), base=base, names=names, version=version)


def fit(
    learner: str,
    features: np.ndarray,
    target: np.ndarray,
    weights: np.ndarray | None,
    names: tuple[str, ...],
    version: int,
    options: Mapping[str, Any],
    seed: int = 0,
) -> Forest:
    """Trains one of LEARNERS on [rows, names] float32 features; `options` are those of scikit-learn.

    Raises:
        UnsupportedOption: unknown learner, or scikit-learn is not installed.
    """
    if learner not in LEARNERS:
        raise UnsupportedOption(f"there is no learner {learner!r}", f"one of {', '.join(LEARNERS)}")
    try:
        from sklearn import ensemble
    except ImportError:
        raise UnsupportedOption("training needs scikit-learn", "pip install tilewright[train]") from None
    features = np.asarray(features, dtype=np.float32)
    if learner == "gradient_boosting":
        boosted = ensemble.HistGradientBoostingRegressor(random_state=seed, early_stopping=False, **options)
        boosted.fit(features, target, sample_weight=weights)
        return _assemble(_boosted_trees(boosted), float(np.ravel(boosted._baseline_prediction)[0]), names, version)
    kind = ensemble.RandomForestRegressor if learner == "random_forest" else ensemble.ExtraTreesRegressor
    grown = kind(random_state=seed, **options)
    grown.fit(features, target, sample_weight=weights)
    share = 1.0 / len(grown.estimators_)
    trees = [
        {
            "left": tree.tree_.children_left, "right": tree.tree_.children_right, "feature": tree.tree_.feature,
            "threshold": tree.tree_.threshold, "value": tree.tree_.value[:, 0, 0] * share,
        }
        for tree in grown.estimators_
    ]  # fmt: skip
    return _assemble(trees, 0.0, names, version)


def _boosted_trees(boosted: Any) -> list[dict[str, np.ndarray]]:
    """The trees of a HistGradientBoostingRegressor, for which scikit-learn has no public access."""
    trees = []
    for (predictor,) in boosted._predictors:
        nodes = predictor.nodes
        leaf = nodes["is_leaf"].astype(bool)
        left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
        trees.append(
            {
                "left": np.where(leaf, -1, left), "right": np.where(leaf, -1, right), "feature": nodes["feature_idx"].astype(np.int64),
                "threshold": nodes["num_threshold"].astype(np.float64), "value": nodes["value"].astype(np.float64),
            }
        )  # fmt: skip
    return trees


def mean_of(forests: list[Forest]) -> Forest:
    """One forest that predicts the mean of several forests with the same feature record."""
    share = 1.0 / len(forests)
    starts = np.cumsum([0, *(len(one.left) for one in forests)])[:-1]
    joined = {
        name: np.concatenate([getattr(one, name) + (start if moves else 0) for one, start in zip(forests, starts, strict=True)])
        for name, moves in (("feature", 0), ("threshold", 0), ("heights", 0), ("left", 1), ("right", 1), ("roots", 1))
    }
    value = np.concatenate([one.value * np.float32(share) for one in forests])
    arrays: dict[str, Any] = {name: array.astype(DTYPES.get(name, np.int64)) for name, array in joined.items()}
    base = share * sum(one.base for one in forests)
    return Forest(**arrays, value=value, base=base, names=forests[0].names, version=forests[0].version)


def save(forest: Forest, path: Path | BinaryIO, more: Mapping[str, Any] | None = None) -> None:
    """Writes an .npz file of plain arrays; `more` is JSON data to store with them."""
    document = {"format": FORMAT, "version": forest.version, "names": list(forest.names), "base": forest.base, "more": dict(more or {})}
    text = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
    np.savez_compressed(path, document=text, **{name: getattr(forest, name) for name in DTYPES})


def load(path: Path, content: bytes | None = None) -> tuple[Forest, dict[str, Any]]:
    """The forest of a file, or of the `content` of an .npz file that `path` holds, and the JSON data stored with it. Nothing in the file is executed,
    and every number is checked before it is used as an index.

    Raises:
        InvalidModel: if the file cannot be read or is not a forest of this format.
    """
    remedy = "train it again"
    with reading(path, InvalidModel, remedy):
        if content is None:
            regular(path)
        with zipfile.ZipFile(path if content is None else io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_STORED_BYTES:
                raise InvalidModel(f"{path} would unpack to more than {MAX_STORED_BYTES} bytes", remedy)
        with np.load(path if content is None else io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in (*DTYPES, "document")}
        document = json_of(arrays.pop("document").tobytes())
        if not isinstance(document, dict) or document["format"] != FORMAT:
            raise InvalidModel(f"{path} is not of format {FORMAT}", remedy)
        names, base, version = tuple(map(str, document["names"])), float(document["base"]), int(document["version"])
        more = dict(document["more"])
    reason = _fault(arrays, len(names), base)
    if reason:
        raise InvalidModel(f"{path} is damaged: {reason}", remedy)
    heights = _heights(arrays["left"], arrays["right"], arrays["roots"])
    if heights.max(initial=0) > MAX_HEIGHT:
        raise InvalidModel(f"{path} is damaged: a tree is higher than {MAX_HEIGHT}", remedy)
    return Forest(**arrays, heights=heights, base=base, names=names, version=version), more


def _fault(arrays: Mapping[str, np.ndarray], features: int, base: float) -> str:
    """What is wrong with stored arrays; empty if they are valid."""
    for name, dtype in DTYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            return f"{name} is not one row of {np.dtype(dtype).name}"
    nodes = len(arrays["left"])
    if not nodes or any(len(arrays[name]) != nodes for name in DTYPES if name != "roots"):
        return "the arrays differ in length, or are empty"
    roots, number = arrays["roots"], np.arange(nodes)
    if not len(roots) or roots[0] != 0 or (np.diff(roots) <= 0).any() or roots[-1] >= nodes:
        return "the roots are out of order"
    last = np.repeat(np.append(roots[1:], nodes), np.diff(np.append(roots, nodes)))
    leaf = arrays["left"] == number
    for side in ("left", "right"):
        if ((arrays[side] < number) | (arrays[side] >= last) | ((arrays[side] == number) != leaf)).any():
            return "a child lies outside its tree, or before its parent"
    inner = ~leaf
    below = np.concatenate([arrays["left"][inner], arrays["right"][inner]])
    if len(np.unique(below)) != len(below) or len(below) + len(roots) != nodes:
        return "a node has not one parent"
    if (arrays["feature"] < 0).any() or (arrays["feature"] >= features).any():
        return "a node asks for a feature that is not in the record"
    if not (np.isfinite(arrays["threshold"]).all() and np.isfinite(arrays["value"]).all() and np.isfinite(base)):
        return "a number is not finite"
    return ""
