"""Columns of schedule candidates: products of axes, rules that reject rows for a named reason, and single rows as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

Columns: TypeAlias = Mapping[str, np.ndarray]
"""Maps each axis name to an array with one number per candidate; all arrays have the same length."""


def product_of(axes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Every combination of the axes' values; the last axis varies fastest."""
    mesh = np.meshgrid(*(np.asarray(values, dtype=np.int64) for values in axes.values()), indexing="ij")
    return {name: grid.ravel() for name, grid in zip(axes, mesh, strict=True)}


def times(candidates: Columns, more: Columns) -> dict[str, np.ndarray]:
    """The product of two sets of candidates: every row of one with every row of the other; rows of `more` vary fastest."""
    each, count = length(more), length(candidates)
    return {name: np.repeat(column, each) for name, column in candidates.items()} | {name: np.tile(column, count) for name, column in more.items()}


def pairs(candidates: Columns, more: Columns, kept: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of `times` of which `kept`, [candidates, more], is true."""
    row, other = np.nonzero(kept)
    return take(candidates, row) | take(more, other)


def vector_widths(widest: int) -> tuple[int, ...]:
    """Widths of vectors that are candidates: up to four elements, and eight where accesses allow it (16-bit values)."""
    return (1, 2, 4, 8) if widest > 4 else (1, 2, 4)


def length(candidates: Columns) -> int:
    return len(next(iter(candidates.values())))


def take(candidates: Columns, which: np.ndarray) -> dict[str, np.ndarray]:
    """The rows selected by a mask or an index array."""
    return {name: column[which] for name, column in candidates.items()}


def joined(parts: Sequence[Columns]) -> dict[str, np.ndarray]:
    """The rows of all parts, with the columns of the first."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def reject(candidates: Columns, rules: Sequence[tuple[str, np.ndarray]]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The rows that no rule rejects, and the number of rows rejected for each reason (a row counts for the first reason that holds).

    A rule is a reason and a mask of the rows that it rejects."""
    alive = np.ones(length(candidates), dtype=bool)
    counts: dict[str, int] = {}
    for reason, bad in rules:
        hit = alive & bad
        if hit.any():
            counts[reason] = counts.get(reason, 0) + int(hit.sum())
            alive &= ~bad
    return take(candidates, alive), counts


def row(candidates: Columns, position: int) -> dict[str, int]:
    """One candidate as plain numbers."""
    return {name: int(column[position]) for name, column in candidates.items()}


def ceil_divided(a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
    """a / b, rounded up."""
    parts: np.ndarray = -(-np.asarray(a) // np.asarray(b))
    return parts
