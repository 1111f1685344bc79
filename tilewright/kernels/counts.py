"""Counts that every schema makes of its candidates: operations, and bytes by memory level.

Ranking computes them once for estimate, bound and learned models. Schemas may extend them (`kernels.gpu.counts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np


@dataclass(frozen=True)
class Counts:
    """Counts of one call, summed over its kernels; one array entry per candidate."""

    flops: np.ndarray
    """Operations that the algorithm needs (a multiply-add counts as two), without padding. Winograd's algorithm counts only its products."""
    read_bytes: np.ndarray
    """Distinct bytes read from memory: each byte counts once, however often it is read."""
    result_bytes: np.ndarray
    """Distinct bytes of the results; each byte counts once."""
    level2_bytes: np.ndarray
    """Bytes that processors read from level 2: everything once, plus repeated reads that level 1 or shared memory is not expected to serve."""

    @property
    def memory_bytes(self) -> np.ndarray:
        """Distinct bytes read and written: the memory traffic with caches that start cold and are large enough."""
        moved: np.ndarray = self.read_bytes + self.result_bytes
        return moved

    def __len__(self) -> int:
        return len(self.flops)


Counted = TypeVar("Counted", bound=Counts)


def taken(counts: Counted, which: np.ndarray) -> Counted:
    """The counts of the candidates selected by a mask or an index array."""
    return type(counts)(**{entry.name: getattr(counts, entry.name)[which] for entry in fields(counts)})


def concatenated(parts: Sequence[Counted]) -> Counted:
    """The counts of several sets of candidates (at least one), concatenated."""
    return type(parts[0])(**{entry.name: np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(parts[0])})


def counted(
    count: int, flops: np.ndarray | float, read_bytes: np.ndarray | float, result_bytes: float, level2_bytes: np.ndarray | float | None = None
) -> Counts:
    """Counts of `count` candidates, each given as an array or as one number for all. Without `level2_bytes` everything is read from level 2 once."""
    again = read_bytes if level2_bytes is None else np.maximum(level2_bytes, read_bytes)
    return Counts(*(np.broadcast_to(np.asarray(value, dtype=np.float64), count) for value in (flops, read_bytes, result_bytes, again)))
