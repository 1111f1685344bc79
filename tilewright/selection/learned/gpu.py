"""The learned ranking on GPUs: the model of a machine, and its order of a region's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import CacheError, InvalidModel
from tilewright.hardware.calibration import in_use
from tilewright.hardware.calibration_file import place, remedy_of
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import concatenated as counts_of
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.features import RECORDS, streamed
from tilewright.kernels.schema import Options
from tilewright.selection.learned.hybrid import Learned, load
from tilewright.selection.ranking import Part, Ranking, rows_of

MODELS = Path(__file__).parent.parent / "models"
"""Trained models in the package, named after their machines."""
STREAMS_SUFFIX = "-streams"
"""Appended to a machine's name: the model of its schemas without tiles in shared memory."""
TENSOR_SUFFIX = "-tensor"
"""Appended to a machine's name: the model of its schemas for tensor cores."""
PAIRS_SUFFIX = "-pairs"
"""Appended to a machine's name: the model of its products of pairs of TF32 numbers."""
HALF_PAIRS_SUFFIX = "-half-pairs"
"""Appended to a machine's name: the model of its products of pairs of float16 numbers."""
ATTENTION_SUFFIX = "-attention"
"""Appended to a machine's name: the model of its attention on tensor cores."""
HEAVY_SUFFIX = "-heavy"
"""Appended to a machine's name: the model of its other tiled schemas for problems of many operations."""
SUFFIXES = ("", HEAVY_SUFFIX, STREAMS_SUFFIX, TENSOR_SUFFIX, PAIRS_SUFFIX, HALF_PAIRS_SUFFIX, ATTENTION_SUFFIX)
"""In order: of two models that cover a schema, the later one's times count."""
KEPT = 8192
"""Candidates that the learned model evaluates: the best by the analytical models."""
KEPT_EACH = 320
"""Minimum number of these for each schema."""
STAGES = ((20, 2048), (80, 512))
"""(trees, candidates): after `trees` trees, only the best `candidates` are evaluated further."""


@lru_cache(maxsize=8)
def model_of(machine: str) -> Learned | None:
    """The model trained for a machine of the catalogue; None if there is none.

    Raises:
        InvalidModel: if the file is damaged or of another version.
    """
    path = MODELS / f"{machine}.npz"
    return load(path) if path.exists() else None


def models_for(machine: Machine) -> tuple[Learned, ...]:
    """The models that rank a machine's candidates: that of its calibration in use, which may have none, or those of the package.

    Raises:
        InvalidModel: as `model_of`.
        CacheError: if the model of the calibration is of another version.
    """
    found = in_use(machine)
    if found is None:
        return tuple(model for suffix in SUFFIXES if (model := model_of(machine.measured_as + suffix)) is not None)
    return (_own_model(found.name, found.model, place(machine), remedy_of(machine)),) if found.model else ()


@lru_cache(maxsize=8)
def _own_model(name: str, content: bytes, path: Path, remedy: str) -> Learned:
    try:
        return load(path, content)
    except InvalidModel as error:
        raise CacheError(f"the calibration {name} does not serve: {error.cause}", remedy) from error


def corrected(ranking: Ranking, machine: Machine) -> Ranking:
    """The ranking with the times of the machine's models."""
    return refined(ranking, machine, models_for(machine))


def refined(ranking: Ranking, machine: Machine, models: Sequence[Learned], kept: int = KEPT, stages: Sequence[tuple[int, int]] = STAGES) -> Ranking:
    """The analytical ranking with the models' times: each corrects the schemas that it covers. Of their candidates those among the `kept` best of all
    schemas that pass the model's `stages` have its times; the others follow in their analytical order. A schema that no model covers keeps its
    analytical times."""
    if not models or not ranking.candidates:
        return ranking
    seconds, starts = ranking.seconds, ranking.starts
    limit = np.partition(seconds, kept)[kept] if len(seconds) > kept else np.inf
    best = [np.flatnonzero(own <= max(limit, _nth(own, KEPT_EACH))) for own in np.split(seconds, starts[1:-1])]
    likely = [rows_of(part, which) for part, which in zip(ranking.parts, best, strict=True)]
    times, behind = seconds.copy(), np.zeros(len(seconds), dtype=bool)
    covered: set[int] = set()
    for model in models:
        known = {number: found for number, part in enumerate(likely) if (found := described(part, machine, model.record)) is not None}
        if not known:
            continue
        # all schemas at once: the time of a forest depends more on its trees than on the rows
        together = concatenated(list(known.values()))
        predicted = model.predicted(together.columns, together.counts, machine, together.analytical, stages)
        passed = ~np.isnan(predicted)
        for number in known:
            behind[starts[number] : starts[number + 1]] = True
        positions = np.concatenate([starts[number] + best[number] for number in known])[passed]
        times[positions] = predicted[passed]
        behind[positions] = False
        covered |= known.keys()
    if not covered:
        return ranking
    times[behind] *= 1 + times[~behind].max() / times.min()
    return replace(ranking, predicted=times)


@dataclass(frozen=True)
class Described:
    """Candidates of one schema: the columns of `kernels.gpu.features.described` or `streamed`, counts, and the seconds of the schema's own model."""

    columns: Columns
    counts: Any
    analytical: np.ndarray


def described(part: Part, machine: Machine, record: str = "formed") -> Described | None:
    """The inputs of a learned model with this feature record for one part of a ranking; None for candidates that it does not cover."""
    schema, counts = part.schema, part.counts
    if schema.features is None or not isinstance(counts, LaunchCounts) or not RECORDS[record].describes(counts):
        return None
    if RECORDS[record].least_flops and part.facts.flops < RECORDS[record].least_flops:
        return None
    columns = schema.features(part.facts, part.candidates, machine, Options())
    if columns is None:
        return None
    if not RECORDS[record].tiled:
        columns = streamed(RECORDS[record].names, part.facts, part.candidates, counts, part.estimate, columns, machine)
    seconds = part.estimate.seconds
    return Described({**columns, "own seconds": seconds}, counts, seconds)


def concatenated(parts: Sequence[Described]) -> Described:
    """The candidates of several schemas, concatenated."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return Described(columns, counts_of([part.counts for part in parts]), np.concatenate([part.analytical for part in parts]))


def _nth(values: np.ndarray, count: int) -> float:
    return float(np.partition(values, count - 1)[count - 1]) if len(values) > count else float("inf")
