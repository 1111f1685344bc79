"""Learned correction of the ranking on CPUs: predicts the error of the analytical models.

A forest for a core (`Machine.pipeline`) and a number of threads, trained on measured schedules of random problems (`bench/cpu_learned.py`), predicts
the logarithm of measured over modelled time. Its features are the models' terms, the problem's sizes, the axes of the schedule, and quantities
derived from them: how much of tiles, panels and threads is filled, and the loads of a register tile. Without a forest for the core and threads, and
for regions unlike those it was trained on, the analytical times are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import length
from tilewright.kernels.schema import Options
from tilewright.selection.learned.forest import Forest, load
from tilewright.selection.ranking import Part, Ranking

MODELS = Path(__file__).parent.parent / "models"
VERSION = 2
"""Incremented whenever the result of `record` changes; a forest of another version is not used."""
MISSING = -64.0
"""Value of features that a schema does not have."""


def record(part: Part, machine: Machine, threads: int) -> dict[str, np.ndarray] | None:
    """Columns of features by name; None for a part that the forest does not cover. Sizes and times are binary logarithms."""
    schema, rows = part.schema, part.candidates
    own = schema.features(part.facts, rows, machine, Options(threads)) if schema.features is not None else None
    if own is None:
        return None
    total, count = part.estimate.seconds, length(rows)
    columns = {"seconds": np.log2(total)}
    columns |= {f"problem {name}": np.full(count, np.log2(max(size, 2.0**-10))) for name, size in _sizes(part.facts)}
    columns |= {f"axis {name}": np.asarray(column, dtype=np.float64) for name, column in rows.items()}
    columns |= {f"term {name}": np.log2(np.maximum(term, 1e-12) / total) for name, term in part.estimate.terms.items()}
    return columns | own


def _sizes(facts: Any) -> Iterator[tuple[str, float]]:
    for field in fields(facts):
        value = getattr(facts, field.name)
        if isinstance(value, tuple):
            yield from ((f"{field.name} {number}", float(one)) for number, one in enumerate(value))
        elif not isinstance(value, str):
            yield field.name, float(value)


def table(columns: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """The features as an array, [candidates, names] float32."""
    missing = np.full(len(columns["seconds"]), MISSING)
    return np.stack([np.broadcast_to(columns.get(name, missing), missing.shape) for name in names], axis=1).astype(np.float32)


def file_of(machine: Machine, threads: int) -> Path:
    return MODELS / f"cpu_{machine.pipeline}_{threads}.npz"


@lru_cache(maxsize=8)
def forest_of(path: Path) -> Forest | None:
    """The forest of a file; None if there is no file or it has another version. Raises InvalidModel if the file is damaged."""
    forest = load(path)[0] if path.exists() else None
    return forest if forest is not None and forest.version == VERSION else None


def predicted(forest: Forest, ranking: Ranking, machine: Machine, threads: int) -> np.ndarray | None:
    """Seconds of all candidates; None if there is a part that the forest does not cover."""
    seconds = []
    for part in ranking.parts:
        columns = record(part, machine, threads)
        if columns is None:
            return None
        seconds.append(part.estimate.seconds * np.exp2(forest.predict(table(columns, forest.names))))
    return np.concatenate(seconds)


def corrected(ranking: Ranking, machine: Machine, threads: int) -> Ranking:
    """The ranking with the times predicted by the forest for the machine's core and `threads` threads, if there is one that covers the region."""
    forest = forest_of(file_of(machine, threads)) if machine.pipeline and ranking.candidates else None
    return ranking if forest is None else replace(ranking, predicted=predicted(forest, ranking, machine, threads))
