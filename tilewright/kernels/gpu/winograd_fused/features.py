"""What learned models read of candidates of Winograd's algorithm in one kernel besides counts."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.features import described
from tilewright.kernels.gpu.winograd.features import winograd_sizes
from tilewright.kernels.gpu.winograd.space import WinogradProblem

NUMBER = 4


def fused_winograd_features(problem: WinogradProblem, rows: Columns) -> dict[str, np.ndarray]:
    tiles = {**rows, "register_k": rows["thread_n"], "register_x": rows["thread_m"], "block_k": rows["outputs"] // rows["thread_n"]}
    tiles["block_x"] = rows["tiles"] // rows["thread_m"]
    return described(NUMBER, tiles, winograd_sizes(problem))
