"""Forests of regression trees as plain arrays: trained by scikit-learn, stored without pickle, evaluated with numpy over whole columns.

The nodes of a tree are contiguous, with children after their parent. A leaf is its own child. The rows are candidates for one problem, of which tests
tell few apart, so that trees are evaluated node by node for sets of rows. Only `fit` imports scikit-learn (the extra `train`).
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Rows evaluated at once: few enough that their features stay in a core's cache."""
SET_BITS = 64
"""Rows of one word of a set."""
DTYPES: Mapping[str, type] = {
    "feature": np.int16, "threshold": np.float32, "left": np.int32, "right": np.int32, "value": np.float32, "roots": np.int32,
}  # fmt: skip
NODES = (("feature", False), ("threshold", False), ("left", True), ("right", True), ("value", False))
"""The arrays of nodes, and whether their elements are numbers of nodes."""
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
    base: float
    names: tuple[str, ...]
    version: int

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        """Predictions, [rows] float64, for [rows, len(names)] features, which are converted to float32. Sums only trees `first` to `last` - 1, plus
        the base if `first` is 0, so that the results of consecutive ranges add up to the prediction.

        Raises:
            ValueError: if the features have another shape.
        """
        if features.ndim != 2 or features.shape[1] != len(self.names):
            raise ValueError(f"features have the shape {features.shape}, and the forest was trained with {len(self.names)} of them")
        roots = self.roots[first:last]
        result = np.full(len(features), 0.0 if first else self.base)
        for start in range(0, len(features) if len(roots) else 0, BLOCK_ROWS):
            block = features[start : start + BLOCK_ROWS]
            values = self._values(block, roots)
            together = max(1, BLOCK_ROWS // len(block))  # the order of additions decides about the last bits
            for tree in range(0, len(roots), together):
                result[start : start + len(block)] += values[tree : tree + together].sum(0, dtype=np.float64)
        return result

    def _values(self, features: np.ndarray, roots: np.ndarray) -> np.ndarray:
        """[roots, rows]: the values of the leaves that rows reach. Goes down all trees together, with the set of the rows that reach a node as bits:
        rows that a test does not tell apart cost nothing there, and nodes that no row reaches are left out."""
        rows = len(features)
        columns = np.zeros((len(self.names), -(-rows // SET_BITS) * SET_BITS), dtype=np.float32)
        columns[:, :rows] = features.T
        low, high = columns[:, :rows].min(1), columns[:, :rows].max(1)
        nodes, sets = roots, _bits(np.broadcast_to(np.arange(columns.shape[1]) < rows, (len(roots), columns.shape[1])))
        ends: list[tuple[np.ndarray, np.ndarray]] = []
        while len(nodes):
            left, leaf = self.left[nodes], self.left[nodes] == nodes
            ends.append((nodes[leaf], sets[leaf]))
            nodes, left, sets = nodes[~leaf], left[~leaf], sets[~leaf]
            feature, threshold = self.feature[nodes], self.threshold[nodes]
            every, none = high[feature] <= threshold, low[feature] > threshold
            passing, telling = np.where(every[:, None], sets, 0), np.flatnonzero(~(every | none))
            passing[telling] = sets[telling] & _bits(columns.take(feature[telling], axis=0) <= threshold[telling, None])
            nodes, sets = np.concatenate([left, self.right[nodes]]), np.concatenate([passing, sets ^ passing])
            reached = sets.any(1)
            nodes, sets = nodes[reached], sets[reached]
        leaves, sets = (np.concatenate(parts) for parts in zip(*ends, strict=True))
        order = np.argsort(leaves)
        leaves, sets = leaves[order], sets[order]
        # each row is in the set of one leaf of each tree: the bits of this leaf's number among those of its tree
        first = np.searchsorted(leaves, roots)
        number = np.arange(len(leaves)) - np.repeat(first, np.diff(np.append(first, len(leaves))))
        found = np.zeros((len(roots), columns.shape[1]), dtype=np.min_scalar_type(number.max()))
        for bit in range(int(number.max()).bit_length()):
            having = np.bitwise_or.reduceat(np.where((number >> bit & 1)[:, None], sets, 0), first)
            found |= np.unpackbits(having.view(np.uint8), axis=1).astype(found.dtype, copy=False) << bit
        values: np.ndarray = self.value[leaves].take(first[:, None] + found[:, :rows])
        return values


def _bits(flags: np.ndarray) -> np.ndarray:
    """Flags of [..., SET_BITS n] elements as bits, [..., n]."""
    return np.packbits(flags, axis=-1).view(np.uint64)


def _height(left: np.ndarray, right: np.ndarray, roots: np.ndarray) -> int:
    """Steps from the roots to the deepest leaf."""
    steps, level = 0, roots
    while len(inner := level[left[level] != level]):
        steps, level = steps + 1, np.concatenate([left[inner], right[inner]])
    return steps


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
    return Forest(**arrays, roots=first, base=base, names=names, version=version)


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
    """One forest that predicts the mean of several forests with the same feature record. It has a tree of each in turns, so that the first trees of
    all come first."""
    share = 1.0 / len(forests)
    longest = max(len(one.roots) for one in forests)
    together = joined([_tree(one, at) for at in range(longest) for one in forests if at < len(one.roots)])
    return replace(together, value=together.value * np.float32(share), base=share * sum(one.base for one in forests))


def _tree(forest: Forest, number: int) -> Forest:
    """One tree of a forest."""
    first, behind = np.append(forest.roots, len(forest.left))[number : number + 2]
    own = {name: getattr(forest, name)[first:behind] - (first if moves else 0) for name, moves in NODES}
    return replace(forest, **own, roots=np.zeros(1, DTYPES["roots"]))


def joined(forests: Sequence[Forest]) -> Forest:
    """The trees of several forests with the same feature record, in order, with the base of the first."""
    starts = np.cumsum([0, *(len(one.left) for one in forests)])[:-1]
    parts = {
        name: np.concatenate([getattr(one, name) + (start if moves else 0) for one, start in zip(forests, starts, strict=True)])
        for name, moves in (*NODES, ("roots", True))
    }
    arrays: dict[str, Any] = {name: array.astype(DTYPES[name]) for name, array in parts.items()}
    return replace(forests[0], **arrays)


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
    if _height(arrays["left"], arrays["right"], arrays["roots"]) > MAX_HEIGHT:
        raise InvalidModel(f"{path} is damaged: a tree is higher than {MAX_HEIGHT}", remedy)
    return Forest(**arrays, base=base, names=names, version=version), more


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
