"""Features of register tiles for learned models, in addition to sizes, axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.contraction.space import ACROSS_N, ALONG_N, CONSTANT, ORDERS, CpuContractionFacts
from tilewright.kernels.cpu.features import balance, read_by_thread

NUMBER = 0


def contraction_features(facts: CpuContractionFacts, candidates: Columns, lanes: int, threads: int) -> dict[str, np.ndarray] | None:
    """The features by name. None for products of a single row, which are bound by memory, and for products followed by reductions of rows or pixels:
    no model was trained on these."""
    if facts.whole_rows or facts.images or facts.outer * facts.rows * facts.columns == 1:
        return None
    height, width, vectors = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"]
    pixels, panel = height * width, vectors * lanes
    panels, down, across = ceil_divided(facts.n, panel), ceil_divided(facts.rows, height), ceil_divided(facts.columns, width)
    tasks = np.where(candidates["order"] == ORDERS.index("n"), panels, facts.outer * (down if facts.rows > 1 else across))
    a_row = facts.a_bytes / (facts.outer * facts.rows)
    a, b = read_by_thread(facts.a_bytes, facts.b_bytes, (candidates["order"] == ORDERS.index("m")) & (tasks > 1), threads)
    return {
        "problem b": np.full(length(candidates), np.log2(1.0 + (CONSTANT, ALONG_N, ACROSS_N).index(facts.b))),
        "schema": np.full(length(candidates), float(NUMBER)),
        "first factor of a thread": a,
        "second factor of a thread": b,
        "factors of a thread": np.logaddexp2(a, b),
        "pixels": pixels.astype(np.float64),
        "accumulators": (pixels * vectors).astype(np.float64),
        "loads": (pixels + vectors) / (pixels * vectors),
        "channels filled": facts.n / (panels * panel),
        "pixels filled": facts.rows * facts.columns / (down * across * pixels),
        "last column": (facts.columns % width) / width,
        "last row": (facts.rows % height) / height,
        "panel bytes": np.log2(float(facts.element_bytes) * facts.r * panel),
        "bytes of a tile": np.log2(a_row * height * width / facts.columns),
        "bytes of its rows": np.log2(a_row * height),
        "panels": np.log2(panels),
        "tiles": np.log2(facts.outer * down * across),
        "tasks": np.log2(tasks),
        "balance": balance(tasks, threads),
    }
