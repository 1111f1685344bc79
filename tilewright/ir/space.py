"""The outcome for the candidates of a region's space of schedules: how many were feasible, how many were rejected for which reason, and the best of
those that were not chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class SpaceCounts:
    """Counts of a region's candidates. All zero if nothing was chosen: an alias, a region that runs through PyTorch, an artifact from before counts
    existed."""

    feasible: int = 0
    rejected: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Candidates by the first reason that rejects them."""

    @property
    def generated(self) -> int:
        return self.feasible + sum(self.rejected.values())

    def __add__(self, other: SpaceCounts) -> SpaceCounts:
        rejected = Counter(self.rejected)
        rejected.update(other.rejected)
        return SpaceCounts(self.feasible + other.feasible, MappingProxyType(dict(rejected)))


@dataclass(frozen=True)
class Candidate:
    """One candidate as explanations show it: the name of its schema, its schedule as text, predicted seconds with their terms (None and empty for a
    library's), and the seconds that records have for it."""

    schema: str
    schedule: str
    predicted_seconds: float | None
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    measured_seconds: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What the choice of a region's schedule was made from.

    schema: the name of the chosen schedule's schema; empty if nothing was chosen.
    others: the best predicted candidates of the other schemas, the best other one of the chosen schema, and a library's, by time.
    unsuitable: the reason of each schema that has no candidate."""

    schema: str = ""
    others: tuple[Candidate, ...] = ()
    unsuitable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
