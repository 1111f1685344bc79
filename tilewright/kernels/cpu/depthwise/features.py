"""What learned models read of depthwise register tiles besides sizes, axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.depthwise.space import ORDERS, CpuDepthwiseProblem, reach
from tilewright.kernels.cpu.features import balance

NUMBER = 2


def depthwise_features(problem: CpuDepthwiseProblem, rows: Columns, lanes: int, threads: int) -> dict[str, np.ndarray]:
    height, width, vectors = rows["tile_rows"], rows["tile_columns"], rows["vectors"]
    pixels, taps = height * width, problem.taps[0] * problem.taps[1]
    span, lines = reach(problem.input_columns, width), reach(problem.input_rows, height)
    down, across = ceil_divided(problem.rows, height), ceil_divided(problem.columns, width)
    units = problem.images * np.where(rows["order"] == ORDERS.index("c"), problem.vectors // vectors, down)
    return {
        "schema": np.full(length(rows), float(NUMBER)),
        "accumulators": pixels.astype(np.float64),
        "registers": (pixels + span + 1).astype(np.float64),
        "registers with filters": (pixels + span + taps).astype(np.float64),
        "loads": (lines * span + height * taps) / (pixels * taps),
        "multiply-adds of a tile": np.log2(pixels * taps),
        "pixels filled": problem.rows * problem.columns / (down * across * pixels),
        "last column": (problem.columns % width) / width,
        "last row": (problem.rows % height) / height,
        "bytes of a tile": np.log2(float(problem.element_bytes) * lanes * vectors * span),
        "bytes of its rows": np.log2(float(problem.element_bytes) * lanes * vectors * lines * problem.columns * max(problem.input_columns[0], 1)),
        "units": np.log2(units),
        "balance": balance(units, threads),
    }
