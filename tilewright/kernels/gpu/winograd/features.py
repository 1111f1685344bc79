"""Features of Winograd's algorithm for learned models, in addition to counts."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.gemm.features import of_product
from tilewright.kernels.gpu.winograd.space import WinogradFacts
from tilewright.kernels.winograd_transform import FILTER

NUMBER = 3


def winograd_features(facts: WinogradFacts, candidates: Columns) -> dict[str, np.ndarray]:
    return of_product(NUMBER, candidates, winograd_sizes(facts))


def winograd_sizes(facts: WinogradFacts) -> dict[str, int]:
    """The convolution's sizes by the names of `kernels.gpu.features.PROBLEM`."""
    return {
        "outputs": facts.outputs, "height": facts.images * facts.height, "width": facts.width, "channels": facts.channels,
        "filter_y": FILTER, "filter_x": FILTER,
    }  # fmt: skip
