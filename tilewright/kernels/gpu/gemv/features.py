"""Features of products of few rows for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.gemv.space import factor_loads, lanes_of, meeting_sums, steps_of


def gemv_features(facts: ContractionFacts, candidates: Columns) -> dict[str, np.ndarray]:
    """A thread's turns over the reduction and the share of them that lies inside; its vector loads in a turn; results that it holds, and sums that it
    adds when they have met; the share of the columns that lies inside; the width of B's vectors and their direction."""
    n_lanes, _ = lanes_of(facts)
    split, along = candidates["split"], candidates["threads_along_r"]
    turns = -(-steps_of(facts, split) // along)
    width = candidates["columns"] * n_lanes
    one = np.ones(len(split))
    return {
        "turns": turns,
        "useful turns": steps_of(facts, 1) / (turns * along * split),
        "factor loads": factor_loads(facts) * one,
        "results of a thread": facts.m * n_lanes * one,
        "sums added": 1.0 + meeting_sums(facts, candidates),
        "useful tile": facts.n / (-(-facts.n // width) * width),
        "fact vector_width": n_lanes * one,
        "across": width * one,
    }
