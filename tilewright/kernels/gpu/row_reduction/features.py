"""Features of row reductions for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.row_reduction.space import RowReductionFacts


def row_reduction_features(facts: RowReductionFacts, candidates: Columns) -> dict[str, np.ndarray]:
    """A thread's turns over the columns, the share of them that lies inside the row, and the bytes of a block's rows."""
    wide = candidates["threads_per_row"] * np.minimum(candidates["vector_width"], facts.vector_width)
    turns = -(-facts.columns // wide)
    block_bytes = facts.columns * candidates["rows"] * float(facts.element_bytes)
    return {"turns": turns, "useful turns": facts.columns / (turns * wide), "block bytes": block_bytes}
