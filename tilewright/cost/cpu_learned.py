"""The learned part of the ranking on CPUs: how far the models' times are off, from their terms, the schedule's axes, and the problem's sizes.

It is for convolutions that suit Winograd's algorithm, whose candidates differ most from each other and from what the models say. A forest for a core
(`Machine.pipeline`) and a number of threads, trained on measured schedules of random layers (`bench/cpu_learned.py`), predicts the logarithm of
measured over modelled time. Where there is no forest for core and threads, and for all other regions, the models' times stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from tilewright.cost.forest import Forest, load
from tilewright.cost.ranking import Part, Ranking
from tilewright.hardware.machine import Machine
from tilewright.schedule.columns import length
from tilewright.schedule.cpu_contraction import CpuContractionProblem
from tilewright.schedule.cpu_winograd import CpuWinogradProblem

MODELS = Path(__file__).parent / "models"
VERSION = 1
"""Raised with every change of what `record` gives; a forest of another version is not used."""
SCHEMAS = (CpuContractionProblem, CpuWinogradProblem)
MISSING = -64.0
"""In place of what a schema does not have."""


def record(part: Part) -> dict[str, np.ndarray] | None:
    """Features by name, a column for each; None for a part that the forest does not know. Sizes and times are logarithms (base 2)."""
    problem = part.problem
    if not isinstance(problem, SCHEMAS) or (isinstance(problem, CpuContractionProblem) and (problem.whole_rows or problem.images)):
        return None
    total, count = part.estimate.seconds, length(part.rows)
    columns = {"schema": np.full(count, float(SCHEMAS.index(type(problem)))), "seconds": np.log2(total)}
    for field in fields(problem):
        value = getattr(problem, field.name)
        if isinstance(value, (int, float)):
            columns[f"problem {field.name}"] = np.full(count, np.log2(max(float(value), 2.0**-10)))
    columns |= {f"axis {name}": np.asarray(column, dtype=np.float64) for name, column in part.rows.items()}
    columns |= {f"term {name}": np.log2(np.maximum(term, 1e-12) / total) for name, term in part.estimate.terms.items()}
    return columns


def table(columns: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """[candidates, names] float32."""
    missing = np.full(len(columns["seconds"]), MISSING)
    return np.stack([np.broadcast_to(columns.get(name, missing), missing.shape) for name in names], axis=1).astype(np.float32)


def file_of(machine: Machine, threads: int) -> Path:
    return MODELS / f"cpu_{machine.pipeline}_{threads}.npz"


@lru_cache(maxsize=8)
def forest_of(path: Path) -> Forest | None:
    """Raises InvalidModel where the file is damaged."""
    forest = load(path)[0] if path.exists() else None
    return forest if forest is not None and forest.version == VERSION else None


def suits(ranking: Ranking) -> bool:
    """Whether the ranking is of a convolution that Winograd's algorithm computes too."""
    return any(isinstance(part.problem, CpuWinogradProblem) for part in ranking.parts)


def predicted(forest: Forest, ranking: Ranking) -> np.ndarray:
    """Seconds of all candidates, those of parts that the forest knows corrected by it."""
    seconds = []
    for part in ranking.parts:
        columns = record(part)
        factor = np.exp2(forest.predict(table(columns, forest.names))) if columns is not None and length(part.rows) else 1.0
        seconds.append(part.estimate.seconds * factor)
    return np.concatenate(seconds)


def corrected(ranking: Ranking, machine: Machine, threads: int) -> Ranking:
    """The ranking with the times that the forest for the machine's core and so many threads predicts, where it is for such regions."""
    forest = forest_of(file_of(machine, threads)) if machine.pipeline and suits(ranking) else None
    return ranking if forest is None else replace(ranking, predicted=predicted(forest, ranking))
