"""Evolution strategies, pycma and random sampling: how much slower the best of n evaluations is than the best of the space.

    python -m bench.evolution                      (needs `cma`, of the extra `bench`)

The score is the models' predicted time, which is known for every candidate, so that the true best is known; each schema of a layer is a space.
"printed" is algorithm 4 of Tuna as printed: no pairs, a random start, and the score as fitness (negated and scaled to unit variance, or its step
would depend on the unit of time). pycma's points also stand for their nearest candidates; it also starts at the best of 16 random ones (which count),
and starts again when it stops or samples nothing new. A candidate that is sampled again counts once.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.evolution_strategies import Searched, Strategy, coordinates, evolve, nearest
from bench.layers import LAYERS, layer
from tilewright.hardware import identified_machine
from tilewright.kernels.columns import Columns
from tilewright.selection.choice import rank
from tilewright.tuning.dataset import layer_problem

TARGETS = {"h200": (25, 50, 100, 200, 400), "x86-avx512": (10, 20, 40, 80), "cortex-a53": (10, 20, 40, 80)}
"""Numbers of evaluations at which the searches are compared."""
SMALLEST = 5
"""Minimum size of a GPU's space as a multiple of the most evaluations; in smaller ones every search finds the best. Spaces of CPUs are smaller."""


def spaces_of(layers: Sequence[str], target: str, smallest: int = 1) -> Iterator[tuple[str, Columns, np.ndarray]]:
    """Name, candidates and predicted seconds of each schema with at least `smallest` candidates."""
    for name in layers:
        problem = layer_problem(layer(name))
        ranking = rank(problem, identified_machine(target), 2)
        for part in ranking.parts:
            if len(part.estimate.seconds) >= smallest:
                yield f"{name} {part.schema.name}", part.candidates, part.estimate.seconds


class _Counted:
    """Scores of positions, counting each candidate once, within a budget."""

    def __init__(self, scores: np.ndarray, budget: int) -> None:
        self.scores, self.budget, self.seen = scores, min(budget, len(scores)), dict[int, None]()

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, bool]:
        """Scores (the worst score beyond the budget), and whether any was new."""
        before = len(self.seen)
        found = []
        for position in positions.tolist():
            if position not in self.seen and len(self.seen) < self.budget:
                self.seen[position] = None
            found.append(self.scores[position] if position in self.seen else self.scores.max())
        return np.array(found), len(self.seen) > before

    @property
    def over(self) -> bool:
        return len(self.seen) >= self.budget

    def result(self) -> Searched:
        positions = np.array(list(self.seen), dtype=np.int64)
        return Searched(positions, self.scores[positions])


def ours(candidates: Columns, scores: np.ndarray, budget: int, seed: int) -> Searched:
    return evolve(candidates, scores.__getitem__, budget, seed)


def printed(candidates: Columns, scores: np.ndarray, budget: int, seed: int) -> Searched:
    """Algorithm 4 with the same n, sigma and alpha; it starts again at random when it samples nothing new."""
    grid, generator, counted, plan = coordinates(candidates), np.random.default_rng(seed), _Counted(scores, budget), Strategy()
    while not counted.over:
        mean, found = grid[generator.integers(len(grid))], True
        while not counted.over and found:
            noise = generator.standard_normal((plan.population, grid.shape[1]))
            values, found = counted(nearest(grid, np.clip(mean + plan.deviation * noise, 0, 1)))
            fitness = (values.mean() - values) / (values.std() or 1.0)
            mean = np.clip(mean + plan.learning_rate * plan.deviation * (fitness @ noise) / len(noise), 0, 1)
    return counted.result()


def pycma(candidates: Columns, scores: np.ndarray, budget: int, seed: int) -> Searched:
    """CMA-ES with its default settings within [0, 1], with our start and deviation."""
    import cma

    grid, generator, counted, plan = coordinates(candidates), np.random.default_rng(seed), _Counted(scores, budget), Strategy()
    while not counted.over:
        sample = generator.choice(len(grid), min(plan.population, len(grid)), replace=False)
        start = grid[sample[np.argmin(counted(sample)[0])]]
        options = {"bounds": [0, 1], "verbose": -9, "seed": int(generator.integers(1, 2**31))}
        search, found = cma.CMAEvolutionStrategy(start, plan.deviation, options), True
        while not counted.over and found and not search.stop():
            points = search.ask()
            values, found = counted(nearest(grid, np.array(points)))
            search.tell(points, values.tolist())
    return counted.result()


def uniform(candidates: Columns, scores: np.ndarray, budget: int, seed: int) -> Searched:
    positions = np.random.default_rng(seed).permutation(len(scores))[:budget]
    return Searched(positions, scores[positions])


SEARCHES: dict[str, Callable[[Columns, np.ndarray, int, int], Searched]] = {"ours": ours, "printed": printed, "pycma": pycma, "random": uniform}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--name", default="evolution")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="cma")
    results: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    table = Table("target", "spaces", "search", "evaluations", "mean loss", "median loss", "within 1 %")
    for target, counts in TARGETS.items():
        smallest = SMALLEST * counts[-1] if identified_machine(target).is_gpu else counts[-1]
        losses: dict[tuple[str, int], list[float]] = {(name, count): [] for name in SEARCHES for count in counts}
        spaces = list(spaces_of(options.layers.split(","), target, smallest))
        for space, rows, scores in spaces:
            for name, search in SEARCHES.items():
                curves = [search(rows, scores, counts[-1], seed).best_so_far / scores.min() - 1 for seed in range(options.seeds)]
                found = {count: [round(float(curve[count - 1]), 5) for curve in curves] for count in counts}
                results.append({"target": target, "space": space, "candidates": len(scores), "search": name, "loss": found})
                for count in counts:
                    losses[name, count] += found[count]
        for (name, count), values in losses.items():
            mean, median, near = float(np.mean(values)), float(np.median(values)), float(np.mean(np.array(values) < 0.01))
            entry = {"target": target, "search": name, "evaluations": count, "mean_loss": mean, "median_loss": median, "within_1_percent": near}
            summary.append(entry)
            table.add_row(target, str(len(spaces)), name, str(count), f"{100 * mean:.2f} %", f"{100 * median:.2f} %", f"{100 * near:.0f} %")
    write_results(options.name, vars(options), [*summary, *results])
    Console().print(table)


if __name__ == "__main__":
    main()
