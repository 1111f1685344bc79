"""Features of depthwise register tiles for learned models, in addition to sizes, axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.depthwise.space import ORDERS, CpuDepthwiseFacts, reach
from tilewright.kernels.cpu.features import balance

NUMBER = 2


def depthwise_features(facts: CpuDepthwiseFacts, candidates: Columns, lanes: int, threads: int) -> dict[str, np.ndarray]:
    height, width, vectors = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"]
    pixels, taps = height * width, facts.taps[0] * facts.taps[1]
    span, lines = reach(facts.input_columns, width), reach(facts.input_rows, height)
    down, across = ceil_divided(facts.rows, height), ceil_divided(facts.columns, width)
    tasks = facts.images * np.where(candidates["order"] == ORDERS.index("c"), facts.vectors // vectors, down)
    return {
        "schema": np.full(length(candidates), float(NUMBER)),
        "accumulators": pixels.astype(np.float64),
        "registers": (pixels + span + 1).astype(np.float64),
        "registers with filters": (pixels + span + taps).astype(np.float64),
        "loads": (lines * span + height * taps) / (pixels * taps),
        "multiply-adds of a tile": np.log2(pixels * taps),
        "pixels filled": facts.rows * facts.columns / (down * across * pixels),
        "last column": (facts.columns % width) / width,
        "last row": (facts.rows % height) / height,
        "bytes of a tile": np.log2(float(facts.element_bytes) * lanes * vectors * span),
        "bytes of its rows": np.log2(float(facts.element_bytes) * lanes * vectors * lines * facts.columns * max(facts.input_columns[0], 1)),
        "tasks": np.log2(tasks),
        "balance": balance(tasks, threads),
    }
