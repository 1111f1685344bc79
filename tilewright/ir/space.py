"""The outcome for the candidates of a region's space of schedules: how many were feasible, and how many were rejected for which reason."""

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
