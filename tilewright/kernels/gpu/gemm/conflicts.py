"""Bank conflicts of the stores that transpose a factor read along r, on its way through registers to [k][m]."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewright.ir.dtypes import DEFAULT_FLOAT
from tilewright.ir.expr import Const, Var
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.gemm.space import Operand, axis_of, copied
from tilewright.kernels.gpu.gemm.tile import BANKS, Tile
from tilewright.kernels.gpu.shared_access import offsets_of, wavefronts


def transposing_wavefronts(operand: Operand, extent: np.ndarray, candidates: Columns) -> np.ndarray:
    """Cycles of shared memory that a store of a warp takes while it fills the operand's tile of `extent` rows: 1 without conflicts, and where nothing
    is transposed."""
    through_registers = ~copied(candidates)
    if operand.along != "r" or not through_registers.any():
        return np.ones(1)
    shapes, where = np.unique((extent * 64 + candidates["block_k"]) * 4 + axis_of(candidates, "layout"), return_inverse=True)
    found = np.array([_wavefronts(int(key) // 256, int(key) // 4 % 64, operand.vector_width, int(key) % 4) for key in shapes], float)
    wavefronts: np.ndarray = np.where(through_registers, found[where], 1.0)
    return wavefronts


@lru_cache(maxsize=256)
def _wavefronts(size: int, depth: int, vector_width: int, layout: int) -> int:
    """The largest number of different words that the lanes of a warp store to one bank, by the addresses of the code."""
    operand = Operand("r", vector_width, 0)
    tile = Tile("", Const(0.0, DEFAULT_FLOAT), (), operand, size, depth, BANKS, False, DEFAULT_FLOAT, layout)
    lane = Var("lane", BANKS)
    return int(wavefronts(offsets_of(tile.at(*tile.own_and_k(lane % tile.run, lane // tile.run, 0)), lane), 1)[0])
