"""An online-learned search over measured configurations in the manner of Ansor, the kind of search with which CNNOpt is compared.

    python -m bench.search_peer FILE ... [--seeds 10] [--name search_peer]

A FILE is CSV with one configuration per line, axes and then the time (the form of CNNOpt's published measurements), or a file that
`bench.bounds_check` reads, with one pool per layer.

Ansor (OSDI 2020, section 5): a batch of configurations is measured, gradient boosting learns throughput from all measurements so far, and evolution
proposes the next batch: mutation and crossover of the best over the axes of the space, the model as fitness, a small part of each batch random.
Nothing is known before the first batch. Here measuring is a look-up: the search runs over a *pool* of configurations that have all been measured, and
proposals are restricted to it. A mutation is a member of the pool that differs from its parent in few axes, a crossover one that differs in few axes
from a mixture of both parents. That favours the search: evolution over a whole space also meets configurations that a pool leaves out.
(`bench.search_live` has it search the whole space on a GPU.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.ensemble import HistGradientBoostingRegressor

from bench.bounds_check import Measured, read
from bench.common import write_results

ABSENT = -1.0
"""Placeholder for an axis that a configuration's schema does not have."""
RANDOM_SHARE = 0.05
"""Random share of a batch (epsilon-greedy, as in Ansor's task scheduler and search policy)."""
GENERATIONS, POPULATION = 4, 64
CLOSEST = 8
"""Members of the pool nearest to a proposal, among which one is drawn."""


def search(features: np.ndarray, seconds: np.ndarray, batch: int = 16, seed: int = 0, trials: int | None = None) -> np.ndarray:
    """The positions of the pool in the order in which the search measures them; deterministic.

    `features` [configurations, axes] (NaN if a schema lacks an axis), `seconds` [configurations]: a time is seen only after its position was tried.
    `trials`: the number of positions to try (default: all).

    Raises:
        ValueError: if the shapes do not fit, or a time is not positive.
    """
    return np.array(list(islice(tried(features, seconds, batch, seed), trials)), dtype=int)


def tried(features: np.ndarray, seconds: np.ndarray, batch: int = 16, seed: int = 0) -> Iterator[int]:
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


def proposed_batches(features: np.ndarray, batch: int = 16, seed: int = 0) -> Generator[np.ndarray, np.ndarray, None]:
    """Yields the positions to measure next and is sent their seconds (infinite: failed), until all are measured."""
    if features.ndim != 2:
        raise ValueError(f"features {features.shape}")
    generator = np.random.default_rng(seed)
    axes = np.where(np.isnan(features), ABSENT, features)
    measured = np.zeros(len(axes), dtype=bool)
    seconds = np.full(len(axes), np.inf)
    while not measured.all():
        open_ = np.flatnonzero(~measured)
        size = min(batch, len(open_))
        if not np.isfinite(seconds).any():
            chosen = generator.choice(open_, size, replace=False)
        else:
            fitness = _learned(axes, seconds, measured, seed)
            at_random = int(generator.binomial(size, RANDOM_SHARE))
            proposed = _evolved(axes, fitness, measured, generator)
            best = proposed[np.argsort(-fitness[proposed], kind="stable")][: size - at_random]
            rest = np.setdiff1d(open_, best)
            chosen = np.concatenate([best, generator.choice(rest, size - len(best), replace=False)])
        measured[chosen] = True
        seconds[chosen] = yield chosen


def _learned(axes: np.ndarray, seconds: np.ndarray, measured: np.ndarray, seed: int) -> np.ndarray:
    """Throughput of every member relative to the best measured, as learned from those measured; fast ones have more weight, as in Ansor."""
    throughput = seconds[measured].min() / seconds[measured]
    model = HistGradientBoostingRegressor(
        learning_rate=0.3, max_iter=24, max_leaf_nodes=12, min_samples_leaf=2, l2_regularization=0.1, early_stopping=False, random_state=seed
    )
    model.fit(axes[measured], throughput, sample_weight=throughput)
    return np.asarray(model.predict(axes))


def _evolved(axes: np.ndarray, fitness: np.ndarray, measured: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Unmeasured members of the pool reached by some generations of mutation and crossover from the best measured and random ones."""
    open_ = np.flatnonzero(~measured)
    best = np.flatnonzero(measured)
    best = best[np.argsort(-fitness[best], kind="stable")][: POPULATION // 2]
    population = np.concatenate([best, generator.choice(open_, min(POPULATION // 2, len(open_)), replace=False)])
    found = set(population[~measured[population]].tolist())
    for _ in range(GENERATIONS):
        weight = np.exp(4 * (fitness[population] - fitness[population].max()))
        parents = generator.choice(population, (POPULATION, 2), p=weight / weight.sum())
        crossed = generator.random(POPULATION) < 0.5
        mixed = np.where((generator.random((POPULATION, axes.shape[1])) < 0.5) & crossed[:, None], axes[parents[:, 1]], axes[parents[:, 0]])
        # differing axes between each proposal and each remaining member; a member may be its parent's neighbour in several ways
        distance = (mixed[:, None, :] != axes[None, open_, :]).sum(axis=2) + 0.5 * generator.random((POPULATION, len(open_)))
        count = min(CLOSEST, len(open_))
        near = np.argpartition(distance, count - 1, axis=1)[:, :count]
        children = open_[near[np.arange(POPULATION), generator.integers(count, size=POPULATION)]]
        found.update(children.tolist())
        candidates = np.unique(np.concatenate([population, children]))
        population = candidates[np.argsort(-fitness[candidates], kind="stable")][:POPULATION]
    return np.array(sorted(found), dtype=int)


def loss_of_performance(order: Sequence[int] | np.ndarray, seconds: np.ndarray, trials: int) -> float:
    """LoP@trials (CNNOpt, section 5): best of the first `trials` / best of all - 1."""
    return float(seconds[np.asarray(order)[:trials]].min() / seconds.min() - 1)


def trials_to(order: Sequence[int] | np.ndarray, seconds: np.ndarray, loss: float) -> int:
    """Trials until the loss is at most that (0.05: what CNNOpt calls 95 % of the performance); one more than were made if it never is."""
    reached = np.flatnonzero(seconds[np.asarray(order)] <= seconds.min() * (1 + loss))
    return int(reached[0]) + 1 if len(reached) else len(order) + 1


@dataclass(frozen=True)
class Judged:
    """Means over seeds for one pool."""

    name: str
    configurations: int
    trials_95: float
    trials_99: float
    trials_100: float
    lop_1: float
    lop_10: float
    lop_30: float


def until_best(features: np.ndarray, seconds: np.ndarray, least: int, batch: int = 16, seed: int = 0) -> np.ndarray:
    """The positions of the pool as `search` tries them, until it has found the best and made `least` trials."""
    order: list[int] = []
    found = False
    for position in tried(features, seconds, batch, seed):
        order.append(position)
        found |= bool(seconds[position] == seconds.min())
        if found and len(order) >= least:
            break
    return np.array(order, dtype=int)


def judge(name: str, features: np.ndarray, seconds: np.ndarray, seeds: int = 10, batch: int = 16) -> Judged:
    """Runs the search with several seeds, each until it has found the best and made 30 trials."""
    rows = []
    for seed in range(seeds):
        order = until_best(features, seconds, 30, batch, seed)
        losses = [loss_of_performance(order, seconds, n) for n in (1, 10, 30)]
        rows.append([trials_to(order, seconds, 0.05), trials_to(order, seconds, 0.01), trials_to(order, seconds, 0.0), *losses])
    means = np.mean(rows, axis=0)
    return Judged(name, len(seconds), *map(float, means))


def table(judged: Sequence[Judged]) -> Table:
    """One row per pool, and the mean."""
    result = Table("pool", "configurations", "trials to 95 %", "99 %", "best", "LoP@1", "LoP@10", "LoP@30")
    rows: list[tuple[str, int, tuple[float, ...]]] = [
        (j.name, j.configurations, (j.trials_95, j.trials_99, j.trials_100, j.lop_1, j.lop_10, j.lop_30)) for j in judged
    ]
    if len(rows) > 1:
        means = np.mean([figures for *_, figures in rows], axis=0)
        rows.append(("mean", sum(count for _, count, _ in rows), tuple(map(float, means))))
    for name, count, figures in rows:
        result.add_row(name, str(count), *(f"{t:.1f}" for t in figures[:3]), *(f"{loss:.1%}" for loss in figures[3:]))
    return result


def pools(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, features, seconds) of every pool of a file. Lines of a CSV file that are not numbers are failures and are left out."""
    if path.suffix == ".csv":
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append([float(cell) for cell in line.split(",")])
            except ValueError:
                continue
        width = max(map(len, rows))
        numbers = np.array([row for row in rows if len(row) == width and row[-1] > 0])
        yield path.stem, numbers[:, :-1], numbers[:, -1]
        return
    layers: dict[str, list[Measured]] = {}
    for found in read(path):
        layers.setdefault(str(found.layer["name"]), []).append(found)
    for name, measured in layers.items():
        yield name, features_of([m.parameters for m in measured]), np.array([m.seconds for m in measured])


def features_of(parameters: Sequence[Mapping[str, int]]) -> np.ndarray:
    """[configurations, axes of all]; NaN if a configuration lacks an axis."""
    axes = list(dict.fromkeys(axis for found in parameters for axis in found))
    return np.array([[found.get(axis, np.nan) for axis in axes] for found in parameters], dtype=float)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--name", default="", help="writes bench/results/NAME.json")
    options = parser.parse_args()
    judged = [judge(*pool, options.seeds) for path in options.files for pool in pools(path)]
    Console(width=120).print(table(judged))
    if options.name:
        print(write_results(options.name, vars(options), [asdict(j) for j in judged]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
