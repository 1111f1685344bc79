"""The learned ranking of a region's candidates: which model a machine has, and the order that it gives a space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from tilewright.cost.candidates import Described, described, joined
from tilewright.cost.hybrid import Learned, load
from tilewright.cost.ranking import Part, Ranking
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.schedule.columns import take

MODELS = Path(__file__).parent / "models"
"""Trained models that come with the package, each named after its machine."""
KEPT = 8192
"""Candidates that the learned model looks at: those that the analytical models like best."""
KEPT_EACH = 320
"""At least so many of each schema."""
STAGES = ((20, 2048), (80, 512))
"""So many of them it looks at with more than so many trees."""


@lru_cache(maxsize=8)
def model_of(machine: str) -> Learned | None:
    """The model trained for a machine of the catalogue; None where there is none.

    Raises:
        InvalidModel: where the file is damaged or of another version.
    """
    path = MODELS / f"{machine}.npz"
    return load(path) if path.exists() else None


def refined(
    ranking: Ranking, machine: Machine, model: Learned | None, kept: int = KEPT, stages: Sequence[tuple[int, int]] = STAGES
) -> Ranking:
    """The ranking with the times that the model predicts of those of the `kept` candidates that pass its `stages`, all others behind those in
    their analytical order. A schema that the model does not know keeps its analytical times."""
    if model is None or not ranking.candidates:
        return ranking
    seconds = ranking.seconds
    limit = np.partition(seconds, kept)[kept] if len(seconds) > kept else np.inf
    times, behind = seconds.copy(), np.zeros(len(seconds), dtype=bool)
    looked_at: list[np.ndarray] = []
    known: list[Described] = []
    for start, part in zip(ranking.starts, ranking.parts, strict=False):
        analytical = part.estimate.seconds
        which = np.flatnonzero(analytical <= max(limit, _nth(analytical, KEPT_EACH)))
        chosen = Part(part.schedule, take(part.rows, which), _rows_of(part.estimate, which), part.problem)
        found = described(chosen, machine)
        if found is not None:
            behind[start : start + len(analytical)] = True
            looked_at.append(start + which)
            known.append(found)
    if known:  # all schemas at once: what a forest takes depends on its trees more than on the rows
        together = joined(known)
        predicted = model.predicted(together.columns, together.volumes, machine, together.analytical, stages)
        passed = ~np.isnan(predicted)
        positions = np.concatenate(looked_at)[passed]
        times[positions] = predicted[passed]
        behind[positions] = False
        times[behind] *= 1 + times[~behind].max() / times.min()
    return replace(ranking, predicted=times)


def _nth(values: np.ndarray, count: int) -> float:
    return float(np.partition(values, count - 1)[count - 1]) if len(values) > count else float("inf")


def _rows_of(estimate: Estimate, which: np.ndarray) -> Estimate:
    return Estimate({name: np.broadcast_to(term, estimate.seconds.shape)[which] for name, term in estimate.terms.items()}, estimate.overlapped)
