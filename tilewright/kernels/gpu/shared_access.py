"""Bank conflicts of a warp's accesses to shared memory, from the addresses of its lanes as the code computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.analysis.gpu.warps import BANK_BYTES, WARP, shared_wavefronts
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.ir.expr import Apply, Const, Expr, Var
from tilewright.ir.scalar import OPERATIONS


def offsets_of(expr: Expr, lane: Var, *others: Var) -> np.ndarray:
    """The values of an expression in all lanes of a warp for all values of the other variables: [values, lanes]."""
    grids = np.meshgrid(*(np.arange(axis.extent or 1) for axis in others), np.arange(WARP), indexing="ij")
    found = _value(expr, dict(zip((*others, lane), grids, strict=True)))
    return np.broadcast_to(found, grids[0].shape).reshape(-1, WARP)


def _value(expr: Expr, values: Mapping[Var, np.ndarray]) -> np.ndarray:
    """An index expression over arrays of values of its variables."""
    if isinstance(expr, Var):
        return values[expr]
    if isinstance(expr, Const):
        return np.asarray(expr.value)
    assert isinstance(expr, Apply), expr
    return np.asarray(OPERATIONS[expr.operation].reference(*(_value(operand, values) for operand in expr.args)))


def wavefronts(words: np.ndarray, width: int, active: np.ndarray | None = None, conflicts: bool = True) -> np.ndarray:
    """Wavefronts of accesses to vectors of `width` words, or those that they would take without bank conflicts. words: [accesses, lanes], offsets in
    words, multiples of the width; active: the lanes that take part, all if None."""
    held = np.broadcast_to(True if active is None else active, words.shape)
    return shared_wavefronts(BANK_BYTES * words, held, BANK_BYTES * width, conflicts)


@dataclass(frozen=True)
class SharedLoads:
    """Loads of a warp. offsets: of the lanes' vectors of `width` elements in their buffer, [loads, lanes]; `times`: how often each occurs."""

    offsets: np.ndarray
    width: int
    times: float = 1.0
    element_bytes: int = size_of(DEFAULT_FLOAT)

    def wavefronts(self, conflicts: bool) -> float:
        """Of all these loads."""
        held = np.ones(self.offsets.shape, bool)
        each = shared_wavefronts(self.element_bytes * self.offsets, held, self.element_bytes * self.width, conflicts)
        return self.times * float(each.sum())


def conflict_coefficient(loads: Sequence[SharedLoads]) -> float:
    """Cycles of loads over those that they would take without bank conflicts: 1 if there are none."""
    least = sum(one.wavefronts(False) for one in loads)
    return sum(one.wavefronts(True) for one in loads) / least if least else 1.0
