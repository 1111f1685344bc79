"""What every schema counts of its candidates: operations, and bytes by memory level. Ranking counts them once; estimate, bound and learned models
draw from the result, to which schemas add what else they count (`kernels.gpu.counts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np


@dataclass(frozen=True)
class Counts:
    """Counts of one call, of all its kernels, an array entry a candidate."""

    flops: np.ndarray
    """Operations that the algorithm needs (a multiply-add is two), without padding; for Winograd those of its products."""
    read_bytes: np.ndarray
    """Distinct bytes that are read from memory: each counts once, however often it is read."""
    result_bytes: np.ndarray
    """Distinct bytes of the results, likewise."""
    level2_bytes: np.ndarray
    """Bytes that processors read from level 2: everything once, and repetitions but for those that level 1 or shared memory is expected to serve."""

    @property
    def memory_bytes(self) -> np.ndarray:
        """Distinct bytes read and written: what memory moves where caches hold nothing before and enough then."""
        moved: np.ndarray = self.read_bytes + self.result_bytes
        return moved

    def __len__(self) -> int:
        return len(self.flops)


Counted = TypeVar("Counted", bound=Counts)


def taken(counts: Counted, which: np.ndarray) -> Counted:
    """Those of a mask or of an index array of candidates."""
    return type(counts)(**{entry.name: getattr(counts, entry.name)[which] for entry in fields(counts)})


def concatenated(parts: Sequence[Counted]) -> Counted:
    """The counts of several sets of candidates, at least one, one after another."""
    return type(parts[0])(**{entry.name: np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(parts[0])})


def counted(
    count: int, flops: np.ndarray | float, read_bytes: np.ndarray | float, result_bytes: float, level2_bytes: np.ndarray | float | None = None
) -> Counts:
    """Counts of so many candidates, each an array or what all have in common. Without `level2_bytes` everything is read from level 2 once."""
    again = read_bytes if level2_bytes is None else np.maximum(level2_bytes, read_bytes)
    return Counts(*(np.broadcast_to(np.asarray(value, dtype=np.float64), count) for value in (flops, read_bytes, result_bytes, again)))
