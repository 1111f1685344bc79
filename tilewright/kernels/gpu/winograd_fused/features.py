"""Features of Winograd's algorithm in one kernel for learned models, in addition to counts."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.features import described
from tilewright.kernels.gpu.winograd.features import winograd_sizes
from tilewright.kernels.gpu.winograd.space import WinogradFacts

NUMBER = 4


def fused_winograd_features(facts: WinogradFacts, candidates: Columns) -> dict[str, np.ndarray] | None:
    """Those of three kernels where there are any."""
    if facts.filter_shape != (3, 3):
        return None
    down, across = candidates["thread_n"], candidates["thread_m"]
    tiles = {**candidates, "register_k": down, "register_x": across, "block_k": candidates["outputs"] // down}
    tiles["block_x"] = candidates["tiles"] // candidates["thread_m"]
    return described(NUMBER, tiles, winograd_sizes(facts))
