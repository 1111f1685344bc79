"""Features of the implicit GEMM for learned models, in addition to counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.features import described
from tilewright.kernels.gpu.gemm.space import ContractionFacts

NUMBER = 2


def contraction_features(facts: ContractionFacts, candidates: Columns) -> dict[str, np.ndarray] | None:
    """The features by name; None if row reductions follow the sum, because no model was trained on such products."""
    if facts.row_stages:
        return None
    sizes = {
        "outputs": facts.n, "height": facts.batch, "width": facts.m, "channels": facts.r, "groups": facts.batch, "input_vector": facts.a.vector_width,
        "filter_vector": facts.b.vector_width, "store_vector": facts.store_vector, "taps": facts.a.taps, "guarded": facts.a.guarded,
        "epilogue_bytes": facts.epilogue_bytes, "epilogue_flops": facts.epilogue_flops,
    }  # fmt: skip
    return of_product(NUMBER, candidates, sizes)


def of_product(number: int, candidates: Columns, sizes: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Features of candidates with the axes of a `ContractionSchedule`."""
    tiles = {
        **candidates,
        "register_k": candidates["thread_n"],
        "register_x": candidates["thread_m"],
        "block_k": candidates["block_n"] // candidates["thread_n"],
        "block_x": candidates["block_m"] // candidates["thread_m"],
        "channels": candidates["block_k"],
    }
    return described(number, tiles, sizes)
