"""What learned models read of register tiles besides sizes, axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.contraction.space import ACROSS_N, ALONG_N, CONSTANT, ORDERS, CpuContractionProblem
from tilewright.kernels.cpu.features import balance, read_by_thread

NUMBER = 0


def contraction_features(problem: CpuContractionProblem, rows: Columns, lanes: int, threads: int) -> dict[str, np.ndarray] | None:
    """None for products of a single row, which take what memory takes, and for those that reduce rows or pixels as well: no model was trained with
    them."""
    if problem.whole_rows or problem.images or problem.outer * problem.rows * problem.columns == 1:
        return None
    height, width, vectors = rows["tile_rows"], rows["tile_columns"], rows["vectors"]
    pixels, panel = height * width, vectors * lanes
    panels, down, across = ceil_divided(problem.n, panel), ceil_divided(problem.rows, height), ceil_divided(problem.columns, width)
    units = np.where(rows["order"] == ORDERS.index("n"), panels, problem.outer * (down if problem.rows > 1 else across))
    a_row = problem.a_bytes / (problem.outer * problem.rows)
    a, b = read_by_thread(problem.a_bytes, problem.b_bytes, (rows["order"] == ORDERS.index("m")) & (units > 1), threads)
    return {
        "problem b": np.full(length(rows), np.log2(1.0 + (CONSTANT, ALONG_N, ACROSS_N).index(problem.b))),
        "schema": np.full(length(rows), float(NUMBER)),
        "first factor of a thread": a,
        "second factor of a thread": b,
        "factors of a thread": np.logaddexp2(a, b),
        "pixels": pixels.astype(np.float64),
        "accumulators": (pixels * vectors).astype(np.float64),
        "loads": (pixels + vectors) / (pixels * vectors),
        "channels filled": problem.n / (panels * panel),
        "pixels filled": problem.rows * problem.columns / (down * across * pixels),
        "last column": (problem.columns % width) / width,
        "last row": (problem.rows % height) / height,
        "panel bytes": np.log2(float(problem.element_bytes) * problem.r * panel),
        "bytes of a tile": np.log2(a_row * height * width / problem.columns),
        "bytes of its rows": np.log2(a_row * height),
        "panels": np.log2(panels),
        "tiles": np.log2(problem.outer * down * across),
        "units": np.log2(units),
        "balance": balance(units, threads),
    }
