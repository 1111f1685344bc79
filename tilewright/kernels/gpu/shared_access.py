"""Bank conflicts of a warp's accesses to shared memory, from the addresses of its lanes as the code computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.analysis.gpu.warps import BANK_BYTES, shared_wavefronts
from tilewright.ir.expr import Const, Expr


def wavefronts(words: np.ndarray, width: int, active: np.ndarray | None = None, conflicts: bool = True) -> np.ndarray:
    """Wavefronts of accesses to vectors of `width` words, or those that they would take without bank conflicts. words: [accesses, lanes], offsets in
    words, multiples of the width; active: the lanes that take part, all if None."""
    held = np.broadcast_to(True if active is None else active, words.shape)
    return shared_wavefronts(BANK_BYTES * words, held, BANK_BYTES * width, conflicts)


def values_of(exprs: Sequence[Expr]) -> np.ndarray:
    """The values of expressions that constants were put into."""
    assert all(isinstance(expr, Const) for expr in exprs), exprs
    return np.array([int(expr.value) for expr in exprs if isinstance(expr, Const)])
