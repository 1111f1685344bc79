"""Features of Winograd's algorithm for learned models, in addition to counts."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.gemm.features import of_product
from tilewright.kernels.gpu.winograd.space import WinogradFacts

NUMBER = 3


def winograd_features(facts: WinogradFacts, candidates: Columns) -> dict[str, np.ndarray] | None:
    """The features by name; None for filters that are not 3 x 3, because no model was trained on their transforms."""
    if facts.filter_shape != (3, 3):
        return None
    return of_product(NUMBER, candidates, winograd_sizes(facts))


def winograd_sizes(facts: WinogradFacts) -> dict[str, float]:
    """The convolution's sizes and facts by the names of `kernels.gpu.features.PROBLEM` and `FORM`."""
    return {
        "outputs": facts.outputs, "height": facts.images * facts.height, "width": facts.width, "channels": facts.channels,
        "filter_y": facts.filter_shape[0], "filter_x": facts.filter_shape[1],
        "images": facts.images, "input_vector": facts.input_vector, "store_vector": facts.store_vector,
        "epilogue_bytes": facts.epilogue_bytes, "epilogue_flops": facts.epilogue_flops,
    }  # fmt: skip
