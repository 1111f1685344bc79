"""The learned ranking of GPU kernels: a forest over analytical features, its training from measurements, and the measures of its quality.

CNNOpt (PACT 2022, section 4) feeds analytical quantities to a random forest that predicts the time. Here the forest may also predict the
correction of the analytical time (`target` "correction"), of the time relative to the other kernels of its problem ("rank"), or this correction and,
by a second forest, the time relative to the fastest kernel of the problem ("combined"): the mean of two that err differently errs less. Good kernels
may have larger weights in training: the paper notes that the order among fast kernels is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tilewright.errors import InvalidModel, UnsupportedOption
from tilewright.hardware.calibration import Overheads
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, take
from tilewright.kernels.counts import concatenated as counts_of
from tilewright.kernels.counts import taken
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.counts import LaunchCounts, TileCounts
from tilewright.kernels.gpu.features import RECORDS, VERSION, features
from tilewright.selection.learned import forest as trees
from tilewright.selection.learned.forest import Forest

TARGETS = ("time", "correction", "rank", "combined")
LEARNED_ROWS = 2048
"""Maximum candidates that the forest evaluates; in a larger space, the best by the analytical model."""


@dataclass(frozen=True)
class Samples:
    """Measured kernels, one per row. `described`: columns of `tilewright.kernels.gpu.features.described` or `streamed`; `counts`: those that the
    record describes; `problem`: the number of each row's problem; `analytical`: seconds predicted by the schema's own analytical
    model, if there is one besides `counted_cost`."""

    described: Columns
    counts: Any
    seconds: np.ndarray
    problem: np.ndarray
    analytical: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, which: np.ndarray) -> Samples:
        """The rows selected by a mask or an index array."""
        analytical = None if self.analytical is None else self.analytical[which]
        return Samples(take(self.described, which), taken(self.counts, which), self.seconds[which], self.problem[which], analytical)

    def expected(self, machine: Machine, overheads: Overheads) -> np.ndarray:
        """Analytical seconds."""
        return counted_cost(self.counts, machine, overheads).seconds if self.analytical is None else self.analytical


def join(parts: list[Samples]) -> Samples:
    """All rows; equal problem numbers of two parts stay equal."""
    described = {name: np.concatenate([part.described[name] for part in parts]) for name in parts[0].described}
    volumes = counts_of([part.counts for part in parts])
    known = [part.analytical for part in parts if part.analytical is not None]
    analytical = np.concatenate(known) if len(known) == len(parts) else None
    seconds, problem = (np.concatenate([getattr(part, name) for part in parts]) for name in ("seconds", "problem"))
    return Samples(described, volumes, seconds, problem, analytical)


@dataclass(frozen=True)
class Recipe:
    """How to train. `record`: a feature record; `target`: what the forest predicts (always logarithms); `favour`: a row's weight is (best time of its
    problem / its time) ** favour; `seeds`: number of forests to average; `options`: those of scikit-learn; `centred`: fraction of its problem's mean
    that target "rank" subtracts (1: only the order within a problem is learned; less: also the analytical model's error for a schema)."""

    learner: str = "gradient_boosting"
    record: str = "hybrid"
    target: str = "correction"
    favour: float = 0.0
    seeds: int = 1
    options: Mapping[str, Any] = field(default_factory=lambda: {"max_iter": 300, "learning_rate": 0.08, "max_leaf_nodes": 31, "min_samples_leaf": 20})
    centred: float = 1.0


@dataclass(frozen=True)
class Learned:
    """A trained model: the forest, what it predicts, and the constants of the analytical model with which its features were computed. `order`: with
    target "combined", the number of the first tree that predicts times relative to the fastest; those before it predict the correction."""

    forest: Forest
    record: str
    target: str
    overheads: Overheads
    order: int | None = None

    def seconds(self, described: Columns, volumes: TileCounts, machine: Machine) -> np.ndarray:
        """Predicted seconds of all candidates. If there are more than LEARNED_ROWS, only the best by the analytical model are evaluated, and the
        others follow in the analytical order. With target "rank" the scale is that of the analytical model; see `predicted` for "combined"."""
        analytical = counted_cost(volumes, machine, self.overheads).seconds
        if len(volumes) <= LEARNED_ROWS:
            return self.predicted(described, volumes, machine, analytical)
        kept = np.sort(np.argpartition(analytical, LEARNED_ROWS)[:LEARNED_ROWS])
        predicted = self.predicted(take(described, kept), taken(volumes, kept), machine, analytical[kept])
        result: np.ndarray = analytical * (1 + predicted.max() / analytical.min())
        result[kept] = predicted
        return result

    def predicted(
        self, described: Columns, volumes: LaunchCounts, machine: Machine, analytical: np.ndarray, stages: Sequence[tuple[int, int]] = ()
    ) -> np.ndarray:
        """Predicted seconds of the candidates, for which the analytical model predicts `analytical` seconds. With target "combined" they are of one
        problem; the least is the least corrected time, so that other schemas' times compare.

        `stages`: (trees, candidates); after `trees` trees, only the best `candidates` are evaluated further, and the others get NaN. (Each tree of a
        boosted forest corrects the error of the previous ones, so a few trees show whether a candidate is among the best.)"""
        table = features(self.record, described, volumes, machine, self.overheads)
        known = np.zeros(len(table)) if self.target == "time" else np.log(analytical)
        result, left, done = np.full(len(table), np.nan), np.arange(len(table)), 0
        for trees_asked, kept in stages:
            asked = trees_asked if self.order is None else min(trees_asked, self.order)
            known[left] += self.forest.predict(table, done, asked)
            done = asked
            if len(left) > kept:
                best = np.sort(np.argpartition(known[left], kept)[:kept])
                left, table = left[best], table.T.take(best, axis=1).T
        known[left] += self.forest.predict(table, done, self.order)
        if self.order is not None and len(left):
            mean = (known[left] + self.forest.predict(table, self.order)) / 2
            known[left] = mean + (known[left].min() - mean.min())
        result[left] = np.exp(known[left])
        return result

    def save(self, path: Path | BinaryIO) -> None:
        more = {"record": self.record, "target": self.target, "overheads": asdict(self.overheads)}
        trees.save(self.forest, path, more if self.order is None else {**more, "order": self.order})


def load(path: Path, content: bytes | None = None) -> Learned:
    """A stored model: of a file, or of the `content` of an .npz file that `path` holds.

    Raises:
        InvalidModel: if the file is damaged, or was trained with a feature record of another version.
    """
    forest, more = trees.load(path, content)
    record, target = str(more.get("record")), str(more.get("target"))
    if record not in RECORDS or forest.version != VERSION or forest.names != RECORDS[record].names or target not in TARGETS:
        which = f"of version {forest.version}, this is {VERSION}" if forest.version != VERSION else "of other features or another target"
        raise InvalidModel(f"{path} was trained with another feature record ({which})", "train it again")
    try:
        overheads = Overheads(**{name: float(value) for name, value in more["overheads"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidModel(f"{path} has no valid analytical constants ({error})", "train it again") from None
    if not all(0 < value < np.inf for value in asdict(overheads).values()):
        raise InvalidModel(f"{path} has analytical constants that are not positive numbers", "train it again")
    order = more.get("order")
    if target != "combined":
        return Learned(forest, record, target, overheads)
    if type(order) is not int or not 0 < order < len(forest.roots):
        raise InvalidModel(f"{path} does not say which of its {len(forest.roots)} trees give the order", "train it again")
    return Learned(forest, record, target, overheads, order)


def best_of_problem(samples: Samples) -> np.ndarray:
    """The best time of each row's problem."""
    numbers = np.unique(samples.problem, return_inverse=True)[1]
    best = np.full(numbers.max(initial=-1) + 1, np.inf)
    np.minimum.at(best, numbers, samples.seconds)
    return best[numbers]


def train(samples: Samples, machine: Machine, recipe: Recipe, overheads: Overheads) -> Learned:
    """A model of the measurements.

    Raises:
        UnsupportedOption: unknown target, record or learner, or scikit-learn is not installed.
    """
    return train_together([(samples, machine)], recipe, overheads)


def train_together(parts: Sequence[tuple[Samples, Machine]], recipe: Recipe, overheads: Overheads) -> Learned:
    """A single model of measurements on several machines, with features of each row's own machine.

    Raises:
        UnsupportedOption: as `train`.
    """
    if recipe.target not in TARGETS or recipe.record not in RECORDS:
        raise UnsupportedOption(f"there is no target {recipe.target!r} or record {recipe.record!r}", f"targets {TARGETS}, records {tuple(RECORDS)}")
    inputs = np.concatenate([features(recipe.record, samples.described, samples.counts, machine, overheads) for samples, machine in parts])
    qualities = np.concatenate([best_of_problem(samples) / samples.seconds for samples, _ in parts])
    weights = qualities**recipe.favour if recipe.favour else None
    names = RECORDS[recipe.record].names

    def grown(target: str) -> Forest:
        goal = np.concatenate([_goal(samples, machine, recipe, target, overheads) for samples, machine in parts])
        forests = [trees.fit(recipe.learner, inputs, goal, weights, names, VERSION, recipe.options, seed) for seed in range(recipe.seeds)]
        return trees.mean_of(forests) if len(forests) > 1 else forests[0]

    if recipe.target != "combined":
        return Learned(grown(recipe.target), recipe.record, recipe.target, overheads)
    correction, order = grown("correction"), grown("order")
    return Learned(trees.joined([correction, order]), recipe.record, recipe.target, overheads, len(correction.roots))


def _goal(samples: Samples, machine: Machine, recipe: Recipe, target: str, overheads: Overheads) -> np.ndarray:
    """The logarithms that a forest learns to predict: a target of TARGETS, or the "order", the times relative to the fastest of each problem."""
    goal = np.log(samples.seconds)
    if target == "order":
        return np.asarray(goal - np.log(best_of_problem(samples)))
    if target != "time":
        goal = goal - np.log(samples.expected(machine, overheads))
    if target == "rank":
        goal = goal - recipe.centred * _centre(samples.problem, goal, best_of_problem(samples) / samples.seconds)
    return np.asarray(goal)


def _centre(problem: np.ndarray, goal: np.ndarray, quality: np.ndarray) -> np.ndarray:
    """The weighted mean of the goals of each row's problem; good kernels have larger weights."""
    numbers = np.unique(problem, return_inverse=True)[1]
    weights = quality**2
    return (np.bincount(numbers, goal * weights) / np.bincount(numbers, weights))[numbers]


def folds_of(problem: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """A fold number for each row; all rows of a problem are in one fold."""
    names, numbers = np.unique(problem, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(names)) % count)[numbers]


def out_of_fold(samples: Samples, machine: Machine, recipe: Recipe, overheads: Overheads, count: int = 5, seed: int = 0) -> np.ndarray:
    """Seconds that models predict for problems on which they were not trained."""
    folds = folds_of(samples.problem, count, seed)
    result = np.empty(len(samples))
    for fold in range(count):
        held = folds == fold
        if held.any():
            part = samples.where(held)
            model = train(samples.where(~held), machine, recipe, overheads)
            result[held] = model.predicted(part.described, part.counts, machine, part.expected(machine, overheads))
    return result


def loss_of_performance(seconds: np.ndarray, predicted: np.ndarray, tried: int) -> float:
    """LoP@n: the relative slowdown of the fastest among the `tried` best predicted kernels against the fastest of all (CNNOpt, equation 5)."""
    order = np.argsort(predicted, kind="stable")[:tried]
    return float(seconds[order].min() / seconds.min() - 1)
