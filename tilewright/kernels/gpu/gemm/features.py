"""What learned models read of the implicit GEMM's candidates besides counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.features import described
from tilewright.kernels.gpu.gemm.space import ContractionProblem

NUMBER = 2


def contraction_features(problem: ContractionProblem, rows: Columns) -> dict[str, np.ndarray] | None:
    """None where rows are reduced behind the sum: no model was trained with such products."""
    if problem.row_stages:
        return None
    return of_product(NUMBER, rows, {"outputs": problem.n, "height": problem.batch, "width": problem.m, "channels": problem.r})


def of_product(number: int, rows: Columns, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Of candidates with the axes of a `ContractionSchedule`."""
    tiles = {
        **rows,
        "register_k": rows["thread_n"],
        "register_x": rows["thread_m"],
        "block_k": rows["block_n"] // rows["thread_n"],
        "block_x": rows["block_m"] // rows["thread_m"],
        "channels": rows["block_k"],
    }
    return described(number, tiles, sizes)
