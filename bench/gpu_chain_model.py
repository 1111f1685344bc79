"""Trains the learned correction of chains in 16 bits on a GPU (`partition.tile_features`) with what `bench.gpu_chains` measured.

    python -m bench.gpu_chain_model gpu_chains_float16_1 gpu_chains_float16_2 gpu_chains_float16_w1 gpu_chains_float16_w2 gpu_chains_float16_3

Only random chains train it. The model predicts the time that decides: the predicted seconds of a chain's layers apart, and what the whole program
took longer with the chain than with them. The table says what models decide of chains on which they were not trained (an eighth at a time): what the
chosen tiles lose against the best measured ones, as a part of the time of the program, and what a program takes over that of separate kernels if
chains shorter than the limit of the calibration file are taken where they are predicted to gain. `formulas` have the constants of `bench.gpu_chains`
that decide best about the chains in training; `best` knows all times, and so gains from their noise too. The result file has the decision on each
chain. No GPU is needed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.chains import Links, taken
from bench.common import write_results
from bench.gpu_chains import compiled, fitted, on_all_cores, random_chains, random_rows
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import UNFITTED_CHAINS, gpu_chains
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.partition.tile_features import NAMES, SUFFIX, VERSION, corrections
from tilewright.partition.tile_judge import TileJudge, TileParts, Tiles
from tilewright.partition.tile_kernel import TileSchedule
from tilewright.selection.learned import forest
from tilewright.selection.learned.forest import Forest
from tilewright.selection.learned.gpu import MODELS

OPTIONS: Mapping[str, Any] = {"max_iter": 300, "learning_rate": 0.05, "max_leaf_nodes": 8, "min_samples_leaf": 8, "max_features": 0.4}
FORESTS, FOLDS = 3, 8
LEAST_SECONDS = 0.6e-6
"""Of a chain: shorter times are noise."""
SAME = 0.01
"""Relative difference of the formulas' seconds of today to those that were written beside a measurement, up to which its kernel is the same."""


@dataclass(frozen=True)
class Measured:
    """A chain: its row in a result file, the ways whose kernels the models of today still make, and what a learned model is told of them."""

    row: Mapping[str, Any]
    ways: tuple[str, ...]
    features: np.ndarray

    @property
    def formulas(self) -> np.ndarray:
        """Seconds by the formulas, without constants."""
        return np.asarray(np.exp(self.features[:, NAMES.index("log seconds")]))

    @property
    def seconds(self) -> np.ndarray:
        """Those that decide, in whole programs."""
        longer = np.array([self.programs[name] for name in self.ways]) - self.programs["separate"]
        return np.asarray(np.maximum(self.row["predicted"]["apart"] + longer, LEAST_SECONDS))

    @property
    def programs(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self.row["programs"]
        return found

    def judged(self, predicted: np.ndarray, longest: float) -> dict[str, Any]:
        """What the tiles of the least predicted seconds lose, whether the chain is taken, and the time of the program with these tiles over that with
        separate kernels."""
        number = int(np.argmin(predicted))
        own, apart = self.programs[self.ways[number]], self.row["predicted"]["apart"]
        takes = bool(apart < longest and taken(predicted[number], apart))
        return {"loss": own / min(self.programs[name] for name in self.ways) - 1, "taken": takes, "ratio": own / self.programs["separate"]}


def told(task: tuple[Links, Mapping[str, Any]], dtype: str, target: str) -> Measured:
    """What a model is told of all measured tiles of a chain, which is planned again."""
    (links, row), problems = task, list[tuple[TileJudge, Problem]]()
    ranked = TileJudge.ranked

    def noted(judge: TileJudge, problem: Problem, alone: Sequence[float]) -> list[Tiles] | str:
        problems.append((judge, problem))
        return ranked(judge, problem, alone)

    with mock.patch.object(TileJudge, "ranked", noted):
        compiled(links, "separate", UNFITTED_CHAINS, {}, dtype, target)
    found: dict[str, np.ndarray] = {}
    for name, way in row["predicted"]["ways"].items():
        then = TileParts(**way["parts"]).seconds(UNFITTED_CHAINS, identified_machine(target).clock_hz)
        schedule = TileSchedule(**{**way["schedule"], "sizes": tuple(way["schedule"]["sizes"])})
        for judge, problem in problems:  # in several layouts, one of which is that of the kernel
            with suppress(Unsuitable):
                own = judge.features_of(problem, schedule)
                if abs(own[NAMES.index("log seconds")] - log(then)) < SAME:
                    found[name] = own
    return Measured(row, tuple(found), np.reshape([*found.values()], (len(found), len(NAMES))))


def read(name: str, target: str) -> list[Measured]:
    """The random chains of a result file of `bench.gpu_chains`.

    Raises:
        ValueError: as `random_rows`, or if its chains are not those that its seed draws.
    """
    settings, rows = random_rows(name)
    known = random_chains(argparse.Namespace(**settings))
    if any(str(known.get(row["name"])) != row["chain"] for row in rows):
        raise ValueError(f"{name} is not of the chains that its seed draws")
    work = partial(told, dtype=settings["type"], target=target)
    with on_all_cores() as pool:
        chains = pool.map(work, [(known[row["name"]], row) for row in rows], chunksize=4)
        return [chain for chain in chains if chain.ways]


def trained(chains: Sequence[Measured]) -> Forest:
    """The learned correction: logarithms of measured seconds over those of the formulas."""
    inputs = np.concatenate([chain.features for chain in chains])
    goals = np.concatenate([np.log(chain.seconds / chain.formulas) for chain in chains])
    return forest.mean_of([forest.fit("gradient_boosting", inputs, goals, None, NAMES, VERSION, OPTIONS, seed) for seed in range(FORESTS)])


def compared(chains: Sequence[Measured], target: str) -> list[dict[str, Any]]:
    """What is decided of each chain by ways of prediction, with its predicted seconds apart."""
    machine = identified_machine(target)
    limits = gpu_chains(machine, half=True)
    longest = limits.longest if limits is not None else 0.0
    folds = np.random.default_rng(0).permutation(len(chains)) % FOLDS
    others = [[chain for chain, own in zip(chains, folds, strict=True) if own != fold] for fold in range(FOLDS)]
    models = [(fitted([chain.row for chain in those], machine.clock_hz)[0], trained(those)) for those in others]
    rows = []
    for chain, fold in zip(chains, folds, strict=True):
        constants, model = models[fold]
        parts = [TileParts(**chain.row["predicted"]["ways"][name]["parts"]) for name in chain.ways]
        by = {"formulas": np.array([part.seconds(constants, machine.clock_hz) for part in parts])}
        by["learned"] = chain.formulas * corrections(model, chain.features)
        by["best"] = chain.seconds
        decided = {how: chain.judged(seconds, longest) for how, seconds in by.items()}
        least = min(chain.programs[name] for name in chain.ways) / chain.programs["separate"]
        rows.append({"chain": chain.row["chain"], "apart": chain.row["predicted"]["apart"], "least": least, **decided})
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By way of prediction: the mean loss of tiles, and the geometric mean of what decisions gain."""
    return {
        how: {
            "loss": statistics.fmean(row[how]["loss"] for row in rows),
            "programs": statistics.geometric_mean(row[how]["ratio"] if row[how]["taken"] else 1.0 for row in rows),
        }
        for how in ("formulas", "learned", "best")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", help="result files of bench.gpu_chains")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--name", default="gpu_chain_model", help="name of the result file")
    options = parser.parse_args()
    console = Console(width=150)
    try:
        chains = [chain for name in options.names for chain in read(name, options.target)]
    except ValueError as error:
        parser.error(str(error))
    rows = compared(chains, options.target)
    table = Table("of chains left out", "tiles lose, %", "programs take, of separate kernels'")
    for how, said in summary(rows).items():
        table.add_row(how, f"{100 * said['loss']:.2f}", f"{said['programs']:.4f}")
    console.print(table)
    path = MODELS / f"{identified_machine(options.target).measured_as}{SUFFIX}.npz"
    forest.save(trained(chains), path)
    tiles, every = sum(len(chain.ways) for chain in chains), sum(len(chain.row["predicted"]["ways"]) for chain in chains)
    console.print(f"{tiles} of {every} tiles, whose kernels are still the same, of {len(chains)} chains, wrote {path}")
    write_results(options.name, {**vars(options), "chains": len(chains), "tiles": tiles, **summary(rows)}, rows)


if __name__ == "__main__":
    main()
