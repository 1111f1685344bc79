"""An online-learned search over measured configurations in the manner of AutoTVM and Ansor, the kind of search with which CNNOpt is compared.

    python -m bench.search_peer bench/data/h200_layers.jsonl.gz [--trials 192] [--seeds 5] [--name search_peer_h200]

A batch of configurations is measured, gradient boosting learns the logarithm of the time from all measurements so far, and the next batch has those
that it predicts to be fastest, besides a small random share (epsilon-greedy). It sees the axes of a schedule and the counts of its kernel's work
(`kernels.gpu.features.COUNTS`: what both systems extract from code), but no analytical time. Nothing is known before the first batch, a random one.
AutoTVM and Ansor look for the model's favourites by annealing or evolution, as their spaces are too large to evaluate; here every candidate is
evaluated, which finds them all.

Measuring is a look-up: the search runs over the *pool* of a layer's configurations that have been measured, beside random orders of it. A pool has
the favourites of our models, which makes both look better than over the space. (`bench.search_live` searches whole spaces on a GPU.) LoP@n and
trials to 95 and 99 % are those of `bench.choice_quality`; where a search or an order has found no such configuration in `--trials`, these count.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.ensemble import HistGradientBoostingRegressor

from bench.common import write_results
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.features import COUNTS
from tilewright.selection.ranking import Part
from tilewright.tuning import dataset
from tilewright.tuning.training import part_of

ABSENT = -1.0
"""Placeholder for what a configuration's schema does not have."""
RANDOM_SHARE = 0.05
"""Random share of a batch."""
BATCH = 8
SLOWEST = 16.0
"""Time over the best so far above which configurations are not told apart; failures have it."""
TOPS = (1, 10, 30, 100)
LOSSES = {"95": 0.05, "99": 0.01}
PERMUTATIONS = 100
"""Number of random orders to average."""


def features_of(parts: Sequence[Part]) -> np.ndarray:
    """[candidates, axes of all schemas and counts], in the order of the parts; NaN where a schema has no such axis or count."""
    names = list(dict.fromkeys(name for part in parts for name in part.candidates))

    def columns(part: Part) -> Iterator[np.ndarray]:
        shape = length(part.candidates)
        yield from (np.broadcast_to(np.asarray(part.candidates.get(name, np.nan), dtype=float), shape) for name in names)
        counts = (np.asarray(getattr(part.counts, name, np.nan), dtype=float) for name in COUNTS)
        yield from (np.broadcast_to(np.log2(np.maximum(count, 1e-12)), shape) for count in counts)

    return np.concatenate([np.stack(list(columns(part)), axis=1) for part in parts])


def search(features: np.ndarray, seconds: np.ndarray, batch: int = BATCH, seed: int = 0, trials: int | None = None) -> np.ndarray:
    """The positions of the pool in the order in which the search measures them; deterministic.

    `features` [configurations, columns] (NaN: absent), `seconds` [configurations]: a time is seen only after its position was tried.
    `trials`: the number of positions to try (default: all).

    Raises:
        ValueError: if the shapes do not fit, or a time is not positive.
    """
    return np.array(list(islice(tried(features, seconds, batch, seed), trials)), dtype=int)


def tried(features: np.ndarray, seconds: np.ndarray, batch: int = BATCH, seed: int = 0) -> Iterator[int]:
    """Like `search`, yielding one position after the other."""
    if seconds.shape != (len(features),) or not (seconds > 0).all():
        raise ValueError(f"features {features.shape} and seconds {seconds.shape}, all positive")
    proposals = proposed_batches(features, batch, seed)
    chosen = next(proposals, None)
    while chosen is not None:
        yield from (int(position) for position in chosen)
        try:
            chosen = proposals.send(seconds[chosen])
        except StopIteration:
            return


def proposed_batches(features: np.ndarray, batch: int = BATCH, seed: int = 0) -> Generator[np.ndarray, np.ndarray, None]:
    """Yields the positions to measure next and is sent their seconds (infinite: failed), until all are measured."""
    if features.ndim != 2:
        raise ValueError(f"features {features.shape}")
    generator = np.random.default_rng(seed)
    features = np.where(np.isnan(features), ABSENT, features)
    measured = np.zeros(len(features), dtype=bool)
    seconds = np.full(len(features), np.inf)
    while not measured.all():
        left = np.flatnonzero(~measured)
        size = min(batch, len(left))
        best = left[:0]
        if np.isfinite(seconds).any():
            model = _learned(features[measured], seconds[measured], seed)
            favourites = left[np.argsort(model.predict(features[left]), kind="stable")]
            best = favourites[: size - int(generator.binomial(size, RANDOM_SHARE))]
        chosen = np.concatenate([best, generator.choice(np.setdiff1d(left, best), size - len(best), replace=False)])
        measured[chosen] = True
        seconds[chosen] = yield chosen


def _learned(features: np.ndarray, seconds: np.ndarray, seed: int) -> HistGradientBoostingRegressor:
    """The logarithm of the time relative to the best measured, as learned from those measured."""
    model = HistGradientBoostingRegressor(
        learning_rate=0.2, max_iter=40, max_leaf_nodes=12, min_samples_leaf=2 if len(seconds) < 100 else 5, l2_regularization=0.1,
        early_stopping=False, random_state=seed,
    )  # fmt: skip
    return model.fit(features, np.log(np.minimum(seconds / seconds.min(), SLOWEST)))


def loss_of_performance(order: Sequence[int] | np.ndarray, seconds: np.ndarray, trials: int) -> float:
    """LoP@trials (CNNOpt, section 5): best of the first `trials` / best of all - 1."""
    return float(seconds[np.asarray(order)[:trials]].min() / seconds.min() - 1)


def trials_to(order: Sequence[int] | np.ndarray, seconds: np.ndarray, loss: float) -> int:
    """Trials until the loss is at most that (0.05: what CNNOpt calls 95 % of the performance); one more than were made if it never is."""
    reached = np.flatnonzero(seconds[np.asarray(order)] <= seconds.min() * (1 + loss))
    return int(reached[0]) + 1 if len(reached) else len(order) + 1


def pool_of(layer: dataset.MeasuredLayer, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """Features and seconds of all measured configurations of a layer whose schema still suits it."""
    problem = dataset.layer_problem(layer.layer)
    found = []
    for kind, columns in layer.schemas.items():
        part = part_of(problem, kind, {name: column for name, column in columns.items() if name not in dataset.MEASURES}, machine)
        if part is not None:
            found.append((part, columns["seconds"]))
    return features_of([part for part, _ in found]), np.concatenate([seconds for _, seconds in found])


def judge(features: np.ndarray, seconds: np.ndarray, seeds: int, trials: int) -> dict[str, dict[str, float]]:
    """For the search and for random order: means of LoP@n and of the trials to a share of the best, over seeds."""

    def means(orders: Iterator[np.ndarray]) -> dict[str, float]:
        rows = [
            {f"lop@{top}": loss_of_performance(order, seconds, top) for top in TOPS}
            | {f"trials_{share}": float(min(trials_to(order, seconds, loss), trials)) for share, loss in LOSSES.items()}
            for order in orders
        ]
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    permuted = (np.random.default_rng(seed).permutation(len(seconds))[:trials] for seed in range(PERMUTATIONS))
    searched = (search(features, seconds, seed=seed, trials=trials) for seed in range(seeds))
    return {"online-learned search": means(searched), "random order": means(permuted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--trials", type=int, default=192)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--name", default="search_peer_h200")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for layer in dataset.read(options.file):
        features, seconds = pool_of(layer, identified_machine(layer.machine))
        for way, found in judge(features, seconds, options.seeds, options.trials).items():
            results.append({"layer": str(layer.layer["name"]), "way": way, "candidates": len(seconds), **found})
        print(f"{layer.layer['name']}: {len(seconds)} configurations", flush=True)
    ways = list(dict.fromkeys(row["way"] for row in results))
    measures = [name for name in results[0] if name.startswith(("lop", "trials"))]
    every = [
        {"layer": "all", "way": way}
        | {name: float(np.mean([row[name] for row in results if row["way"] == way])) for name in measures}
        | {f"median {name}": float(np.median([row[name] for row in results if row["way"] == way])) for name in measures}
        for way in ways
    ]
    print(write_results(options.name, vars(options), [*every, *results]))
    table = Table("layer", "way", *measures, box=None, title="means over seeds")
    for row in [*results, *every]:
        cells = (f"{100 * row[name]:.1f} %" if name.startswith("lop") else f"{row[name]:.1f}" for name in measures)
        table.add_row(row["layer"], row["way"], *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
